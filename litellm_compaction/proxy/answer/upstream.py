"""A deployment's server as an answer's legs ask it, and the one that the transport reaches over HTTP."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import httpx

from litellm_compaction.concurrency import Tasks
from litellm_compaction.core.go_on import Way
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.sse import (
    ERROR_BYTES,
    Batch,
    Bounds,
    Chunk,
    UpstreamDropped,
    UpstreamError,
    as_chunk,
    json_object,
    read_body,
    read_events,
    short_error,
    unreadable,
)
from litellm_compaction.proxy.routing import WAYS_OF
from litellm_compaction.windows.fetch import ACCEPTED_ENCODINGS, is_quickly_read, unfolds_slowly
from litellm_compaction.windows.windows import server_of

# Shapes a whole document, and not the rest of one.
WHOLE_DOCUMENT_KEY = "response_format"
_USAGE_NAMES = re.compile(r"stream_options|include_usage")
_HOP_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection"})
# A client's framing is not that of our body: a server would wait for the rest.
_FRAMING = (b"content-length", b"accept-encoding", b"transfer-encoding", b"expect")
_CHAT = "/chat/completions"
_closing = Tasks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One request to a server, and the most that its answer may have.

    Attributes:
        max_tokens: bound on the answer, of which the server is told.
        asked_tokens: the rest of the client's own limit; None without one.
        thoughts_tokens: the most of nothing but thoughts.
        goes_on: the answer has begun, and goes on in `prepared.continuation.way`.
        is_share: the bound is only a part of the window, because of others.
        is_doubted: the bound is less than the window leaves by our count, since nothing has confirmed that.
        passed: the answer goes on as it comes, with so many choices; 0 for one that is read here.
    """

    prepared: PreparedRequest
    max_tokens: int
    asked_tokens: int | None = None
    thoughts_tokens: float = math.inf
    goes_on: bool = False
    is_share: bool = False
    is_doubted: bool = False
    passed: int = 0

    @property
    def is_document(self) -> bool:
        """A format may shape the answer, but none that has begun: llama.cpp and vLLM would begin a new document."""
        return not self.goes_on or self.prepared.continuation.closing is not None

    @property
    def has_another_way(self) -> bool:
        return self.goes_on and has_another_way(self.prepared)

    @property
    def needs_word(self) -> bool:
        """The server has to be told that the last message goes on (vLLM)."""
        server = server_of(self.prepared.window.source)
        is_begun = self.goes_on and self.prepared.continuation.way == "prefill"
        return is_begun and server is not None and server.continues_when_told


def has_another_way(prepared: PreparedRequest) -> bool:
    """Returns True if the server may not know the way in which it is to go on, so that there is another one."""
    way, closing = prepared.continuation.way, prepared.continuation.closing
    return way is not None and (way != "turn" or bool(closing))


class Upstream(Protocol):
    """The server of one deployment, asked for one client request."""

    @property
    def ways(self) -> frozenset[Way]:
        """Ways to make it go on."""

    def open(self, leg: Leg) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """The chunks of an answer as they come, or an `UpstreamError`; leaving the context aborts it."""


