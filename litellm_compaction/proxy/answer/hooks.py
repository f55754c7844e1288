"""The carrier for every provider, in LiteLLM's hooks: its own streams and router calls, and a beat in their silence.

Used if the transport cannot be installed, and for streams of chats only. The first answer is the one that LiteLLM has
already opened; a continuation is a call through the router, pinned to the same deployment. A whole answer is bounded,
and not continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from litellm.types.utils import Delta, ModelResponseStream

from litellm_compaction.core.continuation.request import Way
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import ended_early, is_crash, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import Batch, Chunk, Received, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.answer.upstream import WHOLE_DOCUMENT_KEY, Leg
from litellm_compaction.proxy.exchange import Exchange
from litellm_compaction.proxy.internal import call_router, log_stopped
from litellm_compaction.proxy.routing import WAYS_OF

# A client's keys that a continuation needs too (OpenAI's API reference for chat completions, LiteLLM's extras).
_CLIENT_KEYS = (
    "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "stop", "seed",
    "presence_penalty", "frequency_penalty", "logit_bias", "reasoning_effort", "thinking", "top_k", "user",
)  # fmt: skip
_END = object()
# Legal in every stream of events, and read by no client.
_COMMENT = b": ping\n\n"
_ANTHROPICS_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@dataclass(slots=True)
class _Part:
    """One stream of the answer, as LiteLLM's books have to know it: its logging object, text, and a logged failure."""

    log: Any
    text: list[str] = field(default_factory=list)
    has_failed: bool = False


class HookedUpstream:
    """The deployment that LiteLLM's router reaches, for the client's request in `data`.

    LiteLLM has opened the `first` stream; by `pin` the router finds this very deployment.
    """

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
        extra = {**(wire.GOES_ON if leg.needs_word else {}), **((leg.goes_on and prepared.closing) or {})}
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


async def with_heartbeat(response: AsyncIterable[Any], call: Exchange, *, every_s: float) -> AsyncGenerator[Any, None]:
    """The chunks of `response`, and an empty one after each `every_s` for which a compaction has kept it silent.

    In place of LiteLLM's own keep-alive, which leaks a slot of the key's parallel limit with every chat stream. The
    race against the clock costs a task, so it is run only if a pause may come.

    A stream that waits before the client is told anything opens with a comment: LiteLLM's router keeps the opening of a
    Responses stream (`_responses_stream_holds_event`), and of a Messages stream if the request may be tried again
    (`_aanthropic_messages_streaming_iterator`), until some of the answer has come.
    """
    source = response.__aiter__()
    last: Any = None
    begun: Any = None
    if call.may_pause and call.attempt.begins_silently:
        yield _COMMENT
    while True:
        if not call.may_pause:
            last = await anext(source, _END)
        else:
            waiting = asyncio.ensure_future(_next(source))
            try:
                while not (await asyncio.wait({waiting}, timeout=every_s))[0]:
                    beat = _COMMENT if last is None and call.attempt.begins_silently else _beat(last, begun)
                    if beat is not None:
                        yield beat
                last = await waiting
            finally:
                if not waiting.done():
                    waiting.cancel()
                    # Neither awaited directly nor without a shield: anyio cancels us again and again when the client
                    # has gone, an await would hand that on, and the upstream connection would stay open half closed.
                    with anyio.CancelScope(shield=True):
                        await asyncio.wait({waiting})
                    if not waiting.cancelled():
                        waiting.exception()  # marks it as retrieved
        if last is _END:
            return
        begun = _copied(last) if _is_in_progress(last) else begun
        yield last


async def _next(source: AsyncIterator[Any]) -> Any:
    # As a coroutine, which a task takes.
    return await anext(source, _END)


def _copied(event: Any) -> Any:
    """An event that stays as it is: LiteLLM hides the answer's id in the one that it sends, and would do so again."""
    return event.model_copy(deep=True) if hasattr(event, "model_copy") else event


def _is_in_progress(event: Any) -> bool:
    # Not by `getattr`: pydantic raises and catches an error for attributes that a chat chunk does not have.
    kind = getattr(event, "__dict__", {}).get("type")
    return getattr(kind, "value", kind) == "response.in_progress"


def _beat(last: Any, begun: Any) -> Any:
    """A chunk that says nothing, in the language of the `last` one; None if there is no such thing.

    Of the Responses API the event that says that an answer has `begun`: it may be said again.
    """
    if isinstance(last, (bytes, bytearray)):
        # Other streams of bytes than Anthropic's name no events.
        return _ANTHROPICS_PING if last.lstrip().startswith(b"event:") else _COMMENT
    if not hasattr(last, "choices") or not hasattr(last, "model_copy"):
        return _copied(begun)
    beat = last.model_copy(deep=True)
    if getattr(beat, "usage", None) is not None:
        # Its numbers must be counted once.
        beat.usage = None
    for choice in beat.choices:
        choice.finish_reason = None
        if getattr(choice, "delta", None) is not None:
            choice.delta = Delta(content="")
        else:
            choice.text = ""
    return beat
