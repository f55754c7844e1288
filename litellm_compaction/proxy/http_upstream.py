"""A deployment's server, asked over HTTP for one client request: always for a stream, whatever the client wants.

A stream can be watched, bounded while it runs, and ended with its client; a whole answer cannot: a llama.cpp whose
client has left a plain request generates to its end, one that streams stops in half a second (measured 2026-11-22).
Below LiteLLM's OpenAI client: `upstream.py` carries answers over it, and joins the pieces where a client wants them
whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import httpx

from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import Message
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.carriers import WAYS_OF
from litellm_compaction.proxy.exchange import Chunk, Continuation, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.sse import Bounds, is_chunk, json_object, read_body, read_events, unreadable
from litellm_compaction.windows.fetch import ACCEPTED_ENCODINGS, is_quickly_read, unfolds_slowly

# What shapes a whole document would make the model start a new one instead of going on with the old.
_WHOLE_DOCUMENT_KEYS = ("response_format",)
# With which servers refuse a key that they do not know (OpenAI and llama.cpp 400, FastAPI servers 422, others 501).
_UNKNOWN_KEY_STATUSES = frozenset({400, 404, 405, 415, 422, 501})
# What we add to a request that the client may not want.
Addition: TypeAlias = Literal["usage", "stream"]
_NAMES: Mapping[Addition, re.Pattern[str]] = {
    "usage": re.compile(r"stream_options|include_usage"),
    # Not "upstream", which gateways write into errors of all kinds.
    "stream": re.compile(r"\bstream(ing)?\b", re.IGNORECASE),
}
_MAX_SERVERS = 1024
# What an error says stands at its beginning; some quote the whole request behind that.
# LiteLLM looks through an error's text some ten times, 10 s for a megabyte (1.106.2, 2026-11-22).
_ERROR_BYTES = 32 * 1024
# What described a transfer that is over.
HOP_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection"})
_CHAT = "/chat/completions"


@dataclass(slots=True)
class Abilities:
    """What servers have refused of what we add to a request, so that each is asked in vain once."""

    _refused: dict[Addition, set[str]] = field(default_factory=lambda: {"usage": set(), "stream": set()})

    def lacks(self, address: str, addition: Addition) -> bool:
        """Whether the server at an address has refused an addition."""
        return address in self._refused[addition]

    def learn(self, address: str, addition: Addition) -> None:
        """Notes what the server at an address has refused."""
        addresses = self._refused[addition]
        if len(addresses) >= _MAX_SERVERS:
            addresses.clear()
        addresses.add(address)


class HttpUpstream:
    """A deployment's server behind the inner transport, for one client request.

    Args:
        inner: carries the requests.
        request: of LiteLLM's client.
        body: its JSON.
        abilities: what servers refuse.
        said: gives every text that the client sent.

    Attributes:
        headers: of the first answer; None before it.
        whole: the only answer, where the server has given it as one JSON; None otherwise.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        request: httpx.Request,
        body: dict[str, Any],
        abilities: Abilities,
        *,
        said: Callable[[], str] = str,
    ) -> None:
        self._inner = inner
        self._request = request
        self._body = body
        self._abilities = abilities
        self._said = said
        self._left_out: set[Addition] = set()
        self._answers = 0
        self.headers: httpx.Headers | None = None
        self.whole: httpx.Response | None = None

    @property
    def wants_stream(self) -> bool:
        """Whether the client reads a stream."""
        return bool(self._body.get("stream"))

    @property
    def ways(self) -> frozenset[Way]:
        """Those by which the server can be made to go on with what this request asks for."""
        has_completions = self._request.url.path.endswith(_CHAT)
        ways = WAYS_OF["transport"]
        return ways if has_completions and wire.can_be_begun(self._body) else ways - {"raw"}

    @asynccontextmanager
    async def open(
        self, messages: Sequence[Message] | None, max_tokens: int, *, continuation: Continuation | None
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """The chunks of an answer; leaving the context closes the connection, which stops the server."""
        response = await self._streaming(messages, max_tokens, continuation=continuation)
        try:
            self._answers += 1
            self.headers = self.headers or response.headers
            self.whole = None
            if response.status_code == 200 and "event-stream" in response.headers.get("content-type", ""):
                events = read_events(response, Bounds.of(max_tokens))
                is_raw = continuation is not None and continuation.prompt is not None
                yield _as_chat(events) if is_raw else events
            else:
                yield await self._as_stream(response, Bounds.of(max_tokens).event_bytes)
        finally:
            await response.aclose()

    async def send(
        self, messages: Sequence[Message] | None, max_tokens: int, *, continuation: Continuation | None, stream: bool
    ) -> httpx.Response:
        """One request to the server; the caller closes the response.

        Raises:
            UpstreamError: its answer is compressed as nobody has asked for.
        """
        body = {**self._body, **wire.with_output_limit(self._body, max_tokens)}
        if stream:
            body["stream"] = True
            if not self._leaves_out("usage"):
                body.update(wire.with_usage(body))
        if messages is not None:
            body["messages"] = wire.encode(messages)
        if continuation is not None:
            body = {key: value for key, value in body.items() if key not in _WHOLE_DOCUMENT_KEYS}
        url = self._request.url
        if continuation is not None and continuation.prompt is not None:
            url = _completions(url)
            body = wire.begun(body, continuation.prompt.text, continuation.prompt.end_of_turn)
        elif continuation is not None and continuation.needs_word:
            body |= wire.GOES_ON
        # ASCII with escapes: lone surrogates, which clients do send, have no UTF-8.
        content = json.dumps(body, separators=(",", ":")).encode()
        left_out = (b"content-length", b"accept-encoding")
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

    async def _streaming(
        self, messages: Sequence[Message] | None, max_tokens: int, *, continuation: Continuation | None
    ) -> httpx.Response:
        """A response that streams, from a server that knows how to; the caller closes it.

        Raises:
            UpstreamDropped: the connection broke.
        """
        while True:
            stream = self.wants_stream or not self._leaves_out("stream")
            try:
                response = await self.send(messages, max_tokens, continuation=continuation, stream=stream)
            except httpx.TransportError as error:
                # It took the request and broke down over it, which near a full window is what an overflow looks like.
                is_broken = isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError))
                if is_broken or (continuation is not None and continuation.is_the_servers_own):
                    raise UpstreamDropped("", None) from error
                raise
            if response.status_code not in _UNKNOWN_KEY_STATUSES:
                return response
            try:
                body, _ = await read_body(response, _ERROR_BYTES)
            finally:
                await response.aclose()
            response = _read(response, body)
            if not self._has_refused(response.text):
                return response

    def _has_refused(self, error: str) -> bool:
        """Whether an error refuses what we have added; then it is left out of this request from now on.

        For all requests only where the client has not said the words itself: a server may quote it.
        """
        addition = _refused_addition(error)
        if addition is None or addition in self._left_out or (addition == "stream" and self.wants_stream):
            return False
        self._left_out.add(addition)
        if _NAMES[addition].search(self._said()) is None:
            self._abilities.learn(self._address, addition)
        return True

    def _leaves_out(self, addition: Addition) -> bool:
        """Whether an addition is left out of this request; once it is, it stays so."""
        if self._abilities.lacks(self._address, addition):
            self._left_out.add(addition)
        return addition in self._left_out

    async def _as_stream(self, response: httpx.Response, most_bytes: int) -> AsyncIterator[Chunk]:
        """What is no event stream, as one: a whole answer is one chunk.

        Raises:
            UpstreamDropped: the connection broke.
            UpstreamError: it is no answer, or a longer one than the request can have.
        """
        is_answer = response.status_code == 200
        body, is_whole = await read_body(response, most_bytes if is_answer else _ERROR_BYTES)
        if is_answer and not is_whole:
            raise unreadable(f"its answer has more than {most_bytes} bytes")
        if is_answer and not is_quickly_read(body):
            raise unreadable("its answer has too many values")
        response = _read(response, body)
        chunk = _as_chunk(response)
        if self._answers == 1:
            self.whole = response
        return _one(chunk)

    @property
    def _address(self) -> str:
        return str(self._request.url)


