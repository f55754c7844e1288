"""A deployment's server, asked over HTTP for one client request: streams, and whole answers as streams of one chunk.

Below LiteLLM's OpenAI client: `upstream.py` carries answers over it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from litellm_compaction.core.messages import Message
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.exchange import Chunk, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.sse import read_events

# What shapes a whole document would make the model start a new one instead of going on with the old.
_WHOLE_DOCUMENT_KEYS = ("response_format",)


class HttpUpstream:
    """A deployment's server behind the inner transport, for one client request."""

    def __init__(self, inner: httpx.AsyncBaseTransport, request: httpx.Request, body: dict[str, Any]) -> None:
        self._inner = inner
        self._request = request
        self._body = body

    @asynccontextmanager
    async def open(
        self, messages: Sequence[Message] | None, max_tokens: int, *, is_continuation: bool
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """The chunks of a streamed answer; leaving the context closes the connection, which stops the server."""
        response = await self.send(messages, max_tokens, is_continuation=is_continuation, stream=True)
        try:
            if response.status_code != 200 or "event-stream" not in response.headers.get("content-type", ""):
                await response.aread()
                raise UpstreamError(response.text, response)
            yield read_events(response)
        finally:
            await response.aclose()

    async def send(
        self, messages: Sequence[Message] | None, max_tokens: int, *, is_continuation: bool, stream: bool
    ) -> httpx.Response:
        """One request to the server; the caller closes the response."""
        body = {**self._body, **wire.with_output_limit(self._body, max_tokens)}
        if stream:
            body.update(wire.with_usage(body))
        if messages is not None:
            body["messages"] = wire.encode(messages)
        if is_continuation:
            body = {key: value for key, value in body.items() if key not in _WHOLE_DOCUMENT_KEYS}
        # ASCII with escapes: lone surrogates, which clients do send, have no UTF-8.
        content = json.dumps(body, separators=(",", ":")).encode()
        headers = [(key, value) for key, value in self._request.headers.raw if key.lower() != b"content-length"]
        return await self._inner.handle_async_request(
            httpx.Request(
                self._request.method,
                self._request.url,
                headers=headers,
                content=content,
                extensions=self._request.extensions,
            )
        )


class WholeUpstream:
    """The same server, asked for whole answers: each is one chunk.

    Attributes:
        responses: what the server sent, in order.
    """

    def __init__(self, upstream: HttpUpstream) -> None:
        self._upstream = upstream
        self.responses: list[httpx.Response] = []

    @asynccontextmanager
    async def open(
        self, messages: Sequence[Message] | None, max_tokens: int, *, is_continuation: bool
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """The whole answer as one chunk."""
        try:
            response = await self._upstream.send(messages, max_tokens, is_continuation=is_continuation, stream=False)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise UpstreamDropped("", None) from error
        self.responses.append(response)
        yield _one(_as_chunk(response))


async def _one(chunk: Chunk) -> AsyncIterator[Chunk]:
    yield chunk


def _as_chunk(response: httpx.Response) -> Chunk:
    """A whole answer as if it had come in one piece of a stream.

    Raises:
        UpstreamError: it is not an answer.
    """
    try:
        answer = response.json()
    except ValueError:
        answer = None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if response.status_code != 200 or not isinstance(answer, dict) or not choices:
        raise UpstreamError(response.text, response)
    choice = choices[0]
    delta = dict(choice.get("message") or {})
    return {**answer, "choices": [{"index": 0, "delta": delta, "finish_reason": choice.get("finish_reason")}]}
