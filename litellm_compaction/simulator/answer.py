"""An answer of a simulated server: its pieces, its JSON as a stream or as one body, and the way to its client."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from .messages import JsonObject
from .rendering import call_opening, count, encode, token_bytes
from .script import Reply

_Reply = TypeVar("_Reply", bound=Reply)
PieceKind = Literal["reasoning", "content", "tool_start", "tool_arguments", "hidden"]


class Piece(NamedTuple):
    """A delta and its cost in tokens; `hidden` tokens are generated but never shown (the frame of a call)."""

    kind: PieceKind
    text: str
    tokens: int
    call_index: int = 0
    call_id: str = ""


class _Run(NamedTuple):
    kind: PieceKind
    token_ids: array[int]
    call_index: int = 0
    name: str = ""


def visible_reply(reply: _Reply, stops: tuple[str, ...]) -> _Reply:
    """The reply as its text comes out: cut at the first stop string."""
    ends = [end for stop in stops if (end := reply.content.find(stop)) >= 0]
    return replace(reply, content=reply.content[: min(ends)], tool_calls=()) if ends else reply


def reply_tokens(reply: Reply) -> int:
    return sum(len(run.token_ids) for run in _runs(reply))


def reasoning_tokens(reply: Reply) -> int:
    return count(reply.reasoning)


def pieces(reply: Reply, chunk_tokens: int, limit_tokens: int, new_call_id: Callable[[], str]) -> Iterator[Piece]:
    """The deltas of `reply`, `chunk_tokens` each, ending after `limit_tokens` tokens (unscaled)."""
    remaining = limit_tokens
    call_ids: dict[int, str] = {}
    for run in _runs(reply):
        if run.kind == "tool_start":
            size = len(run.token_ids)
            if size > remaining:
                yield Piece("hidden", "", remaining)
                return
            call_ids[run.call_index] = new_call_id()
            yield Piece("tool_start", run.name, size, run.call_index, call_ids[run.call_index])
            remaining -= size
            continue
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        position = 0
        while position < len(run.token_ids):
            if remaining == 0:
                return
            step = run.token_ids[position : position + min(chunk_tokens, remaining)]
            position += len(step)
            remaining -= len(step)
            text = decoder.decode(b"".join(map(token_bytes, step)), final=position == len(run.token_ids))
            kind = run.kind if text else "hidden"
            yield Piece(kind, text, len(step), run.call_index, call_ids.get(run.call_index, ""))


def _runs(reply: Reply) -> Iterator[_Run]:
    if reply.reasoning:
        yield _Run("reasoning", encode(reply.reasoning))
    if reply.content:
        yield _Run("content", encode(reply.content))
    for index, (name, arguments) in enumerate(reply.tool_calls):
        yield _Run("tool_start", encode(call_opening(name)), index, name)
        if arguments:
            yield _Run("tool_arguments", encode(arguments), index)


Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STREAM_HEADERS = [  # as LM Studio's Express layer sends them
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
]


class Connection:
    """The way back to one client; `client_left` is set when it has gone, and later bytes are lost."""

    def __init__(self, send: Send, close: Callable[[], None]) -> None:
        self._send = send
        self._close = close
        self.client_left = asyncio.Event()

    async def send_json(self, status: int, body: object) -> None:
        await self.send_whole(status, to_json(body), b"application/json; charset=utf-8")

    async def send_whole(self, status: int, body: bytes, content_type: bytes) -> None:
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def send_bytes(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def drop(self) -> None:
        """Close the connection as it is, with the bytes that were sent before."""
        self._close()
        # The server learns of it in the next turn of the loop and then asks for no response any more.
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def to_json(body: object) -> bytes:
    """The UTF-8 JSON text; unpaired surrogates, which JSON requests may smuggle in, are replaced."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def event(data: object, name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + (data if isinstance(data, bytes) else to_json(data)) + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The fields that all JSON of one answer shares; `is_text` is that of a text completion."""

    id: str
    model: str
    is_text: bool = False
    reasoning_field: str = "reasoning_content"
    created_s: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, **fields: object) -> JsonObject:
        frame = {"id": self.id, "created": self.created_s, "model": self.model, "system_fingerprint": self.model}
        return {"object": "text_completion" if self.is_text else kind} | frame | fields

    def chunk(self, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
        said: JsonObject = {"text": delta.get("content", "")} if self.is_text else {"delta": delta}
        choice = {"index": 0} | said | {"logprobs": None, "finish_reason": finish_reason}
        return self.body("chat.completion.chunk", choices=[choice])

    def delta(self, piece: Piece) -> JsonObject:
        """The delta of one piece; a tool call begins with id and name, and goes on with both null."""
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {self.reasoning_field: piece.text}
        is_start = piece.kind == "tool_start"
        function: JsonObject = (
            {"name": piece.text, "arguments": ""} if is_start else {"name": None, "arguments": piece.text}
        )
        call = {
            "index": piece.call_index,
            "id": piece.call_id if is_start else None,
            "type": "function",
            "function": function,
        }
        return {"tool_calls": [call]}

    def whole(self, message: JsonObject, finish_reason: str | None, usage: JsonObject) -> JsonObject:
        """The body of an answer that is not streamed."""
        said: JsonObject = {"text": message["content"]} if self.is_text else {"message": message}
        choice = {"index": 0} | said | {"logprobs": None, "finish_reason": finish_reason}
        return self.body("chat.completion", choices=[choice], usage=usage)
