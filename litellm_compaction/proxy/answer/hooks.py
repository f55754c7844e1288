"""The carrier for every provider, in LiteLLM's hooks: its own streams and router calls.

Used if the transport cannot be installed, and for streams of chats only. LiteLLM has opened the first answer; one that
goes on is a call through the router, pinned to the same deployment.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from litellm.types.utils import ModelResponseStream

from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import ended_early, is_crash, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import Batch, Chunk, Received, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.answer.upstream import WHOLE_DOCUMENT_KEY, Leg
from litellm_compaction.proxy.internal import call_router, log_stopped
from litellm_compaction.proxy.routing import WAYS_OF

# A client's keys that a continuation needs too (OpenAI's API reference for chat completions, LiteLLM's extras).
_CLIENT_KEYS = (
    "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "stop", "seed",
    "presence_penalty", "frequency_penalty", "logit_bias", "reasoning_effort", "thinking", "top_k", "user",
)  # fmt: skip


@dataclass(slots=True)
class _Part:
    """One stream of the answer, as LiteLLM's books have to know it: its logging object, text, and a logged failure."""

    log: Any
    text: list[str] = field(default_factory=list)
    has_failed: bool = False


class HookedUpstream:
    """The deployment that LiteLLM's router finds by `pin`, for the client's request in `data`; `first` is open."""

    ways: frozenset[Way] = WAYS_OF["hooks"]

    def __init__(self, first: Any, router: Any, pin: str, data: Mapping[str, Any]) -> None:
        self._first: Any = first
        self._router = router
        self._pin = pin
        self._data = data
        self._parts: list[_Part] = []

    @asynccontextmanager
    async def open(self, leg: Leg) -> AsyncIterator[AsyncIterator[Batch]]:
        stream, part = self._first, _Part(self._data.get("litellm_logging_obj"))
        if stream is None:
            # LiteLLM reads the first chunk before it returns: its errors come from here.
            with _understood(part, leg):
                stream = await self._again(leg)
            part.log = getattr(stream, "logging_obj", None)
        self._first = None
        try:
            yield _chunks(stream, part, leg)
        finally:
            with anyio.CancelScope(shield=True):
                if (aclose := getattr(stream, "aclose", None)) is not None:
                    await aclose()
            self._parts.append(part)

    async def log_partials(self, count: Callable[[str], int], prompt_tokens: int) -> None:
        """Logs the streams that were stopped: LiteLLM itself logs only streams that end.

        Late, when the whole answer has ended: the first stream's slot in the key's parallel limit then spans all of it.
        """
        for part in self._parts:
            if not part.has_failed:
                text = "".join(part.text)
                await log_stopped(part.log, text, {"prompt_tokens": prompt_tokens, "completion_tokens": count(text)})

    async def _again(self, leg: Leg) -> Any:
        prepared = leg.prepared
        asked: dict[str, Any] = {key: self._data[key] for key in _CLIENT_KEYS if self._data.get(key) is not None}
        if leg.is_document and self._data.get(WHOLE_DOCUMENT_KEY) is not None:
            asked[WHOLE_DOCUMENT_KEY] = self._data[WHOLE_DOCUMENT_KEY]
        if prepared.tools is not None:
            asked["tools"] = list(prepared.tools)
        extra = {**(wire.GOES_ON if leg.needs_word else {}), **((leg.goes_on and prepared.continuation.closing) or {})}
        if extra:
            asked = {**{key: value for key, value in asked.items() if key not in extra}, "extra_body": extra}
        parent = self._data.get("metadata")
        return await call_router(
            self._router,
            self._pin,
            parent if isinstance(parent, Mapping) else {},
            messages=wire.encode(prepared.messages) if prepared.messages is not None else self._data["messages"],
            max_tokens=leg.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            **asked,
        )


async def hooked(answer: Answer, upstream: HookedUpstream, prepared: PreparedRequest) -> AsyncGenerator[Any, None]:
    """The answer's chunks as LiteLLM's own; streams that were stopped are logged at the end."""
    batches = answer.batches()
    try:
        async for batch in batches:
            for chunk in batch:
                yield chunk.origin if isinstance(chunk, Received) else ModelResponseStream(**chunk)
    except UpstreamError as error:
        raise error.__cause__ or error from None
    finally:
        with anyio.CancelScope(shield=True):
            await batches.aclose()
            if answer.is_joined:
                await upstream.log_partials(prepared.count_text, prepared.count.tokens)


async def _chunks(stream: Any, part: _Part, leg: Leg) -> AsyncIterator[Batch]:
    if stream is None:
        return
    with _understood(part, leg):
        async for chunk in stream:
            plain: Chunk = chunk.model_dump(exclude_none=True)
            for choice in plain.get("choices") or ():
                part.text.append(str((choice.get("delta") or {}).get("content") or ""))
            if "usage" in plain and not _has_reported_usage(stream):
                del plain["usage"]
            yield [Received(plain, chunk)]


def _has_reported_usage(stream: Any) -> bool:
    """A stream's usage is the server's, if it is in `chunks`: LiteLLM makes one up if the server reports none."""
    sent = getattr(stream, "chunks", None)
    return isinstance(sent, list) and any(getattr(chunk, "usage", None) is not None for chunk in reversed(sent))


@contextmanager
def _understood(part: _Part, leg: Leg) -> Iterator[None]:
    """Turns LiteLLM's errors of a stream into those that the loop judges; others stay as they are."""
    try:
        yield
    except Exception as error:
        part.has_failed = True
        text = str(error)
        if ended_early(text):
            raise UpstreamDropped(text, error) from error
        if overflow_from_text(text) is None and not is_crash(text) and not leg.has_another_way:
            raise
        status = getattr(error, "status_code", None)
        raise UpstreamError(text, error, status=status if isinstance(status, int) else None) from error
