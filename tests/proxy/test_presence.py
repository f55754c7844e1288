"""A client's presence, before an application that waits for what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from litellm_compaction.errors import ClientLeft
from litellm_compaction.proxy.presence import beats, watched, while_here
from tests.virtual_time import run


def _served(application: Any, *, leaves_s: float) -> None:
    """Serves one request whose client leaves after so long."""

    async def serve() -> None:
        coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        coming.put_nowait({"type": "http.request"})
        asyncio.get_running_loop().call_later(leaves_s, coming.put_nowait, {"type": "http.disconnect"})

        async def send(_: Any) -> None:
            pass

        await watched(application)({"type": "http", "method": "POST"}, coming.get, send)

    run(serve())


def test_work_for_a_client_that_leaves_ends_a_second_later() -> None:
    """LiteLLM hears of it at once; what it has cancelled is cancelled; work that begins later ends as it begins."""
    heard: list[object] = []

    async def works() -> None:
        with while_here():
            await asyncio.sleep(60)

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        now_s, cancelled = asyncio.get_running_loop().time, asyncio.ensure_future(works())
        heard.append((await receive())["type"])
        heard.append(now_s())
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for _ in range(2):
            with pytest.raises(ClientLeft):
                await works()
            heard.append(now_s())

    _served(application, leaves_s=5)
    assert heard == ["http.disconnect", 5, 6, 6]


@pytest.mark.parametrize("is_answered", [True, False])
def test_work_that_is_done_in_time_is_left_alone(is_answered: bool) -> None:
    """Within LiteLLM's own second; and for a client that has its answer, as it may be about another request."""
    done: list[float] = []

    async def application(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with while_here():
            await asyncio.sleep(1)
            if is_answered:
                await send({"type": "http.response.body", "body": b""})
            await asyncio.sleep(60 if is_answered else 1.9)
        done.append(asyncio.get_running_loop().time())

    _served(application, leaves_s=2)
    assert done == [61 if is_answered else 2.9]


def heard(pieces: Sequence[tuple[float, bytes]], may_pause: bool, sending_s: float = 0.0) -> list[tuple[str, float]]:
    """The pieces of a stream, each after so many seconds, and beats between them, as its client hears them."""
    said: list[tuple[str, float]] = []

    async def serve() -> None:
        clock = asyncio.get_running_loop().time

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(sending_s)
            said.append((message["body"].decode().strip(), round(clock(), 3)))

        async def application(_scope: Any, _receive: Any, send: Any) -> None:
            beats(lambda: may_pause, every_s=5)
            for pause_s, piece in pieces:
                await asyncio.sleep(pause_s)
                await send({"type": "http.response.body", "body": piece, "more_body": True})

        await watched(application)({"type": "http", "method": "POST"}, asyncio.Event().wait, send)

    run(serve())
    return said


def test_a_beat_stands_between_events_alone() -> None:
    """Before the first byte a failure keeps its status; within an event, and while one is sent, it would break that."""
    pieces = [(9.0, b"data: a"), (9.0, b"\n\n"), (12.0, b"data: b\n\n")]
    assert heard(pieces, True) == [("data: a", 9), ("", 18), (": ping", 23), (": ping", 28), ("data: b", 30)]
    slow = [("a", 7), (": ping", 19), ("b", 26)]
    assert heard([(0.0, b"a\n\n"), (6.0, b"b\n\n")], True, sending_s=7) == slow
