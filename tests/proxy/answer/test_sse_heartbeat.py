"""Signs of life in a silent stream, and a clean end of what is waited for when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from litellm.types.llms.openai import OutputItemAddedEvent, ResponseInProgressEvent
from litellm.types.utils import ModelResponseStream, TextCompletionResponse, Usage

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Attempts
from litellm_compaction.proxy.answer.sse import with_heartbeat
from litellm_compaction.proxy.call import Call, ClientRequest


def _call(*, may_pause: bool, begins_silently: bool = False) -> Call:
    request = Request(messages=())
    call = Call(ClientRequest(received=request, original=request, group="g"), Attempts(summary_calls_left=1))
    call.may_pause, call.attempt.begins_silently = may_pause, begins_silently
    return call


_PROGRESS = ResponseInProgressEvent.model_construct(type="response.in_progress")
_ADDED = OutputItemAddedEvent.model_construct(type="response.output_item.added")
_WORD = TextCompletionResponse(choices=[{"index": 0, "text": "word", "finish_reason": "stop"}])
_DELTA = ModelResponseStream(choices=[{"index": 0, "delta": {"role": "assistant", "content": "word"}}])


@pytest.mark.parametrize(
    ("before", "beats"),
    [
        ([], None),
        ([b"event: message_start\ndata: {}\n\n"], b'event: ping\ndata: {"type": "ping"}\n\n'),
        ([b'data: {"candidates": []}\n\n'], b": ping\n\n"),
        ([_PROGRESS], _PROGRESS),
        ([_PROGRESS, _ADDED], _PROGRESS),
        ([_ADDED], None),
        ([_WORD], ("", None)),
        ([_DELTA], ("", None)),
    ],
    ids=["nothing yet", "messages", "other bytes", "responses", "responses later", "no event", "completions", "chat"],
)
async def test_each_route_has_a_beat(before: list[Any], beats: Any) -> None:
    """A beat is an event of the route's own that says nothing, or there is none."""
    silence = _SilentBehind(before)
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
            assert (said, choice.finish_reason) == beats
        else:
            assert beat == beats
    finally:
        await stream.aclose()


async def test_a_stream_that_begins_silently_opens_with_a_comment() -> None:
    """LiteLLM keeps what opens a stream until some of the answer has come; a comment goes out before all that."""
    stream = with_heartbeat(_SilentBehind([]), _call(may_pause=True, begins_silently=True), every_s=0.001)
    assert [await anext(stream) for _ in range(3)] == [b": ping\n\n"] * 3
    await stream.aclose()
    stream = with_heartbeat(_SilentBehind([_PROGRESS]), _call(may_pause=True, begins_silently=True), every_s=0.001)
    assert [await anext(stream) for _ in range(3)] == [b": ping\n\n", _PROGRESS, _PROGRESS]
    await stream.aclose()


async def test_a_beat_is_as_the_event_was_made() -> None:
    """LiteLLM hides the answer's id in the events that it sends, in place; a beat names the same answer."""

    def made(name: str) -> ResponseInProgressEvent:
        return ResponseInProgressEvent.model_construct(type="response.in_progress", response={"id": name})

    seen: list[Any] = []
    stream = with_heartbeat(_SilentBehind([made("own")]), _call(may_pause=True), every_s=0.01)
    for number in range(4):
        event = await anext(stream)
        seen.append(event.model_copy(deep=True))
        event.response["id"] = f"hidden {number}"
    await stream.aclose()
    assert seen == [made("own")] * 4


class _SilentBehind:
    """A stream that gives some chunks and then nothing."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = list(chunks)

    def __aiter__(self) -> _SilentBehind:
        return self

    async def __anext__(self) -> Any:
        if not self._chunks:
            await asyncio.Event().wait()
        return self._chunks.pop(0)


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


@pytest.mark.parametrize("last", [_DELTA, _WORD])
async def test_the_usage_is_said_once(last: Any) -> None:
    """On a slow machine a stream may be silent behind its usage, too: clients add up what they read."""
    speak = asyncio.Event()

    async def source() -> AsyncGenerator[Any, None]:
        told = last.model_copy(deep=True)
        told.usage = Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
        yield told
        await speak.wait()

    seen: list[Any] = []
    async for chunk in with_heartbeat(source(), _call(may_pause=True), every_s=0.01):
        seen.append(json.loads(chunk.model_dump_json(exclude_none=True)))
        if len(seen) == 3:
            speak.set()
    assert [bool(chunk.get("usage")) for chunk in seen][:3] == [True, False, False]
