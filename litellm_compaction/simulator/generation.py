"""Cuts an answer into pieces that unfold in time, at a given speed until it is complete, cut, or made to fail.

The pieces become a response here, too: its JSON, as an event stream or as one body, and how the connection ends.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from litellm_compaction.simulator.catalog import Flight, FlightFailed, Instance
from litellm_compaction.simulator.messages import POOL_EXCEEDED, JsonObject, error_body, event_body
from litellm_compaction.simulator.rendering import call_opening, count, encode, token_bytes
from litellm_compaction.simulator.script import Fault, FinishReason, Gate, Outcome, ReasoningField, Reply, RequestRecord
from litellm_compaction.simulator.simulator import Simulator

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


def visible_reply(reply: Reply, stops: tuple[str, ...], reasoning_field: ReasoningField) -> Reply:
    """The reply as its text comes out: cut at the first stop string, thoughts inline if so configured."""
    ends = [end for stop in stops if (end := reply.content.find(stop)) >= 0]
    if ends:
        reply = replace(reply, content=reply.content[: min(ends)], tool_calls=())
    if reply.reasoning and reasoning_field == "think":
        reply = replace(reply, content=f"<think>\n{reply.reasoning}\n</think>\n\n{reply.content}", reasoning="")
    return reply


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


_GATE_POLL_S = 0.002


class Ending(NamedTuple):
    """The end of an answer: a finish reason, none, an error, or a broken connection.

    `status` is that of a response that is not streamed.
    """

    kind: Literal["finish", "unfinished", "empty", "error", "drop"]
    outcome: Outcome
    finish_reason: FinishReason | None = None
    message: str = ""
    status: int = 200


@dataclass(kw_only=True)
class Generation:
    """The generation of `reply` for one request.

    `max_tokens` is scaled (as the client counts). A `preset` ending, as for too long a prompt, precedes all deltas.
    """

    simulator: Simulator
    record: RequestRecord
    reply: Reply
    fault: Fault | None
    preset: Ending | None = None
    instance: Instance
    flight: Flight
    max_tokens: int | None
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallSoFar] = field(default_factory=list)
    raw_tokens: int = 0
    thought_is_over: bool = False

    @property
    def _factor(self) -> float:
        return self.instance.model.counting.factor

    def completion_tokens(self) -> int:
        """The tokens generated so far, as the server counts them."""
        generated = math.ceil(self.raw_tokens * self._factor)
        return generated if self.max_tokens is None else min(generated, self.max_tokens)

    def end_thought(self) -> None:
        """Have the thought end here, as at llama.cpp's `reasoning_end`."""
        self.thought_is_over = True

    async def run(self) -> AsyncGenerator[Piece | Ending, None]:
        """The deltas, then exactly one `Ending`."""
        try:
            if self.preset is not None:
                await self.flight.sleep(0)
                yield self.preset
                return
            await self._prefill()
            limits = self._limits(reply_tokens(self.reply))
            started_s = asyncio.get_running_loop().time()
            chunk_tokens = self.reply.chunk_tokens or self.simulator.chunk_tokens
            coming = pieces(self.reply, chunk_tokens, limits.stop_at, self.simulator.new_id)
            while (piece := next(coming, None)) is not None:
                if self.thought_is_over and piece.kind == "reasoning":
                    # The rest of the thought is never written; the answer follows.
                    rest = replace(self.reply, reasoning="")
                    limits = self._limits(self.raw_tokens + reply_tokens(rest))
                    coming = pieces(rest, chunk_tokens, limits.stop_at - self.raw_tokens, self.simulator.new_id)
                    continue
                await self._pace(started_s, piece.tokens)
                self._account(piece)
                if piece.kind != "hidden":
                    yield piece
                await self._wait_at_gate(self.raw_tokens)
                if limits.slow_at is not None and self.raw_tokens >= limits.slow_at:
                    await self._be_slow()
                    limits = limits._replace(slow_at=None)
            yield await self._ending(limits)
        except FlightFailed as failure:
            yield Ending("error", failure.outcome, message=failure.message, status=400)

    async def _prefill(self) -> None:
        speed = self.simulator.prompt_tokens_per_second
        prefill_s = self.record.computed_tokens / speed if speed else 0.0
        self.flight.prefill_ends_s = asyncio.get_running_loop().time() + prefill_s
        await self.flight.sleep(prefill_s)
        await self.flight.sleep(self.reply.delay_ms / 1000)
        await self._wait_at_gate(0)
        if self.fault and self.fault.kind == "slow" and self.fault.at == "before_first_delta":
            await self._be_slow()

    async def _pace(self, started_s: float, tokens: int) -> None:
        speed = self.reply.tokens_per_second or self.simulator.tokens_per_second
        if speed is None:
            await self.flight.sleep(0)
        else:
            await self.flight.sleep_until(started_s + (self.raw_tokens + tokens) * self._factor / speed)

    def _account(self, piece: Piece) -> None:
        before = self.completion_tokens()
        self.raw_tokens += piece.tokens
        self.flight.used_tokens += self.completion_tokens() - before
        if self.simulator.is_pool_full(self.instance):
            self.instance.fail_all(POOL_EXCEEDED, "pool_overflow")
            self.flight.check()
        if piece.kind == "reasoning":
            self.reasoning += piece.text
        elif piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "tool_start":
            self.calls.append(ToolCallSoFar(piece.call_id, piece.text))
        elif piece.kind == "tool_arguments":
            self.calls[piece.call_index].arguments += piece.text

    async def _wait_at_gate(self, generated_tokens: int) -> None:
        gate = self.reply.gate
        if gate is None or generated_tokens < self.reply.gate_after_tokens or gate.is_set():
            return
        if isinstance(gate, Gate):
            gate.reached.set()
        while not gate.is_set():
            await self.flight.sleep(_GATE_POLL_S)

    async def _be_slow(self) -> None:
        await self.flight.sleep(self.fault.delay_ms / 1000 if self.fault else 0)

    def _limits(self, total: int) -> _Limits:
        max_at = None if self.max_tokens is None else self._raw(self.max_tokens, minimum=min(1, self.max_tokens))
        room_tokens = self.instance.context_length - self.record.kept_tokens
        window_at = None if self.simulator.mid_overflow == "shift" else self._raw(room_tokens, minimum=0)
        fault_at, slow_at = None, None
        if self.fault is not None:
            point = 0
            if self.fault.at == "mid_text":
                point = total // 2 if self.fault.after_tokens is None else self.fault.after_tokens
                point = max(1, point)
            if self.fault.kind != "slow":
                fault_at = point
            elif self.fault.at == "mid_text":
                slow_at = point
        ends = [end for end in (total, max_at, window_at, fault_at) if end is not None]
        return _Limits(total, min(ends), max_at, window_at, fault_at, slow_at)

    def _raw(self, scaled_tokens: int, *, minimum: int) -> int:
        return max(minimum, math.floor(scaled_tokens / self._factor))

    async def _ending(self, limits: _Limits) -> Ending:
        if self.fault is not None and limits.fault_at is not None and limits.fault_at <= limits.stop_at:
            return await self._fault_ending(self.fault)
        if limits.total <= limits.stop_at:
            finish = self.reply.finish_reason or ("tool_calls" if self.reply.tool_calls else "stop")
            return Ending("finish", "ok", finish)
        if limits.max_at is not None and limits.max_at <= limits.stop_at:
            return Ending("finish", "ok", "length")
        overflow = self.simulator.mid_overflow
        if overflow in ("length", "stop"):
            return Ending("finish", "mid_overflow", overflow)
        if overflow == "drop":
            return Ending("drop", "mid_overflow", status=0)
        return Ending("error", "mid_overflow", message=POOL_EXCEEDED, status=400)

    async def _fault_ending(self, fault: Fault) -> Ending:
        if fault.kind == "hang":
            await self.flight.hang()
        if fault.kind == "drop":
            return Ending("drop", "fault", status=0)
        if fault.kind == "empty":
            return Ending("empty" if fault.at == "before_first_delta" else "unfinished", "fault")
        status = fault.status if fault.kind == "500" else 200
        return Ending("error", "fault", message=fault.message, status=status)


