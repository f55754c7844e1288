"""How a generation becomes a response: its JSON, as an event stream or as one body, and how the connection ends."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from litellm_compaction.simulator.catalog import Instance
from litellm_compaction.simulator.generation import Ending, Generation, Piece, reasoning_tokens
from litellm_compaction.simulator.refusals import JsonObject, error_body, event_body
from litellm_compaction.simulator.script import ReasoningField, RequestRecord
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
        """Close the connection as it is, what was sent before included."""
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
    """What all JSON of one answer has in common; `is_text` is that of a text completion."""

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
