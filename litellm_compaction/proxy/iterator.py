"""A streaming answer on its way out: the notice, the usage that nobody asked for, what the usage teaches.

Serves LiteLLM's streaming iterator hook for chat completions. Streams that are not guarded are never wrapped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
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
    pending = notices if call.action == "compacted" and call.plain_text else "off"
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
    # Whatever the first chunk says stays in the first chunk alone.
    for name in ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking_blocks"):
        if getattr(delta, name, None) is not None:
            setattr(delta, name, None)
    delta.content = text if place == "content" else None
    if place == "reasoning":
        delta.reasoning_content = text
    delta.role = first.choices[0].delta.role or "assistant"
    first.choices[0].delta.role = None
    return notice
