"""Event streams, taken apart and put together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from litellm.types.llms.openai import OutputItemAddedEvent, ResponseInProgressEvent
from litellm.types.utils import ModelResponseStream, TextCompletionResponse, Usage

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import overflow_from_text
from litellm_compaction.proxy.answer.sse import (
    Bounds,
    Received,
    UpstreamDropped,
    UpstreamError,
    event_of,
    json_object,
    read_events,
    with_heartbeat,
)
from litellm_compaction.proxy.exchange import ClientRequest, Exchange

_BOUNDS = Bounds.of(1000)
# What `str.splitlines` takes for the end of a line, and JSON strings may hold as it is.
_SEPARATORS = "\u2028\u2029\x85\x1c\x0b\x0c"


def _response(pieces: list[bytes], error: Exception | None = None) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if error is not None:
            raise error

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body())


async def _read(pieces: list[bytes], bounds: Bounds = _BOUNDS) -> list[dict[str, object]]:
    return [chunk async for batch in read_events(_response(pieces), bounds) for chunk in batch]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just(_SEPARATORS), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n"]),
)
async def test_every_chunk_arrives_however_it_is_cut(texts: list[str], size: int, end: str) -> None:
    """Whatever a text holds and wherever the network cuts the bytes: every chunk arrives, once, in order."""
    chunks = [{"text": text} for text in texts]
    whole = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}{end}{end}" for chunk in chunks).encode()
    whole = whole.replace(b"\x1c", b"\\u001c") + f"data: [DONE]{end}{end}".encode()
    assert await _read([whole[i : i + size] for i in range(0, len(whole), size)]) == chunks


@given(st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
async def test_each_line_is_an_event(size: int, end: str, has_mark: bool) -> None:
    """Whatever ends it, behind a byte order mark too; comments, names and empty data say nothing, nor does the end."""
    lines = ['data: {"a": 1}', "", 'data: {"b": 2}', ": ping", "event: x", "data:", 'data: {"c": 3}', "data: [DONE]"]
    lines += ['data: {"late": 1}', ""]
    whole = ("\ufeff" * has_mark + end.join(lines) + end).encode()
    assert await _read([whole[i : i + size] for i in range(0, len(whole), size)]) == [{"a": 1}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize("piece", [b"{broken", b"[1]", b"7", b'{"choices": [7]}', b'{"choices": true}'])
async def test_piece_that_says_nothing_is_an_error(piece: bytes) -> None:
    """It may have been a word of the answer."""
    with pytest.raises(UpstreamError) as caught:
        await _read([b'data: {"choices": []}\n\n', b"data: " + piece + b"\n\n", b"data: [DONE]\n\n"])
    assert caught.value.text == "The model's server cannot be understood: a piece of its answer is no part of one."


@pytest.mark.parametrize("error", [None, httpx.ReadError("gone")])
async def test_a_stream_without_its_own_end_is_broken(error: Exception | None) -> None:
    """Even if the connection was closed as it should be; what came before has been given."""
    events = read_events(_response([b'data: {"a": 1}\n\n'], error), _BOUNDS)
    assert await anext(events) == [{"a": 1}]
    with pytest.raises(UpstreamDropped):
        await anext(events)


def test_chunk_goes_on_in_its_own_bytes() -> None:
    """A received chunk is written as it came, any other one as JSON in ASCII: lone surrogates have no UTF-8."""
    assert event_of(Received({"a": 1}, b'data:{"a" : 1}')) == b'data:{"a" : 1}\n\n'
    assert event_of({"a": "\ud800"}) == b'data: {"a":"\\ud800"}\n\n'


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"data: " + b"x" * 60, b"x" * 60], "a piece of its answer has more than 100 bytes"),
        ([b": ping\n\n"] * 200, "its answer has more than 1000 bytes"),
        ([b'data: {"a": [' + b"[]," * 300_000 + b"[]]}\n\n"], "too many values"),
    ],
    ids=["line without an end", "stream without an end", "nothing but structure"],
)
async def test_server_that_sends_without_end_is_not_read_to_its_end(pieces: list[bytes], words: str) -> None:
    """What was asked for bounds what is read, and the client is told whose fault it is."""
    bounds = Bounds(100, 1000) if len(b"".join(pieces)) < 10_000 else _BOUNDS
    with pytest.raises(UpstreamError, match="server") as caught:
        await _read(pieces, bounds)
    assert words in caught.value.text
    assert caught.value.response.status_code == 502
    assert overflow_from_text(caught.value.text) is None


async def test_what_came_before_a_piece_that_cannot_be_read_reaches_the_client() -> None:
    """Though both come in one read."""
    said = [f'data: {{"choices": [{{"delta": {{"content": "{word}"}}}}]}}\n\n' for word in ("So", "far")]
    hostile = 'data: {"a": [' + "[]," * 300_000 + "[]]}\n\n"
    stream = read_events(_response(["".join((*said, hostile)).encode()]), _BOUNDS)
    batch = await anext(stream)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in batch] == ["So", "far"]
    with pytest.raises(UpstreamError) as caught:
        await anext(stream)
    assert "too many values" in caught.value.text


def test_deeply_nested_json_is_not_an_object() -> None:
    """JSON made to exhaust the stack is passed over like any other nonsense."""
    assert json_object(b"[" * 200_000) == {}


def _call(*, may_pause: bool, begins_silently: bool = False) -> Exchange:
    request = Request(messages=())
    call = Exchange(ClientRequest(received=request, original=request, group="g"), Attempts(summary_calls_left=1))
    call.may_pause, call.attempt.begins_silently = may_pause, begins_silently
    return call


_PROGRESS = ResponseInProgressEvent.model_construct(type="response.in_progress")
_ADDED = OutputItemAddedEvent.model_construct(type="response.output_item.added")
_WORD = TextCompletionResponse(choices=[{"index": 0, "text": "word", "finish_reason": "stop"}])
_DELTA = ModelResponseStream(choices=[{"index": 0, "delta": {"role": "assistant", "content": "word"}}])
_WORD.usage = _DELTA.usage = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)


@pytest.mark.parametrize(
    ("before", "beats"),
    [
        ([], None),
        ([b"event: message_start\ndata: {}\n\n"], b'event: ping\ndata: {"type": "ping"}\n\n'),
        ([b'data: {"candidates": []}\n\n'], b": ping\n\n"),
        ([_PROGRESS], _PROGRESS),
        ([_PROGRESS, _ADDED], _PROGRESS),
        ([_ADDED], None),
        ([_WORD], ("", None, None)),
        ([_DELTA], ("", None, None)),
    ],
    ids=["nothing yet", "messages", "other bytes", "responses", "responses later", "no event", "completions", "chat"],
)
async def test_each_route_has_a_beat(before: list[Any], beats: Any) -> None:
    """A beat is an event of the route's own that says nothing, or there is none; a usage that was said is not again."""
    silence = _silent_behind(before)
    stream = with_heartbeat(silence, _call(may_pause=True), every_s=0.001)
    seen = [await anext(stream) for _ in before]
    assert seen == before
    try:
        if beats is None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
            return
        beat = await anext(stream)
        if isinstance(beats, tuple):
            (choice,) = beat.choices
            said = choice.text if hasattr(choice, "text") else choice.delta.content
            assert (said, choice.finish_reason, getattr(beat, "usage", None)) == beats
        else:
            assert beat == beats
    finally:
        await stream.aclose()


