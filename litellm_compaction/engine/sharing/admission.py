"""The seats of all loaded contexts that answers may share, and who is there; `pool.py` decides who is next in one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.pool import Pool, Seat

# A llama.cpp whose stream was closed is idle after half a second.
_STOPPING_S = 0.6


class MakeWay(Protocol):
    def __call__(self, name: str, *, is_beside: bool = False) -> Coroutine[Any, Any, None]: ...


class Held(NamedTuple):
    answers: int
    tokens: int


class Admission:
    """Seats by context; not for use from several event loops.

    The queue is strict: a small request never overtakes a large one, so none starves; as many from its head are
    admitted together as fit.

    Args:
        clock: seconds, for the waiting time that an error names; time limits run on the event loop's own clock.
        stopping_s: how long a server generates on at most after its stream was closed.
        leases: held together with the other processes that send to the same contexts; None for no others.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        stopping_s: float = _STOPPING_S,
        leases: Leases | None = None,
    ) -> None:
        self.stopping_s = stopping_s
        self._clock = clock
        self._leases = leases
        self._pools: dict[str, Pool] = {}
        # Answers by instance if nothing is shared.
        self.present: Counter[str] = Counter()
        self._behind: dict[str, list[asyncio.Semaphore]] = {}
        # Gives the engine back to an answer that comes; not called for what is written ahead.
        self.make_way: MakeWay | None = None

    def running(self, pool: str) -> int:
        """Returns how many answers run or wait in `pool`, those of other processes included if they are known."""
        place = self._pools.get(pool)
        return max(self.present[pool], len(place.seats) + place.others_seats if place is not None else 0)

    def held(self) -> Held:
        """Returns what all answers of this process hold, those that are about to leave and those that wait included."""
        seats = [seat for pool in self._pools.values() for seat in pool.seats]
        return Held(len(seats) + self.present.total(), sum(seat.tokens for seat in seats))

    def leave(self, pool: str) -> None:
        """Ends the presence of an answer that shares nothing."""
        self.present[pool] -= 1
        for gone in self._behind.get(pool, ()):
            gone.release()

    async def after_those_present(self, pool: str, timeout_s: float) -> None:
        """Waits until as many answers have left as are present that share nothing, and no longer than that.

        A server of one slot takes them in turn: those that come meanwhile are not waited for.
        """
        if not (present := self.present[pool]):
            return
        gone, behind = asyncio.Semaphore(0), self._behind.setdefault(pool, [])
        behind.append(gone)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_acquired(gone, present), timeout_s)
        finally:
            behind.remove(gone)
            if not behind:
                self._behind.pop(pool, None)

    def is_idle(self, server: str) -> bool:
        """Returns True if no answer runs, waits or is about to at any instance of a server: they share a processor."""
        return not any(pool.startswith(f"{server} ") for pool in (*self._pools, *+self.present))

    async def enter(
        self,
        pool: str,
        *,
        window_tokens: int,
        tokens: int,
        timeout_s: float,
        most_tokens: int = 0,
        is_restart: bool = False,
    ) -> Seat:
        """Waits for its turn and for room, then returns a seat that holds `tokens`.

        A holder must call `exchange` instead: entering twice would deadlock. Not to be wrapped in `asyncio.wait_for`,
        which before Python 3.12 can lose the seat; `timeout_s` is the limit.

        Args:
            pool: the loaded instance; named in errors.
            window_tokens: its context length; the newest that was given counts. A smaller one stops no running request.
            tokens: of the prompt and the answer's reserve, ≥ 1. More than the whole window is admitted into an
                empty pool only: to refuse it is the budget's business.
            timeout_s: for the wait; with 0, room must be free now.
            most_tokens: up to so much it gets of what is free, if nothing waits: alone all of it, else an even part.
            is_restart: its answer has begun, in room that was given back since.

        Raises:
            Overloaded: `timeout_s` is over.
        """
        place = self._pools.get(pool)
        if place is None:
            place = self._pools[pool] = Pool(pool, self, self._leases)
        place.window_tokens = window_tokens
        seat = Seat(place)
        place.seats.append(seat)
        try:
            await place.wait(seat, tokens, timeout_s, most_tokens, is_restart=is_restart)
        except BaseException:
            # Also on cancellation: a caller without the seat cannot leave it.
            seat.release()
            raise
        return seat

    def release_later(self, seat: Seat, *, after_s: float | None = None) -> None:
        """Has a seat left when the server has stopped: after so long, or as soon as it notices a closed stream."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            seat.release()
            return
        loop.call_later(self.stopping_s if after_s is None else after_s, seat.release)

    def clock(self) -> float:
        return self._clock()

    def forget(self, pool: str) -> None:
        """Called when the last seat of a pool has left."""
        self._pools.pop(pool, None)

    def are_beside_others(self, pool: str) -> None:
        """Ends what is written ahead while another process's answer is there: it has the engine at once as well."""
        if self.make_way is not None and self._leases is not None:
            self._leases.tasks.begin(self.make_way(pool.partition(" ")[0]))


async def _acquired(semaphore: asyncio.Semaphore, times: int) -> None:
    for _ in range(times):
        await semaphore.acquire()
