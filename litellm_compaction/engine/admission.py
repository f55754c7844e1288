"""Which requests may run at the same time in one loaded context, who is next, and one answer's share of it.

LM Studio ≥ 0.4 shares the loaded context among its parallel slots, and when the running requests together outgrow it,
all of them die (lmstudio-bug-tracker 1628, 1757, 2201). So a request takes a seat before it is sent, and the seats of
a pool never hold more than its window. Where nothing is shared, or the operator does not want it, a `Reservation` does
nothing.

A seat holds all that its request can come to: the prompt, and the `max_tokens` that the server was told. Watching an
answer while it grows is not enough: a server of 1,000 tokens/s was 300 tokens ahead of a busy proxy when its room
ended, and four answers overflowed (2026-11-22). With the bound at the server it does not matter how late the proxy
reads. What follows from it:

- A running seat cannot grow: the server would not know. An answer that comes to its bound goes on as another request,
  with what is free by then (`exchange`).
- Every request is promised only the least with which it is worth beginning. What is free beyond that is lent to it
  (`widen`): all of it to one that is alone, up to an even part beside others, nothing while somebody waits.
- What was lent is called back when somebody waits for it (`must_give_way`): an answer that can be cut is stopped, and
  goes on with what it needs. That costs it one more request; the one who waits would else wait for its end. It is
  stopped only if that lets the next in the queue in, so nobody is cut in vain, and never twice for the same.
- Room is free when the server has stopped, not when the proxy has: whoever leaves says so (`Reservation.leave`).

Where several processes send to one context, the same rules hold for all of them together: who waits is let in, lent to
and called back by what `shared_pool.py` hears from the others. Where these cannot be reached, within this process.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

from litellm_compaction.core.budget import margin_tokens
from litellm_compaction.core.sharing import Loan, Part, Verdict, Wish
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.engine.coordination import Coordination
from litellm_compaction.engine.shared_pool import SharedPool, Stance, shared_name
from litellm_compaction.errors import DoesNotFit, Overloaded, Share
from litellm_compaction.tokens.counter import Count
from litellm_compaction.windows.windows import Window

# A llama.cpp whose stream was closed was idle after 0.54 s (measured 2026-11-22).
_STOPPING_S = 0.6
# A summary's own instruction, answer and thinking beside the history that it reads: 450 + 800 + 800, rounded up.
SUMMARY_EXTRA_TOKENS = 2100
# As slow as a machine may be that people wait for; a faster one gives its room back later than it could.
_SLOW_S_PER_TOKEN = 0.05
# Most answers are far shorter than their bound: nobody waits longer for one that nobody reads.
_MOST_ABANDONED_S = 10.0
# What makes a model go on, and what the template puts around the answer so far.
_GOING_ON_TOKENS = 128
# Of the room with which an answer goes on whose share was too small; with so many even 256 tokens are a whole window.
_MAX_DOUBLINGS = 12
# Nobody is refused before the other processes have been asked, which takes a millisecond; a board that does not answer
# is given up before this.
_ANSWERED_S, _ANSWER_AGAIN_S = 3.5, 0.02


class Usage(NamedTuple):
    """How full a pool is.

    Attributes:
        used_tokens: held by the running requests, as far as is known in all processes; above the window only for one
            alone, or after the window shrank.
        window_tokens: the newest known; 0 for a pool that nobody uses.
        waiting: requests of this process in the queue, restarts included.
    """

    used_tokens: int
    window_tokens: int
    waiting: int


class Admission:
    """Seats by pool, first come, first served; not for use from several event loops.

    The queue is strict: a small request never overtakes a large one, so nobody starves; as many from its head are
    admitted together as fit. Restarts (`Seat.exchange`) stand before new entries: their client is in the middle of
    an answer.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        stopping_s: float = _STOPPING_S,
        coordination: Coordination | None = None,
    ) -> None:
        """Makes it without pools.

        Args:
            clock: seconds, for the waiting time that an error names; time limits run on the event loop's own clock.
            stopping_s: how long a server generates on at most after its stream was closed.
            coordination: with the other processes that send to the same contexts; None for no others.
        """
        self.stopping_s = stopping_s
        self._clock = clock
        self._coordination = coordination
        self._pools: dict[Hashable, _TokenPool] = {}
        self._present: Counter[Hashable] = Counter()
        # Who gives the engine back to an answer that comes; not called for what is written ahead.
        self.make_way: Callable[[str], Coroutine[Any, Any, None]] | None = None

    def come(self, pool: Hashable) -> None:
        """Notes an answer where nobody has to be fitted beside others, as far as is known."""
        self._present[pool] += 1

    def go(self, pool: Hashable) -> None:
        """Notes its end."""
        self._present[pool] -= 1
        if self._present[pool] <= 0:
            del self._present[pool]

    def seated(self, pool: Hashable) -> int:
        """How many run or wait in `pool`, those of other processes included, as far as they are known."""
        place = self._pools.get(pool)
        return len(place.held_tokens) + place.others_seats if place is not None else 0

    def present(self, pool: Hashable) -> int:
        """How many such answers there are."""
        return self._present[pool]

    def is_idle(self, server: str) -> bool:
        """Whether nobody runs, waits or is about to at any instance of a server: they share its processor."""
        return not any(str(pool).startswith(f"{server} ") for pool in (*self._pools, *self._present))

    async def enter(
        self, pool: Hashable, *, window_tokens: int, tokens: int, timeout_s: float, most_tokens: int = 0
    ) -> Seat:
        """A seat that holds `tokens`, as soon as they fit beside the pool's other seats and it is this one's turn.

        Whoever holds a seat must not enter the same pool again (both would wait for each other): it exchanges. Not to
        be wrapped in `asyncio.wait_for`, which before Python 3.12 can lose the seat; `timeout_s` is the limit.

        Args:
            pool: the loaded instance; its `str` names it in errors.
            window_tokens: its context length; the newest that anybody gave counts. A smaller one stops nobody who runs.
            tokens: prompt and what is reserved for the answer, ≥ 1. More than the whole window is admitted into an
                empty pool only: to refuse it is the budget's business.
            timeout_s: for the wait; with 0, room must be free now.
            most_tokens: up to so much it is lent, as by `Seat.widen`.

        Raises:
            Overloaded: `timeout_s` is over.
        """
        place = self._pools.get(pool)
        if place is None:
            place = self._pools[pool] = _TokenPool(
                name=str(pool), clock=self._clock, forget=lambda: self._pools.pop(pool, None)
            )
            if self._coordination is not None:
                place.shared = SharedPool(self._coordination, f"pool {shared_name(str(pool))}", place)
                place.beside_others = lambda: self._leave_to_others(str(pool))
        place.window_tokens = window_tokens
        seat = Seat(place)
        place.held_tokens[seat] = 0
        try:
            await place.wait(seat, tokens, place.entries, timeout_s, most_tokens)
        except BaseException:
            # Also on cancellation: whoever has not got the seat cannot leave it.
            seat.leave()
            raise
        return seat

    def _leave_to_others(self, pool: str) -> None:
        """Ends what is written ahead while another process's answer is there: it has the engine at once as well."""
        if self.make_way is not None and self._coordination is not None:
            self._coordination.behind(self.make_way(pool.partition(" ")[0]))

    def leave_later(self, seat: Seat, *, after_s: float | None = None) -> None:
        """Has a seat left when the server has stopped.

        Args:
            seat: of an answer that nobody reads any more.
            after_s: when its server will have ended it; None where it ends as soon as it notices that nobody reads.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            seat.leave()
            return
        seat.leaves_at_s = loop.time() + (self.stopping_s if after_s is None else after_s)
        loop.call_at(seat.leaves_at_s, seat.leave)

    def usage(self, pool: Hashable) -> Usage:
        """How full `pool` is, for metrics and `doctor`."""
        place = self._pools.get(pool)
        if place is None:
            return Usage(0, 0, 0)
        used_tokens = place.used_tokens + place.others_tokens
        return Usage(used_tokens, place.window_tokens, len(place.exchanges) + len(place.entries))


class Seat:
    """One running request's share of a pool; used by one task at a time, left by whoever entered.

    Leave it when the server is done with the request: a closed upstream may still finish its prefill.
    """

    __slots__ = ("_gives_way", "_hear", "_needed_tokens", "_pool", "leaves_at_s")

    def __init__(self, pool: _TokenPool) -> None:
        self._pool = pool
        # By the event loop's clock, where it is left when its server has stopped.
        self.leaves_at_s = math.inf
        self._gives_way = False
        self._needed_tokens: int | None = None
        self._hear: Callable[[], None] | None = None

    @property
    def tokens(self) -> int:
        """What it holds; 0 while it waits, after an exchange that failed, and after it has left."""
        return self._pool.held_tokens.get(self, 0)

    @property
    def needed_tokens(self) -> int | None:
        """What it would hold if it were stopped now and went on; None where its answer cannot be cut."""
        return self._needed_tokens

    @needed_tokens.setter
    def needed_tokens(self, tokens: int | None) -> None:
        is_news = self._needed_tokens is None and tokens is not None
        self._needed_tokens = tokens
        if is_news and self._pool.shared is not None and self._pool.shared.is_waited_for:
            self._pool.shared.wake()

    @property
    def is_alone(self) -> bool:
        """Whether nobody else runs in the pool or waits for room in it."""
        return len(self._pool.held_tokens) + self._pool.others_seats == 1

    @property
    def has_company(self) -> bool:
        """Whether anybody else runs in the pool or may wait for room in it; asked for each chunk of each answer."""
        pool = self._pool
        if len(pool.held_tokens) > 1 or pool.entries or pool.exchanges:
            return True
        return pool.shared is not None and (pool.others_seats > 0 or pool.has_waiters)

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits for room in its pool."""
        return self._pool.has_waiters

    @property
    def lent_tokens(self) -> int:
        """How much it holds that it could do without, for now."""
        return 0 if self.needed_tokens is None else max(self.tokens - self.needed_tokens, 0)

    @property
    def must_give_way(self) -> bool:
        """Whether it has to stop now, for one that waits; once it was told so, it is taken at its word."""
        self._gives_way = self._gives_way or self._pool.calls_back(self)
        return self._gives_way

    def give_way(self) -> None:
        """Tells it that it has to stop."""
        self._gives_way = True

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to give way, so that what it was lent is as good as free."""
        return self._gives_way

    def listen(self, hear: Callable[[], None] | None) -> None:
        """Has `hear` called, in a moment and whenever somebody else is the next who waits: it looks at `must_give_way`.

        A server may be silent for minutes; what is asked only with its next words would be asked too late.

        Args:
            hear: must not change the pool; None for nobody.
        """
        self._hear = hear
        if hear is not None:
            # Who came before it could listen has told nobody; by then its server is waited for.
            asyncio.get_running_loop().call_soon(self._pool.tell)

    def hear(self) -> None:
        """Tells whoever listens."""
        if self._hear is not None:
            self._hear()

    def stay(self) -> None:
        """Takes back that it gives way: its answer cannot go on later, as it turns out."""
        self._gives_way, self.needed_tokens = False, None

    def widen(self, most_tokens: int) -> None:
        """Makes it hold more, before its request is sent: up to `most_tokens`, of what is free while nobody waits.

        Beside others no more than an even part, so that the next one finds room. Alone it may hold more than the
        window, as it may enter with more: it harms nobody else, and the window is its budget's business.
        """
        pool = self._pool
        if not self.tokens or pool.is_shared:
            # Whoever holds nothing does not run: it has to exchange. What is free beside other processes is lent with
            # the room itself.
            return
        if self.is_alone:
            pool.hold(self, max(self.tokens, most_tokens))
        elif not pool.has_waiters:
            even_tokens = min(most_tokens, pool.window_tokens // (len(pool.held_tokens) + pool.others_seats))
            free_tokens = max(pool.window_tokens - pool.used_tokens - pool.others_tokens, 0)
            pool.hold(self, max(self.tokens, min(even_tokens, self.tokens + free_tokens)))

    def shrink(self, tokens: int) -> None:
        """Gives back what it holds above `tokens` (≥ 0); no more than it holds is no change."""
        if tokens < self.tokens:
            self._pool.hold(self, tokens)
            self._pool.admit()

    async def exchange(self, tokens: int, *, timeout_s: float, most_tokens: int = 0) -> None:
        """Makes it hold `tokens` (≥ 1), more or fewer, for another upstream request in place of the one before.

        What fits into the room that it holds is exchanged at once. For more it first gives back everything and then
        waits, before all entries and behind earlier exchanges: it holds nothing while it waits, so restarts cannot
        block each other however many wait. The upstream before must have ended. On any exception it holds nothing
        and may exchange again. Up to `most_tokens` it is lent, as by `widen`.

        Raises:
            Overloaded: `timeout_s` is over.
            RuntimeError: it has left, or waits already: an error of the caller.
        """
        pool = self._pool
        if self not in pool.held_tokens or self in pool.exchanges:
            raise RuntimeError("A seat was exchanged after it left or while it waited.")
        self._gives_way, self.needed_tokens = False, None
        if tokens <= self.tokens and pool.fits(tokens, instead_of_tokens=self.tokens):
            self.shrink(tokens)
            await pool.lend(self, most_tokens)
            return
        pool.hold(self, 0)
        await pool.wait(self, tokens, pool.exchanges, timeout_s, most_tokens)
        if self not in pool.held_tokens:
            raise RuntimeError("A seat left while it waited for an exchange.")

    def leave(self) -> None:
        """Gives everything back, for good; again is no change."""
        pool = self._pool
        if self in pool.held_tokens:
            pool.give_back(self)
            del pool.held_tokens[self]
            if pool.shared is not None and not pool.shared.has_ended:
                # It is forgotten when the others know.
                pool.shared.wake()
            elif not pool.held_tokens:
                pool.forget()

    async def __aenter__(self) -> Seat:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


@dataclass(slots=True, eq=False)
class _Waiter:
    """One who waits.

    Attributes:
        tokens: what it needs; of one that wants more than it holds already, 0.
        most_tokens: what it is lent at most.
        number: by which it is known to whoever decides for all processes.
        ticket: its place in the queue of all processes; 0 until it has one.
    """

    tokens: int
    turn: asyncio.Future[None]
    most_tokens: int
    number: int
    ticket: int = 0


_Queue = OrderedDict[Seat, _Waiter]


@dataclass(slots=True, kw_only=True, eq=False)
class _TokenPool:
    """One loaded context.

    Every change happens between two awaits, and whoever makes room calls `admit`, which gives the room away at once:
    a woken task finds its tokens already held, so nobody can slip in before it.

    Attributes:
        forget: called when the last seat has left.
        used_tokens: the sum of `held_tokens`.
        held_tokens: of all seats that have not left; 0 for those that wait.
        exchanges: seats that wait for a restart, longest first.
        entries: seats that wait for their first tokens, longest first; behind all exchanges.
        told_of: who was the next to wait when the running ones were last told.
        shared: what lets in, lends and calls back where there are other processes.
        beside_others: called where other processes were seen in it.
        wider: seats that hold room and wait for what they may be lent.
        numbers: of waiters.
    """

    name: str
    clock: Callable[[], float]
    forget: Callable[[], object]
    window_tokens: int = 0
    used_tokens: int = 0
    held_tokens: dict[Seat, int] = field(default_factory=dict)
    exchanges: _Queue = field(default_factory=OrderedDict)
    entries: _Queue = field(default_factory=OrderedDict)
    told_of: _Waiter | None = None
    shared: SharedPool | None = None
    beside_others: Callable[[], object] | None = None
    wider: _Queue = field(default_factory=OrderedDict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _loans: dict[int, Seat] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        """Whether others decide with this process."""
        return self.shared is not None and self.shared.is_up

    @property
    def others_tokens(self) -> int:
        """What other processes hold, as far as is known."""
        return self.shared.others_tokens if self.shared is not None else 0

    @property
    def others_seats(self) -> int:
        """How many requests of other processes run or wait, as far as is known."""
        return self.shared.others_seats if self.shared is not None else 0

    @property
    def has_waiters(self) -> bool:
        """Whether anybody waits for room."""
        return self._next() is not None or (self.shared is not None and self.shared.is_waited_for)

    def calls_back(self, seat: Seat) -> bool:
        """Whether what `seat` was lent is needed, with what other seats were lent, for the next one to be let in."""
        waiter = self._next()
        if waiter is None or not seat.lent_tokens or self.is_shared:
            return False
        leaving_tokens = sum(each.lent_tokens for each in self.held_tokens if each.is_leaving)
        free_tokens = self.window_tokens - self.used_tokens - self.others_tokens
        missing_tokens = waiter.tokens - free_tokens - leaving_tokens
        lent_tokens = sum(each.lent_tokens for each in self.held_tokens if not each.is_leaving)
        return 0 < missing_tokens <= lent_tokens

    def _next(self) -> _Waiter | None:
        waiters = (waiter for queue in (self.exchanges, self.entries) for waiter in queue.values())
        return next((waiter for waiter in waiters if not waiter.turn.done()), None)

    def fits(self, tokens: int, *, instead_of_tokens: int = 0) -> bool:
        """Whether `tokens` may be held, in place of some that are held: inside the window, or alone."""
        others_tokens = self.used_tokens + self.others_tokens - instead_of_tokens
        return others_tokens == 0 or others_tokens + tokens <= self.window_tokens

    def hold(self, seat: Seat, tokens: int) -> None:
        """Makes `seat` hold exactly `tokens`."""
        self.used_tokens += tokens - self.held_tokens[seat]
        self.held_tokens[seat] = tokens

    def admit(self) -> None:
        """Gives free room to those who wait, in their order, up to the first whose tokens do not fit."""
        if self.shared is not None:
            self.shared.wake()
        if not self.is_shared:
            self._admit_alone()

    def _admit_alone(self) -> None:
        for queue in (self.exchanges, self.entries):
            while queue:
                seat, waiter = next(iter(queue.items()))
                # Done in the queue: cancelled or out of time, and its task has not run since.
                if not waiter.turn.done():
                    if not self.fits(waiter.tokens):
                        if waiter is not self.told_of:
                            self.told_of = waiter
                            self.tell()
                        return
                    self.hold(seat, waiter.tokens)
                    waiter.turn.set_result(None)
                del queue[seat]

    def tell(self) -> None:
        """Has all who run look whether they have to give way, for one that waits.

        Twice: stopping one may be worth it only with another, who says just now what it could do without.
        """
        for _ in range(2 if self.has_waiters else 0):
            for seat in self.held_tokens:
                seat.hear()

    async def wait(self, seat: Seat, tokens: int, queue: _Queue, timeout_s: float, most_tokens: int = 0) -> None:
        """Returns when `seat`, which holds nothing, holds `tokens`, or more up to `most_tokens`.

        On any exception it still holds nothing.
        """
        loop = asyncio.get_running_loop()
        waiter = queue[seat] = _Waiter(tokens, loop.create_future(), most_tokens, next(self.numbers))
        self.admit()
        if not waiter.turn.done():
            await self._turn(seat, waiter, timeout_s)
        seat.widen(most_tokens)

    async def _turn(self, seat: Seat, waiter: _Waiter, timeout_s: float) -> None:
        # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a finished future.
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, waiter, self.clock())
        try:
            await waiter.turn
        except BaseException:
            # Also on cancellation: what was granted in the same moment would be lost.
            self.give_back(seat)
            raise
        finally:
            timer.cancel()

    async def lend(self, seat: Seat, most_tokens: int) -> None:
        """Lends `seat`, which holds room, what is free, up to `most_tokens`."""
        if not self.is_shared or most_tokens <= seat.tokens:
            seat.widen(most_tokens)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wider[seat] = _Waiter(0, turn, most_tokens, next(self.numbers))
        self.admit()
        try:
            await turn
        except BaseException:
            # Also on cancellation: nobody is there to be lent anything.
            self.give_back(seat)
            raise
        seat.widen(most_tokens)

    def stance(self) -> Stance:
        """What is held, lent and waited for, for the other processes."""
        seats = [seat for seat in self.held_tokens if seat.lent_tokens]
        self._loans = dict(enumerate(seat for seat in seats if not seat.is_leaving))
        loans = tuple(Loan(number, seat.lent_tokens) for number, seat in self._loans.items())
        wishes = [
            Wish(waiter.number, waiter.tokens, waiter.most_tokens, queue is self.exchanges, waiter.ticket)
            for queue in (self.exchanges, self.entries)
            for waiter in queue.values()
            if not waiter.turn.done()
        ]
        part = Part(
            held_tokens=self.used_tokens,
            seats=len(self.held_tokens),
            spare_tokens=sum(loan.tokens for loan in loans),
            leaving_tokens=sum(seat.lent_tokens for seat in seats if seat.is_leaving),
            wishes=tuple(wishes),
        )
        more = (Wish(waiter.number, seat.tokens, waiter.most_tokens) for seat, waiter in self.wider.items())
        return Stance(part, self.window_tokens, loans, tuple(more))

    def apply(self, verdict: Verdict) -> None:
        """Gives those who wait what all processes have agreed on, and tells those that have to give way."""
        tickets = {wish.number: wish.ticket for wish in verdict.part.wishes}
        for queue in (self.exchanges, self.entries, self.wider):
            for seat, waiter in list(queue.items()):
                waiter.ticket = tickets.get(waiter.number, waiter.ticket)
                # Who is not in it came while the others were asked, and is answered by the next one.
                if waiter.turn.done() or waiter.number not in verdict.grants:
                    continue
                self.hold(seat, max(self.held_tokens[seat], verdict.grants[waiter.number]))
                waiter.turn.set_result(None)
                del queue[seat]
        for number in verdict.called_back:
            # It may have begun anew meanwhile.
            if self._loans[number].lent_tokens:
                self._loans[number].give_way()
        self.tell()
        if verdict.others_seats and self.beside_others is not None:
            self.beside_others()

    def go_on_alone(self) -> None:
        """Decides for this process only."""
        for seat, waiter in list(self.wider.items()):
            del self.wider[seat]
            if not waiter.turn.done():
                waiter.turn.set_result(None)
        self._admit_alone()

    def emptied(self) -> None:
        """Forgets the pool, now that the others know that nobody is left."""
        self.forget()

    def held_for_s(self) -> float:
        """How long it will be held at most, where nobody is served any more."""
        now_s = asyncio.get_running_loop().time()
        return max((seat.leaves_at_s - now_s for seat, tokens in self.held_tokens.items() if tokens), default=0.0)

    def give_back(self, seat: Seat) -> None:
        """Makes `seat` neither hold nor wait for anything; an exchange that it waits for ends."""
        waiter = self.exchanges.pop(seat, None) or self.entries.pop(seat, None) or self.wider.pop(seat, None)
        if waiter is not None and not waiter.turn.done():
            waiter.turn.set_result(None)
        self.hold(seat, 0)
        self.admit()

    def _expire(self, waiter: _Waiter, since_s: float) -> None:
        if waiter.turn.done():
            # Cancelled or admitted in this very turn of the loop.
            return
        if self.is_shared and not waiter.ticket and self.clock() < since_s + _ANSWERED_S:
            # Whether there is room now is not known yet.
            asyncio.get_running_loop().call_later(_ANSWER_AGAIN_S, self._expire, waiter, since_s)
            return
        waiter.turn.set_exception(
            Overloaded(
                self.name,
                tokens=waiter.tokens,
                in_use_tokens=self.used_tokens + self.others_tokens,
                window_tokens=self.window_tokens,
                waited_s=self.clock() - since_s,
            )
        )


def shares_context(admission: Literal["auto", "pool", "off"], parallel: int) -> bool:
    """Whether requests to one instance are fitted beside each other.

    Args:
        admission: the operator's wish.
        parallel: how many requests the server says that it serves at once.
    """
    return admission == "pool" or (admission == "auto" and parallel > 1)


def server_of(case: RequestContext) -> str:
    """By what a request's server is known here."""
    return str(case.target.api_base)


