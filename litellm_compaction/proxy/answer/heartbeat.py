"""A sign of life for a stream that a compaction keeps silent.

Serves LiteLLM's streaming iterator hook. Not LiteLLM's own keep-alive: that leaks a slot of the key's parallel limit
with every chat stream on 1.106.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any

import anyio

from litellm_compaction.proxy.call import Call

_END = object()
# Legal in every stream of events, and read by no client.
_COMMENT = b": ping\n\n"


async def with_heartbeat(response: AsyncIterable[Any], call: Call, *, every_s: float) -> AsyncGenerator[Any, None]:
    """The chunks of `response`, and an empty one after each `every_s` for which a compaction has kept it silent.

    Clients and load balancers close connections on which nothing moves. The race against the clock costs a task,
    so it is run only where a pause may come.

    A stream that waits before anybody is told anything opens with a comment: LiteLLM's router keeps what opens a
    Responses stream (`_responses_stream_holds_event`), and a Messages stream where the request may be tried again
    (`_aanthropic_messages_streaming_iterator`), until some of the answer has come (1.106.2 and 1.109.1).
    """
    source = response.__aiter__()
    last: Any = None
    begun: Any = None
    if call.may_pause and call.begins_silently:
        yield _COMMENT
    while True:
        if not call.may_pause:
            try:
                last = await source.__anext__()
            except StopAsyncIteration:
                return
            begun = _copied(last) if _is_in_progress(last) else begun
            yield last
            continue
        waiting = asyncio.ensure_future(_next(source))
        try:
            while not (await asyncio.wait({waiting}, timeout=every_s))[0]:
                beat = _COMMENT if last is None and call.begins_silently else _beat(last, begun)
                if beat is not None:
                    yield beat
            last = await waiting
        except StopAsyncIteration:
            return
        finally:
            if not waiting.done():
                waiting.cancel()
                # Neither awaited directly nor without a shield: anyio cancels us again and again when the client has
                # gone, an await would hand that on, and the upstream connection would stay open half closed.
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({waiting})
                if not waiting.cancelled():
                    waiting.exception()  # marks it as retrieved
        if last is _END:
            return
        begun = _copied(last) if _is_in_progress(last) else begun
        yield last


async def _next(source: AsyncIterator[Any]) -> Any:
    # A task may not raise StopAsyncIteration.
    async for chunk in source:
        return chunk
    return _END


def _copied(event: Any) -> Any:
    """An event that stays as it is: LiteLLM hides the answer's id in the one that it sends, and would do so again."""
    return event.model_copy(deep=True) if hasattr(event, "model_copy") else event


def _is_in_progress(event: Any) -> bool:
    # Not by `getattr`: pydantic raises and catches an error for what a chat chunk does not have.
    kind = getattr(event, "__dict__", {}).get("type")
    return getattr(kind, "value", kind) == "response.in_progress"


def _beat(last: Any, begun: Any) -> Any:
    """A chunk that says nothing, in the language of the one before; None if there is no such thing.

    Args:
        last: the chunk before, None before the first.
        begun: of the Responses API, the event that says that an answer is being made; it may be said again.
    """
    if isinstance(last, (bytes, bytearray)):
        # Other streams of bytes than Anthropic's name no events; a comment is legal in all of them.
        return b'event: ping\ndata: {"type": "ping"}\n\n' if last.lstrip().startswith(b"event:") else _COMMENT
    if not hasattr(last, "choices") or not hasattr(last, "model_copy"):
        return _copied(begun)
    beat = last.model_copy(deep=True)
    if getattr(beat, "usage", None) is not None:
        # What it adds up is said once.
        beat.usage = None
    for choice in beat.choices:
        choice.finish_reason = None
        delta = getattr(choice, "delta", None)
        if delta is None:
            if not isinstance(getattr(choice, "text", None), str):
                return None
            choice.text = ""
            continue
        for name in ("role", "tool_calls", "function_call", "reasoning_content", "thinking_blocks"):
            if getattr(delta, name, None) is not None:
                setattr(delta, name, None)
        delta.content = ""
    return beat
