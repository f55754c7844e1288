"""The better carrier: an httpx transport below LiteLLM's OpenAI client, so that LiteLLM sees one ordinary call.

The gate hands LiteLLM an `AsyncOpenAI` client over `GuardedTransport`. What has to happen while a response is open
happens here: the notice before the summary, abort and restart, streaming and not, on every route that LiteLLM
bridges to chat completions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import httpx
import litellm
from openai import APIStatusError, AsyncOpenAI

from litellm_compaction.engine import Case, Compactor, Guarded, Pending, Room
from litellm_compaction.engine.threads import is_long, off_loop_if
from litellm_compaction.errors import CompactionError, TooDeep, overflow_from_text
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.exchange import Asked, Chunk, Listener, UpstreamError
from litellm_compaction.proxy.http_upstream import HOP_HEADERS, Abilities, HttpUpstream
from litellm_compaction.proxy.notices import SILENT
from litellm_compaction.proxy.one_answer import joined
from litellm_compaction.proxy.refusals import RECOGNIZED, bad_request, litellm_error_of, response_of
from litellm_compaction.proxy.restart import Answer
from litellm_compaction.proxy.sse import DONE, event_of, json_object

_LISTS = ("messages", "tools")
# Reading this much JSON takes 2 ms.
_OFF_LOOP_BYTES = 200_000


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
        case: Case,
        asked: Asked,
        prepared: Guarded | Pending | None,
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

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer to LiteLLM's one call."""
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
        upstream = HttpUpstream(self._inner, request, body, self._abilities, said=asked.said)
        try:
            prepared = ready or await self._compactor.prepare(asked.request, self._case)
            if not wire.can_be_carried_over(body):
                answers = wire.asked_answers(body)
                return await self._passed(upstream, prepared, asked, stream=bool(body.get("stream")), answers=answers)
            if upstream.wants_stream:
                return await self._streamed(self._answer(upstream, asked, prepared), upstream)
            asked = replace(asked, notices=SILENT, is_whole=True)
            return await self._whole(self._answer(upstream, asked, prepared), upstream)
        except CompactionError as error:
            return self._refused(error)
        except RecursionError:
            return self._refused(TooDeep())

    async def aclose(self) -> None:
        """Nothing: the inner transport belongs to everybody."""

    async def _completed(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        """A text completion that the server itself knows, its answer as it comes; nothing of it is a conversation."""
        found, ids = wire.decode_prompt(body, is_bridged=False), wire.longest_ids(body)
        if found is None and ids is None:
            return await self._inner.handle_async_request(request)
        asked = replace(self._asked, output_tokens=wire.asked_output_tokens(body))
        try:
            if found is None:
                guarded = await self._compactor.bound(ids or 0, self._case)
            else:
                asked = replace(asked, request=found)
                guarded = await self._compactor.guard(found, self._case)
                if guarded.messages is not None:
                    body |= wire.with_prompt(body, found, guarded.messages)
            upstream = HttpUpstream(self._inner, request, body, self._abilities, said=self._asked.said)
            # A chunk with nothing but the usage would be new to clients of completions.
            answers, prompts = wire.asked_answers(body), wire.asked_prompts(body)
            return await self._passed(upstream, guarded, asked, stream=False, answers=answers, prompts=prompts)
        except CompactionError as error:
            return self._refused(error)

    def _refused(self, error: CompactionError) -> httpx.Response:
        self._listener.refused(error)
        return response_of(error)

    def _answer(self, upstream: HttpUpstream, asked: Asked, prepared: Guarded | Pending) -> Answer:
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
        prepared: Guarded | Pending,
        asked: Asked,
        *,
        stream: bool,
        answers: int,
        prompts: int = 1,
    ) -> httpx.Response:
        """One compacted request, its answer as it comes: several choices or log probabilities cannot be joined."""
        room = self._compactor.room(self._case)
        try:
            guarded = await self._compactor.finish(prepared, room) if isinstance(prepared, Pending) else prepared
            self._listener.sent(self._case, guarded)
            limit = guarded.max_output_tokens(asked.output_tokens)
            limit = await room.take(guarded, limit, is_watched=False, answers=answers, prompts=prompts)
            response = await upstream.send(guarded.messages, limit, continuation=None, stream=stream)
        except BaseException:
            # Also on cancellation: without an answer nothing else would end what it holds.
            room.leave()
            raise
        response.stream = _Held(response.stream, room)
        return response

    async def _streamed(self, answer: Answer, upstream: HttpUpstream) -> httpx.Response:
        """A response whose first chunk is already there, so that a refusal keeps its real status."""
        chunks = answer.chunks()
        try:
            first = await anext(chunks, None)
        except UpstreamError as error:
            return _refusal(error)
        stream = _EventStream(first, chunks, self._listener)
        return httpx.Response(200, headers=_headers(upstream, "text/event-stream"), stream=stream)

    async def _whole(self, answer: Answer, upstream: HttpUpstream) -> httpx.Response:
        """One JSON answer: the server's own where it gave one, else its pieces joined."""
        try:
            chunks = [chunk async for chunk in answer.chunks()]
        except UpstreamError as error:
            return _refusal(error)
        if upstream.whole is not None:
            return _copied(upstream.whole)
        return httpx.Response(200, headers=_headers(upstream, "application/json"), json=joined(chunks))