class Reservation:
    """What one answer holds of its instance's context.

    Args:
        admission: who decides for all answers of this process.
        case: of the request.
    """

    def __init__(self, admission: Admission, case: RequestContext) -> None:
        self._admission = admission
        self._case = case
        self._seat: Seat | None = None
        # By its count, which stays the same object where a carrier tells the rest of it anew.
        self._taken_for: Count | None = None
        self._limit_tokens = 0
        self._is_running = False
        self._cuts = 0
        self._is_lent = False
        self._has_left = False
        self._present_in = ""

    def is_shared(self, window: Window) -> bool:
        """Whether requests to this instance have to be fitted beside each other."""
        return shares_context(self._case.settings.admission, window.parallel)

    def check(self, guarded: PreparedRequest, limit_tokens: int, *, answers: int, prompts: int) -> None:
        """Refuses what `take` would refuse whoever else is there; arguments as there.

        Raises:
            DoesNotFit: so many answers fit the context under no circumstances.
        """
        if self.is_shared(guarded.window) and (written := prompts * answers) > 1:
            _least_of_several(guarded, limit_tokens, 1, prompts=prompts, written=written)

    async def take(
        self, guarded: PreparedRequest, limit_tokens: int, *, is_watched: bool, answers: int = 1, prompts: int = 1
    ) -> int:
        """Waits for room for a prompt and its answer; gives the bound on the answer that the server has to be told.

        Once for each that is sent. It may have all that the window leaves where it is alone, else a share.

        Args:
            guarded: what is sent.
            limit_tokens: what the window leaves, and the client wants.
            is_watched: whether the answer comes in pieces, can be stopped, and can go on: such a one begins with less.
            answers: how many the server writes to each prompt (`n`) at once, each up to the bound; they share it.
            prompts: how many of them the request has, none longer than the one that was counted.

        Raises:
            DoesNotFit: so many answers fit the context under no circumstances.
            Overloaded: there was no room in time.
        """
        window = guarded.window
        if self._admission.make_way is not None:
            await self._admission.make_way(server_of(self._case))
        if not self.is_shared(window):
            self._be_present(window)
            return limit_tokens
        if self._taken_for is guarded.count:
            return min(limit_tokens, self._limit_tokens)
        prompt_tokens, least_tokens = prompts * _prompt_tokens(guarded), self._reserve_tokens(guarded)
        if not is_watched:
            least_tokens = max(window.tokens // max(window.parallel, 1) - guarded.count.tokens, least_tokens)
        if (written := prompts * answers) > 1:
            least_tokens = _least_of_several(guarded, limit_tokens, least_tokens, prompts=prompts, written=written)
        most_tokens = prompt_tokens + written * limit_tokens
        seat = await self._hold(
            window,
            prompt_tokens + written * min(limit_tokens, least_tokens),
            most_tokens if written == 1 else min(most_tokens, window.tokens),
        )
        limit_tokens = max(min(limit_tokens, (seat.tokens - prompt_tokens) // written), 1)
        self._taken_for, self._limit_tokens = guarded.count, limit_tokens
        return limit_tokens

    @asynccontextmanager
    async def for_summary(self, window: Window, history_tokens: int) -> AsyncGenerator[None, None]:
        """Room for a summary of so much history, in place of what is held now; waits for it.

        A summary may have more readers than the answer whose room this is: whoever leaves meanwhile leaves when it is
        made.

        Raises:
            Overloaded: there was none in time.
        """
        if not self.is_shared(window):
            self._be_present(window)
            yield
            return
        self._is_lent = True
        try:
            await self._hold(window, min(history_tokens + SUMMARY_EXTRA_TOKENS, window.tokens))
            yield
        finally:
            self._is_lent = False
            if self._has_left:
                self.leave()

    def rest(self) -> None:
        """Gives back what is held until the next answer, which then stands before those that have not begun.

        For an answer that waits for somebody else's summary: that may need the very room.
        """
        if self._seat is not None:
            self._count_seat(-1)
            self._seat.shrink(0)
            self._taken_for = None

    async def take_for_question(self, window: Window, prompt_tokens: int) -> None:
        """Waits for room for a prompt that is only counted.

        Raises:
            Overloaded: there was none in time.
        """
        if self.is_shared(window):
            await self._hold(window, prompt_tokens)

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits for room beside the answer."""
        return self._seat is not None and self._seat.is_waited_for

    @property
    def has_company(self) -> bool:
        """Whether anybody runs in its context beside the answer, or waits for room there."""
        return self._seat is not None and self._seat.has_company

    def is_called_back(self, guarded: PreparedRequest, generated_tokens: int, *, can_be_cut: bool) -> bool:
        """Whether a running answer has to stop, since somebody waits for what it was lent.

        Args:
            guarded: what was sent.
            generated_tokens: of its answer so far.
            can_be_cut: whether it could go on later where it stops now.
        """
        seat = self._seat
        if seat is None:
            return False
        if not can_be_cut:
            seat.needed_tokens = None
            return False
        again_tokens = guarded.count.tokens + generated_tokens + _GOING_ON_TOKENS
        margin = margin_tokens(again_tokens, guarded.count.error_ratio)
        seat.needed_tokens = again_tokens + margin + self._reserve_tokens(guarded)
        return seat.must_give_way

    @contextmanager
    def listening(self, hear: Callable[[], None]) -> Generator[None, None, None]:
        """Has `hear` called when somebody waits for room, which may be a reason to stop a silent server."""
        seat = self._seat
        if seat is None:
            yield
            return
        seat.listen(hear)
        try:
            yield
        finally:
            seat.listen(None)

    def stay(self) -> None:
        """Notes that an answer which was called back runs on: it could not go on later."""
        if self._seat is not None:
            self._seat.stay()

    def started(self) -> None:
        """Notes that the server has begun, and generates for as long as it is not told to stop."""
        self._is_running = True

    async def stopped(self) -> None:
        """Waits until the server has noticed that its answer was stopped: until then it holds the room all the same."""
        if self._is_running and self._seat is not None:
            await asyncio.sleep(self._admission.stopping_s)
        self._is_running = False

    def ended(self) -> None:
        """Notes that the server has ended the answer itself."""
        self._is_running = False

    def was_cut(self, *, is_spent: bool) -> None:
        """Notes that an answer goes on as another request, not for its own length's sake.

        Args:
            is_spent: its share was too small: its next part begins with the double, so that it comes to an end.
        """
        self._cuts += is_spent
        self._taken_for = None

    def beside(self, window: Window) -> int:
        """How many other answers of this process run or wait at the same instance."""
        pool = self._pool(window)
        running = max(self._admission.present(pool), self._admission.seated(pool))
        return max(running - 1, 0)

    def abandon(self) -> None:
        """Gives everything back when the server must have ended an answer that is no stream, and that nobody reads.

        It writes that to its end (a llama.cpp whose client had left a plain request, for half a minute; measured
        2026-11-22). Nobody hears when, so its bound at a slow machine's pace decides, and for 10 s at most: an overflow
        by a longer one is rarer than others who would wait for minutes, and their answers are restarted.
        """
        seat = self._seat
        if seat is None or self._is_lent:
            self.leave()
            return
        self._count_seat(-1)
        self._seat = None
        self._admission.leave_later(seat, after_s=min(self._limit_tokens * _SLOW_S_PER_TOKEN, _MOST_ABANDONED_S))
        self.leave()

    def leave(self) -> None:
        """Gives everything back; what an answer holds that has just been stopped, when its server has noticed it."""
        if self._present_in:
            self._admission.go(self._present_in)
            self._present_in = ""
        self._has_left = True
        if self._seat is None or self._is_lent:
            return
        self._count_seat(-1)
        seat, self._seat = self._seat, None
        if self._is_running:
            self._admission.leave_later(seat)
        else:
            seat.leave()

    def _be_present(self, window: Window) -> None:
        if not self._present_in:
            self._present_in = self._pool(window)
            self._admission.come(self._present_in)

    def _pool(self, window: Window) -> str:
        return f"{server_of(self._case)} {window.instance_id}"

    def _reserve_tokens(self, guarded: PreparedRequest) -> int:
        """With how much of an answer it begins; after each share that was spent with the double, up to the window."""
        budget = guarded.budget
        reserve = max(budget.output_buffer_tokens(guarded.count.tokens), budget.rules.answer_min_tokens)
        return min(reserve << min(self._cuts, _MAX_DOUBLINGS), guarded.window.tokens)

    async def _hold(self, window: Window, tokens: int, most_tokens: int = 0) -> Seat:
        timeout_s = self._case.settings.admission_timeout_s
        tokens = max(min(tokens, window.tokens), 1)
        if self._seat is None:
            self._seat = await self._admission.enter(
                self._pool(window),
                window_tokens=window.tokens,
                tokens=tokens,
                timeout_s=timeout_s,
                most_tokens=most_tokens,
            )
        else:
            self._count_seat(-1)
            await self._seat.exchange(tokens, timeout_s=timeout_s, most_tokens=most_tokens)
        self._count_seat(1)
        return self._seat

    def _count_seat(self, change: int) -> None:
        """Says to the request's other phases that it holds a place, which one that rests is not."""
        if self._seat is not None and self._seat.tokens > 0:
            self._case.attempts.seats += change


def _prompt_tokens(guarded: PreparedRequest) -> int:
    """The most that the prompt can take."""
    return guarded.count.tokens + margin_tokens(guarded.count.tokens, guarded.count.error_ratio)


def _least_of_several(
    guarded: PreparedRequest, limit_tokens: int, least_tokens: int, *, prompts: int, written: int
) -> int:
    """With how much each of several answers begins, so that all of them fit the context together.

    Raises:
        DoesNotFit: not even the shortest do.
    """
    window_tokens, prompt_tokens = guarded.window.tokens, prompts * _prompt_tokens(guarded)
    shortest_tokens = min(limit_tokens, guarded.budget.rules.answer_min_tokens)
    needed_tokens = prompt_tokens + written * shortest_tokens
    if needed_tokens > window_tokens:
        counted = "its prompt" if prompts == 1 else f"{prompts} prompts"
        raise DoesNotFit(
            f"This model's maximum context length is {window_tokens} tokens, which all answers of a request share. "
            f"However, you asked for {written} answers: {counted} and {shortest_tokens} tokens for each of them need "
            f"{needed_tokens} tokens (context_length_exceeded). Ask for fewer at a time.",
            shares=(
                Share(counted, prompt_tokens),
                Share(f"{written} answers of {shortest_tokens}", written * shortest_tokens),
            ),
            window_tokens=window_tokens,
            needed_tokens=needed_tokens,
        )
    return min(least_tokens, (window_tokens - prompt_tokens) // written)
