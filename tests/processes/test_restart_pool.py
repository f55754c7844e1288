"""Several answers at once in one shared context: nobody's generation ends anybody else's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from litellm_compaction.simulator import ChatCall, Reply
from tests.builders import prose
from tests.integration.restart_bench import Restarting, changed, shut, without_restarts
from tests.processes.counting import TAGS, counting, held_tokens, words

pytestmark = pytest.mark.proxy


def test_parallel_answers_share_one_context(restarting: Restarting) -> None:
    """Four long answers, streamed and whole, each past its share of 4096 tokens: all complete, none ends another."""
    watch = restarting.watch("pool", counting)

    def answer(tag: str) -> str:
        messages = [{"role": "user", "content": f"count {tag}"}]
        if tag in TAGS[:2]:
            return without_restarts(restarting.proxy.stream("pool", messages).text)
        content: str = restarting.proxy.chat("pool", messages).json()["choices"][0]["message"]["content"]
        return content

    with ThreadPoolExecutor(len(TAGS)) as clients:
        answers = list(clients.map(answer, TAGS))
    assert [text.split() for text in answers] == [words(tag) for tag in TAGS]
    assert "pool_overflow" not in {record.outcome for record in watch.records}
    assert max(held_tokens(watch.chats, at.started_s) for at in watch.chats) <= 4096


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
    body = {"model": "pool", "messages": asked, "stream": stream, "max_tokens": 60}
    watch = restarting.watch("pool", lambda call: waiting if _is_asked(call, content) else Reply("Served."))
    with changed(restarting.simulators["pool"], runs_on=stream):
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


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return "".join([piece async for piece in answer.aiter_text()])
