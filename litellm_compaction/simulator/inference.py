"""Serves one inference request of a simulated server: its answer is made of pieces, for a stream or one body."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from .messages import ChatRequest, JsonObject, Refusal, parse_chat, parse_completion
from .rendering import Prompt, answer_segments, call_opening, encode, render_chat, render_text, token_bytes, with_newest
from .simulator import ChatCall, Instance, Reply, RequestRecord, Simulator, default_reply

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
        self._send, self.close = send, close
        self.client_left = asyncio.Event()

    async def send_json(self, status: int, body: object) -> None:
        await self.send_whole(status, to_json(body), b"application/json; charset=utf-8")

    async def send_whole(self, status: int, body: bytes, content_type: bytes) -> None:
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send_bytes(body, goes_on=False)

    async def start_stream(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def send_bytes(self, data: bytes, *, goes_on: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": goes_on})

    async def end_stream(self) -> None:
        await self.send_bytes(b"", goes_on=False)


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
        id_, name, arguments = (
            (piece.call_id, piece.text, "") if piece.kind == "tool_start" else (None, None, piece.text)
        )
        call = {"index": piece.call_index, "id": id_, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": name, "arguments": arguments}}]}

    def whole(self, message: JsonObject, finish_reason: str | None, usage: JsonObject) -> JsonObject:
        """The body of an answer that is not streamed."""
        said: JsonObject = {"text": message["content"]} if self.is_text else {"message": message}
        choice = {"index": 0} | said | {"logprobs": None, "finish_reason": finish_reason}
        return self.body("chat.completion", choices=[choice], usage=usage)


@dataclass(kw_only=True)
class Inference:
    simulator: Simulator
    connection: Connection
    record: RequestRecord
    body: JsonObject
    is_text: bool
    calls: list[list[str]] = field(default_factory=list, init=False)

    async def serve(self) -> None:
        record = self.record
        try:
            request = parse_completion(self.body) if self.is_text else parse_chat(self.body)
            record.streamed = request.stream
            instance = await self.simulator.resolve(request.model)
            prompt = self._prompt(request, instance)
            reply = self._reply(request, instance)
        except Refusal as refusal:
            record.status, record.error = refusal.status, str(refusal)
            self.simulator.finish(record, refusal.outcome)
            await self.connection.send_json(refusal.status, refusal.body)
            return
        record.status = 200
        try:
            await self._answer(request, instance, visible_reply(reply, request.stop))
        finally:
            said = [(name, arguments) for _, name, arguments in self.calls]
            instance.give_back((*prompt.segments(), *answer_segments("", record.content, said)))

    def _prompt(self, request: ChatRequest, instance: Instance) -> Prompt:
        """The rest of the prompt in the window: one that is as long overflows, too, as no token of an answer fits."""
        record = self.record
        record.model, record.instance_id = instance.model.key, instance.id
        record.context_length = instance.context_length
        whole = render_text(request.messages[0].text) if self.is_text else render_chat(request.messages, request.tools)
        prompt = whole
        record.prompt_tokens = record.kept_tokens = whole.count_tokens()
        if record.prompt_tokens >= instance.context_length:
            prompt = with_newest(whole, instance.context_length)
            record.truncated, record.kept_tokens = True, prompt.count_tokens()
        self._note_texts(request, whole, prompt)
        record.cached_tokens = instance.take(prompt.segments(), record.kept_tokens)
        record.computed_tokens = record.kept_tokens - record.cached_tokens
        return prompt

    def _note_texts(self, request: ChatRequest, whole: Prompt, kept: Prompt) -> None:
        # A final assistant message is part of the opening, not of a block.
        last, record = request.messages[-1], self.record
        begun = last.text if last.role == "assistant" else ""
        record.seen_text, record.sent_text = ("\n".join(filter(None, (each.text(), begun))) for each in (kept, whole))

    def _reply(self, request: ChatRequest, instance: Instance) -> Reply:
        record, script = self.record, self.simulator.script
        same = ("instance_id", "sent_text", "prompt_tokens", "context_length", "truncated")
        call = ChatCall(
            body=self.body,
            messages=[] if self.is_text else list(self.body["messages"]),
            model=request.model,
            prompt_text=record.seen_text,
            index=self.simulator.take_call_index(),
            stream=request.stream,
            **{name: getattr(record, name) for name in same},
        )
        try:
            return (script(call) if script is not None else None) or default_reply(call)
        except Exception as error:
            raise Refusal(500, {"error": f"the script failed: {error!r}"}) from error

    async def _answer(self, request: ChatRequest, instance: Instance, reply: Reply) -> None:
        record, prefix = self.record, "cmpl-" if self.is_text else "chatcmpl-"
        envelope = Envelope(id=self.simulator.new_id(prefix), model=instance.id, is_text=self.is_text)
        room_tokens = instance.context_length - record.kept_tokens
        most = room_tokens if request.max_tokens is None else min(request.max_tokens, room_tokens)
        record.finish_reason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        if reply_tokens(reply) > most:
            record.finish_reason = "length"
        if request.stream:
            await self.connection.start_stream()
        delta: JsonObject = {"role": "assistant"}
        for piece in pieces(reply, self.simulator.chunk_tokens, max(0, most), self.simulator.new_id):
            await asyncio.sleep(0)
            self._note(piece)
            if request.stream and piece.kind != "hidden":
                await self.connection.send_bytes(event(envelope.chunk(delta | envelope.delta(piece))))
                delta = {}
        self.simulator.finish(record, "ok")
        usage = self._usage()
        if not request.stream:
            await self.connection.send_json(200, envelope.whole(self._message(), record.finish_reason, usage))
            return
        tail = event(envelope.chunk(delta | ({"content": ""} if delta else {}), record.finish_reason))
        if request.include_usage:
            tail += event(envelope.body("chat.completion.chunk", choices=[], usage=usage))
        await self.connection.send_bytes(tail + event(b"[DONE]"))
        await self.connection.end_stream()

    def _note(self, piece: Piece) -> None:
        record = self.record
        if record.first_delta_s is None:
            record.first_delta_s = time.monotonic()
            self.simulator.notify()
        record.completion_tokens += piece.tokens
        if piece.kind == "content":
            record.content += piece.text
        elif piece.kind == "tool_start":
            self.calls.append([piece.call_id, piece.text, ""])
        elif piece.kind == "tool_arguments":
            self.calls[piece.call_index][2] += piece.text

    def _message(self) -> JsonObject:
        functions = [(id_, {"name": name, "arguments": arguments}) for id_, name, arguments in self.calls]
        calls = [{"id": id_, "type": "function", "function": function} for id_, function in functions]
        return {"role": "assistant", "content": self.record.content, "tool_calls": calls}

    def _usage(self) -> JsonObject:
        """LM Studio's, which never tells cached tokens (bt#778, bt#2390)."""
        prompt, completion = self.record.prompt_tokens, self.record.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
