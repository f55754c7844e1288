"""Thoughts that run away, through the real proxy: a stop ends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from tests.integration.bench import Bench, Group, open_bench
from tests.integration.forms import Said, ask
from tests.lmstudio_double import ChatCall, Gate, Reply, numbered_words

_WINDOW = 4096
_BUDGET = _WINDOW // 2
# The proxy's count of a begun answer may be too low.
_MOST = _BUDGET * 11 // 10
# More than the window holds.
_RUNAWAY = numbered_words(2500)
# Each chunk costs processor time.
_PACE = {"chunk_tokens": 8}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A proxy before LM Studio."""
    groups = [
        # Its template, which is known here, shows how a thought is closed; the simulator's own shows no thoughts.
        Group("qwen", _WINDOW, key="qwen/qwen3-8b", architecture="qwen3", speaks=False, simulator=_PACE),
    ]
    with open_bench(
        tmp_path_factory.mktemp("thoughts"),
        groups,
        {"background": "off"},
        litellm_settings={"drop_params": True},
    ) as bench:
        yield bench


def _thinks(*, stream: bool) -> Any:
    """A model that thinks without end until it is told to answer: a stream a little past its budget."""
    gate = Gate() if stream else None

    def script(call: ChatCall) -> Reply:
        if "answer now" in call.prompt_text or call.prompt_text.endswith("</think>\n\n"):
            return Reply("It is four.")
        return Reply("It is four.", reasoning=_RUNAWAY, gate=gate, gate_after_tokens=_MOST)

    return script


def _ask(bench: Bench, route: str, group: str, *, stream: bool = True, **extra: Any) -> Said:
    question = [{"role": "user", "content": f"Two and two? {group} {route} {stream} {sorted(extra)}"}]
    limit = 8000 if route == "messages" else None
    said = ask(bench, route, group, question, stream=stream, limit=limit, **extra)
    assert said.status == 200, said.events
    return said


@pytest.mark.parametrize(
    ("route", "stream"), [("chat", True), ("chat", False), ("messages", False), ("responses", True)]
)
def test_lm_studio_goes_on_behind_the_closed_thought(thinking: Bench, route: str, stream: bool) -> None:
    """All that was thought stands before the answer, as the model itself would have closed it; nothing is told.

    Of a thought that has filled the window, as it does in a whole answer, only the end.
    """
    watch = thinking.watch("qwen", _thinks(stream=stream))
    assert _ask(thinking, route, "qwen", stream=stream).text.strip() == "It is four."
    (first,), (second,) = watch.chats, watch.records_of("/v1/completions")
    assert watch.summaries == []
    prompt = (second.body or {})["prompt"]
    assert prompt.endswith("\n</think>\n\n")
    assert prompt.count("<think>") == 1
    thoughts = prompt.partition("<think>\n")[2].partition("\n</think>")[0]
    assert _RUNAWAY.startswith(thoughts) if stream else thoughts in _RUNAWAY
    assert (first.disconnected_s is not None) is stream
    assert not stream or TokenCounter().text_counter("qwen", family_of("qwen3", "qwen3-8b"))(thoughts) >= 0.9 * _BUDGET