class _Held(httpx.AsyncByteStream):
    """A server's answer that holds its room in a shared context until it has been read, or its client has left."""

    def __init__(self, stream: httpx.SyncByteStream | httpx.AsyncByteStream, room: Room) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)  # noqa: S101 - of an asynchronous transport
        self._stream = stream
        self._room = room
        room.started()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece
        self._room.ended()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._room.leave()


class _EventStream(httpx.AsyncByteStream):
    """Chunks as server-sent events; closing it ends whatever is under way upstream."""

    def __init__(self, first: Chunk | None, chunks: AsyncGenerator[Chunk, None], listener: Listener) -> None:
        self._first = first
        self._chunks = chunks
        self._listener = listener

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._first is not None:
            yield event_of(self._first)
        try:
            async for chunk in self._chunks:
                yield event_of(chunk)
        except UpstreamError as error:
            raise error.__cause__ or _as_litellm_error(error) from error
        except CompactionError as error:
            self._listener.refused(error)
            raise litellm_error_of(error, {}) from error
        yield DONE

    async def aclose(self) -> None:
        await self._chunks.aclose()


def client_over(transport: ListTransport, *, api_base: str, api_key: str | None) -> AsyncOpenAI:
    """The OpenAI client that LiteLLM will use for this one call.

    Args:
        transport: a `GuardedTransport`.
        api_base: of the deployment, resolved: LiteLLM's own argument may be None where it comes from the environment.
        api_key: likewise; LM Studio needs none.
    """
    client = AsyncOpenAI(
        api_key=api_key or "fake-api-key",
        base_url=api_base,
        max_retries=0,
        # LiteLLM sets the time limits of each call itself.
        http_client=httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None), trust_env=False),
    )
    completions = client.chat.completions
    completions.create = _as_it_is(completions.create, transport)  # type: ignore[assignment, method-assign]
    return client


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


def _refusal(error: UpstreamError) -> httpx.Response:
    """The server's refusal as LiteLLM would have got it.

    Raises:
        httpx.TransportError: the connection broke.
    """
    if isinstance(error.__cause__, httpx.TransportError):
        raise error.__cause__
    upstream: httpx.Response | None = error.response if isinstance(error.response, httpx.Response) else None
    if overflow_from_text(error.text) is not None:
        # LiteLLM recognizes this wording as ContextWindowExceededError, so that the fallbacks for it fire. LM Studio
        # reports an overflow inside HTTP 200, too (goose 11318): for the client it is a 400 all the same.
        status = upstream.status_code if upstream is not None and upstream.status_code >= 400 else 400
        return bad_request(f"{error.text} {RECOGNIZED}", status)
    if upstream is None:
        return httpx.Response(500, json=error.response if isinstance(error.response, dict) else {"error": "upstream"})
    return _copied(upstream)


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
