"""A deployment's server as an answer's legs ask it: over HTTP below LiteLLM's client, or by LiteLLM's own calls."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import httpx

from litellm_compaction.concurrency import Tasks
from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import ended_early, is_crash, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer import sse
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.sse import Batch, Chunk, Received, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.internal import call_router, log_stopped
from litellm_compaction.proxy.routing import WAYS_OF
from litellm_compaction.windows.fetch import ACCEPTED_ENCODINGS, unfolds_slowly

if TYPE_CHECKING:
    from litellm_compaction.proxy.answer.loop import Answer

_USAGE_NAMES = re.compile(r"stream_options|include_usage")
# A client's framing is not that of our body: a server would wait for the rest.
_FRAMING = (b"content-length", b"accept-encoding", b"transfer-encoding", b"expect")
_CHAT = "/chat/completions"
# A client's keys that a continuation needs too (OpenAI's API reference for chat completions, LiteLLM's extras).
_CLIENT_KEYS = (
    "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "stop", "seed",
    "presence_penalty", "frequency_penalty", "logit_bias", "reasoning_effort", "thinking", "top_k", "user",
)  # fmt: skip
closing = Tasks()


# ------------------------------------------------------------------ over HTTP


@dataclass(slots=True, eq=False)
class HttpUpstream:
    """A deployment's server, reached by the `inner` transport, for the `request` of LiteLLM's client, with its JSON."""

    inner: httpx.AsyncBaseTransport
    request: httpx.Request
    body: dict[str, Any]
    headers: httpx.Headers | None = None  # Of the first answer.
    whole: httpx.Response | None = None  # The last answer, if it was given as one JSON.
    _asks_for_usage: bool = True

    @property
    def wants_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def ways(self) -> frozenset[Way]:
        ways = WAYS_OF["transport"]
        has_completions = self.request.url.path.endswith(_CHAT)
        return ways if has_completions and wire.can_be_begun(self.body) else ways - {"raw"}

    @asynccontextmanager
    async def open(self, leg: Leg) -> AsyncIterator[AsyncIterator[Batch]]:
        response, tokens = await self._answered(leg), leg.max_tokens * max(leg.passed, 1)
        logprobs = min(tokens * wire.asked_logprobs(self.body), sse.MOST_LOGPROBS)
        bounds = sse.bounds_of(tokens + logprobs)
        is_stream = response.is_success and "event-stream" in response.headers.get("content-type", "")
        try:
            if is_stream and not self.wants_stream:
                raise sse.faulty("it streams an answer that was asked for as a whole")
            self.headers = self.headers or response.headers
            if is_stream:
                async with aclosing(sse.read_events(response, bounds, is_passed=bool(leg.passed))) as batches:
                    yield batches
            else:
                self.whole = await sse.read_whole(response, bounds[0], logprobs=logprobs)
                yield _read(self.whole)
        finally:
            # Stops the server, also if anyio cancels all waiting of a client that has gone.
            closing.begin(response.aclose())

    async def _answered(self, leg: Leg) -> httpx.Response:
        """The server's response, to a second request if it refuses to report a stream's usage; the caller closes it."""
        try:
            response = await self.send(leg)
            if response.status_code < 400 or not (self.wants_stream and self._asks_for_usage):
                return response
            response = await sse.read_whole(response, sse.ERROR_BYTES)
            if not _USAGE_NAMES.search(response.text):
                return response
            self._asks_for_usage = False
            return await self.send(leg)
        except httpx.TransportError as error:
            # It took the request and broke down over it, as it does at an overflow near a full window.
            is_broken = isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError))
            if is_broken or leg.has_another_way:
                raise UpstreamDropped("", None) from error
            raise

    async def send(self, leg: Leg) -> httpx.Response:
        """The response to one request, which the caller closes; one that nobody asked to compress so is an error."""
        content, first, url = wire.to_json(self._body_of(leg)), self.request, self.request.url
        if leg.goes_on and leg.prepared.continuation.prompt is not None:
            # Its address for text completions, beside its address for chats.
            url = url.copy_with(path=url.path.removesuffix(_CHAT) + "/completions")
        headers = [(key, value) for key, value in first.headers.raw if key.lower() not in _FRAMING]
        headers.append((b"Accept-Encoding", ACCEPTED_ENCODINGS.encode()))
        request = httpx.Request(first.method, url, headers=headers, content=content, extensions=first.extensions)
        response = await self.inner.handle_async_request(request)
        if "content-encoding" in response.headers and not unfolds_slowly(response):
            await response.aclose()
            raise sse.faulty("its answer is compressed in a way that nobody has asked for")
        return response

    def _body_of(self, leg: Leg) -> dict[str, Any]:
        prepared = leg.prepared
        body = {**self.body, **leg.changes(self.body)}
        if self.wants_stream and self._asks_for_usage and not leg.passed:
            body.update(wire.added(body, wire.REPORTS_USAGE))
        if not leg.is_document:
            body = {key: value for key, value in body.items() if key not in wire.DOCUMENT_KEYS}
        if leg.goes_on and prepared.continuation.prompt is not None:
            body = wire.begun(body, prepared.continuation.prompt.text, prepared.continuation.prompt.end_of_turn)
        return {**body, **wire.added(body, leg.fields)}


async def _read(response: httpx.Response) -> AsyncIterator[Batch]:
    """A whole answer as a chunk; what is none is raised."""
    if not response.is_success:
        raise UpstreamError(response.text, response, status=response.status_code)
    body = sse.json_object(response.content)
    chunk = sse.as_chunk(body) or {}
    if not (choices := chunk.get("choices")):
        if not (text := sse.error_text(body)):
            raise sse.faulty("its answer is cut, or is none")
        # An error inside of 200 would be an empty stream to LiteLLM.
        refused = httpx.Response(502, json=sse.short_error(text))
        raise UpstreamError(text, refused, status=refused.status_code, is_inside=True)
    delta = choices[0].get("delta") or {}
    calls = [{**call, "index": at} for at, call in enumerate(delta.get("tool_calls") or ())]
    first = {**choices[0], "index": 0, "delta": {**delta, "tool_calls": calls} if calls else delta}
    yield [{**chunk, "choices": [first]}]


# ------------------------------------------------------------------ by LiteLLM's calls, for streams of chats alone


@dataclass(slots=True)
class _Part:
    """One stream of the answer, as LiteLLM's books have to know it: its logging object, text, and a logged failure."""

    log: Any
    text: list[str] = field(default_factory=list)
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class HookedUpstream:
    """The deployment that LiteLLM's router finds by `pin`, for the client's request in `data`; `first` is open.

    For every provider: LiteLLM has opened the first answer, and one that goes on is a call through its router.
    """

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
        if prepared.tools is not None:
            fields["tools"] = list(prepared.tools)
        if leg.fields:
            fields = {key: value for key, value in fields.items() if key not in leg.fields}
            fields["extra_body"] = dict(leg.fields)
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


# What an answer's legs ask; leaving the context of its `open` aborts a leg.
Upstream: TypeAlias = HttpUpstream | HookedUpstream


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