def _refused_addition(error: str) -> Addition | None:
    """Which of our additions an error names."""
    return next((addition for addition, names in _NAMES.items() if names.search(error)), None)


def _completions(url: httpx.URL) -> httpx.URL:
    """Where the server completes a text, beside where it answers chats."""
    return url.copy_with(path=url.path.removesuffix(_CHAT) + "/completions")


async def _as_chat(events: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """The chunks of a text completion as those of a chat."""
    async for event in events:
        choices = event.get("choices")
        if not isinstance(choices, list):
            yield event
            continue
        yield {
            **event,
            "choices": [
                {"index": 0, "delta": {"content": choice.get("text")}, "finish_reason": choice.get("finish_reason")}
                for choice in choices
                if isinstance(choice, dict)
            ],
        }


def _read(response: httpx.Response, body: bytes) -> httpx.Response:
    """A response as if it had come with `body`."""
    headers = [(key, value) for key, value in response.headers.multi_items() if key.lower() not in HOP_HEADERS]
    return httpx.Response(response.status_code, headers=headers, content=body)


async def _one(chunk: Chunk) -> AsyncIterator[Chunk]:
    yield chunk


def _as_chunk(response: httpx.Response) -> Chunk:
    """A whole answer as if it had come in one piece of a stream.

    Raises:
        UpstreamError: it is not an answer.
    """
    answer = json_object(response.content) if response.status_code == 200 else {}
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise UpstreamError(response.text, response, status=response.status_code)
    message = choice.get("message", {"content": choice["text"]} if "text" in choice else None)
    delta = dict(message) if isinstance(message, dict) else {}
    if isinstance(calls := delta.get("tool_calls"), list):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)]
    shown = {key: value for key, value in choice.items() if key not in ("message", "text")}
    chunk = {**answer, "choices": [{**shown, "index": 0, "delta": delta}]}
    if not is_chunk(chunk):
        raise UpstreamError(response.text, response, status=response.status_code)
    return chunk
