"""Decides which requests may run at the same time in one loaded context, and which is next.

LM Studio ≥ 0.4 shares the loaded context among its parallel slots, and when the running requests together outgrow it,
all of them die (lmstudio-bug-tracker 1628, 1757, 2201). So a request takes a seat before it is sent, and the seats of
a pool never hold more than its window. `reservation.py` takes it for an answer, and says how much that needs.

A seat holds all that its request can come to: the prompt, and the `max_tokens` that the server was told. Watching an
answer while it grows is not enough: a server of 1,000 tokens/s was 300 tokens ahead of a busy proxy when its room
ended, and four answers overflowed (2026-11-22). The consequences:

- A running seat cannot grow: the server would not know. An answer that comes to its bound goes on as another request,
  with what is free by then (`exchange`).
- Every request is promised only the least with which it is worth beginning. Free room beyond that is lent to it:
  all of it to one that is alone, up to an even part beside others, nothing while another waits.
- A loan is called back when another waits for it (`must_give_way`): an answer that can be cut is stopped at its
  next chunk, and goes on with what it needs. It is stopped only if that lets the next in the queue in, and never twice
  for the same.
- Room is free when the server has stopped, not when the proxy has: `release_later` frees it then.

`core/sharing.py` decides, for one process and for several that send to one context. If the others cannot be reached,
each process decides for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from litellm_compaction.core.sharing import Loan, Part, Verdict, Wish, settle
from litellm_compaction.engine.sharing.coordination import LEASE_S, RENEWED_EVERY_S, Coordination, shared_name
from litellm_compaction.errors import Overloaded, StoreError

logger = logging.getLogger("litellm_compaction")

# A llama.cpp whose stream was closed was idle after 0.54 s (measured 2026-11-22).
_STOPPING_S = 0.6
# No request is refused before the other processes have been asked, which takes a millisecond; a board that does not
# answer is given up before this.
_ANSWERED_S, _ANSWER_AGAIN_S = 3.5, 0.02
_MOST_WAIT_S = 86_400.0
# A waiting request looks this often if there is room, a running one if another process's request waits.
_WAITING_S = 0.1
_RUNNING_S = 0.25
# So long others count as there after they were last seen. Before they are known they wait for a renewal.
_KNOWN_S = 600.0
# A board counts in milliseconds.
_LEAST_LEASE_S = 0.001

# A request that waits longer is told of: to the operator, and to its client.
TOLD_AFTER_S = 10.0

_PART = TypeAdapter(Part)
_NOTHING_HEARD = settle(Part(), (), 0)


class MakeWay(Protocol):
    def __call__(self, name: str, *, is_beside: bool = False) -> Coroutine[Any, Any, None]: ...


class Held(NamedTuple):
    answers: int
    tokens: int


class Admission:
    """Seats by pool, first come, first served; not for use from several event loops.

    The queue is strict: a small request never overtakes a large one, so none starves; as many from its head are
    admitted together as fit. Restarts (`Seat.exchange`) stand before new entries: their client is in the middle of
    an answer.

    Args:
        clock: seconds, for the waiting time that an error names; time limits run on the event loop's own clock.
        stopping_s: how long a server generates on at most after its stream was closed.
        coordination: with the other processes that send to the same contexts; None for no others.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        stopping_s: float = _STOPPING_S,
        coordination: Coordination | None = None,
    ) -> None:
        self.stopping_s = stopping_s
        self._clock = clock
        self._coordination = coordination
        self._pools: dict[str, _Pool] = {}
        # Answers by instance if nothing is shared.
        self.present: Counter[str] = Counter()
        self._behind: dict[str, list[asyncio.Semaphore]] = {}
        # Gives the engine back to an answer that comes; not called for what is written ahead.
        self.make_way: MakeWay | None = None

    def running(self, pool: str) -> int:
        """Returns how many answers run or wait in `pool`, those of other processes included if they are known."""
        place = self._pools.get(pool)
        return max(self.present[pool], len(place.seats) + place.heard.others_seats if place is not None else 0)

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
            most_tokens: up to so much it is lent of what is free, if nothing waits: alone all of it, else an even part.
            is_restart: its answer has begun, in room that was given back since.

        Raises:
            Overloaded: `timeout_s` is over.
        """
        place = self._pools.get(pool)
        if place is None:
            place = self._pools[pool] = _Pool(name=pool, clock=self._clock, forget=lambda: self._pools.pop(pool, None))
            if self._coordination is not None:
                place.others = _Others(self._coordination, f"pool {shared_name(pool)}", place)
                place.beside_others = lambda: self._leave_to_others(pool)
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

    def _leave_to_others(self, pool: str) -> None:
        """Ends what is written ahead while another process's answer is there: it has the engine at once as well."""
        if self.make_way is not None and self._coordination is not None:
            self._coordination.tasks.begin(self.make_way(pool.partition(" ")[0]))

    def release_later(self, seat: Seat, *, after_s: float | None = None) -> None:
        """Has a seat left when the server has stopped: after so long, or as soon as it notices a closed stream."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            seat.release()
            return
        seat.leaves_at_s = loop.time() + (self.stopping_s if after_s is None else after_s)
        loop.call_at(seat.leaves_at_s, seat.release)


async def _acquired(semaphore: asyncio.Semaphore, times: int) -> None:
    for _ in range(times):
        await semaphore.acquire()


class Seat:
    """One running request's share of a pool; used by one task at a time, left by the one that entered.

    Leave it when the server is done with the request: a closed upstream may still finish its prefill.

    Attributes:
        tokens: what it holds; 0 while it waits, after an exchange that failed, and after it has left.
        needed_tokens: what it would hold if it were stopped now and went on; None if its answer cannot be cut.
        gives_way: it was told to stop, so that what it was lent is as good as free.
        leaves_at_s: by the event loop's clock, if it is left when its server has stopped; else infinite.
        turn: set while it waits for `wanted_tokens`, or, if these are 0, for what it is lent on top of its own.
        number: of this wait, in the order of waits.
        ticket: its place in the queue of all processes; 0 until it has one.
    """

    __slots__ = (
        "_pool", "gives_way", "is_restart", "leaves_at_s", "most_tokens", "needed_tokens", "number", "ticket",
        "tokens", "turn", "wanted_tokens",
    )  # fmt: skip

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self.tokens = 0
        self.needed_tokens: int | None = None
        self.gives_way = False
        self.leaves_at_s = math.inf
        self.turn: asyncio.Future[None] | None = None
        self.wanted_tokens = self.most_tokens = self.number = self.ticket = 0
        self.is_restart = False

    @property
    def has_company(self) -> bool:
        """Returns True if others run in the pool or may wait for room; asked for each chunk of each answer."""
        pool = self._pool
        return len(pool.seats) > 1 or pool.heard.others_seats > 0 or pool.heard.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Returns True if a request waits for room in its pool."""
        return self._pool.heard.is_waited_for

    @property
    def lent_tokens(self) -> int:
        """The part that it could do without, for now."""
        return 0 if self.needed_tokens is None else max(self.tokens - self.needed_tokens, 0)

    def must_give_way(self, needed_tokens: int | None) -> bool:
        """Returns True if it has to stop now, for one that waits; once it was told so, it is taken at its word.

        `needed_tokens` is what it would hold if it were stopped now and went on; None if it cannot go on later.
        """
        is_news = self.needed_tokens is None and needed_tokens is not None
        self.needed_tokens = needed_tokens
        if needed_tokens is None:
            self.gives_way = False
        elif not self.gives_way and self.is_waited_for and (is_news or not self._pool.is_shared):
            self._pool.changed()
        return self.gives_way

    def shrink(self, tokens: int) -> None:
        """Gives back what it holds above `tokens` (≥ 0); no more than it holds is no change."""
        if tokens < self.tokens:
            self.tokens = tokens
            self._pool.changed()

    async def exchange(self, tokens: int, *, timeout_s: float, most_tokens: int = 0) -> None:
        """Makes it hold `tokens` (≥ 1), more or fewer, for another upstream request in place of the one before.

        What fits into the room that it holds is exchanged at once. For more it first gives back everything and then
        waits, before all entries and after earlier exchanges: it holds nothing while it waits, so restarts cannot
        block each other however many wait. The upstream before must have ended. On any exception it holds nothing
        and may exchange again. Up to `most_tokens` it is lent, as in `Admission.enter`.

        Raises:
            Overloaded: `timeout_s` is over.
            RuntimeError: it has left, or waits already: an error of the caller.
        """
        pool = self._pool
        if self not in pool.seats or self.turn is not None:
            raise RuntimeError("A seat was exchanged after it left or while it waited.")
        self.gives_way, self.needed_tokens = False, None
        if tokens <= self.tokens and pool.fits(tokens, instead_of_tokens=self.tokens):
            self.shrink(tokens)
            if most_tokens > tokens:
                await pool.wait(self, 0, math.inf, most_tokens, is_restart=True)
            return
        self.tokens = 0
        await pool.wait(self, tokens, timeout_s, most_tokens, is_restart=True)
        if self not in pool.seats:
            raise RuntimeError("A seat left while it waited for an exchange.")

    def release(self) -> None:
        """Gives everything back, for good; again is no change."""
        pool = self._pool
        if self in pool.seats:
            pool.seats.remove(self)
            pool.give_back(self)
            # If there are others it is forgotten when they know.
            if not pool.seats and (pool.others is None or pool.others.has_ended):
                pool.forget()


