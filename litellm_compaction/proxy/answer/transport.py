"""The better carrier: an httpx transport below LiteLLM's OpenAI client, so that LiteLLM sees one ordinary call.

LiteLLM is handed an `AsyncOpenAI` client over `GuardedTransport`. What has to happen while a response is open happens
here: the notice before the summary, abort and restart, streaming and not, on every route that LiteLLM bridges to chat
completions.

The server is always asked for a stream, whatever the client wants. A stream can be watched, bounded while it runs, and
ended with its client; a whole answer cannot: a llama.cpp whose client has left a plain request generates to its end,
one that streams stops in half a second (measured 2026-11-22). The pieces are joined where a client wants them whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import httpx
import litellm
from openai import APIStatusError, AsyncOpenAI

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import Message
from litellm_compaction.engine import CompactionNeeded, Compactor, PreparedRequest, RequestContext, Reservation
from litellm_compaction.engine.threads import is_long, off_loop_if
from litellm_compaction.errors import CompactionError, TooDeep, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.protocol import (
    Asked,
    Batch,
    Chunk,
    Continuation,
    Listener,
    UpstreamDropped,
    UpstreamError,
)
from litellm_compaction.proxy.answer.relay import joined
from litellm_compaction.proxy.answer.sse import (
    DONE,
    ERROR_BYTES,
    Bounds,
    events_of,
    is_chunk,
    json_object,
    pass_events,
    read_body,
    read_events,
    short_error,
    unreadable,
)
from litellm_compaction.proxy.refusals import (
    RECOGNIZED,
    bad_request,
    litellm_error_of,
    log_failure,
    response_of,
    server_gone,
)
from litellm_compaction.proxy.routing import WAYS_OF
from litellm_compaction.windows.fetch import ACCEPTED_ENCODINGS, is_quickly_read, unfolds_slowly

# What shapes a whole document, and not the rest of one.
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
# What described a transfer that is over.
HOP_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection"})
_CHAT = "/chat/completions"
_LISTS = ("messages", "tools")
_transport: ContextVar[ListTransport] = ContextVar("litellm_compaction_transport")
# Reading this much JSON takes 2 ms.
_OFF_LOOP_BYTES = 200_000


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
    ) -> None:
        self._inner = inner
        self._request = request
        self._body = body
        self._abilities = abilities
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
    ) -> AsyncIterator[AsyncIterator[Batch]]:
        """The chunks of an answer; leaving the context closes the connection, which stops the server."""
        response = await self._streaming(messages, max_tokens, continuation=continuation)
        try:
            self._answers += 1
            self.headers = self.headers or response.headers
            self.whole = None
            if _is_stream(response):
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
                if is_broken or (continuation is not None and continuation.has_another_way):
                    raise UpstreamDropped("", None) from error
                raise
            if response.status_code not in _UNKNOWN_KEY_STATUSES:
                if response.status_code == HTTPStatus.OK:
                    # Proof that it was an addition which the server refused: an error may quote the client.
                    for addition in self._left_out:
                        self._abilities.learn(self._address, addition)
                return response
            try:
                body, _ = await read_body(response, ERROR_BYTES)
            finally:
                await response.aclose()
            response = _read(response, body)
            if not self._has_refused(response.text):
                return response

    def _has_refused(self, error: str) -> bool:
        """Returns True if an error names what we have added; it is left out of this request from now on."""
        addition = next((addition for addition, names in _NAMES.items() if names.search(error)), None)
        if addition is None or addition in self._left_out or (addition == "stream" and self.wants_stream):
            return False
        self._left_out.add(addition)
        return True

    def _leaves_out(self, addition: Addition) -> bool:
        """Whether an addition is left out of this request; once it is, it stays so."""
        if self._abilities.lacks(self._address, addition):
            self._left_out.add(addition)
        return addition in self._left_out

    async def _as_stream(self, response: httpx.Response, most_bytes: int) -> AsyncIterator[Batch]:
        """What is no event stream, as one: a whole answer is one chunk.

        Raises:
            UpstreamDropped: the connection broke.
            UpstreamError: it is no answer, or a longer one than the request can have.
        """
        is_answer = response.status_code == 200
        body, is_whole = await read_body(response, most_bytes if is_answer else ERROR_BYTES)
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


def _completions(url: httpx.URL) -> httpx.URL:
    """Where the server completes a text, beside where it answers chats."""
    return url.copy_with(path=url.path.removesuffix(_CHAT) + "/completions")


async def _as_chat(completion: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
    """The chunks of a text completion as those of a chat."""
    async for batch in completion:
        yield list(map(_as_chat_chunk, batch))


def _as_chat_chunk(event: Chunk) -> Chunk:
    choices = event.get("choices")
    if not isinstance(choices, list):
        return event
    return {
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


async def _one(chunk: Chunk) -> AsyncIterator[Batch]:
    yield [chunk]


def _as_chunk(response: httpx.Response) -> Chunk:
    """A whole answer as if it had come in one piece of a stream.

    Raises:
        UpstreamError: it is not an answer.
    """
    answer = json_object(response.content) if response.status_code == 200 else {}
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise UpstreamError(_beginning(response), response, status=response.status_code)
    message = choice.get("message", {"content": choice["text"]} if "text" in choice else None)
    delta = dict(message) if isinstance(message, dict) else {}
    if isinstance(calls := delta.get("tool_calls"), list):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)]
    shown = {key: value for key, value in choice.items() if key not in ("message", "text")}
    chunk = {**answer, "choices": [{**shown, "index": 0, "delta": delta}]}
    if not is_chunk(chunk):
        raise UpstreamError(_beginning(response), response, status=response.status_code)
    return chunk


def _beginning(response: httpx.Response) -> str:
    return response.content[:ERROR_BYTES].decode(errors="replace")


class ListTransport(httpx.AsyncBaseTransport):
    """A transport that is given what is long beside a body's bytes.

    Attributes:
        lists: keys of the next body that do not come in its bytes.
    """

    lists: Mapping[str, Any] = MappingProxyType({})


class GuardedTransport(ListTransport):
    """Carries one client request to its deployment, over as many upstream requests as it takes.

    Args:
        inner: the shared transport with the connection pool; never closed here.
        compactor: compacts and learns.
        case: of the request.
        asked: by the client; without `request` and `prepared` on routes whose messages only the body shows.
        prepared: what the engine found before routing ended.
        listener: is told what goes out.
        abilities: what servers refuse of a request's shape.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        compactor: Compactor,
        case: RequestContext,
        asked: Asked,
        prepared: PreparedRequest | CompactionNeeded | None,
        listener: Listener,
        abilities: Abilities,
    ) -> None:
        self._inner = inner
        self._compactor = compactor
        self._case = case
        self._asked = asked
        self._prepared = prepared
        self._listener = listener
        self._abilities = abilities
        self._upstream: HttpUpstream | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer to LiteLLM's one call."""
        try:
            return await self._handled(request)
        except httpx.TransportError as error:
            # Of the server's.
            gone = None if self._has_answered else server_gone(error, self._case)
            if gone is None:
                raise
            return self._refused(gone)
        except Exception as error:
            too_long = self._case.attempts.too_long
            if too_long is None or self._has_answered:
                raise
            log_failure("transport", error, too_long=too_long)
            return self._refused(too_long)

    @property
    def _has_answered(self) -> bool:
        return self._upstream is not None and self._upstream.headers is not None

    async def _handled(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        body = await off_loop_if(len(content) > _OFF_LOOP_BYTES, lambda: json_object(content))
        if not body:
            # What cannot be read cannot be guarded.
            return self._refused(TooDeep())
        body |= self.lists
        ready, found = self._prepared, self._asked.request
        long = is_long(body.get("messages"), body.get("tools"))
        if ready is None or not await off_loop_if(long, lambda: wire.is_same_request(body, found)):
            # What is guarded is what leaves, by whatever way it came into the body.
            ready, decoded = None, await off_loop_if(long, lambda: wire.decode(body))
            if decoded is None:
                return await self._completed(request, body)
            found = decoded
        asked = replace(self._asked, request=found, stops=wire.stops(body))
        upstream = self._upstream = HttpUpstream(self._inner, request, body, self._abilities)
        try:
            prepared = ready or await self._compactor.prepare(asked.request, self._case)
            if not wire.can_be_carried_over(body):
                return await self._passed(upstream, prepared, asked, body, stream=bool(body.get("stream")))
            if upstream.wants_stream:
                return await self._streamed(self._answer(upstream, asked, prepared), upstream)
            asked = replace(asked, notices=asked.notices.at_the_end_only, is_whole=True)
            return await self._whole(self._answer(upstream, asked, prepared), upstream)
        except CompactionError as error:
            return self._refused(error)
        except RecursionError:
            return self._refused(TooDeep())

    async def aclose(self) -> None:
        """Nothing: the inner transport belongs to everybody."""

    async def _completed(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        """A text completion that the server itself knows, its answer as it comes; nothing of it is a conversation."""
        prompt = body.get("prompt")
        long = is_long(prompt, [prompt])
        found = await off_loop_if(long, lambda: wire.decode_prompt(body, is_bridged=False))
        ids = await off_loop_if(long, lambda: wire.longest_ids(body))
        if found is None and ids is None:
            return await _short_if_error(await self._inner.handle_async_request(request))
        asked = replace(self._asked, output_tokens=wire.asked_output_tokens(body))
        try:
            if found is None:
                guarded = await self._compactor.bound(ids or 0, self._case)
            else:
                asked = replace(asked, request=found)
                guarded = await self._compactor.guard(found, self._case)
                if (sent := guarded.messages) is not None:
                    body |= await off_loop_if(long, partial(wire.with_prompt, body, found, sent))
            upstream = HttpUpstream(self._inner, request, body, self._abilities)
            # A chunk with nothing but the usage would be new to clients of completions.
            return await self._passed(upstream, guarded, asked, body, stream=False)
        except CompactionError as error:
            return self._refused(error)

    def _refused(self, error: CompactionError) -> httpx.Response:
        self._listener.refused(error)
        return response_of(error)

    def _answer(self, upstream: HttpUpstream, asked: Asked, prepared: PreparedRequest | CompactionNeeded) -> Answer:
        return Answer(
            self._compactor,
            self._case,
            upstream,
            asked,
            prepared,
            self._listener,
            room=self._compactor.room(self._case),
        )

    async def _passed(
        self,
        upstream: HttpUpstream,
        prepared: PreparedRequest | CompactionNeeded,
        asked: Asked,
        body: Mapping[str, Any],
        *,
        stream: bool,
    ) -> httpx.Response:
        """One compacted request, its answer as it comes: several choices or log probabilities cannot be joined."""
        room = self._compactor.room(self._case)
        answers, prompts = wire.asked_answers(body), wire.asked_prompts(body)
        try:
            guarded = (
                await self._compactor.finish(prepared, room) if isinstance(prepared, CompactionNeeded) else prepared
            )
            self._listener.sent(self._case, guarded)
            limit = guarded.max_output_tokens(asked.output_tokens)
            limit = await room.take(guarded, limit, is_watched=False, answers=answers, prompts=prompts)
            response = await upstream.send(guarded.messages, limit, continuation=None, stream=stream)
            room.started()
            bounds = Bounds.of(limit * answers * prompts)
            if not _is_stream(response):
                response = await _passed_whole(response, bounds.event_bytes)
                room.leave()
                return response
        except BaseException:
            # Also on cancellation: without an answer nothing else would end what it holds.
            room.leave()
            raise
        headers = [(key, value) for key, value in response.headers.multi_items() if key.lower() not in HOP_HEADERS]
        return httpx.Response(200, headers=headers, stream=_Held(response, room, bounds))

    async def _streamed(self, answer: Answer, upstream: HttpUpstream) -> httpx.Response:
        """A response whose first chunk is already there, so that a refusal keeps its real status."""
        batches = answer.batches()
        try:
            first = await anext(batches, ())
        except UpstreamError as error:
            return _refusal(error)
        stream = _EventStream(first, batches, self._listener)
        return httpx.Response(200, headers=_headers(upstream, "text/event-stream"), stream=stream)

    async def _whole(self, answer: Answer, upstream: HttpUpstream) -> httpx.Response:
        """One JSON answer: the server's own where it gave one, else its pieces joined."""
        try:
            chunks = [chunk async for batch in answer.batches() for chunk in batch]
        except UpstreamError as error:
            return _refusal(error)
        if upstream.whole is not None and not answer.is_cut:
            return _copied(upstream.whole)
        return httpx.Response(200, headers=_headers(upstream, "application/json"), json=joined(chunks))


class _Held(httpx.AsyncByteStream):
    """A server's stream that holds its room in a shared context until it has been read, or its client has left."""

    def __init__(self, response: httpx.Response, room: Reservation, bounds: Bounds) -> None:
        self._response = response
        self._room = room
        self._bounds = bounds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in pass_events(self._response, self._bounds):
            yield piece
        self._room.ended()

    async def aclose(self) -> None:
        try:
            await self._response.aclose()
        finally:
            self._room.leave()


class _EventStream(httpx.AsyncByteStream):
    """Chunks as server-sent events; closing it ends whatever is under way upstream."""

    def __init__(self, first: Batch, batches: AsyncGenerator[Batch, None], listener: Listener) -> None:
        self._first = first
        self._batches = batches
        self._listener = listener

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield events_of(self._first)
        try:
            async for batch in self._batches:
                yield events_of(batch)
        except UpstreamError as error:
            raise error.__cause__ or _as_litellm_error(error) from error
        except CompactionError as error:
            self._listener.refused(error)
            raise litellm_error_of(error, {}) from error
        yield DONE

    async def aclose(self) -> None:
        await self._batches.aclose()


class Clients:
    """The OpenAI clients that LiteLLM uses: one is made for each server, and copied for each call."""

    def __init__(self) -> None:
        self._made: Bounded[tuple[str, str | None], _Client] = Bounded(_MAX_SERVERS)

    def over(self, transport: ListTransport, *, api_base: str, api_key: str | None) -> AsyncOpenAI:
        """The client for one call.

        Args:
            transport: carries it.
            api_base: of the deployment, resolved: LiteLLM's own argument may be None where it comes from the
                environment.
            api_key: likewise; LM Studio needs none.
        """
        if (made := self._made.get((api_base, api_key))) is None:
            made = self._made[api_base, api_key] = _Client(
                api_key=api_key or "fake-api-key",
                base_url=api_base,
                max_retries=0,
                http_client=httpx.AsyncClient(
                    transport=_Chosen(),
                    # LiteLLM sets the time limits of each call itself.
                    timeout=httpx.Timeout(None),
                    # No call sends the cookies of another one.
                    cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                    trust_env=False,
                ),
            )
        # A copy, since LiteLLM writes the call's own options into its client.
        client = copy(made)
        client.transport = transport
        completions = client.chat.completions
        completions.create = _as_it_is(completions.create, transport)  # type: ignore[assignment, method-assign]
        return client


class _Client(AsyncOpenAI):
    """A client whose requests one transport carries, although it shares its connections' client with its copies."""

    transport: ListTransport

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        _transport.set(self.transport)
        return await super().request(*args, **kwargs)


class _Chosen(httpx.AsyncBaseTransport):
    """The transport of the client that has begun the running task's request."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await _transport.get().handle_async_request(request)


def _as_it_is(create: Callable[..., Awaitable[Any]], transport: ListTransport) -> Callable[..., Awaitable[Any]]:
    """OpenAI's `create`, which does not look through messages and tools for what its types name otherwise.

    There is no such name in them (openai 2.54, types/chat), and it holds the event loop for 0.3 ms a message: of 40,000
    for 12 s, in which a stock proxy serves nobody (2026-11-22). Nor does it write them as JSON, which the transport
    would have to read again: of 50 MB for 0.7 s.
    """

    async def created(**asked: Any) -> Any:
        extra = asked.get("extra_body") or {}
        # What is in there already goes before, as ever.
        lists = {key: asked[key] for key in _LISTS if key in asked and key not in extra}
        long = is_long(*lists.values())
        plain = {key: value for key, value in lists.items() if await off_loop_if(long, partial(wire.is_plain, value))}
        if not wire.is_conversation(plain.get("messages")):
            # What the transport does not read goes on as it came.
            plain = {}
        transport.lists = plain
        kept = {key: value for key, value in asked.items() if key not in plain}
        return await create(**{"messages": [], **kept})

    return created


def _is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and "event-stream" in response.headers.get("content-type", "")


async def _short_if_error(response: httpx.Response) -> httpx.Response:
    """A response as it is, an error without its end."""
    if response.status_code < 400:
        return response
    try:
        body, _ = await read_body(response, ERROR_BYTES)
    finally:
        await response.aclose()
    return _read(response, body)


async def _passed_whole(response: httpx.Response, most_bytes: int) -> httpx.Response:
    """An answer that is no stream, read within bounds; what is no answer without its end."""
    if response.status_code >= 400:
        return await _short_if_error(response)
    try:
        body, is_whole = await read_body(response, most_bytes)
        if not is_whole:
            raise unreadable(f"its answer has more than {most_bytes} bytes")
    except UpstreamError as error:
        return _refusal(error)
    finally:
        await response.aclose()
    is_short = len(body) <= ERROR_BYTES
    is_answer = is_short or (is_quickly_read(body) and "choices" in json_object(body))
    return _read(response, body if is_answer else body[:ERROR_BYTES])


def _refusal(error: UpstreamError) -> httpx.Response:
    """The server's refusal as LiteLLM would have got it.

    Raises:
        httpx.TransportError: the connection broke.
    """
    if isinstance(error.__cause__, httpx.TransportError):
        raise error.__cause__
    upstream: httpx.Response | None = error.response if isinstance(error.response, httpx.Response) else None
    if overflow_from_text(error.text) is not None:
        text = error.text if len(error.text) <= ERROR_BYTES // 6 else short_error(error.text)["error"]["message"]
        # LiteLLM recognizes this wording as ContextWindowExceededError, so that the fallbacks for it fire. LM Studio
        # reports an overflow inside HTTP 200, too (goose 11318): for the client it is a 400 all the same.
        status = upstream.status_code if upstream is not None and upstream.status_code >= 400 else 400
        return bad_request(f"{text} {RECOGNIZED}", status)
    if upstream is None:
        told = error.response if isinstance(error.response, dict) else {"error": "upstream"}
        content = json.dumps(told).encode()
        is_short = len(content) <= ERROR_BYTES
        return httpx.Response(500, json=told if is_short else short_error(error.text))
    copied = _copied(upstream)
    is_short = len(copied.content) <= ERROR_BYTES
    return copied if is_short else _read(copied, copied.content[:ERROR_BYTES])


def _headers(upstream: HttpUpstream, content_type: str) -> list[tuple[str, str]]:
    """The headers of the server's first answer, as far as it has come, for the body that the client gets."""
    own = upstream.headers.multi_items() if upstream.headers is not None else []
    kept = [(key, value) for key, value in own if key.lower() not in HOP_HEADERS and key.lower() != "content-type"]
    return [*kept, ("content-type", content_type)]


def _copied(response: httpx.Response) -> httpx.Response:
    """A response that has been read, without the headers that described its transfer."""
    headers = [(key, value) for key, value in response.headers.items() if key.lower() not in HOP_HEADERS]
    return httpx.Response(response.status_code, headers=headers, content=response.content)


def _as_litellm_error(error: UpstreamError) -> Exception:
    """The server's error behind the first chunk, as LiteLLM puts it into the stream."""
    if overflow_from_text(error.text) is not None:
        overflow: Exception = litellm.ContextWindowExceededError(
            message=error.text[:500], model="", llm_provider="lm_studio"
        )
        return overflow
    response = httpx.Response(500, request=httpx.Request("POST", "http://upstream.invalid/"))
    return APIStatusError(error.text[:500], response=response, body=None)
