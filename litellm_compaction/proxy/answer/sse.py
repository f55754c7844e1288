"""Chunks and errors of a server's answer, as server-sent events in and out.

A server's answer is bounded by its request: a broken or hostile server must not cost all other requests. Servers differ
in the shapes of tool calls and of text: a chunk that is read here has OpenAI's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx

from litellm_compaction.errors import is_crash
from litellm_compaction.windows.fetch import is_quickly_read

# OpenAI's `chat.completion.chunk` as JSON.
Chunk: TypeAlias = dict[str, Any]
# Chunks that came in one read, or go out in one write; at least one. A fast server sends hundreds at once, and a step
# through all carriers for each would be most of what they cost.
Batch: TypeAlias = Sequence[Chunk]
REASONING_FIELDS = ("reasoning_content", "reasoning")
# An error's own words stand at its beginning; some quote the whole request after that.
# LiteLLM looks through an error's text some ten times, 10 s for a megabyte.
ERROR_BYTES = 32 * 1024
DONE = b"data: [DONE]\n\n"
_FIELD = b"data:"
# More at once gives way to others before the next piece: a thousand of the smallest chunks.
_MUCH_BYTES = 16 * 1024
_REPLACED = "\ufffd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Too slow, too early, too many requests.
_PASSING_STATUSES = frozenset({408, 425, 429})
_NOT_IMPLEMENTED = 501
_TEXT = (str, type(None))


class Received(dict[str, Any]):
    """A chunk that can go on to the client as it came: as its `origin`, the bytes of an event or LiteLLM's object."""

    __slots__ = ("origin",)

    def __init__(self, chunk: Chunk, origin: Any) -> None:
        super().__init__(chunk)
        self.origin = origin


class UpstreamError(Exception):
    """The server refused a request before its first chunk, or reported an error inside the stream.

    Attributes:
        text: the body, for recognizing an overflow; never logged.
        response: the carrier's own error object, to be passed on unchanged.
        status: of HTTP, or in the error itself; None for none.
        is_inside: it came inside an answer, whose request the server had accepted.
    """

    def __init__(self, text: str, response: Any = None, *, status: int | None = None, is_inside: bool = False) -> None:
        super().__init__("the upstream server reported an error")
        self.text = text
        self.response = response
        self.status = status
        self.is_inside = is_inside

    @property
    def may_pass(self) -> bool:
        """Returns True if the server has failed just now, or is too busy, and does not refuse requests like this one.

        RFC 9110, sections 15.5 and 15.6: 4xx is the request's fault, 5xx the server's, except for 501.
        """
        if is_crash(self.text) or self.status in _PASSING_STATUSES:
            return True
        return self.status is not None and self.status >= 500 and self.status != _NOT_IMPLEMENTED


class UpstreamDropped(UpstreamError):
    """The connection broke; the carrier's own exception is the cause."""

    @property
    def may_pass(self) -> bool:
        return True


def unreadable(why: str) -> UpstreamError:
    """The error for an answer that is not read to its end."""
    return _bad_gateway(UpstreamError, f"The model's server cannot be understood: {why}.")


def broken() -> UpstreamError:
    """The error for a stream that stops before its end."""
    return _bad_gateway(UpstreamDropped, "The model's server has broken off its answer.")


def _bad_gateway(kind: type[UpstreamError], message: str) -> UpstreamError:
    body = {"error": {"message": message, "type": "server_error", "code": "bad_gateway"}}
    return kind(message, httpx.Response(502, json=body), status=502)


