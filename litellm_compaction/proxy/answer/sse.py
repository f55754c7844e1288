"""Chunks and errors of a server's answer, as server-sent events in and out.

A server's answer is bounded by its request: a broken or hostile one must not cost all other requests. Servers differ in
the shapes of tool calls and of text: a chunk that is read here has OpenAI's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import httpx

from litellm_compaction.errors import is_crash
from litellm_compaction.windows.fetch import MOST_MARKS, is_quickly_read

# OpenAI's `chat.completion.chunk` as JSON.
Chunk: TypeAlias = dict[str, Any]
# Chunks that came in one read, or go out in one write; at least one. A fast server sends hundreds at once, and a step
# through all carriers for each would be most of what they cost.
Batch: TypeAlias = Sequence[Chunk]
Batches: TypeAlias = AsyncGenerator[Batch, None]
REASONING_FIELDS = ("reasoning_content", "reasoning")
# An error's own words stand at its beginning; LiteLLM looks through all of it some ten times, 10 s for a megabyte.
ERROR_BYTES = 32 * 1024
DONE = b"data: [DONE]\n\n"
_FIELD = b"data:"
# More at once, a thousand of the smallest chunks, gives way to others before the next piece.
_MUCH_BYTES = 16 * 1024
# The structure of a log probability: nine marks, and one for each byte of its token from the third on. At most so many
# of them are read, those of 12,000 tokens with twenty others, which takes half a second.
_LOGPROB_MARKS = 16
MOST_LOGPROBS = 2**18
_NO_PART = "a piece of its answer is no part of one"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Too slow, too early, too many requests.
_PASSING_STATUSES = frozenset({408, 425, 429})
_NOT_IMPLEMENTED = 501
_HOP_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection"})
_TEXT = (str, type(None))


class Received(dict[str, Any]):
    """A chunk that can go on to the client as it came; its `origin` is LiteLLM's object, if that had it first."""

    origin: Any = None


class UpstreamError(Exception):
    """The server refused a request before its first chunk, or reported an error inside the stream."""

    def __init__(self, text: str, response: Any = None, *, status: int | None = None, is_inside: bool = False) -> None:
        super().__init__("the upstream server reported an error")
        self.text = text  # The body, for recognizing an overflow; never logged.
        self.response = response  # The carrier's own error object, to be passed on unchanged.
        self.status = status  # Of HTTP, or in the error itself.
        self.is_inside = is_inside  # An answer, whose request the server had accepted.

    @property
    def may_pass(self) -> bool:
        """The server has failed just now, or is too busy, and does not refuse requests like this one."""
        if isinstance(self, UpstreamDropped) or is_crash(self.text):
            return True
        return self.status in _PASSING_STATUSES or ((self.status or 0) >= 500 and self.status != _NOT_IMPLEMENTED)


class UpstreamDropped(UpstreamError):
    """The connection broke; the carrier's own exception is the cause."""


def faulty(why: str = "") -> UpstreamError:
    """The error for an answer that cannot be understood, since `why`, or that stops before its end."""
    kind = UpstreamError if why else UpstreamDropped
    fault = f"cannot be understood: {why}" if why else "has broken off its answer"
    body = {"error": {"message": f"The model's server {fault}.", "type": "server_error", "code": "bad_gateway"}}
    return kind(body["error"]["message"], httpx.Response(502, json=body), status=502)


