"""How a generation becomes a response: as an event stream or as one JSON body.

Both close the record and give back the slot before the last bytes leave, so that whoever has read the
response to its end finds the simulator in the state after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from .catalog import Instance
from .connection import Connection, event
from .emissions import reasoning_tokens
from .generation import Ending, Generation
from .records import RequestRecord
from .refusals import JsonObject, error_body, event_body
from .simulator import Simulator
from .wire import Envelope, usage, v0_extras


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
            scaled = math.ceil(reasoning_tokens(reply) * self.instance.model.tokens_factor)
            thought_tokens = min(scaled, record.completion_tokens)
        return usage(prompt_tokens, record.completion_tokens, thought_tokens)

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
