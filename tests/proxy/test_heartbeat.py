"""Signs of life in a silent stream, and a clean end of what is waited for when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.proxy.calls import Call
from litellm_compaction.proxy.heartbeat import with_heartbeat


def _call(*, may_pause: bool) -> Call:
    request = Request(messages=())
    attempts = Attempts(summary_calls_left=1)
    return Call(received=request, original=request, group="g", attempts=attempts, may_pause=may_pause)


@pytest.mark.parametrize("may_pause", [False, True])
async def test_chunks_pass_in_order(may_pause: bool) -> None:
    """Whether or not a pause may come, the client gets exactly the stream."""

    async def source() -> AsyncGenerator[bytes, None]:
        for number in range(5):
            yield b"%d" % number

    assert [chunk async for chunk in with_heartbeat(source(), _call(may_pause=may_pause), every_s=5)] == [
        b"%d" % number for number in range(5)
    ]


async def test_silence_is_broken_in_the_stream_s_own_language() -> None:
    """A stream of bytes gets pings while it is silent, and none before its first chunk."""
    speak = asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await speak.wait()
        yield b"last"

    seen: list[Any] = []
    async for chunk in with_heartbeat(source(), _call(may_pause=True), every_s=0.01):
        seen.append(chunk)
        if len(seen) == 3:
            speak.set()
    assert (seen[0], seen[-1]) == (b"first", b"last")
    assert set(seen[1:-1]) == {b'event: ping\ndata: {"type": "ping"}\n\n'}


@pytest.mark.parametrize("may_pause", [False, True])
async def test_error_of_the_stream_passes(may_pause: bool) -> None:
    """An error is the client's to know."""

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        async for _ in with_heartbeat(source(), _call(may_pause=may_pause), every_s=5):
            pass


async def test_client_that_leaves_does_not_interrupt_the_closing() -> None:
    """anyio cancels again and again until a task ends; the closing of the connection upstream takes its time."""
    waits, closed = asyncio.Event(), asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            waits.set()
            await asyncio.Event().wait()
            yield b""
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            closed.set()

    async def read() -> None:
        async for _ in with_heartbeat(source(), _call(may_pause=True), every_s=5):
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await waits.wait()
        group.cancel_scope.cancel()
    assert closed.is_set()
