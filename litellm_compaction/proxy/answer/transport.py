"""The better carrier: an httpx transport below LiteLLM's OpenAI client, so that LiteLLM sees one ordinary call.

LiteLLM is handed an `AsyncOpenAI` client over `GuardedTransport`. All work in an open response happens here: the notice
before the summary, abort and restart, streaming and not, on every route that LiteLLM bridges to chat completions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import httpx
import litellm
from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from litellm_compaction.concurrency import Tasks, is_long, off_loop_if
from litellm_compaction.core.go_on import Way
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import Compactor, Decided, RequestContext, Reservation
from litellm_compaction.errors import NO_CHAT, TOO_DEEP, ClientLeft, CompactionError, NotServed, overflow_from_text
from litellm_compaction.proxy import refusals, wire
from litellm_compaction.proxy.answer import sse
from litellm_compaction.proxy.answer.client import Asked, joined
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import Batch, Batches, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.exchange import Exchange
from litellm_compaction.proxy.litellm_inside import with_chats
from litellm_compaction.proxy.presence import ends_with_client, while_here
from litellm_compaction.proxy.routing import WAYS_OF
from litellm_compaction.windows.fetch import ACCEPTED_ENCODINGS, unfolds_slowly

# Reading this much JSON takes 2 ms.
_OFF_LOOP_BYTES = 200_000
# Nothing is pulled from a stream for so long: its reader has left, and nobody has told. A slow one pulls now and then.
UNREAD_S = 30.0
_USAGE_NAMES = re.compile(r"stream_options|include_usage")
# A client's framing is not that of our body: a server would wait for the rest.
_FRAMING = (b"content-length", b"accept-encoding", b"transfer-encoding", b"expect")
_CHAT = "/chat/completions"
_closing = Tasks()


# ------------------------------------------------------------------ to the client


@dataclass(eq=False)
class GuardedTransport(httpx.AsyncBaseTransport):
    """Carries one client request to its deployment, over as many upstream requests as it takes."""

    inner: httpx.AsyncBaseTransport  # Shared, and never closed here.
    compactor: Compactor
    context: RequestContext
    asked: Asked
    prepared: Decided  # Found before routing ended.
    exchange: Exchange
    body: dict[str, Any] = field(default_factory=dict)  # All of a request's, if that does not come in its bytes.
    _upstream: HttpUpstream | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            with while_here():
                return await self._handled(request)
        except (CompactionError, RecursionError) as error:
            return self._refused(error if isinstance(error, CompactionError) else NotServed(TOO_DEEP))
        except Exception as error:
            too_long, is_servers = self.context.attempts.too_long, isinstance(error, httpx.TransportError)
            refusal = refusals.server_gone(error, self.context) if is_servers else too_long and too_long()
            if refusal is None or (self._upstream is not None and self._upstream.headers is not None):
                raise
            if not is_servers:
                refusals.log_failure("transport", error, is_too_long=too_long is not None)
            return self._refused(refusal)

    async def _handled(self, request: httpx.Request) -> httpx.Response:
        content = b"" if self.body else await request.aread()
        body = self.body or await off_loop_if(len(content) > _OFF_LOOP_BYTES, lambda: sse.json_object(content))
        if not body:
            # A request that cannot be read cannot be guarded.
            return self._refused(NotServed(TOO_DEEP))
        upstream = self._upstream = HttpUpstream(self.inner, request, body)
        prepared, asked, room = self.prepared, self.asked, self.compactor.room(self.context)

        def read() -> Request | None:
            # The body that leaves is guarded, however its parts came into it.
            same = asked.request if wire.is_same_request(body, asked.request) else None
            return same or wire.decode(body) or wire.decode_text(body)

        prompt = body.get("prompt")
        sent = await off_loop_if(is_long(body.get("messages"), body.get("tools"), prompt, [prompt]), read)
        if sent is None:
            return self._refused(NotServed(NO_CHAT))
        if sent is not asked.request:
            prepared = await self.compactor.prepare(sent, self.context)
        asked = replace(asked, request=sent, stops=wire.stops(body), is_whole=not upstream.wants_stream)
        if not (body.get("messages") and wire.can_be_continued(body)):
            # No part of a text completion is a conversation.
            return await self._answered(self._passed(upstream, prepared, room), upstream)
        answer = Answer(self.compactor, self.context, upstream, asked, prepared, self.exchange, room)
        return await self._answered(answer.batches(), upstream, answer)

    def _refused(self, error: CompactionError) -> httpx.Response:
        self.exchange.refusal = error
        return refusals.response_of(error)

    async def _passed(self, upstream: HttpUpstream, decided: Decided, room: Reservation) -> Batches:
        """One request, its answer as it comes: a text, several choices or log probabilities cannot be joined."""
        answers = wire.asked_answers(upstream.body)
        try:
            prepared = await self.compactor.finish(decided, room)
            self.exchange.sent(prepared)
            limit = prepared.max_output_tokens(wire.asked_output_tokens(upstream.body))
            limit = await room.acquire(prepared, limit, is_watched=False, answers=answers)
            room.started()
            leg = Leg(prepared=prepared, max_tokens=limit, passed=answers)
            async with upstream.open(leg) as batches:
                async for batch in batches:
                    yield batch
            room.ended()
        finally:
            room.release()

    async def _answered(self, batches: Batches, upstream: HttpUpstream, answer: Answer | None = None) -> httpx.Response:
        """A response whose first chunk is already there, so that a refusal keeps its real status.

        A whole answer is the server's own as it came, or its legs joined.
        """
        try:
            if upstream.wants_stream:
                first = await anext(batches, None)
                if not first:
                    raise sse.faulty("its answer is empty")
                stream = EventStream(first, batches, self.exchange, self.context)
                return httpx.Response(200, headers=_headers(upstream, "text/event-stream"), stream=stream)
            chunks = [chunk async for batch in batches for chunk in batch]
        except UpstreamError as error:
            return _refusal(error)
        if upstream.whole is not None and (answer is None or answer.is_one_leg):
            return upstream.whole
        # `httpx` writes no NaN, which servers do.
        content = json.dumps(joined(chunks)).encode()
        return httpx.Response(200, headers=_headers(upstream, "application/json"), content=content)


class EventStream(httpx.AsyncByteStream):
    """Chunks, for OpenAI's client as server-sent events; closing it ends the answer upstream.

    LiteLLM may leave one open: it is closed when its client has left, and when nobody has pulled for `UNREAD_S`.
    """

    def __init__(self, first: Batch, batches: Batches, exchange: Exchange, context: RequestContext) -> None:
        self._first, self._batches, self._exchange, self._context = first, batches, exchange, context
        self._left: asyncio.Task[None] | None = None
        self._wait()
        ends_with_client(self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for batch in self.batches():
            yield b"".join(map(sse.event_of, batch))
        yield sse.DONE

    async def chunks(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        """As OpenAI's client would give them, which encodes and decodes each, and its iterator anew for LiteLLM."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    if said := sse.error_text(chunk):
                        raise _as_litellm_error(UpstreamError(said))
                    yield ChatCompletionChunk.construct(**chunk)

    async def batches(self) -> Batches:
        batch: Batch | None = self._first
        try:
            while batch is not None:
                yield batch
                self._timer.cancel()
                if self._left is not None:
                    raise ClientLeft
                with while_here():
                    batch = await anext(self._batches, None)
                self._wait()
        except UpstreamError as error:
            raise error.__cause__ or _as_litellm_error(error) from error
        except (CompactionError, httpx.ConnectError) as error:
            refusal = error if isinstance(error, CompactionError) else refusals.server_gone(error, self._context)
            if refusal is None:
                raise
            self._exchange.refusal = refusal
            # LiteLLM calls no failure hook of ours for an answer that has begun.
            refusals.log_refused(self._context.label, refusal)
            raise refusals.litellm_error_of(refusal, {}) from error
        finally:
            await self.aclose()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(UNREAD_S, self.cancel)

    def cancel(self) -> None:
        """Ends the answer upstream; if somebody pulls, that ends with the client as well."""
        if not self._timer.cancelled():
            self._left = _closing.begin(self._batches.aclose())

    async def aclose(self) -> None:
        self._timer.cancel()
        if self._left is None:
            await self._batches.aclose()


