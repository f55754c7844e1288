"""An answer that unfolds in time, at a given speed until it is complete, cut, or made to fail; and how it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from litellm_compaction.simulator import inference as simulated
from litellm_compaction.simulator.inference import Envelope, Piece, pieces, reply_tokens
from litellm_compaction.simulator.simulator import FinishReason, RequestRecord

from .catalog import Flight, FlightFailed, Instance
from .messages import POOL_EXCEEDED
from .script import Fault, Gate, Outcome, ReasoningField, Reply
from .simulator import Simulator

__all__ = ["Ending", "Envelope", "Generation", "pieces", "reply_tokens", "visible_reply"]


def visible_reply(reply: Reply, stops: tuple[str, ...], reasoning_field: ReasoningField = "reasoning_content") -> Reply:
    """The reply as its text comes out: cut at the first stop string, thoughts inline if so configured."""
    seen = simulated.visible_reply(reply, stops)
    if seen.reasoning and reasoning_field == "think":
        return replace(seen, content=f"<think>\n{seen.reasoning}\n</think>\n\n{seen.content}", reasoning="")
    return seen


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
                self._account(piece.tokens)
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

    def _account(self, tokens: int) -> None:
        before = self.completion_tokens()
        self.raw_tokens += tokens
        self.flight.used_tokens += self.completion_tokens() - before
        if self.simulator.is_pool_full(self.instance):
            self.instance.fail_all(POOL_EXCEEDED, "pool_overflow")
            self.flight.check()

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


class _Limits(NamedTuple):
    """The end of the generation, in unscaled tokens: the least of its reasons."""

    total: int
    stop_at: int
    max_at: int | None
    fault_at: int | None
    slow_at: int | None
