"""A request's place in an instance: one of its parallel slots, its share of the pool, and its KV slot.

Taken when the request's turn comes and left exactly once, whatever ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .catalog import Instance
from .flights import Flight
from .kv_cache import Reuse
from .rendering import Segment, answer_segments


class Seat:
    """The place of one request; `take` waits for it."""

    def __init__(self, instance: Instance, client_left: asyncio.Event) -> None:
        self.instance = instance
        self.flight = Flight(used_tokens=0, client_left=client_left)
        self._reuse: Reuse | None = None
        self._segments: tuple[Segment, ...] = ()
        self._is_left = False
        instance.flights.append(self.flight)

    @classmethod
    async def take(cls, instance: Instance, client_left: asyncio.Event) -> Seat:
        """A place in `instance`, first come, first served."""
        await instance.queue.acquire()
        return cls(instance, client_left)

    def start(self, segments: tuple[Segment, ...], raw_tokens: int, used_tokens: int) -> int:
        """Begin computing a prompt; returns how many of its tokens (unscaled) the cache already holds."""
        self.flight.used_tokens = used_tokens
        self._segments = segments
        self._reuse = self.instance.cache.take(segments, raw_tokens)
        return self._reuse.cached_tokens

    def leave(self, answer: tuple[str, str, Sequence[tuple[str, str]]]) -> None:
        """Give the place back; the slot then holds the prompt and `answer` (reasoning, content, calls).

        A client that leaves during prompt processing frees the place only when that is finished, as in LM
        Studio (bt#1143).
        """
        if self._is_left:
            return
        self._is_left = True
        self._segments += answer_segments(*answer)
        loop = asyncio.get_running_loop()
        if loop.time() < self.flight.prefill_ends_s:
            loop.call_at(self.flight.prefill_ends_s, self._free)
        else:
            self._free()

    def _free(self) -> None:
        if self._reuse is not None:
            self.instance.cache.give_back(self._reuse.slot, self._segments)
        if self.flight in self.instance.flights:
            self.instance.flights.remove(self.flight)
        self.instance.queue.release()
