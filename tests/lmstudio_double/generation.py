"""An answer that unfolds in time, at a given speed until it is complete, cut, or made to fail; and how it ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from litellm_compaction.simulator import inference as simulated
from litellm_compaction.simulator.inference import Connection, Envelope, Piece, event, pieces, reply_tokens
from litellm_compaction.simulator.messages import JsonObject
from litellm_compaction.simulator.rendering import count
from litellm_compaction.simulator.simulator import FinishReason, RequestRecord

from .catalog import Flight, FlightFailed, Instance
from .messages import POOL_EXCEEDED, event_body
from .script import Fault, Gate, Outcome, ReasoningField, Reply
from .simulator import Simulator

__all__ = ["Answer", "Connection", "Ending", "Envelope", "Generation", "pieces", "reply_tokens", "visible_reply"]


def visible_reply(reply: Reply, stops: tuple[str, ...], reasoning_field: ReasoningField = "reasoning_content") -> Reply:
    """The reply as its text comes out: cut at the first stop string, thoughts inline if so configured."""
    seen = simulated.visible_reply(reply, stops)
    if seen.reasoning and reasoning_field == "think":
        return replace(seen, content=f"<think>\n{seen.reasoning}\n</think>\n\n{seen.content}", reasoning="")
    return seen


_GATE_POLL_S = 0.002


async def drop(connection: Connection) -> None:
    """Closes the connection as it is, with the bytes that were sent before."""
    connection.close()
    # The server learns of it in the next turn of the loop and then asks for no response any more.
    await asyncio.sleep(0)
    await asyncio.sleep(0)


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

    @property
    def _factor(self) -> float:
        return self.instance.model.tokens_factor

    def completion_tokens(self) -> int:
        """The tokens generated so far, as the server counts them."""
        generated = math.ceil(self.raw_tokens * self._factor)
        return generated if self.max_tokens is None else min(generated, self.max_tokens)

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
            for piece in coming:
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
        window_at = self._raw(room_tokens, minimum=0)
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
        return _Limits(total, min(ends), max_at, fault_at, slow_at)

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
        return Ending("finish", "mid_overflow", "length")

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
    fault_at: int | None
    slow_at: int | None


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
            await drop(self.connection)
            return
        if ending.kind == "error":
            await self.connection.send_bytes(event(event_body(ending.message), "error"))
            await self.connection.end_stream()
            return
        tail = b""
        if ending.kind == "finish":
            delta: JsonObject = {"role": "assistant", "content": ""} if is_first else {}
            tail += event(self.envelope.chunk(delta, ending.finish_reason))
        if self.include_usage:
            tail += event(self.envelope.body("chat.completion.chunk", choices=[], usage=self._usage()))
        await self.connection.send_bytes(tail + event(b"[DONE]"))
        await self.connection.end_stream()

    async def _send_whole(self, ending: Ending) -> None:
        self.record.status = ending.status
        self.release(ending)
        if ending.kind == "drop":
            await drop(self.connection)
        elif ending.kind == "error" and self.record.status == 200:
            await self.connection.send_json(200, event_body(ending.message))
        elif ending.kind == "error":
            await self.connection.send_json(self.record.status, {"error": ending.message})
        else:
            await self.connection.send_json(200, self._whole(ending))

    def _whole(self, ending: Ending) -> JsonObject:
        generation = self.generation
        message: JsonObject = {"role": "assistant", "content": self.echo + generation.content}
        if generation.reasoning:
            message[self.envelope.reasoning_field] = generation.reasoning
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call, (_, arguments) in zip(generation.calls, generation.reply.tool_calls, strict=False)
            if call.arguments == arguments
        ]
        return self.envelope.whole(message, "stop" if ending.kind == "empty" else ending.finish_reason, self._usage())

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
            thoughts = math.ceil(count(reply.reasoning) * self.instance.model.tokens_factor)
            counts["completion_tokens_details"] = {"reasoning_tokens": min(thoughts, record.completion_tokens)}
        return counts