def client_over(transport: GuardedTransport, *, api_base: str, api_key: str | None) -> Any:
    """LiteLLM's client for one call, by the deployment's own address and key; LM Studio needs none."""
    # LiteLLM sets the time limits of each call itself.
    http_client = httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None), trust_env=False)
    client = _client_of(api_base, api_key or "fake-api-key").with_options(http_client=http_client)
    return with_chats(client, partial(_asked, client, transport))


@lru_cache(maxsize=64)
def _client_of(api_base: str, api_key: str) -> AsyncOpenAI:
    """One for a server, which leads nowhere: a copy of it costs a quarter of another."""
    nowhere = httpx.AsyncClient(transport=httpx.AsyncBaseTransport(), trust_env=False)
    return AsyncOpenAI(api_key=api_key, base_url=api_base, max_retries=0, http_client=nowhere)


async def _asked(client: AsyncOpenAI, transport: GuardedTransport, **asked: Any) -> Any:
    """A chat's raw response, past OpenAI's own way to it: half a millisecond, and 0.3 ms for each message."""
    options = {key: asked.pop(key, None) for key in ("timeout", "extra_headers", "extra_query", "extra_body")}
    transport.body = {**asked, **(options["extra_body"] or {})}
    if client.max_retries:
        # Nothing else tries again.
        asked["messages"] = []
        return await client.with_options().chat.completions.with_raw_response.create(**asked, **options)
    own = {key: value for key, value in client.default_headers.items() if isinstance(value, str)}
    own |= {"Authorization": f"Bearer {client.api_key}", **(options["extra_headers"] or {})}
    url, extensions = f"{client.base_url}chat/completions", {"timeout": httpx.Timeout(options["timeout"]).as_dict()}
    request = httpx.Request("POST", url, params=options["extra_query"], headers=own, extensions=extensions)
    try:
        response = await transport.handle_async_request(request)
    except Exception as error:
        is_late = isinstance(error, httpx.TimeoutException)
        raise (APITimeoutError(request) if is_late else APIConnectionError(request=request)) from error
    response.request = request
    if not response.is_success:
        raise client._make_status_error_from_response(response)
    stream, headers = response.stream, response.headers
    chat = stream.chunks() if isinstance(stream, EventStream) else ChatCompletion.construct(**response.json())
    return SimpleNamespace(headers=headers, parse=lambda: chat)


