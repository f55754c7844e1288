"""The other carrier, of chat streams alone: an answer's legs are LiteLLM's own calls, and its stream comes by a hook.

For every provider: LiteLLM has opened the first answer, and one that goes on is a call through its router.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import ended_early, is_crash, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.sse import Batch, Chunk, Received, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.client import mapping
from litellm_compaction.proxy.internal import call_router, log_stopped
from litellm_compaction.proxy.routing import WAYS_OF

if TYPE_CHECKING:
    from litellm_compaction.proxy.answer.loop import Answer

# A client's keys that a continuation needs too: tools, what else is in the prompt, and how the words are chosen.
_CLIENT_KEYS = (
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "thinking", *wire.EXTRAS,
    *sorted(wire.COMPLETION_KEYS - {"model", "stream", "stream_options", "max_tokens"}),
)  # fmt: skip


@dataclass(slots=True)
class _Part:
    """One stream of the answer, as LiteLLM's books have to know it: its logging object, text, and a logged failure."""

    log: Any
    text: list[str] = field(default_factory=list)
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class HookedUpstream:
    """The deployment that LiteLLM's router finds by `pin`, for the client's request in `data`; `first` is open."""

    first: Any
    router: Any
    pin: str
    data: Mapping[str, Any]
    ways: frozenset[Way] = WAYS_OF["hooks"]
    _parts: list[_Part] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, leg: Leg) -> AsyncIterator[AsyncIterator[Batch]]:
        stream, part = self.first, _Part(self.data.get("litellm_logging_obj"))
        if stream is None:
            # LiteLLM reads the first chunk before it returns: its errors come from here.
            with _understood(part, leg):
                stream = await self._again(leg)
            part.log = getattr(stream, "logging_obj", None)
        self.first = None
        try:
            yield _chunks(stream, part, leg)
        finally:
            with anyio.CancelScope(shield=True):
                if (aclose := getattr(stream, "aclose", None)) is not None:
                    await aclose()
            self._parts.append(part)

    async def _again(self, leg: Leg) -> Any:
        prepared = leg.prepared
        keys = (*_CLIENT_KEYS, *wire.DOCUMENT_KEYS) if leg.is_document else _CLIENT_KEYS
        fields: dict[str, Any] = {key: self.data[key] for key in keys if self.data.get(key) is not None}
        extra = mapping(self.data.get("extra_body"))
        extra = {key: value for key, value in extra.items() if key in keys or key not in wire.DOCUMENT_KEYS}
        if prepared.tools is not None:
            fields["tools"] = list(prepared.tools)
        extra |= wire.added({**fields, **extra}, leg.fields)
        fields = {key: value for key, value in fields.items() if key not in leg.fields}
        fields |= {"extra_body": extra} if extra else {}
        parent = self.data.get("metadata")
        return await call_router(
            self.router,
            self.pin,
            parent if isinstance(parent, Mapping) else {},
            messages=wire.encode(prepared.messages) if prepared.messages is not None else self.data["messages"],
            max_tokens=leg.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )

    async def carried(self, answer: Answer, prepared: PreparedRequest) -> AsyncGenerator[Any, None]:
        """The answer's chunks as LiteLLM's own; streams that were stopped are logged at the end."""
        from litellm.types.utils import ModelResponseStream

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
                # LiteLLM itself logs only streams that end. Late: the first stream's slot in the key's parallel limit
                # then spans the whole answer.
                for part in self._parts if not answer.is_one_leg else ():
                    if not part.has_failed:
                        text, count = "".join(part.text), prepared.count
                        usage = {"prompt_tokens": count.tokens, "completion_tokens": prepared.count_text(text)}
                        await log_stopped(part.log, text, usage)


async def _chunks(stream: Any, part: _Part, leg: Leg) -> AsyncIterator[Batch]:
    if stream is None:
        return
    with _understood(part, leg):
        async for chunk in stream:
            plain: Chunk = chunk.model_dump(exclude_none=True)
            for choice in plain.get("choices") or ():
                part.text.append(str((choice.get("delta") or {}).get("content") or ""))
            # The server's is in `chunks`: LiteLLM makes one up if the server reports none.
            sent = getattr(stream, "chunks", None) if "usage" in plain else None
            if not isinstance(sent, list) or all(getattr(each, "usage", None) is None for each in sent):
                plain.pop("usage", None)
            received = Received(plain)
            received.origin = chunk
            yield [received]


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
