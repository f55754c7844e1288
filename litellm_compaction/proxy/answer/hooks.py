"""The carrier for every provider: LiteLLM's own streams and router calls, joined in its hooks.

Used if the transport cannot be installed, and for streams of chats only. The first answer is the one that LiteLLM has
already opened; a continuation is a call through the router, pinned to the same deployment. A whole answer is bounded,
and not continued.

LiteLLM calls no hook if a client leaves before its stream is read, or while a whole answer is being written. So the
task that asks the deployment is watched too, and its stream: room in a shared context is always given back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from litellm.exceptions import Timeout
from litellm.types.utils import ModelResponseStream

from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Compactor, Foreseen, PreparedRequest, RequestContext, Reservation
from litellm_compaction.errors import ended_early, is_crash, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.protocol import (
    Batch,
    Chunk,
    Continuation,
    LegRequest,
    Received,
    UpstreamDropped,
    UpstreamError,
)
from litellm_compaction.proxy.internal import call_router, log_stopped
from litellm_compaction.proxy.routing import WAYS_OF

# A client's keys that a continuation needs too (OpenAI's API reference for chat completions, LiteLLM's extras).
_CLIENT_KEYS = (
    "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "stop", "seed",
    "presence_penalty", "frequency_penalty", "logit_bias", "reasoning_effort", "thinking", "top_k", "user",
)  # fmt: skip


async def prepared_in_room(
    compactor: Compactor,
    request: Request | int,
    context: RequestContext,
    asked_tokens: int | None,
    *,
    foreseen: Foreseen | None = None,
    is_watched: bool,
    is_stream: bool = True,
    answers: int = 1,
    prompts: int = 1,
) -> tuple[PreparedRequest, int, Reservation]:
    """The request as it is sent, the bound on its answer, and the room that it holds until its task or stream ends.

    Args:
        request: the conversation, or the number of token ids in a prompt that consists of them.
        asked_tokens: the client's bound on the answer.
        foreseen: found before the deployment was chosen.
        is_watched: the answer comes in pieces, and can go on after a stop.
        is_stream: the server notices when its reader leaves; a plain answer is written to its end.
        answers: to each prompt.

    Raises:
        DoesNotFit, WindowUnknown, ModelNotLoaded: as the engine.
        Overloaded: there was no room in time.
    """
    room = compactor.room(context)
    try:
        while True:
            if isinstance(request, int):
                prepared = await compactor.bound(request, context)
            else:
                prepared = await compactor.finish(await compactor.prepared_for(request, context, foreseen), room)
            limit = prepared.max_output_tokens(asked_tokens)
            limit = await room.acquire(prepared, limit, is_watched=is_watched, answers=answers, prompts=prompts)
            if not await compactor.has_shrunk(context, prepared):
                # Otherwise the model has been loaded with a smaller window while it waited for its turn.
                break
    except BaseException:
        # Also for a client that leaves during the summary: nothing else would end its hold.
        room.release()
        raise
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(partial(_asked, room, is_stream))
    return prepared, limit, room


def _asked(room: Reservation, is_stream: bool, task: asyncio.Task[Any]) -> None:
    """The task that asked the deployment has ended: with a stream, which is still open, or for good."""
    if not is_stream and (task.cancelled() or isinstance(task.exception(), Timeout)):
        room.abandon()
        return
    stream = None if task.cancelled() or task.exception() is not None else task.result()
    if not hasattr(stream, "__aiter__"):
        room.release()
        return
    try:
        # The stream's reader gives the room back at its end; a stream without a reader is just dropped.
        weakref.finalize(stream, room.release).atexit = False
    except TypeError:
        room.release()


class HookedUpstream:
    """The deployment that LiteLLM's router reaches, for one client request.

    Args:
        first: the stream that LiteLLM has opened.
        pin: the model name or id under which the router finds this very deployment.
        data: the client's request, with LiteLLM's metadata.
    """

    def __init__(self, first: Any, router: Any, pin: str, data: Mapping[str, Any]) -> None:
        self._first: Any = first
        self._router = router
        self._pin = pin
        self._data = data
        self._logging: Any = data.get("litellm_logging_obj")
        self._parts: list[_Part] = []

    @property
    def ways(self) -> frozenset[Way]:
        return WAYS_OF["hooks"]

    async def end_thoughts(self, answer_id: str) -> bool:
        """LiteLLM has no call for it."""
        return False

    @asynccontextmanager
    async def open(self, leg: LegRequest, on_end: Callable[[], object] = bool) -> AsyncIterator[AsyncIterator[Batch]]:
        stream, part = self._first, _Part(self._logging)
        if stream is None:
            # A newer LiteLLM reads the first chunk before it returns: its errors come from here.
            with _understood(part, leg.continuation):
                stream = await self._again(leg)
            part.log = getattr(stream, "logging_obj", None)
        self._first = None
        try:
            yield _chunks(stream, part, leg.continuation)
        finally:
            with anyio.CancelScope(shield=True):
                if (aclose := getattr(stream, "aclose", None)) is not None:
                    await aclose()
            self._parts.append(part)

    async def log_partials(self, count: Callable[[str], int], prompt_tokens: int) -> None:
        """Logs the streams that were stopped: LiteLLM itself logs only streams that end.

        Late, when the whole answer has ended: the first stream's slot in the key's parallel limit then spans all of it.
        """
        with anyio.CancelScope(shield=True):
            for part in self._parts:
                if not part.has_failed:
                    text = "".join(part.text)
                    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count(text)}
                    await log_stopped(part.log, text, usage)

    async def _again(self, leg: LegRequest) -> Any:
        continuation = leg.continuation
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if continuation is not None and continuation.needs_word:
            options["extra_body"] = wire.GOES_ON
        is_begun = continuation is not None and not continuation.begins_anew
        keys = _CLIENT_KEYS if is_begun else (*_CLIENT_KEYS, "response_format")
        asked = {key: self._data[key] for key in keys if self._data.get(key) is not None}
        if leg.tools is not None:
            asked["tools"] = list(leg.tools)
        if continuation is not None and continuation.closing:
            options["extra_body"] = dict(continuation.closing)
            asked = {key: value for key, value in asked.items() if key not in continuation.closing}
        sent = wire.encode(leg.messages) if leg.messages is not None else self._data["messages"]
        parent = self._data.get("metadata")
        return await call_router(
            self._router,
            self._pin,
            parent if isinstance(parent, Mapping) else {},
            messages=sent,
            max_tokens=leg.max_tokens,
            **asked,
            **options,
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


@dataclass(slots=True)
class _Part:
    """One stream of the answer, as LiteLLM's books have to know it.

    Attributes:
        log: LiteLLM's logging object.
        text: the text so far.
        has_failed: LiteLLM has logged it as a failure.
    """

    log: Any
    text: list[str] = field(default_factory=list)
    has_failed: bool = False


async def _chunks(stream: Any, part: _Part, continuation: Continuation | None) -> AsyncIterator[Batch]:
    if stream is None:
        return
    with _understood(part, continuation):
        async for chunk in stream:
            plain: Chunk = chunk.model_dump(exclude_none=True)
            for choice in plain.get("choices") or ():
                part.text.append(str((choice.get("delta") or {}).get("content") or ""))
            if "usage" in plain and not _has_reported_usage(stream):
                del plain["usage"]
            yield [Received(plain, chunk)]


def _has_reported_usage(stream: Any) -> bool:
    """Returns True if a stream's usage is the server's: LiteLLM makes one up if the server reports none.

    By a tokenizer of its own, so that learning from it would teach the counter too little. The server's numbers are in
    `chunks`; after another callback's iterator hook they are unknown.
    """
    sent = getattr(stream, "chunks", None)
    return isinstance(sent, list) and any(getattr(chunk, "usage", None) is not None for chunk in reversed(sent))


@contextmanager
def _understood(part: _Part, continuation: Continuation | None) -> Iterator[None]:
    """Turns LiteLLM's errors of a stream into those that the loop judges; others stay as they are."""
    try:
        yield
    except Exception as error:
        part.has_failed = True
        text = str(error)
        if ended_early(text):
            raise UpstreamDropped(text, error) from error
        has_another_way = continuation is not None and continuation.has_another_way
        if overflow_from_text(text) is None and not is_crash(text) and not has_another_way:
            raise
        status = getattr(error, "status_code", None)
        raise UpstreamError(text, error, status=status if isinstance(status, int) else None) from error