def _refusal(error: UpstreamError) -> httpx.Response:
    """The server's refusal as LiteLLM would have got it; the error of a connection that broke is raised."""
    if isinstance(error.__cause__, httpx.TransportError):
        raise error.__cause__
    upstream: httpx.Response | None = error.response if isinstance(error.response, httpx.Response) else None
    short = sse.short_error(error.text)
    if overflow_from_text(error.text) is not None:
        # LiteLLM recognizes this wording as ContextWindowExceededError, so that the fallbacks for it fire. An overflow
        # inside HTTP 200 is a 400 for the client all the same.
        status = upstream.status_code if upstream is not None and upstream.status_code >= 400 else 400
        return refusals.bad_request(f"{short['error']['message']} {refusals.RECOGNIZED}", status)
    if upstream is not None:
        return upstream
    told = error.response if isinstance(error.response, dict) else {"error": "upstream"}
    return httpx.Response(500, json=told if len(json.dumps(told)) <= sse.ERROR_BYTES else short)


def _headers(upstream: HttpUpstream, content_type: str) -> list[tuple[str, str]]:
    """The headers of the server's first answer, as far as it has come, for the client's body."""
    own = sse.end_to_end(upstream.headers) if upstream.headers is not None else []
    return [*((key, value) for key, value in own if key.lower() != "content-type"), ("content-type", content_type)]


def _as_litellm_error(error: UpstreamError) -> Exception:
    """The server's error after the first chunk, as LiteLLM puts it into the stream."""
    text = error.text[:500]
    if overflow_from_text(error.text) is not None:
        overflow: Exception = litellm.ContextWindowExceededError(text, model="", llm_provider="lm_studio")
        return overflow
    response = httpx.Response(500, request=httpx.Request("POST", "http://upstream.invalid/"))
    return APIStatusError(text, response=response, body=None)


# ------------------------------------------------------------------ to the server


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
        # Some name another type than that of events, or none; OpenAI's client does not look.
        kind = response.headers.get("content-type", "").lower()
        is_stream = response.is_success and ("event-stream" in kind or (self.wants_stream and "/json" not in kind))
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
            _closing.begin(response.aclose())

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
