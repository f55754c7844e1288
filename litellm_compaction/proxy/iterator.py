"""A streaming answer on its way out of LiteLLM: notice, unasked usage, what the usage teaches, a heartbeat.

Serves LiteLLM's streaming iterator hook. The chunks of streams that are not guarded are never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any

from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE
from litellm_compaction.proxy.calls import Call
from litellm_compaction.proxy.wire import Usage, usage_of


async def guarded_stream(
    response: AsyncIterable[Any], call: Call, *, notices: str, seen: StreamReport
) -> AsyncGenerator[Any, None]:
    """The chunks of `response` as the client gets them.

    Args:
        response: LiteLLM's stream of `ModelResponseStream`.
        call: the request that it answers.
        notices: where a notice goes: content, reasoning or off.
        seen: filled while the stream runs.
    """
    pending = notices if call.action == "compacted" and not call.is_structured else "off"
    async for chunk in response:
        seen.take(chunk)
        if pending != "off" and _opens(chunk):
            yield _notice_chunk(chunk, pending)
            pending = "off"
        if call.asks_for_usage or getattr(chunk, "usage", None) is None:
            yield chunk
        elif not _is_bare_usage(chunk):
            chunk.usage = None
            yield chunk


async def with_heartbeat(response: AsyncIterable[Any], call: Call, *, every_s: float) -> AsyncGenerator[Any, None]:
    """The chunks of `response`, and an empty one whenever a compaction has kept it silent for a while.

    Clients and load balancers close connections on which nothing moves. The race against the clock costs a task,
    so it is run only where a pause may come.

    Args:
        response: LiteLLM's stream of any route.
        call: the request that it answers.
        every_s: longest silence.
    """
    source = response.__aiter__()
    last: Any = None
    while True:
        if not call.may_pause:
            try:
                last = await source.__anext__()
            except StopAsyncIteration:
                return
            yield last
            continue
        waiting = asyncio.ensure_future(_next(source))
        try:
            while not (await asyncio.wait({waiting}, timeout=every_s))[0]:
                if (beat := _beat(last)) is not None:
                    yield beat
            last = await waiting
        except StopAsyncIteration:
            return
        finally:
            if not waiting.done():
                waiting.cancel()
                with contextlib.suppress(BaseException):
                    await waiting
        if last is _END:
            return
        yield last


_END = object()


async def _next(source: AsyncIterator[Any]) -> Any:
    # A task may not raise StopAsyncIteration.
    async for chunk in source:
        return chunk
    return _END


def _beat(last: Any) -> Any:
    """A chunk that says nothing, in the language of the one before; None where there is no such thing."""
    if isinstance(last, (bytes, bytearray)):
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    if not hasattr(last, "choices") or not hasattr(last, "model_copy"):
        return None
    beat = last.model_copy(deep=True)
    for choice in beat.choices:
        delta = getattr(choice, "delta", None)
        if delta is None:
            return None
        choice.finish_reason = None
        for name in ("role", "tool_calls", "function_call", "reasoning_content", "thinking_blocks"):
            if getattr(delta, name, None) is not None:
                setattr(delta, name, None)
        delta.content = ""
    return beat


class StreamReport:
    """What a stream said about itself: its usage, and whether anything came at all."""

    def __init__(self) -> None:
        self.usage: Usage | None = None

    def take(self, chunk: object) -> None:
        """Notes what `chunk` tells."""
        self.usage = usage_of(chunk) or self.usage


def _opens(chunk: Any) -> bool:
    return any(getattr(choice, "delta", None) is not None for choice in getattr(chunk, "choices", None) or ())


def _is_bare_usage(chunk: Any) -> bool:
    """Whether a chunk carries usage and nothing else (LiteLLM's shape: one choice with an empty delta)."""
    for choice in getattr(chunk, "choices", None) or ():
        delta = getattr(choice, "delta", None)
        if getattr(choice, "finish_reason", None):
            return False
        fields = ("content", "reasoning_content", "tool_calls", "function_call", "role")
        if any(getattr(delta, name, None) for name in fields):
            return False
    return True


def _notice_chunk(first: Any, place: str) -> Any:
    """A chunk like the stream's first one that says what happened; it takes over the only role delta."""
    notice = first.model_copy(deep=True)
    text = f"{START_NOTICE}\n{DONE_NOTICE}\n\n"
    for choice in notice.choices[1:]:
        choice.delta.content = None
    delta = notice.choices[0].delta
    notice.choices[0].finish_reason = None
    delta.tool_calls = None
    delta.content = text if place == "content" else None
    if place == "reasoning":
        delta.reasoning_content = text
    delta.role = first.choices[0].delta.role or "assistant"
    first.choices[0].delta.role = None
    return notice
