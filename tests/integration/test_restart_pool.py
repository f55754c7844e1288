"""Several answers at once in one shared context: nobody's generation ends anybody else's."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from litellm_compaction.simulator import ChatCall, Reply
from tests.integration.bench import SUMMARY, is_summary_call
from tests.integration.restart_bench import Restarting, shared, without_restarts

pytestmark = pytest.mark.proxy

_TAGS = ("alpha", "beta", "gamma", "delta")
_WORDS = 600


def _words(tag: str) -> list[str]:
    return [f"{tag}{number}" for number in range(1, _WORDS + 1)]


def _counting(call: ChatCall) -> Reply:
    """Counts in the client's own words, and goes on after the last word that it sees."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    tag = re.findall(r"count (\w+)", json.dumps(call.messages))[0]
    done = re.findall(rf"{tag}(\d+)", str(call.messages[-2]["content"])) if len(call.messages) > 1 else []
    return Reply(" ".join(_words(tag)[int(done[-1]) if done else 0 :]))


@pytest.fixture
def restarting(request: pytest.FixtureRequest) -> Restarting:
    """The transport: only it can wait before the server is asked."""
    return shared(request, "auto")


@pytest.mark.parametrize("stream", [True, False])
def test_parallel_answers_share_one_context(restarting: Restarting, stream: bool) -> None:
    """Four long answers, each past its share of one context of 4096 tokens: all complete, none ends another."""
    watch = restarting.watch("pool", _counting)

    def answer(tag: str) -> str:
        messages = [{"role": "user", "content": f"count {tag}"}]
        if stream:
            return without_restarts(restarting.proxy.stream("pool", messages).text)
        content: str = restarting.proxy.chat("pool", messages).json()["choices"][0]["message"]["content"]
        return content

    with ThreadPoolExecutor(len(_TAGS)) as clients:
        answers = list(clients.map(answer, _TAGS))
    assert [text.split() for text in answers] == [_words(tag) for tag in _TAGS]
    assert "pool_overflow" not in {record.outcome for record in watch.records}
    assert len(watch.chats) > len(_TAGS)
