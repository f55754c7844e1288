"""Clients that leave, keys with one request at a time: nothing goes on generating, no slot is lost or freed early."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest

from tests.builders import prose, user
from tests.integration.harness import until
from tests.integration.restart_bench import LONG, Restarting, Teller, asked, changed, without_restarts
from tests.lmstudio_double import Gate, Reply

pytestmark = pytest.mark.proxy
_numbers = itertools.count()


def _key() -> dict[str, str]:
    return {"Authorization": f"Bearer sk-one.{next(_numbers)}"}


def _small(restarting: Restarting, key: dict[str, str], **body: Any) -> httpx.Response:
    return restarting.proxy.post({"model": "local", "messages": [user("Hi.")], **body}, headers=key)


def _served(restarting: Restarting, key: dict[str, str]) -> bool:
    """Whether a request of the key's is served; LiteLLM frees its slot just after the connection has ended."""
    answer = _small(restarting, key)
    assert answer.status_code in (200, 429), answer.text
    return answer.status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_client_that_leaves_ends_everything(restarting: Restarting, stream: bool) -> None:
    """Its second request upstream is closed, nothing is asked any more, and the key's slot is free for its next one.

    The server would wait for ever where it is. Of a whole answer, LiteLLM notices that its client has left only with
    `cancel_on_disconnect`, and only while it waits for the deployment: the transport does all of its work there. Where
    it is not told so, and earlier in an answer: `tests/integration/test_leaving.py`.
    """
    key, gate = _key(), Gate()
    assert (await asyncio.to_thread(_small, restarting, key, stream=True)).status_code == 200
    middle = restarting.simulators["middle"]
    later = Reply(f" {prose('later', 300)}", gate=gate, gate_after_tokens=60)
    watch = restarting.watch("middle", Teller(Reply(LONG), later=(later,)))
    with changed(middle, runs_on=stream):
        body = {"model": "middle", "messages": asked(f"leaving {key}"), "stream": stream}
        async with httpx.AsyncClient(base_url=restarting.proxy.base_url, trust_env=False, timeout=300) as client:
            waiting = asyncio.ensure_future(_read(client, body, key))
            assert await asyncio.to_thread(gate.reached.wait, 60)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await asyncio.to_thread(
            middle.wait_until,
            lambda: all(record.outcome != "running" for record in watch.records),
        )
        gate.open()
        opened = watch.chats + watch.summaries
        assert max(opened, key=lambda record: record.started_s).outcome == "disconnected"
        assert len(watch.chats) == 2
        watch_small = restarting.watch("local")
        await asyncio.to_thread(until, lambda: _served(restarting, key))
        # Nothing was asked of the model after the client had left.
        assert len(watch.chats + watch.summaries) == len(opened)
    assert len(watch_small.chats) == 1


async def _read(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        async for _ in answer.aiter_bytes():
            pass


def test_failed_answer_frees_its_slot(restarting: Restarting) -> None:
    """An answer that breaks in its second stream ends with an error event, and the key's next request is served."""
    key = _key()
    refused = Reply("model unloaded", status=503)
    restarting.watch("middle", Teller(Reply(LONG), later=(refused,)))
    body = {"model": "middle", "messages": asked("failing second"), "stream": True}
    answer = restarting.proxy.stream_body(body, **key)
    assert answer.finish_reasons == []
    assert [chunk for chunk in answer.chunks if "error" in chunk]
    assert LONG.startswith(without_restarts(answer.text).split("\n\n⚙️")[0])
    until(lambda: _served(restarting, key))
