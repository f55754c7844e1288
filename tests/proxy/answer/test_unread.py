"""Answers that are read late or never: read ahead within bounds, and closed if their reader has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import httpx
import pytest

from litellm_compaction.engine import TOLD_AFTER_S
from litellm_compaction.errors import LeftUnread
from litellm_compaction.proxy.answer import unread
from litellm_compaction.proxy.answer.unread import UNREAD_S, ReadAhead, closed_if_unread
from tests.builders import prose
from tests.engine.bench import settled
from tests.lmstudio_double import Reply
from tests.proxy.answer.wired import SHORT, USAGE_CHUNK, Wire, chunk, sse
from tests.proxy.scripted import Scene, Turn, chunks_of
from tests.virtual_time import run

SHARED = {"admission": "pool"}
WORDS = [chunk({"content": f"word{number} "}) for number in range(50)]


class Body(httpx.AsyncByteStream):
    """A server's body in pieces; each waits until it is let go on."""

    def __init__(self, *pieces: bytes, error: Exception | None = None, hangs: bool = False) -> None:
        self.pieces, self.error, self.hangs = pieces, error, hangs
        self.given = 0
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.given += 1
            yield piece
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


def _ahead(body: Body, on_end: Callable[[], object] = bool) -> ReadAhead:
    return ReadAhead(httpx.Response(200, stream=body), on_end)


async def _read(ahead: ReadAhead) -> bytes:
    return b"".join([piece async for piece in ahead.aiter_bytes()])


async def test_the_end_is_told_though_nothing_is_read() -> None:
    """The server has ended its answer, whoever reads; all of it can be read later."""
    ended: list[int] = []
    ahead = _ahead(Body(b"one ", b"two ", b"three"), lambda: ended.append(1))
    await settled()
    assert ended == [1]
    assert await _read(ahead) == b"one two three"
    await ahead.aclose()
    assert ended == [1]


async def test_a_server_that_is_far_ahead_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the bound is kept of an answer that is not read; with the reader it goes on."""
    monkeypatch.setattr(unread, "_MOST_UNREAD_BYTES", 100)
    body, ended = Body(*[b"x" * 30] * 40), list[int]()
    ahead = _ahead(body, lambda: ended.append(1))
    await settled()
    assert (body.given, ended) == (4, [])
    assert await _read(ahead) == b"x" * 1200
    assert ended == [1]


@pytest.mark.parametrize("has_begun", [True, False])
async def test_closing_ends_the_answer_upstream(has_begun: bool) -> None:
    """Also if nothing has been read of it, and without a word about an end that the server did not make."""
    body, ended = Body(b"one ", hangs=True), list[int]()
    ahead = _ahead(body, lambda: ended.append(1))
    if has_begun:
        await settled()
    await ahead.aclose()
    await ahead.aclose()
    await settled()
    assert (body.is_closed, ended) == (True, [])


async def _numbers(closed: list[str]) -> AsyncGenerator[int, None]:
    try:
        for number in range(100):
            yield number
    finally:
        await asyncio.sleep(0)
        closed.append("closed")


def test_a_stream_that_is_not_pulled_is_closed() -> None:
    """After half a minute; a reader that comes back is told so, and does not take it for the end."""

    async def play() -> None:
        closed: list[str] = []
        numbers = closed_if_unread(_numbers(closed))
        assert await anext(numbers) == 0
        await asyncio.sleep(UNREAD_S - 1)
        assert closed == []
        await asyncio.sleep(2)
        assert closed == ["closed"]
        with pytest.raises(LeftUnread):
            await anext(numbers)
        await numbers.aclose()

    run(play())


def test_a_slow_reader_keeps_its_stream() -> None:
    """One item every five seconds, for minutes."""

    async def play() -> None:
        closed: list[str] = []
        seen = 0
        async for number in closed_if_unread(_numbers(closed)):
            assert (number, closed) == (seen, [])
            seen += 1
            await asyncio.sleep(5)
        assert (seen, closed) == (100, ["closed"])

    run(play())


def _wire(**settings: object) -> Wire:
    return Wire([lambda: sse(*WORDS, chunk({}, "stop"), USAGE_CHUNK)], settings={**SHARED, **settings})


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=["carried", "passed on"])
def test_a_reader_that_leaves_without_a_word_holds_nothing(options: dict[str, int]) -> None:
    """Its server has ended the answer: nothing is held a moment later, though the stream is neither read nor closed."""

    async def play() -> None:
        wire = _wire()
        transport, scene = await wire.transport()
        body = {"messages": SHORT, "stream": True, **options}
        answer = await transport.handle_async_request(
            httpx.Request("POST", "http://served/v1/chat/completions", json=body)
        )
        left = aiter(answer.stream)  # type: ignore[arg-type]
        await anext(left)
        assert scene.compactor.held().answers == 1
        await asyncio.sleep(2)
        assert scene.compactor.held() == (0, 0)

    run(play())


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=["carried", "passed on"])
def test_an_answer_that_goes_on_without_a_reader_is_ended(options: dict[str, int]) -> None:
    """Upstream first; then it gives its room back."""

    async def play() -> None:
        body = Body(
            *(b"data: %s\n\n" % each for each in [b'{"choices":[{"index":0,"delta":{"content":"a"}}]}'] * 9), hangs=True
        )
        headers = {"content-type": "text/event-stream"}
        wire = Wire([lambda: httpx.Response(200, headers=headers, stream=body)], settings=SHARED)
        transport, scene = await wire.transport()
        asked = {"messages": SHORT, "stream": True, **options}
        answer = await transport.handle_async_request(
            httpx.Request("POST", "http://served/v1/chat/completions", json=asked)
        )
        left = aiter(answer.stream)  # type: ignore[arg-type]
        await anext(left)
        await asyncio.sleep(UNREAD_S - 1)
        assert (body.is_closed, scene.compactor.held().answers) == (False, 1)
        await asyncio.sleep(1.1)
        assert (body.is_closed, scene.compactor.held().answers) == (True, 1)
        await asyncio.sleep(1)
        assert scene.compactor.held() == (0, 0)

    run(play())


def _waiting_scene() -> Scene:
    return Scene(
        [{"role": "user", "content": "Hello."}],
        [Turn(reply=Reply(prose("an answer", 30)))],
        settings=SHARED,
        window_tokens=2048,
    )


def test_who_waits_for_room_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """After ten seconds: the operator by one line, the client by the opening of its answer."""

    async def play() -> None:
        scene = _waiting_scene()
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
