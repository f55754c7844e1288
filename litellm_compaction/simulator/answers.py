"""How a generation becomes a response: its JSON, as an event stream or as one body, and how the connection ends."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from litellm_compaction.simulator.catalog import Instance
from litellm_compaction.simulator.generation import (
    Ending,
    Generation,
    Piece,
    ReasoningField,
    ToolCallSoFar,
    reasoning_tokens,
)
from litellm_compaction.simulator.refusals import JsonObject, error_body, event_body
from litellm_compaction.simulator.script import RequestRecord
from litellm_compaction.simulator.simulator import Simulator

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STREAM_HEADERS = [  # as LM Studio's Express layer sends them
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
]


class Connection:
    """The way back to one client; `client_left` is set when it has gone, and what is sent then reaches nobody."""

    def __init__(self, send: Send, close: Callable[[], None]) -> None:
        self._send = send
        self._close = close
        self.client_left = asyncio.Event()

    async def send_json(self, status: int, body: object) -> None:
        """Send a whole JSON response."""
        await self.send_whole(status, to_json(body), b"application/json; charset=utf-8")

    async def send_whole(self, status: int, body: bytes, content_type: bytes) -> None:
        """Send a whole response."""
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self) -> None:
        """Send the head of an event stream with HTTP 200."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def send_bytes(self, data: bytes) -> None:
        """Send a part of the stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """End the stream regularly."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def drop(self) -> None:
        """Close the connection as it is, what was sent before included."""
        self._close()
        # The server learns of it in the next turn of the loop and then asks for no response any more.
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def to_json(body: object) -> bytes:
    """The UTF-8 JSON text; unpaired surrogates, which JSON requests may smuggle in, are replaced."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def event(data: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + (data if isinstance(data, bytes) else to_json(data)) + b"\n\n"


Dialect = Literal["chat", "v0", "text"]

_STOP_REASONS = {"stop": "eosFound", "length": "maxPredictedTokensReached", "tool_calls": "toolCalls"}


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What all JSON of one answer has in common."""

    id: str
    created_s: int
    model: str
    dialect: Dialect
    reasoning_field: ReasoningField

    def chunk(self, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
        """One streaming chunk with one choice."""
        if self.dialect == "text":
            choice: JsonObject = {"index": 0, "text": delta.get("content", "")}
        else:
            choice = {"index": 0, "delta": delta}
        return self._frame(True) | {"choices": [choice | {"logprobs": None, "finish_reason": finish_reason}]}

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """The chunk after the last choice that `stream_options.include_usage` asks for."""
        return self._frame(True) | {"choices": [], "usage": usage}

    def delta(self, piece: Piece) -> JsonObject:
        """The delta of one piece; a tool call begins with id and name, and goes on with both null."""
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {self.reasoning_field: piece.text}
        function: JsonObject = {"name": piece.text, "arguments": ""}
        if piece.kind == "tool_arguments":
            function = {"name": None, "arguments": piece.text}
        call_id = piece.call_id if piece.kind == "tool_start" else None
        call = {"index": piece.call_index, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def whole(
        self,
        content: str,
        reasoning: str,
        calls: list[ToolCallSoFar],
        finish_reason: str | None,
        usage: JsonObject,
    ) -> JsonObject:
        """The body of a response that is not streamed."""
        choice: JsonObject = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.dialect == "text":
            choice["text"] = content
        else:
            message: JsonObject = {"role": "assistant", "content": content}
            if reasoning:
                message[self.reasoning_field] = reasoning
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
            choice["message"] = message
        return self._frame(False) | {"choices": [choice], "usage": usage}

    def _frame(self, streaming: bool) -> JsonObject:
        kind = "text_completion" if self.dialect == "text" else "chat.completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if streaming and self.dialect != "text" else kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.model,
        }


def usage(
    prompt_tokens: int, completion_tokens: int, reasoning_tokens: int | None, cached_tokens: int | None = None
) -> JsonObject:
    """The usage; LM Studio's never with cached tokens (bt#778, bt#2390), reasoning tokens since 0.4.22 (bt#2335)."""
    counts: JsonObject = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def v0_extras(
    instance: Instance,
    finish_reason: str | None,
    completion_tokens: int,
    first_delta_s: float,
    generation_s: float,
) -> JsonObject:
    """What REST v0 adds to an answer; durations in seconds."""
    model = instance.model
    engine = "mlx-llm" if model.format == "mlx" else "llama.cpp"
    return {
        "stats": {
            "tokens_per_second": completion_tokens / generation_s if generation_s > 0 else 0.0,
            "time_to_first_token": first_delta_s,
            "generation_time": generation_s,
            "stop_reason": _STOP_REASONS.get(finish_reason or "", "failed"),
        },
        "model_info": {
            "arch": model.architecture,
            "quant": model.quantization,
            "format": model.format,
            "context_length": instance.context_length,
        },
        "runtime": {"name": f"{engine}-simulator", "version": "1.0.0", "supported_formats": [model.format]},
    }


def now_s() -> int:
    """The time for `created`, in Unix seconds."""
    return int(time.time())


@dataclass(kw_only=True)
class Answer:
    """One generation on its way to the client; `release` gives back the slot and closes the record.

    `echo` is what the server repeats before it: no token of it is generated, so none is counted.
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
        """Send the answer as server-sent events."""
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
        """Send the answer as one JSON body."""
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
            chunk = self.envelope.chunk(delta, ending.finish_reason)
            if self.envelope.dialect == "v0":
                chunk |= self._v0_extras()
            tail += event(chunk)
        if self.include_usage and self.simulator.reports_usage:
            tail += event(self.envelope.usage_chunk(self._usage()))
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
            body = self._whole_body(ending)
            await self.connection.send_json(200, body)

    def _whole_body(self, ending: Ending) -> JsonObject:
        generation = self.generation
        calls = [
            call
            for call, (_, arguments) in zip(generation.calls, generation.reply.tool_calls, strict=False)
            if call.arguments == arguments
        ]
        finish_reason = "stop" if ending.kind == "empty" else ending.finish_reason
        content, reasoning = self.echo + generation.content, generation.reasoning
        body = self.envelope.whole(content, reasoning, calls, finish_reason, self._usage())
        return body | self._v0_extras() if self.envelope.dialect == "v0" else body

    def _note_first_delta(self) -> None:
        self.record.first_delta_s = time.monotonic()
        self.simulator.notify()

    def _usage(self) -> JsonObject:
        record, reply = self.record, self.generation.reply
        truncated_as_kept = self.simulator.truncated_usage == "kept" and record.truncated
        prompt_tokens = record.kept_tokens if truncated_as_kept else record.prompt_tokens
        thought_tokens: int | None = None
        if reply.reasoning and self.simulator.api == "v1":
            scaled = math.ceil(reasoning_tokens(reply) * self.instance.model.counting.factor)
            thought_tokens = min(scaled, record.completion_tokens)
        cached_tokens = record.cached_tokens if self.simulator.reports_cached else None
        return usage(prompt_tokens, record.completion_tokens, thought_tokens, cached_tokens)

    def _v0_extras(self) -> JsonObject:
        record = self.record
        ended_s = record.ended_s or time.monotonic()
        first_s = record.first_delta_s or ended_s
        return v0_extras(
            self.instance,
            record.finish_reason,
            record.completion_tokens,
            first_s - record.started_s,
            ended_s - first_s,
        )
