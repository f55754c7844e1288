"""Chunks as server-sent events: the transport reads them from LM Studio and writes them to LiteLLM's OpenAI client.

A server's answer is bounded by its request: a broken or hostile server must not cost all other requests.
`with_heartbeat` serves LiteLLM's streaming iterator hook, in place of LiteLLM's own keep-alive, which leaks a slot of
the key's parallel limit with every chat stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from litellm_compaction.proxy.answer.chunks import as_chunk
from litellm_compaction.proxy.answer.protocol import Batch, Chunk, Received, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.answer.unread import ReadAhead
from litellm_compaction.proxy.exchange import Exchange
from litellm_compaction.windows.fetch import is_quickly_read

# An error's own words stand at its beginning; some quote the whole request after that.
# LiteLLM looks through an error's text some ten times, 10 s for a megabyte.
ERROR_BYTES = 32 * 1024
DONE = b"data: [DONE]\n\n"
_FIELD = b"data:"
# More at once gives way to others before the next piece: a thousand of the smallest chunks.
_MUCH_BYTES = 16 * 1024
_REPLACED = "\ufffd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on a server's answer to one request.

    Room for parts that are no text, such as sound and numbers for each token of the prompt. Of a token the longest are
    128 bytes (o200k), and around it an event has 200 to 400 (LM Studio 0.4, llama.cpp and vLLM).

    Attributes:
        event_bytes: in one line of a stream, or as a whole answer.
        stream_bytes: in all.
    """

    event_bytes: int
    stream_bytes: int

    @classmethod
    def of(cls, max_tokens: int) -> Bounds:
        return cls(8 * 2**20 + 128 * max_tokens, 16 * 2**20 + 4096 * max_tokens)


async def read_events(response: httpx.Response | ReadAhead, bounds: Bounds) -> AsyncIterator[Batch]:
    """The chunks of an event stream, those of each read together.

    Raises:
        UpstreamDropped: the connection broke, or ended without the stream's own end.
        UpstreamError: it cannot be read, or is out of bounds.
    """
    lines, events, read_bytes = _Lines(bounds.event_bytes), _Events(bounds.event_bytes), 0
    try:
        async for data in response.aiter_bytes():
            read_bytes += len(data)
            if read_bytes > bounds.stream_bytes:
                raise unreadable(f"its answer has more than {bounds.stream_bytes} bytes")
            chunks, is_over, failure = events.chunks(lines.feed(data))
            if chunks:
                yield chunks
            if failure is not None:
                raise failure
            if is_over:
                return
            if len(data) >= _MUCH_BYTES:
                await asyncio.sleep(0)
        chunks, is_over, failure = events.chunks(lines.feed(b"\n"))
        if chunks:
            yield chunks
        if failure is not None:
            raise failure
        if not is_over:
            raise broken()
    except httpx.TransportError as error:
        raise UpstreamDropped("", None) from error
    except httpx.DecodingError as error:
        raise unreadable("its answer is not compressed as it says") from error


async def pass_events(response: httpx.Response | ReadAhead, bounds: Bounds) -> AsyncIterator[bytes]:
    """An event stream as it comes, line by line; only the beginning of an error that is too long.

    Raises:
        httpx.RemoteProtocolError: it is out of bounds.
    """
    lines, read_bytes = _Lines(bounds.event_bytes), 0
    try:
        async for data in response.aiter_bytes():
            read_bytes += len(data)
            if read_bytes > bounds.stream_bytes:
                raise unreadable(f"its answer has more than {bounds.stream_bytes} bytes")
            if ended := lines.feed(data):
                yield b"".join(_short(line) + b"\n" for line in ended)
        if rest := b"".join(lines.feed(b"\n")):
            yield _short(rest)
    except UpstreamError as error:
        raise httpx.RemoteProtocolError(error.text) from error


def _short(line: bytes) -> bytes:
    """A line of a stream; for a long one that is no part of an answer, an error with its beginning."""
    if len(line) <= ERROR_BYTES or not line.startswith(_FIELD):
        return line
    data = line[len(_FIELD) :]
    if not is_quickly_read(data) or "choices" in json_object(data):
        return line
    return event_of(short_error(data.decode(errors="replace"))).rstrip()


