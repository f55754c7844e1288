"""A deployment's server as the transport asks it: for what the client wants, a stream or a whole answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

import httpx

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.chunks import as_chunk, is_right_answer
from litellm_compaction.proxy.answer.protocol import Batch, Chunk, LegRequest, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.answer.sse import (
    ERROR_BYTES,
    Bounds,
    json_object,
    read_body,
    read_events,
    short_error,
    unreadable,
)
from litellm_compaction.proxy.answer.unread import ReadAhead
from litellm_compaction.proxy.routing import WAYS_OF
from litellm_compaction.windows.fetch import ACCEPTED_ENCODINGS, is_quickly_read, unfolds_slowly

# Keys that shape a whole document, and not the rest of one.
_WHOLE_DOCUMENT_KEYS = ("response_format",)
# Statuses by which servers refuse an unknown key (OpenAI and llama.cpp 400, FastAPI servers 422, others 501).
_UNKNOWN_KEY_STATUSES = frozenset({400, 404, 405, 415, 422, 501})
# Addresses of servers that refuse to report a stream's usage.
Unsupported: TypeAlias = Bounded[str, None]
_USAGE_NAMES = re.compile(r"stream_options|include_usage")
# Of a request that generates nothing; the answer that it is about waits meanwhile.
_CONTROL_LIMIT_S = 5.0
_HOP_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection"})
_CHAT = "/chat/completions"


class HttpUpstream:
    """A deployment's server, reached by the inner transport, for one client request.

    Args:
        inner: carries the requests.
        request: of LiteLLM's client.
        body: its JSON.
        unsupported: servers that have refused our question for the usage, so that each is asked in vain once.

    Attributes:
        headers: of the first answer; None before it.
        whole: the last answer, if the server has given it as one JSON that clients read as it is; else None.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        request: httpx.Request,
        body: dict[str, Any],
        unsupported: Unsupported,
    ) -> None:
        self._inner = inner
        self._request = request
        self._body = body
        self._unsupported = unsupported
        self._leaves_usage_out = str(request.url) in unsupported
        self.headers: httpx.Headers | None = None
        self.whole: httpx.Response | None = None

    @property
    def wants_stream(self) -> bool:
        """Returns True if the client reads a stream."""
        return bool(self._body.get("stream"))

    @property
    def ways(self) -> frozenset[Way]:
        has_completions = self._request.url.path.endswith(_CHAT)
        ways = WAYS_OF["transport"]
        return ways if has_completions and wire.can_be_begun(self._body) else ways - {"raw"}

    @asynccontextmanager
    async def open(self, leg: LegRequest, on_end: Callable[[], object] = bool) -> AsyncIterator[AsyncIterator[Batch]]:
        # Leaving the context closes the connection, which stops the server.
        response = await self._answered(leg)
        ahead = ReadAhead(response, on_end) if is_stream(response) else None
        try:
            if ahead is not None and not self.wants_stream:
                raise unreadable("it streams an answer that was asked for as a whole")
            self.headers = self.headers or response.headers
            if ahead is not None:
                yield read_events(ahead, Bounds.of(leg.max_tokens))
            else:
                whole = await read_whole(response, Bounds.of(leg.max_tokens).event_bytes)
                chunk, is_right = _as_chunk(whole)
                self.whole = whole if is_right else None
                yield _one(chunk)
        finally:
            await (ahead or response).aclose()

    async def end_thoughts(self, answer_id: str) -> bool:
        try:
            return await asyncio.wait_for(self._has_ended_thoughts(answer_id), _CONTROL_LIMIT_S)
        except (httpx.TransportError, UpstreamError, asyncio.TimeoutError):
            return False

    async def _has_ended_thoughts(self, answer_id: str) -> bool:
        url = self._request.url
        url = url.copy_with(path=f"{url.path}/control")
        response = await self._post(url, {"id": answer_id, "action": wire.THOUGHTS_END})
        try:
            body, _ = await read_body(response, ERROR_BYTES)
        finally:
            await response.aclose()
        return response.status_code == HTTPStatus.OK and json_object(body).get("success") is True

    async def send(self, leg: LegRequest, *, stream: bool) -> httpx.Response:
        """One request to the server; the caller closes the response.

        Raises:
            UpstreamError: its answer is compressed in a way that was not asked for.
        """
        body, continuation = {**self._body, **wire.with_output_limit(self._body, leg.max_tokens)}, leg.continuation
        if leg.can_end_thoughts:
            body |= wire.THOUGHTS_CAN_END
        if stream:
            body["stream"] = True
            if not self._leaves_usage_out:
                body.update(wire.with_usage(body))
        if leg.messages is not None:
            body["messages"] = wire.encode(leg.messages, like=self._body.get("messages") or [])
        if leg.tools is not None:
            body["tools"] = list(leg.tools)
        if continuation is not None and not continuation.begins_anew:
            body = {key: value for key, value in body.items() if key not in _WHOLE_DOCUMENT_KEYS}
        url = self._request.url
        if continuation is not None and continuation.prompt is not None:
            url = _completions(url)
            body = wire.begun(body, continuation.prompt.text, continuation.prompt.end_of_turn)
        elif continuation is not None and continuation.needs_word:
            body |= wire.GOES_ON
        if continuation is not None and continuation.closing:
            body = wire.with_fields(body, continuation.closing)
        return await self._post(url, body)

    async def _post(self, url: httpx.URL, body: Mapping[str, Any]) -> httpx.Response:
        # ASCII with escapes: lone surrogates, which clients do send, have no UTF-8.
        content = json.dumps(body, separators=(",", ":")).encode()
        # A client's framing is not that of this body: a server would wait for the rest.
        left_out = (b"content-length", b"accept-encoding", b"transfer-encoding", b"expect")
        headers = [(key, value) for key, value in self._request.headers.raw if key.lower() not in left_out]
        headers.append((b"Accept-Encoding", ACCEPTED_ENCODINGS.encode()))
        response = await self._inner.handle_async_request(
            httpx.Request(
                self._request.method,
                url,
                headers=headers,
                content=content,
                extensions=self._request.extensions,
            )
        )
        if not unfolds_slowly(response):
            await response.aclose()
            raise unreadable("its answer is compressed in a way that nobody has asked for")
        return response

    async def _answered(self, leg: LegRequest) -> httpx.Response:
        """The server's response, to a second request if it refuses to report a stream's usage; the caller closes it."""
        while True:
            try:
                response = await self.send(leg, stream=self.wants_stream)
            except httpx.TransportError as error:
                # It took the request and broke down over it, as it does at an overflow near a full window.
                is_broken = isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError))
                if is_broken or (leg.continuation is not None and leg.continuation.has_another_way):
                    raise UpstreamDropped("", None) from error
                raise
            if response.status_code not in _UNKNOWN_KEY_STATUSES:
                if self._leaves_usage_out and response.status_code == HTTPStatus.OK:
                    # Proof that the server refused just that: an error may quote the client.
                    self._unsupported[str(self._request.url)] = None
                return response
            response = await read_whole(response, ERROR_BYTES)
            if self._leaves_usage_out or not self.wants_stream or not _USAGE_NAMES.search(response.text):
                return response
            self._leaves_usage_out = True