class _Stance(NamedTuple):
    """One process's seats and wants; arguments of `core.sharing.settle`."""

    part: Part
    window_tokens: int
    loans: tuple[Loan, ...]
    more: tuple[Wish, ...]

    def beside(self, others: Sequence[Part]) -> Verdict:
        return settle(self.part, others, self.window_tokens, loans=self.loans, more=self.more)


@dataclass(slots=True, kw_only=True, eq=False)
class _Pool:
    """One loaded context, and this process's part in it.

    Every change happens between two awaits, and ends in `changed`, which gives free room away at once: a woken task
    finds its tokens already held, so none can slip in before it.

    Attributes:
        forget: called when the last seat has left.
        seats: all that have not left, also those that wait.
        others: the other processes that send to it; None for none.
        heard: the last verdict.
        beside_others: called if other processes were seen in it.
    """

    name: str
    clock: Callable[[], float]
    forget: Callable[[], object]
    window_tokens: int = 0
    seats: list[Seat] = field(default_factory=list)
    others: _Others | None = None
    heard: Verdict = _NOTHING_HEARD
    beside_others: Callable[[], object] | None = None
    _waits: int = 0
    _loans: dict[int, Seat] = field(default_factory=dict)

    @property
    def used_tokens(self) -> int:
        return sum(seat.tokens for seat in self.seats)

    @property
    def is_shared(self) -> bool:
        return self.others is not None and self.others.is_up

    def waiting(self) -> list[Seat]:
        """Seats in the order of their waits, without those that were cancelled and whose tasks have not run since."""
        waiting = (seat for seat in self.seats if seat.turn is not None and not seat.turn.done())
        return sorted(waiting, key=lambda seat: seat.number)

    def fits(self, tokens: int, *, instead_of_tokens: int) -> bool:
        """Returns True if `tokens` may be held in place of some that are held: inside the window, or alone."""
        others_tokens = self.used_tokens + self.heard.others_tokens - instead_of_tokens
        return others_tokens == 0 or others_tokens + tokens <= self.window_tokens

    def changed(self) -> None:
        """Gives free room to waiting requests, and calls back loans: here, or when the others have been asked."""
        if self.others is not None:
            self.others.wake()
        if not self.is_shared:
            self.go_on_alone()

    async def wait(self, seat: Seat, tokens: int, timeout_s: float, most_tokens: int, *, is_restart: bool) -> None:
        """Returns when `seat` holds `tokens`, or more up to `most_tokens`; with 0 tokens, when it was lent more.

        On any exception it holds nothing.
        """
        loop = asyncio.get_running_loop()
        self._waits += 1
        seat.number, seat.ticket, seat.is_restart = self._waits, 0, is_restart
        seat.wanted_tokens, seat.most_tokens = tokens, most_tokens
        turn = seat.turn = loop.create_future()
        self.changed()
        if not turn.done():
            # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a finished future.
            timer = loop.call_later(min(timeout_s, _MOST_WAIT_S), self._expire, seat, turn, self.clock())
            telling = loop.call_later(TOLD_AFTER_S, self._tell, seat, turn)
            try:
                await turn
            except BaseException:
                # Also on cancellation: what was granted in the same moment would be lost.
                self.give_back(seat)
                raise
            finally:
                timer.cancel()
                telling.cancel()
        seat.turn = None

    def stance(self) -> _Stance:
        lent = [seat for seat in self.seats if seat.lent_tokens]
        self._loans = dict(enumerate(seat for seat in lent if not seat.gives_way))
        loans = tuple(Loan(number, seat.lent_tokens) for number, seat in self._loans.items())
        waiting = self.waiting()
        part = Part(
            held_tokens=self.used_tokens,
            seats=len(self.seats),
            spare_tokens=sum(loan.tokens for loan in loans),
            leaving_tokens=sum(seat.lent_tokens for seat in lent if seat.gives_way),
            wishes=tuple(
                Wish(seat.number, seat.wanted_tokens, seat.most_tokens, seat.is_restart, seat.ticket)
                for seat in waiting
                if seat.wanted_tokens
            ),
        )
        more = (Wish(seat.number, seat.tokens, seat.most_tokens) for seat in waiting if not seat.wanted_tokens)
        return _Stance(part, self.window_tokens, loans, tuple(more))

    def apply(self, verdict: Verdict) -> None:
        """Gives waiting requests what all processes have agreed on, and tells those that have to give way."""
        tickets = {wish.number: wish.ticket for wish in verdict.part.wishes}
        waiting = {seat.number: seat for seat in self.waiting()}
        for number, seat in waiting.items():
            seat.ticket = tickets.get(number, seat.ticket)
        # In their order. A request that is not in it came while the others were asked; the next verdict answers it.
        for number, tokens in verdict.grants.items():
            if (granted := waiting.get(number)) is not None and granted.turn is not None:
                granted.tokens = tokens
                granted.turn.set_result(None)
        for number in verdict.called_back:
            # It may have begun anew meanwhile.
            if self._loans[number].lent_tokens:
                self._loans[number].gives_way = True
        self.heard = verdict
        if verdict.others_seats and self.beside_others is not None:
            self.beside_others()

    def go_on_alone(self) -> None:
        """Decides for this process only."""
        self.apply(self.stance().beside(()))

    def held_for_s(self) -> float:
        """The longest time for which it is held if no request is served any more: until servers have stopped."""
        now_s = asyncio.get_running_loop().time()
        return max((seat.leaves_at_s - now_s for seat in self.seats if seat.tokens), default=0.0)

    def give_back(self, seat: Seat) -> None:
        """Makes `seat` neither hold nor wait for anything; an exchange that it waits for ends."""
        turn, seat.turn, seat.tokens = seat.turn, None, 0
        if turn is not None and not turn.done():
            turn.set_result(None)
        self.changed()

    def _tell(self, seat: Seat, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            logger.warning(
                "waits_for_room model=%s tokens=%d in_use=%d window=%d answers=%d waited_s=%.0f",
                self.name.rpartition(" ")[2],
                seat.wanted_tokens,
                self.used_tokens + self.heard.others_tokens,
                self.window_tokens,
                sum(each.tokens > 0 for each in self.seats) + self.heard.others_seats,
                TOLD_AFTER_S,
            )

    def _expire(self, seat: Seat, turn: asyncio.Future[None], since_s: float) -> None:
        if turn.done():
            # Cancelled or admitted in this very turn of the loop.
            return
        if self.is_shared and not seat.ticket and self.clock() < since_s + _ANSWERED_S:
            # It is not known yet if there is room now.
            asyncio.get_running_loop().call_later(_ANSWER_AGAIN_S, self._expire, seat, turn, since_s)
            return
        turn.set_exception(
            Overloaded(
                self.name,
                tokens=seat.wanted_tokens,
                in_use_tokens=self.used_tokens + self.heard.others_tokens,
                window_tokens=self.window_tokens,
                waited_s=self.clock() - since_s,
            )
        )


class _Others:
    """Tells this process's part in a context to the others that send to it, and hears what it may do.

    One look at the board answers all that came since the last: nothing is asked while nothing changes, but for the
    renewals, and more often while others are there. `topic` names the context to all processes alike.
    """

    def __init__(self, coordination: Coordination, topic: str, pool: _Pool) -> None:
        self._coordination = coordination
        self._topic = topic
        self._pool = pool
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._changed = asyncio.Event()
        self._known_until_s = -math.inf
        self.is_up = True
        self.has_ended = False
        coordination.while_held(self._run(), farewell=self._farewell)

    def wake(self) -> None:
        """Has the others told soon that something has changed; from any thread."""
        if threading.get_ident() == self._thread:
            self._changed.set()
            return
        # The loop may have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _run(self) -> None:
        try:
            while True:
                self._changed.clear()
                stance = self._pool.stance()
                pause_s = await self._settled(stance)
                if not stance.part.seats and not self._pool.stance().part.seats:
                    self._pool.forget()
                    return
                await self._change(pause_s)
        except BaseException:
            # The process ends; a request that is still served is served by it alone.
            self.has_ended = True
            self._go_on_alone()
            if not self._pool.stance().part.seats:
                self._pool.forget()
            raise

    async def _change(self, limit_s: float) -> None:
        # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a change.
        timer = self._loop.call_later(limit_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _farewell(self) -> None:
        """Tells the others what the process leaves to its servers when it ends: free when these have stopped."""
        part = replace(self._pool.stance().part, spare_tokens=0, leaving_tokens=0, wishes=())
        note = _PART.dump_json(part) if part.held_tokens else None
        with contextlib.suppress(StoreError):
            lease_s = max(min(self._pool.held_for_s(), LEASE_S), _LEAST_LEASE_S)
            await self._coordination.update(self._topic, lambda _: (note, None), lease_s=lease_s)

    async def _settled(self, stance: _Stance) -> float:
        """Tells the others and does what is allowed; gives the seconds for which that holds if nothing changes."""

        def decide(others: Sequence[bytes]) -> tuple[bytes | None, Verdict]:
            verdict = stance.beside(_parts(others))
            return (_PART.dump_json(verdict.part) if verdict.part.seats else None), verdict

        try:
            verdict = await self._coordination.update(self._topic, decide)
        except StoreError:
            if not self._coordination.is_lost:
                return _RUNNING_S
            self._go_on_alone()
            return RENEWED_EVERY_S
        self.is_up = True
        if verdict.others_seats:
            self._known_until_s = self._loop.time() + _KNOWN_S
        self._pool.apply(verdict)
        if self._loop.time() >= self._known_until_s:
            return RENEWED_EVERY_S
        return _WAITING_S if verdict.part.wishes else _RUNNING_S

    def _go_on_alone(self) -> None:
        self.is_up = False
        self._pool.go_on_alone()


def _parts(notes: Sequence[bytes]) -> list[Part]:
    parts: list[Part] = []
    for note in notes:
        # Another version's, which cannot be understood, is as if it were not there.
        with contextlib.suppress(ValidationError):
            parts.append(_PART.validate_json(note))
    return parts