def short_error(text: str) -> dict[str, Any]:
    """The beginning of a server's error in OpenAI's shape, short enough as JSON."""
    return {"error": {"message": text.encode(errors="replace")[: ERROR_BYTES // 6].decode(errors="ignore")}}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of a server's answer: in one line of a stream or as a whole, and in all.

    Of a token the longest are 128 bytes (o200k), and around it an event has 200 to 400; beside that there is room for
    parts that are no text, such as sound and numbers for each token of the prompt.
    """

    event_bytes: int
    stream_bytes: int

    @classmethod
    def of(cls, max_tokens: int) -> Bounds:
        return cls(8 * 2**20 + 128 * max_tokens, 16 * 2**20 + 4096 * max_tokens)


async def read_events(
    response: httpx.Response, bounds: Bounds, *, is_passed: bool = False
) -> AsyncGenerator[Batch, None]:
    """The chunks of an event stream, those of each read together.

    Args:
        is_passed: its chunks go on as they came, whatever their shape.

    Raises:
        UpstreamDropped: the connection broke, or ended without the stream's own end.
        UpstreamError: it cannot be read, or is out of bounds.
    """
    reader = _Reader(bounds, is_passed=is_passed)
    try:
        async for data in response.aiter_bytes():
            for batch in reader.batches(data):
                yield batch
            if reader.is_over:
                return
            if len(data) >= _MUCH_BYTES:
                await asyncio.sleep(0)
        for batch in reader.batches(b"\n"):
            yield batch
        if not (reader.is_over or is_passed):
            raise broken()
    except httpx.TransportError as error:
        raise UpstreamDropped("", None) from error
    except httpx.DecodingError as error:
        raise unreadable("its answer is not compressed as it says") from error


class _Reader:
    """Takes a stream apart: each line of data is an event, since some servers write single newlines between events.

    As bytes: `Response.aiter_lines` also splits at U+2028, U+0085 and the like, which JSON strings may hold as they
    are. All lines of one read at once: a step of an asynchronous generator for each costs more than the split.
    """

    def __init__(self, bounds: Bounds, *, is_passed: bool) -> None:
        self._bounds = bounds
        self._is_passed = is_passed
        self._read_bytes = 0
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self.is_over = False

    def batches(self, data: bytes) -> Iterator[Batch]:
        """The chunks in `data`, if there are any.

        Raises:
            UpstreamError: after those before it.
        """
        chunks: list[Chunk] = []
        failure: UpstreamError | None = None
        try:
            for line in self._lines(data):
                if self._is_end(line, chunks):
                    self.is_over = True
                    break
        except UpstreamError as error:
            failure = error
        if chunks:
            yield chunks
        if failure is not None:
            raise failure

    def _lines(self, data: bytes) -> list[bytes]:
        self._read_bytes += len(data)
        if self._read_bytes > self._bounds.stream_bytes:
            raise unreadable(f"its answer has more than {self._bounds.stream_bytes} bytes")
        if b"\r" in data:
            data = data.replace(b"\r", b"\n")
        *ended, rest = data.split(b"\n")
        if ended and self._begun:
            ended[0] = b"".join((*self._begun, ended[0]))
            self._begun, self._begun_bytes = [], 0
        if rest:
            self._begun.append(rest)
            self._begun_bytes += len(rest)
            if self._begun_bytes > self._bounds.event_bytes:
                raise unreadable(f"a piece of its answer has more than {self._bounds.event_bytes} bytes")
        return ended

    def _is_end(self, line: bytes, chunks: list[Chunk]) -> bool:
        """Adds the chunk of a line, if it has one; True at the stream's own end."""
        line = line.strip().removeprefix(_BYTE_ORDER_MARK)
        data = line[len(_FIELD) :].strip() if line.startswith(_FIELD) else b""
        if data.startswith(b"[DONE]"):
            return True
        if data and not is_quickly_read(data):
            raise unreadable("a piece of its answer has too many values")
        if data:
            chunks.append(self._chunk(data, line))
        return False

    def _chunk(self, data: bytes, line: bytes) -> Chunk:
        """The chunk that the data of an event says; it goes on as it came if it is right in one `line`."""
        text = data.decode(errors="replace")
        try:
            # `null` says nothing, and nothing is lost with it.
            event: object = json.loads(text) or {}
        except (ValueError, RecursionError):
            event = None
        chunk = None
        if isinstance(event, dict) and self._is_passed:
            is_long_error = len(line) > ERROR_BYTES and "choices" not in event
            return short_error(text) if is_long_error else Received(event, line)
        if isinstance(event, dict):
            chunk = as_chunk(event)
        if chunk is None:
            raise unreadable("a piece of its answer is no part of one")
        return Received(chunk, line) if chunk is event and _REPLACED not in text else chunk


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


def as_chunk(event: Chunk) -> Chunk | None:
    """Returns `event` itself if it has a chunk's shape, else a copy that says the same in it; None if it says nothing.

    A whole answer's message is read as one delta.
    """
    choices = event.get("choices")
    if choices is None or (type(choices) is list and all(map(_is_plain, choices))):
        return event
    listed = choices if isinstance(choices, list) else [choices]
    read = [_as_choice(choice) for choice in listed if isinstance(choice, dict)]
    if read == choices:
        return event
    return {**event, "choices": read} if read else None


def _is_plain(choice: object) -> bool:
    """Returns True for most choices of a stream: nothing but text. By `type`, since it is asked for each chunk."""
    delta = choice.get("delta") if type(choice) is dict else None
    if type(delta) is not dict or type(choice.get("finish_reason")) not in _TEXT:  # type: ignore[attr-defined] # a dict
        return False
    return all(type(value) in _TEXT for value in delta.values())


def _as_choice(choice: Mapping[str, Any]) -> Chunk:
    """A choice of a chat or a text completion, in pieces or whole, as one of a stream."""
    said: Any = next((choice[key] for key in ("delta", "message", "text") if choice.get(key) is not None), {})
    delta = dict(said) if isinstance(said, dict) else {"content": said}
    delta.update({key: _as_text(delta[key]) for key in ("content", *REASONING_FIELDS) if key in delta})
    calls = delta.pop("tool_calls", None)
    listed = calls if isinstance(calls, list) else [calls]
    if read := [_as_call(call) for call in listed if isinstance(call, dict)]:
        delta["tool_calls"] = read
    reason = choice.get("finish_reason")
    shown = {key: value for key, value in choice.items() if key not in ("message", "text")}
    return {**shown, "delta": delta, "finish_reason": str(reason) if reason else None}


def _as_text(value: Any) -> Any:
    """The text of a field in parts; one that holds none stays as it came."""
    if type(value) in _TEXT:
        return value
    listed = value if isinstance(value, list) else [value]
    parts = [part.get("text") if isinstance(part, dict) else part for part in listed]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts or not parts else value


def _as_call(call: Mapping[str, Any]) -> Chunk:
    function = call.get("function")
    read = {**call, "function": function if isinstance(function, dict) else None}
    if isinstance(function, dict):
        odd = [key for key in ("name", "arguments") if type(function.get(key)) not in _TEXT]
        read["function"] = {**function, **{key: json.dumps(function[key]) for key in odd}}
    if type(call.get("index")) is not int:
        read.pop("index", None)
    if type(call.get("id")) not in _TEXT:
        read["id"] = json.dumps(call["id"])
    return read