def _completions(url: httpx.URL) -> httpx.URL:
    """The server's address for text completions, beside its address for chats."""
    return url.copy_with(path=url.path.removesuffix(_CHAT) + "/completions")


async def read_whole(response: httpx.Response, most_bytes: int) -> httpx.Response:
    """A response that is no stream, with its body; of an error only the beginning.

    Raises:
        UpstreamError: it has not come to its end, or is out of bounds.
    """
    is_answer = response.status_code == HTTPStatus.OK
    try:
        body, is_whole = await read_body(response, most_bytes if is_answer else ERROR_BYTES)
    finally:
        await response.aclose()
    if is_answer and not is_whole:
        raise unreadable(f"its answer has more than {most_bytes} bytes")
    if is_answer and not is_quickly_read(body):
        raise unreadable("its answer has too many values")
    return with_body(response, body)


def is_stream(response: httpx.Response) -> bool:
    """Returns False for an error, too."""
    return response.status_code == HTTPStatus.OK and "event-stream" in response.headers.get("content-type", "")


def with_body(response: httpx.Response, body: bytes) -> httpx.Response:
    """A response as if it had come with `body`."""
    return httpx.Response(response.status_code, headers=end_to_end(response.headers), content=body)


def end_to_end(headers: httpx.Headers) -> list[tuple[str, str]]:
    """Those that do not describe a transfer which is over."""
    return [(key, value) for key, value in headers.multi_items() if key.lower() not in _HOP_HEADERS]


async def _one(chunk: Chunk) -> AsyncIterator[Batch]:
    yield [chunk]


def _as_chunk(response: httpx.Response) -> tuple[Chunk, bool]:
    """A whole answer as a chunk, and True if nothing in it had to be read as something else.

    Raises:
        UpstreamError: it is not an answer.
    """
    text, status = response.content[:ERROR_BYTES].decode(errors="replace"), response.status_code
    if status != HTTPStatus.OK:
        raise UpstreamError(text, response, status=status)
    answer = json_object(response.content)
    chunk = as_chunk(answer)
    choices = chunk.get("choices") if chunk is not None else None
    if chunk is None or not choices:
        # An error inside of 200 would be an empty stream to LiteLLM.
        refused = httpx.Response(502, json=short_error(text))
        raise UpstreamError(text, refused, status=refused.status_code, is_inside=True)
    delta = choices[0].get("delta") or {}
    calls = [{**call, "index": at} for at, call in enumerate(delta.get("tool_calls") or ())]
    first = {**choices[0], "index": 0, "delta": {**delta, "tool_calls": calls} if calls else delta}
    return {**chunk, "choices": [first]}, is_right_answer(answer["choices"])