def short_error(text: str) -> dict[str, Any]:
    """The beginning of a server's error in OpenAI's shape, short enough as JSON."""
    return {"error": {"message": text.encode(errors="replace")[: ERROR_BYTES // 6].decode(errors="ignore")}}


def error_text(body: Mapping[str, Any]) -> str:
    """The error that an answer of JSON reports; "" for none, since the rest of an answer is the model's words."""
    if not (error := body.get("error")):
        return ""
    text = json.dumps({"error": error}, ensure_ascii=False)
    return text.encode(errors="replace")[:ERROR_BYTES].decode(errors="replace")


# ------------------------------------------------------------------ what a server writes


def bounds_of(max_tokens: int) -> tuple[int, int]:
    """Bytes of a server's answer: in one line of a stream or as a whole, and in all."""
    # The longest tokens have 128 bytes (o200k), and so have log probabilities; an event has 200 to 400 around one; the
    # rest is for sound and such.
    return 8 * 2**20 + 128 * max_tokens, 16 * 2**20 + 4096 * max_tokens


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise UpstreamDropped("", None) from error
    except httpx.DecodingError as error:
        raise faulty("its answer is not compressed as it says") from error


async def read_events(response: httpx.Response, bounds: tuple[int, int], *, is_passed: bool = False) -> Batches:
    """The chunks of an event stream, those of each read together; if it `is_passed`, whatever their shape.

    An `UpstreamDropped` tells that the connection broke, or ended without the stream's own end.
    """
    begun, event, read_bytes, (event_bytes, stream_bytes) = bytearray(), bytearray(), 0, bounds
    with _understood():
        async with aclosing(_pieces(response)) as pieces:
            async for data in pieces:
                read_bytes += len(data)
                if read_bytes > stream_bytes:
                    raise faulty(f"its answer has more than {stream_bytes} bytes")
                lines, newline, behind = data.rpartition(b"\n")
                if newline:
                    chunks, end = _chunks((bytes(begun) + lines).split(b"\n"), event, is_passed=is_passed)
                    if chunks:
                        yield chunks
                    if isinstance(end, UpstreamError):
                        raise end
                    if end:
                        return
                    begun.clear()
                begun += behind
                if len(begun) + len(event) > event_bytes:
                    raise faulty(f"a piece of its answer has more than {event_bytes} bytes")
    if not is_passed:
        raise faulty()


async def _pieces(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream with one kind of line end, and the end of its last event.

    `aiter_lines` also splits where JSON strings may be.
    """
    is_half = False  # The last line end may be half of one.
    async for data in response.aiter_bytes():
        piece = data[1:] if is_half and data.startswith(b"\n") else data
        is_half = data.endswith(b"\r")
        yield piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if len(data) >= _MUCH_BYTES:
            await asyncio.sleep(0)
    yield b"\n\n"


def _chunks(lines: Iterable[bytes], event: bytearray, *, is_passed: bool) -> tuple[list[Chunk], UpstreamError | bool]:
    """The chunks of some lines, and what cannot be read behind them, or True at the stream's own end.

    Each line of data is an event, since some servers write single newlines between events; so is an answer in one
    piece. One that is no JSON by itself is one with those behind it: `event` holds them until a blank line.
    """
    chunks: list[Chunk] = []
    for raw in lines:
        line = raw.strip().removeprefix(_BYTE_ORDER_MARK)
        data = line.removeprefix(_FIELD).strip() if line.startswith((_FIELD, b"{", b"<")) else b""
        is_end = data.startswith(b"[DONE]")
        try:
            if event and (is_end or not line):
                chunks.append(_chunk(bytes(event), is_passed=is_passed))
                event.clear()
            if is_end:
                return chunks, True
            if data and not event:
                chunks.append(_chunk(data, is_passed=is_passed))
                continue
        except UpstreamError as error:
            return chunks, error
        except (ValueError, RecursionError):
            if event:
                return chunks, faulty(_NO_PART)
        # Not read again with each line: that would take the square of their number. A blank stands for the line's end.
        event += data + b" " if data else b""
    return chunks, False


def _chunk(data: bytes, *, is_passed: bool) -> Chunk:
    """The chunk that an event says, which goes on as it came if it is right; a ValueError if it is no JSON."""
    if len(data) > MOST_MARKS and not is_quickly_read(data):
        raise faulty("a piece of its answer has too many values")
    # `null` says nothing, and nothing is lost with it.
    event: object = json.loads(data.decode(errors="replace")) or {}
    if isinstance(event, dict) and is_passed:
        if len(data) <= ERROR_BYTES or "choices" in event:
            return Received(event)
        if error := error_text(event):
            return short_error(error)
        event = None
    chunk = as_chunk(event) if isinstance(event, dict) else None
    if chunk is None:
        raise faulty(_NO_PART)
    return Received(chunk) if chunk is event else chunk


async def read_whole(response: httpx.Response, most_bytes: int, *, logprobs: int = 0) -> httpx.Response:
    """A response that is no stream, with its body; of an error the beginning. One out of bounds is an error itself.

    Besides the answer it may hold so many `logprobs`.
    """
    is_answer, body = response.is_success, bytearray()
    most_bytes = most_bytes if is_answer else ERROR_BYTES
    async with aclosing(response):
        with _understood():
            async for data in response.aiter_bytes():
                body += data
                if len(body) > most_bytes:
                    break
    if is_answer and len(body) > most_bytes:
        raise faulty(f"its answer has more than {most_bytes} bytes")
    content = bytes(body[:most_bytes])
    if len(content) > MOST_MARKS and not is_quickly_read(content, asked_marks=_LOGPROB_MARKS * logprobs):
        raise faulty("its answer has too many values")
    return httpx.Response(response.status_code, headers=end_to_end(response.headers), content=content)


def end_to_end(headers: httpx.Headers) -> list[tuple[str, str]]:
    """The headers that do not describe a transfer which is over."""
    return [(key, value) for key, value in headers.multi_items() if key.lower() not in _HOP_HEADERS]


def event_of(chunk: Chunk) -> bytes:
    return b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode()


def json_object(content: bytes) -> dict[str, Any]:
    """{} for anything but a JSON object."""
    try:
        # Decoded here: `json` guesses the encoding of bytes first, which takes as long as reading a chunk.
        body = json.loads(content.decode("utf-8", "surrogatepass").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def as_chunk(event: Chunk) -> Chunk | None:
    """Returns `event` itself if it has a chunk's shape, else a copy that says the same; None if it says nothing."""
    choices = event.get("choices")
    if choices is None or (type(choices) is list and all(map(_is_plain, choices))):
        return event
    read = [_as_choice(choice) for choice in _listed(choices) if isinstance(choice, dict)]
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
    if calls := [_as_call(call) for call in _listed(delta.pop("tool_calls", None)) if isinstance(call, dict)]:
        delta["tool_calls"] = calls
    reason = choice.get("finish_reason")
    shown = {key: value for key, value in choice.items() if key not in ("message", "text")}
    return {**shown, "delta": delta, "finish_reason": str(reason) if reason else None}


def _as_text(value: Any) -> Any:
    """The text of a field in parts; one that holds none stays as it came."""
    if type(value) in _TEXT:
        return value
    parts = [part.get("text") if isinstance(part, dict) else part for part in _listed(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts or not parts else value


def _as_call(call: Mapping[str, Any]) -> Chunk:
    function = call.get("function")
    if isinstance(function, dict):
        odd = [key for key in ("name", "arguments") if type(function.get(key)) not in _TEXT]
        function = {**function, **{key: json.dumps(function[key]) for key in odd}}
    read = {**call, "function": function if isinstance(function, dict) else None}
    if type(call.get("index")) is not int:
        read.pop("index", None)
    return read if type(call.get("id")) in _TEXT else {**read, "id": json.dumps(call["id"])}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