async def test_a_stream_that_begins_silently_opens_with_a_comment() -> None:
    """LiteLLM keeps what opens a stream until some of the answer has come; a comment goes out before all that."""
    stream = with_heartbeat(_silent_behind([]), _call(may_pause=True, begins_silently=True), every_s=0.001)
    assert [await anext(stream) for _ in range(3)] == [b": ping\n\n"] * 3
    await stream.aclose()
    stream = with_heartbeat(_silent_behind([_PROGRESS]), _call(may_pause=True, begins_silently=True), every_s=0.001)
    assert [await anext(stream) for _ in range(3)] == [b": ping\n\n", _PROGRESS, _PROGRESS]
    await stream.aclose()


async def test_a_beat_is_as_the_event_was_made() -> None:
    """LiteLLM hides the answer's id in the events that it sends, in place; a beat names the same answer."""

    def made(name: str) -> ResponseInProgressEvent:
        return ResponseInProgressEvent.model_construct(type="response.in_progress", response={"id": name})

    seen: list[Any] = []
    stream = with_heartbeat(_silent_behind([made("own")]), _call(may_pause=True), every_s=0.01)
    for number in range(4):
        event = await anext(stream)
        seen.append(event.model_copy(deep=True))
        event.response["id"] = f"hidden {number}"
    await stream.aclose()
    assert seen == [made("own")] * 4


async def _silent_behind(chunks: list[Any]) -> AsyncGenerator[Any, None]:
    for chunk in chunks:
        yield chunk
    await asyncio.Event().wait()


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
