"""Answers that are read late or never: they are closed if their reader has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from litellm_compaction.engine import TOLD_AFTER_S
from litellm_compaction.proxy.answer.sse import Batch
from litellm_compaction.proxy.answer.transport import EventStream
from tests.lmstudio_double import Reply
from tests.proxy.answer.wired import SHORT, Wire, chunk, sse, text_of
from tests.proxy.scripted import Listening, Scene, Turn, chunks_of
from tests.virtual_time import run

SHARED = {"admission": "pool"}


class Body(httpx.AsyncByteStream):
    """A server's body in pieces, which never ends."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


def _stream(closed: list[str]) -> EventStream:
    async def batches() -> AsyncGenerator[Batch, None]:
        try:
            for number in range(100):
                yield [{"n": number}]
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    exchange: Any = Listening()
    return EventStream([{"n": -1}], batches(), exchange, Scene([], [Turn()]).context)


@pytest.mark.parametrize("pulled", [0, 1, 5])
def test_a_stream_that_is_not_pulled_is_closed(pulled: int) -> None:
    """After half a minute; a reader that comes back is told so, and does not take it for the end."""

    async def play() -> None:
        closed: list[str] = []
        stream = _stream(closed)
        events = aiter(stream)
        for _ in range(pulled):
            await anext(events)
        await asyncio.sleep(29)
        assert closed == []
        await asyncio.sleep(2)
        assert closed == (["closed"] if pulled > 1 else [])
        if pulled:
            with pytest.raises(Exception, match="had read nothing for 30 s"):
                await anext(events)
        await stream.aclose()

    run(play())


def test_a_slow_reader_keeps_its_stream() -> None:
    """One item every five seconds, for minutes."""

    async def play() -> None:
        closed: list[str] = []
        seen = 0
        async for event in _stream(closed):
            assert (b"DONE" in event) == (seen == 101)
            seen += 1
            await asyncio.sleep(5)
        assert (seen, closed) == (102, ["closed"])

    run(play())


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=["carried", "passed on"])
def test_an_answer_that_goes_on_without_a_reader_is_ended(options: dict[str, int]) -> None:
    """Upstream first; then it gives its room back."""

    async def play() -> None:
        body = Body(*(b"data: %s\n\n" % each for each in [b'{"choices":[{"index":0,"delta":{"content":"a"}}]}'] * 9))
        headers = {"content-type": "text/event-stream"}
        wire = Wire([lambda: httpx.Response(200, headers=headers, stream=body)], settings=SHARED)
        transport, scene = await wire.transport()
        asked = {"messages": SHORT, "stream": True, **options}
        answer = await transport.handle_async_request(
            httpx.Request("POST", "http://served/v1/chat/completions", json=asked)
        )
        left = aiter(answer.stream)  # type: ignore[arg-type]
        await anext(left)
        await asyncio.sleep(29)
        assert (body.is_closed, len(scene.compactor.admission.pools)) == (False, 1)
        await asyncio.sleep(1.1)
        assert (body.is_closed, len(scene.compactor.admission.pools)) == (True, 1)
        await asyncio.sleep(1)
        assert len(scene.compactor.admission.pools) == 0

    run(play())


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=["carried", "passed on"])
async def test_an_answer_that_has_ended_gives_its_room_back_at_once(options: dict[str, int]) -> None:
    """No server writes for it any more."""
    wire = Wire([lambda: sse(chunk({"content": "Fine."}, "stop"))], settings=SHARED)
    assert text_of(await wire.ask(stream=True, **options)) == "Fine."
    assert wire.scene is not None
    assert (wire.scene.listener.actions, wire.scene.compactor.admission.pools) == (["none"], {})


def test_who_waits_for_room_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """After ten seconds: the operator by one line, the client by the opening of its answer."""

    async def play() -> None:
        scene = Scene([{"role": "user", "content": "Hello."}], [Turn(reply=Reply("It is so."))], settings=SHARED)
        prepared = await scene.prepared()
        first = scene.compactor.room(scene.context)
        await first.acquire(prepared, 2000, is_watched=False)
        reading = chunks_of(await scene.answer())
        opening = await anext(reading)
        assert asyncio.get_running_loop().time() == TOLD_AFTER_S
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert scene.listener.may_pause
        asyncio.get_running_loop().call_later(120, first.release)
        rest = [each async for each in reading]
        assert [each["choices"][0]["finish_reason"] for each in rest if each["choices"]][-1] == "stop"
        assert {each["id"] for each in rest} == {opening["id"]}

    with caplog.at_level(logging.WARNING, "litellm_compaction"):
        run(play())
    (told,) = [record.getMessage() for record in caplog.records if "waits_for_room" in record.getMessage()]
    assert "waited_s=10" in told
    assert "Hello" not in told