def short_error(text: str) -> dict[str, Any]:
    """The beginning of a server's error in OpenAI's shape, short enough as JSON."""
    return {"error": {"message": text.encode(errors="replace")[: ERROR_BYTES // 6].decode(errors="ignore")}}


async def read_body(response: httpx.Response, most_bytes: int) -> tuple[bytes, bool]:
    """The body of a response, and True if that is all of it; the rest of a longer one is not read.

    Raises:
        UpstreamDropped: the connection broke.
        UpstreamError: it cannot be read.
    """
    body = bytearray()
    try:
        async for data in response.aiter_bytes():
            body += data
            if len(body) > most_bytes:
                return bytes(body[:most_bytes]), False
    except httpx.TransportError as error:
        raise UpstreamDropped("", None) from error
    except httpx.DecodingError as error:
        raise unreadable("its answer is not compressed as it says") from error
    return bytes(body), True


def unreadable(why: str) -> UpstreamError:
    """The error for an answer that is not read to its end."""
    return _bad_gateway(UpstreamError, f"The model's server cannot be understood: {why}.")


def broken() -> UpstreamError:
    """The error for a stream that stops before its end."""
    return _bad_gateway(UpstreamDropped, "The model's server has broken off its answer.")


def _bad_gateway(kind: type[UpstreamError], message: str) -> UpstreamError:
    body = {"error": {"message": message, "type": "server_error", "code": "bad_gateway"}}
    return kind(message, httpx.Response(502, json=body), status=502)


def events_of(batch: Batch) -> bytes:
    """Chunks as events: those that go on unchanged as the bytes that came."""
    return b"".join(map(event_of, batch))


def event_of(chunk: Chunk) -> bytes:
    if isinstance(chunk, Received):
        origin: bytes = chunk.origin
        return origin + b"\n\n"
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def json_object(content: bytes) -> dict[str, Any]:
    """{} for anything but a JSON object."""
    try:
        # Decoded here: `json` guesses the encoding of bytes first, which takes as long as reading a chunk.
        body = json.loads(content.decode("utf-8", "surrogatepass").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


class _Events:
    """Puts the lines of a stream together to chunks.

    The data lines of an event are one text (WHATWG, "Server-sent events"). One that is a chunk by itself does not wait
    for the event's end: some servers write single newlines between events.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._begun: list[bytes] = []
        self._begun_bytes = 0

    def chunks(self, lines: Iterable[bytes]) -> tuple[Batch, bool, UpstreamError | None]:
        """The chunks in `lines` up to the first that cannot be read, True if the stream ends there, and that error."""
        chunks: list[Chunk] = []
        for line in lines:
            if line.startswith(_FIELD):
                data = line[len(_FIELD) :].strip()
                if self._begun:
                    self._add(data)
                    if self._begun_bytes > self._most_bytes:
                        return (
                            chunks,
                            False,
                            unreadable(f"a piece of its answer has more than {self._most_bytes} bytes"),
                        )
                    continue
            elif self._begun and not line:
                data, self._begun, self._begun_bytes = b"\n".join(self._begun), [], 0
            else:
                continue
            if data.startswith(b"[DONE]"):
                return chunks, True, None
            if not is_quickly_read(data):
                return chunks, False, unreadable("a piece of its answer has too many values")
            chunk = _chunk(data, line)
            if chunk is not None:
                chunks.append(chunk)
            elif not line:
                return chunks, False, unreadable("a piece of its answer is no part of one")
            elif data:
                self._add(data)
        return chunks, False, None

    def _add(self, data: bytes) -> None:
        self._begun.append(data)
        self._begun_bytes += len(data)


def _chunk(data: bytes, line: bytes) -> Chunk | None:
    """The chunk that the data of an event says, None for none; it goes on as it came if it is right in one `line`."""
    text = data.decode(errors="replace")
    try:
        # `null` says nothing, and nothing is lost with it.
        event = json.loads(text) or {}
    except (ValueError, RecursionError):
        return None
    chunk = as_chunk(event) if isinstance(event, dict) else None
    is_right = chunk is event and line and _REPLACED not in text
    return Received(chunk, line) if chunk is not None and is_right else chunk


class _Lines:
    """Splits data from the network into lines, without their ends: a newline, a carriage return, or both.

    As bytes: `Response.aiter_lines` also splits at U+2028, U+0085 and the like, which JSON strings may hold as they
    are, and the two halves of such a chunk would be lost. All lines of one read at once: a step of an asynchronous
    generator for each costs more than the split.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._is_first = True
        # A newline at once would belong to it.
        self._ends_with_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in `data`.

        Raises:
            UpstreamError: one that has begun is too long.
        """
        if self._ends_with_return:
            data = data.removeprefix(b"\n")
        self._ends_with_return = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        ended = data.split(b"\n")
        rest = ended.pop()
        if ended and self._begun:
            ended[0] = b"".join((*self._begun, ended[0]))
            self._begun.clear()
            self._begun_bytes = 0
        if ended and self._is_first:
            self._is_first = False
            ended[0] = ended[0].removeprefix(_BYTE_ORDER_MARK)
        if rest:
            self._begun.append(rest)
            self._begun_bytes += len(rest)
            if self._begun_bytes > self._most_bytes:
                raise unreadable(f"a piece of its answer has more than {self._most_bytes} bytes")
        return ended


_END = object()
# Legal in every stream of events, and read by no client.
_COMMENT = b": ping\n\n"


async def with_heartbeat(response: AsyncIterable[Any], call: Exchange, *, every_s: float) -> AsyncGenerator[Any, None]:
    """The chunks of `response`, and an empty one after each `every_s` for which a compaction has kept it silent.

    Clients and load balancers close connections on which nothing moves. The race against the clock costs a task, so it
    is run only if a pause may come.

    A stream that waits before the client is told anything opens with a comment: LiteLLM's router keeps the opening of a
    Responses stream (`_responses_stream_holds_event`), and of a Messages stream if the request may be tried again
    (`_aanthropic_messages_streaming_iterator`), until some of the answer has come.
    """
    source = response.__aiter__()
    last: Any = None
    begun: Any = None
    if call.may_pause and call.attempt.begins_silently:
        yield _COMMENT
    while True:
        if not call.may_pause:
            last = await anext(source, _END)
        else:
            waiting = asyncio.ensure_future(_next(source))
            try:
                while not (await asyncio.wait({waiting}, timeout=every_s))[0]:
                    beat = _COMMENT if last is None and call.attempt.begins_silently else _beat(last, begun)
                    if beat is not None:
                        yield beat
                last = await waiting
            finally:
                if not waiting.done():
                    waiting.cancel()
                    # Neither awaited directly nor without a shield: anyio cancels us again and again when the client
                    # has gone, an await would hand that on, and the upstream connection would stay open half closed.
                    with anyio.CancelScope(shield=True):
                        await asyncio.wait({waiting})
                    if not waiting.cancelled():
                        waiting.exception()  # marks it as retrieved
        if last is _END:
            return
        begun = _copied(last) if _is_in_progress(last) else begun
        yield last


async def _next(source: AsyncIterator[Any]) -> Any:
    # As a coroutine, which a task takes.
    return await anext(source, _END)


def _copied(event: Any) -> Any:
    """An event that stays as it is: LiteLLM hides the answer's id in the one that it sends, and would do so again."""
    return event.model_copy(deep=True) if hasattr(event, "model_copy") else event


def _is_in_progress(event: Any) -> bool:
    # Not by `getattr`: pydantic raises and catches an error for attributes that a chat chunk does not have.
    kind = getattr(event, "__dict__", {}).get("type")
    return getattr(kind, "value", kind) == "response.in_progress"


def _beat(last: Any, begun: Any) -> Any:
    """A chunk that says nothing, in the language of the one before; None if there is no such thing.

    Args:
        last: the chunk before, None before the first.
        begun: of the Responses API, the event that says that an answer is being made; it may be said again.
    """
    if isinstance(last, (bytes, bytearray)):
        # Other streams of bytes than Anthropic's name no events; a comment is legal in all of them.
        return b'event: ping\ndata: {"type": "ping"}\n\n' if last.lstrip().startswith(b"event:") else _COMMENT
    if not hasattr(last, "choices") or not hasattr(last, "model_copy"):
        return _copied(begun)
    beat = last.model_copy(deep=True)
    if getattr(beat, "usage", None) is not None:
        # Its numbers must be counted once.
        beat.usage = None
    for choice in beat.choices:
        choice.finish_reason = None
        delta = getattr(choice, "delta", None)
        if delta is None:
            if not isinstance(getattr(choice, "text", None), str):
                return None
            choice.text = ""
            continue
        for name in ("role", "tool_calls", "function_call", "reasoning_content", "thinking_blocks"):
            if getattr(delta, name, None) is not None:
                setattr(delta, name, None)
        delta.content = ""
    return beat