@dataclass
class ToolCallSoFar:
    id: str
    name: str
    arguments: str = ""


class _Limits(NamedTuple):
    """The end of the generation, in unscaled tokens: the least of its reasons."""

    total: int
    stop_at: int
    max_at: int | None
    window_at: int | None
    fault_at: int | None
    slow_at: int | None


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
    reasoning_field: ReasoningField = "reasoning_content"
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


@dataclass(kw_only=True)
class Answer:
    """One generation on its way to the client; `release` gives back the slot and closes the record.

    `echo` is the server's repetition before it: no token of it is generated, so none is counted.
    """

    simulator: Simulator
    connection: Connection
    record: RequestRecord
    instance: Instance
    generation: Generation
    envelope: Envelope
    include_usage: bool
    echo: str
    release: Callable[[Ending], None]

    async def stream(self) -> None:
        self.record.status = 200
        await self.connection.start_stream()
        is_first = True
        async with aclosing(self.generation.run()) as items:
            async for item in items:
                if isinstance(item, Ending):
                    await self._end_stream(item, is_first)
                    continue
                delta = self.envelope.delta(item)
                if is_first and self.echo:
                    echoed: JsonObject = {"role": "assistant", "content": self.echo}
                    await self.connection.send_bytes(event(self.envelope.chunk(echoed)))
                elif is_first:
                    delta = {"role": "assistant"} | delta
                if is_first:
                    self._note_first_delta()
                    is_first = False
                await self.connection.send_bytes(event(self.envelope.chunk(delta)))

    async def send(self) -> None:
        async with aclosing(self.generation.run()) as items:
            async for item in items:
                if isinstance(item, Ending):
                    await self._send_whole(item)
                elif self.record.first_delta_s is None:
                    self._note_first_delta()

    async def _end_stream(self, ending: Ending, is_first: bool) -> None:
        self.release(ending)
        if ending.kind == "drop":
            await self.connection.drop()
            return
        if ending.kind == "error":
            await self.connection.send_bytes(event(event_body(ending.message), "error"))
            await self.connection.end_stream()
            return
        tail = b""
        if ending.kind == "finish":
            delta: JsonObject = {"role": "assistant", "content": ""} if is_first else {}
            tail += event(self.envelope.chunk(delta, ending.finish_reason))
        if self.include_usage and self.simulator.reports_usage:
            tail += event(self.envelope.body("chat.completion.chunk", choices=[], usage=self._usage()))
        await self.connection.send_bytes(tail + event(b"[DONE]"))
        await self.connection.end_stream()

    async def _send_whole(self, ending: Ending) -> None:
        self.record.status = ending.status
        self.release(ending)
        if ending.kind == "drop":
            await self.connection.drop()
        elif ending.kind == "error" and self.record.status == 200:
            await self.connection.send_json(200, event_body(ending.message))
        elif ending.kind == "error":
            shape = self.simulator.error_shape
            await self.connection.send_json(self.record.status, error_body(ending.message, shape))
        else:
            await self.connection.send_json(200, self._whole(ending))

    def _whole(self, ending: Ending) -> JsonObject:
        generation = self.generation
        content = self.echo + generation.content
        choice: JsonObject = {
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop" if ending.kind == "empty" else ending.finish_reason,
        }
        if self.envelope.is_text:
            choice["text"] = content
        else:
            message: JsonObject = {"role": "assistant", "content": content}
            if generation.reasoning:
                message[self.envelope.reasoning_field] = generation.reasoning
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call, (_, arguments) in zip(generation.calls, generation.reply.tool_calls, strict=False)
                if call.arguments == arguments
            ]
            choice["message"] = message
        return self.envelope.body("chat.completion", choices=[choice], usage=self._usage())

    def _note_first_delta(self) -> None:
        self.record.first_delta_s = time.monotonic()
        self.simulator.notify()

    def _usage(self) -> JsonObject:
        """LM Studio's has reasoning tokens since 0.4.22 (bt#2335), and never cached tokens (bt#778, bt#2390)."""
        record, reply = self.record, self.generation.reply
        truncated_as_kept = self.simulator.truncated_usage == "kept" and record.truncated
        prompt_tokens = record.kept_tokens if truncated_as_kept else record.prompt_tokens
        counts: JsonObject = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "total_tokens": prompt_tokens + record.completion_tokens,
        }
        if reply.reasoning and self.simulator.api == "v1":
            thoughts = math.ceil(reasoning_tokens(reply) * self.instance.model.counting.factor)
            counts["completion_tokens_details"] = {"reasoning_tokens": min(thoughts, record.completion_tokens)}
        if self.simulator.reports_cached:
            counts["prompt_tokens_details"] = {"cached_tokens": record.cached_tokens}
        return counts