class HttpUpstream:
    """A deployment's server, reached by the inner transport, for the `request` of LiteLLM's client, with its JSON.

    Attributes:
        headers: of the first answer; None before it.
        whole: the last answer, if the server has given it as one JSON; else None.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, request: httpx.Request, body: dict[str, Any]) -> None:
        self._inner = inner
        self._request = request
        self._body = body
        self._asks_for_usage = True
        self.headers: httpx.Headers | None = None
        self.whole: httpx.Response | None = None

    @property
    def wants_stream(self) -> bool:
        return bool(self._body.get("stream"))

    @property
    def ways(self) -> frozenset[Way]:
        ways = WAYS_OF["transport"]
        has_completions = self._request.url.path.endswith(_CHAT)
        return ways if has_completions and wire.can_be_begun(self._body) else ways - {"raw"}

    @asynccontextmanager
    async def open(self, leg: Leg) -> AsyncIterator[AsyncIterator[Batch]]:
        response, bounds = await self._answered(leg), Bounds.of(leg.max_tokens * max(leg.passed, 1))
        try:
            is_stream = _is_stream(response)
            if is_stream and not self.wants_stream:
                raise unreadable("it streams an answer that was asked for as a whole")
            self.headers = self.headers or response.headers
            if is_stream:
                async with aclosing(read_events(response, bounds, is_passed=bool(leg.passed))) as batches:
                    yield batches
            else:
                self.whole = await read_whole(response, bounds.event_bytes)
                yield _one(_as_chunk(self.whole))
        finally:
            # Stops the server, also if anyio cancels all waiting of a client that has gone.
            _closing.begin(response.aclose())

    async def _answered(self, leg: Leg) -> httpx.Response:
        """The server's response, to a second request if it refuses to report a stream's usage; the caller closes it."""
        try:
            response = await self.send(leg)
            if response.status_code < 400 or not (self.wants_stream and self._asks_for_usage):
                return response
            response = await read_whole(response, ERROR_BYTES)
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
        prepared, url = leg.prepared, self._request.url
        body = {**self._body, **wire.with_output_limit(self._body, leg.max_tokens)}
        if self.wants_stream and self._asks_for_usage and not leg.passed:
            body.update(wire.with_usage(body))
        if prepared.messages is not None:
            body["messages"] = wire.encode(prepared.messages, like=self._body.get("messages") or [])
        if prepared.tools is not None:
            body["tools"] = list(prepared.tools)
        if not leg.is_document:
            body.pop(WHOLE_DOCUMENT_KEY, None)
        if leg.goes_on and prepared.continuation.prompt is not None:
            # Its address for text completions, beside its address for chats.
            url = url.copy_with(path=url.path.removesuffix(_CHAT) + "/completions")
            body = wire.begun(body, prepared.continuation.prompt.text, prepared.continuation.prompt.end_of_turn)
        elif leg.needs_word:
            body |= wire.GOES_ON
        if leg.goes_on:
            body = wire.with_fields(body, prepared.continuation.closing or {})
        # ASCII with escapes: lone surrogates, which clients do send, have no UTF-8.
        content = json.dumps(body, separators=(",", ":")).encode()
        headers = [(key, value) for key, value in self._request.headers.raw if key.lower() not in _FRAMING]
        headers.append((b"Accept-Encoding", ACCEPTED_ENCODINGS.encode()))
        method, extensions = self._request.method, self._request.extensions
        response = await self._inner.handle_async_request(
            httpx.Request(method, url, headers=headers, content=content, extensions=extensions)
        )
        if not unfolds_slowly(response):
            await response.aclose()
            raise unreadable("its answer is compressed in a way that nobody has asked for")
        return response


async def read_whole(response: httpx.Response, most_bytes: int) -> httpx.Response:
    """A response that is no stream, with its body; of an error the beginning. One out of bounds is an error itself."""
    is_answer = response.status_code == HTTPStatus.OK
    try:
        body, is_whole = await read_body(response, most_bytes if is_answer else ERROR_BYTES)
    finally:
        await response.aclose()
    if is_answer and not is_whole:
        raise unreadable(f"its answer has more than {most_bytes} bytes")
    if is_answer and not is_quickly_read(body):
        raise unreadable("its answer has too many values")
    return httpx.Response(response.status_code, headers=end_to_end(response.headers), content=body)


def _is_stream(response: httpx.Response) -> bool:
    return response.status_code == HTTPStatus.OK and "event-stream" in response.headers.get("content-type", "")


def end_to_end(headers: httpx.Headers) -> list[tuple[str, str]]:
    """The headers that do not describe a transfer which is over."""
    return [(key, value) for key, value in headers.multi_items() if key.lower() not in _HOP_HEADERS]


async def _one(chunk: Chunk) -> AsyncIterator[Batch]:
    yield [chunk]


def _as_chunk(response: httpx.Response) -> Chunk:
    """A whole answer as a chunk; what is none is raised."""
    text, status = response.content[:ERROR_BYTES].decode(errors="replace"), response.status_code
    if status != HTTPStatus.OK:
        raise UpstreamError(text, response, status=status)
    chunk = as_chunk(json_object(response.content))
    choices = chunk.get("choices") if chunk is not None else None
    if chunk is None or not choices:
        # An error inside of 200 would be an empty stream to LiteLLM.
        refused = httpx.Response(502, json=short_error(text))
        raise UpstreamError(text, refused, status=refused.status_code, is_inside=True)
    delta = choices[0].get("delta") or {}
    calls = [{**call, "index": at} for at, call in enumerate(delta.get("tool_calls") or ())]
    first = {**choices[0], "index": 0, "delta": {**delta, "tool_calls": calls} if calls else delta}
    return {**chunk, "choices": [first]}
