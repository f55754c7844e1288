"""Several answers at once in one shared context: nobody's generation ends anybody else's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import httpx
import pytest

from litellm_compaction.simulator import ChatCall, Reply, RequestRecord
from tests.builders import prose
from tests.integration.bench import SUMMARY, is_summary_call
from tests.integration.restart_bench import Restarting, changed, shut, without_restarts

pytestmark = pytest.mark.proxy

_TAGS = ("alpha", "beta", "gamma", "delta")
_WORDS = 600


def _words(tag: str) -> list[str]:
    return [f"{tag}{number}" for number in range(1, _WORDS + 1)]


def _counting(call: ChatCall) -> Reply:
    """Counts in the client's own words, and goes on after the last word that it sees."""
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    tag = re.findall(r"count (\w+)", call.sent_text)[0]
    # Whichever way the answer is carried on, the words that the server is shown are in what it is sent.
    done = re.findall(rf"{tag}(\d+)", call.sent_text)
    return Reply(" ".join(_words(tag)[int(done[-1]) if done else 0 :]))


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
    assert max(_held_tokens(watch.chats, at) for at in watch.chats) <= 4096


def _held_tokens(records: Sequence[RequestRecord], at: RequestRecord) -> int:
    """What the prompts and bounds of all that ran when a request came could have come to together."""
    running = [each for each in records if each.started_s <= at.started_s < (each.ended_s or inf)]
    return sum(each.prompt_tokens + (each.body or {})["max_tokens"] for each in running)


def _is_asked(call: ChatCall, content: str) -> bool:
    """Not what a first prompt is asked about, which is one token of answer."""
    return content in call.sent_text and call.body.get("max_tokens") != 1


@pytest.mark.parametrize("gate_after_tokens", [0, 40], ids=["before the first word", "within the answer"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_client_that_leaves_gives_its_room_back(
    restarting: Restarting, stream: bool, gate_after_tokens: int
) -> None:
    """Two requests do not fit beside each other: the second is served as soon as the first one's client has left."""
    gate = shut()
    waiting = Reply(prose("waiting", 200), gate=gate, gate_after_tokens=gate_after_tokens)
    content = prose(f"large {stream} {gate_after_tokens}", 2200)
    asked = [{"role": "user", "content": content}]
    # By hooks the room of a whole answer is kept for as long as its bound may take.
    body = {"model": "pool", "messages": asked, "stream": stream, "max_tokens": 60}
    watch = restarting.watch("pool", lambda call: waiting if _is_asked(call, content) else Reply("Served."))
    # By hooks a whole answer is LiteLLM's own plain request; where an engine runs on with it, its room is not free yet.
    with changed(restarting.simulators["pool"], runs_on=stream or restarting.carrier == "auto"):
        async with httpx.AsyncClient(
            base_url=restarting.proxy.base_url, headers=restarting.proxy.headers, trust_env=False, timeout=300
        ) as client:
            first = asyncio.ensure_future(_read(client, body))
            assert await asyncio.to_thread(gate.reached.wait, 60)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            second = {**body, "messages": [{"role": "user", "content": prose("second", 2200)}]}
            assert "Served." in await _read(client, second)
    assert {record.outcome for record in watch.records} == {"disconnected", "ok"}


async def test_plain_answer_that_runs_on_without_its_client_keeps_its_room(restarting: Restarting) -> None:
    """By hooks it is LiteLLM's own request, which an engine writes to its end: who comes then waits for that."""
    if restarting.carrier == "auto":
        pytest.skip("the transport asks for a stream, which ends with its client")
    gate = shut()
    left = Reply(prose("left", 200), gate=gate, tokens_per_second=100)
    content = prose("large and left", 2200)
    body = {"model": "pool", "messages": [{"role": "user", "content": content}], "max_tokens": 60}
    watch = restarting.watch("pool", lambda call: left if _is_asked(call, content) else Reply("Served."))
    async with httpx.AsyncClient(
        base_url=restarting.proxy.base_url, headers=restarting.proxy.headers, trust_env=False, timeout=300
    ) as client:
        first = asyncio.ensure_future(_read(client, body))
        assert await asyncio.to_thread(gate.reached.wait, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.to_thread(watch.simulator.wait_until, lambda: watch.chats[0].disconnected_s is not None)
        gate.open()
        second = {**body, "messages": [{"role": "user", "content": prose("after it", 2200)}]}
        assert "Served." in await _read(client, second)
    assert watch.chats[0].completion_tokens == 60
    assert "pool_overflow" not in {record.outcome for record in watch.records}
    assert max(_held_tokens(watch.chats, at) for at in watch.chats) <= 4096


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return "".join([piece async for piece in answer.aiter_text()])
