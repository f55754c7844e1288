"""What requests to one instance share: the queue for its slots, a failure that hits all of them, and its KV cache.

A slot holds the token sequence of its last request: as much of a new prompt as begins alike has been computed already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from litellm_compaction.simulator.rendering import Segment

FailureOutcome = Literal["error", "pool_overflow"]


class FlightFailed(Exception):
    """The request was ended by something outside it: a pool overflow, a crash, or an unload."""

    def __init__(self, message: str, outcome: FailureOutcome) -> None:
        super().__init__(message)
        self.message = message
        self.outcome: FailureOutcome = outcome


class Flight:
    """A request that occupies a slot; `used_tokens` is its prompt plus what it has generated."""

    def __init__(self, used_tokens: int, client_left: asyncio.Event) -> None:
        self.used_tokens = used_tokens
        self._client_left = client_left
        self.prefill_ends_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._failed = asyncio.Event()
        self._failure: FlightFailed | None = None

    def fail(self, message: str, outcome: FailureOutcome) -> None:
        """Make the request fail at its next step; may be called from any thread."""
        if self._failure is None:
            self._failure = FlightFailed(message, outcome)
            self._loop.call_soon_threadsafe(self._failed.set)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def sleep(self, seconds: float) -> None:
        """Wait, at least one turn of the event loop.

        Raises:
            FlightFailed: at once when the request is made to fail.
        """
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._failed.wait(), seconds)
        self.check()

    async def sleep_until(self, moment_s: float) -> None:
        await self.sleep(moment_s - self._loop.time())

    async def hang(self) -> None:
        """Wait until the request is made to fail, cancelled, or left by its client.

        A server that really hangs does so for longer; here it would take a slot from all later tests.
        """
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._failed, self._client_left)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        self.check()
        raise asyncio.CancelledError


class SlotQueue:
    """First come, first served admission to the parallel slots of an instance; the rest wait."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self) -> None:
        if self._taken < self._slots and not self._waiting:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken -= 1

    def reset(self) -> None:
        """Forget who holds or waits for slots, when the event loop they belong to is gone."""
        self._taken = 0
        self._waiting.clear()


_MINIMUM_SIMILARITY_RATIO = 0.1


@dataclass(eq=False)
class Slot:
    """One sequence in the KV cache; `busy` while a request computes in it."""

    segments: tuple[Segment, ...] = ()
    last_used: int = 0
    busy: bool = False


class KvCache:
    """The slots of one instance; without `goes_back` a slot only serves a prompt that goes on behind all of it."""

    def __init__(self, parallel: int, *, goes_back: bool = True) -> None:
        self._goes_back = goes_back
        self._slots = [Slot() for _ in range(parallel)]
        self._clock = 0

    def take(self, segments: tuple[Segment, ...], prompt_tokens: int) -> tuple[Slot, int]:
        """Returns the slot for a prompt, and how many of its tokens (unscaled) it already holds.

        The caller makes sure that one is free.
        """
        free = [slot for slot in self._slots if not slot.busy]
        shared = [(common_prefix_tokens(slot.segments, segments), slot) for slot in free]
        cached_tokens, slot = max(shared, key=lambda item: item[0])
        if cached_tokens < _MINIMUM_SIMILARITY_RATIO * prompt_tokens:
            cached_tokens, slot = min(shared, key=lambda item: item[1].last_used)
        if not self._goes_back and cached_tokens < sum(segment.count_tokens() for segment in slot.segments):
            cached_tokens = 0
        slot.busy = True
        slot.segments = segments
        self._touch(slot)
        return slot, cached_tokens

    def give_back(self, slot: Slot, segments: tuple[Segment, ...]) -> None:
        slot.segments = segments
        slot.busy = False
        self._touch(slot)

    def clear(self) -> None:
        for slot in self._slots:
            slot.segments = ()

    def free_all(self) -> None:
        for slot in self._slots:
            slot.busy = False

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def common_prefix_tokens(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """How many leading tokens two sequences share; only the first difference is looked at by token."""
    shared = 0
    index = 0
    limit = min(len(first), len(second))
    while index < limit and first[index] == second[index]:
        shared += first[index].count_tokens()
        index += 1
    if index < limit and not (first[index].is_image or second[index].is_image):
        for left, right in zip(first[index].tokens(), second[index].tokens(), strict=False):
            if left != right:
                break
            shared += 1
    return shared
