"""Which requests may run at the same time in one loaded context, and who is next.

LM Studio ≥ 0.4 shares the loaded context among its parallel slots, and when the running requests together outgrow
it, all of them die (lmstudio-bug-tracker 1628, 1757, 2201). So a request takes a seat before it is sent, and the seats
of a pool never hold more than its window. Called by `proxy/` around every upstream request to a pooled instance.

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
- Room is free when the server has stopped, not when the proxy has: whoever leaves says so (`Room.leave`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from litellm_compaction.errors import Overloaded

# A llama.cpp whose stream was closed was idle after 0.54 s (measured 2026-11-22).
_STOPPING_S = 0.6


class Usage(NamedTuple):
    """How full a pool is.

    Attributes:
        used_tokens: held by the running requests; above the window only for one alone, or after the window shrank.
        window_tokens: the newest known; 0 for a pool that nobody uses.
        waiting: requests in the queue, restarts included.
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

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, stopping_s: float = _STOPPING_S) -> None:
        """Makes it without pools.

        Args:
            clock: seconds, for the waiting time that an error names; time limits run on the event loop's own clock.
            stopping_s: how long a server generates on at most after its stream was closed.
        """
        self.stopping_s = stopping_s
        self._clock = clock
        self._pools: dict[Hashable, _Pool] = {}
        self._present: Counter[Hashable] = Counter()

    def come(self, pool: Hashable) -> None:
        """Notes an answer where nobody has to be fitted beside others, as far as is known."""
        self._present[pool] += 1

    def go(self, pool: Hashable) -> None:
        """Notes its end."""
        self._present[pool] -= 1
        if self._present[pool] <= 0:
            del self._present[pool]

    def seated(self, pool: Hashable) -> int:
        """How many run or wait in `pool`."""
        place = self._pools.get(pool)
        return len(place.held_tokens) if place is not None else 0

    def present(self, pool: Hashable) -> int:
        """How many such answers there are."""
        return self._present[pool]

    async def enter(self, pool: Hashable, *, window_tokens: int, tokens: int, timeout_s: float) -> Seat:
        """A seat that holds `tokens`, as soon as they fit beside the pool's other seats and it is this one's turn.

        Whoever holds a seat must not enter the same pool again (both would wait for each other): it exchanges. Not to
        be wrapped in `asyncio.wait_for`, which before Python 3.12 can lose the seat; `timeout_s` is the limit.

        Args:
            pool: the loaded instance; its `str` names it in errors.
            window_tokens: its context length; the newest that anybody gave counts. A smaller one stops nobody who runs.
            tokens: prompt and what is reserved for the answer, ≥ 1. More than the whole window is admitted into an
                empty pool only: to refuse it is the budget's business.
            timeout_s: for the wait; with 0, room must be free now.

        Raises:
            Overloaded: `timeout_s` is over.
        """
        place = self._pools.get(pool)
        if place is None:
            place = self._pools[pool] = _Pool(
                name=str(pool), clock=self._clock, forget=lambda: self._pools.pop(pool, None)
            )
        place.window_tokens = window_tokens
        seat = Seat(place)
        place.held_tokens[seat] = 0
        try:
            await place.wait(seat, tokens, place.entries, timeout_s)
        except BaseException:
            # Also on cancellation: whoever has not got the seat cannot leave it.
            seat.leave()
            raise
        return seat

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
        loop.call_later(self.stopping_s if after_s is None else after_s, seat.leave)

    def usage(self, pool: Hashable) -> Usage:
        """How full `pool` is, for metrics and `doctor`."""
        place = self._pools.get(pool)
        if place is None:
            return Usage(0, 0, 0)
        return Usage(place.used_tokens, place.window_tokens, len(place.exchanges) + len(place.entries))


class Seat:
    """One running request's share of a pool; used by one task at a time, left by whoever entered.

    Leave it when the server is done with the request: a closed upstream may still finish its prefill.
    """

    __slots__ = ("_gives_way", "_hear", "_pool", "needed_tokens")

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._gives_way = False
        # What it would hold if it were stopped now and went on; None where its answer cannot be cut.
        self.needed_tokens: int | None = None
        self._hear: Callable[[], None] | None = None

    @property
    def tokens(self) -> int:
        """What it holds; 0 while it waits, after an exchange that failed, and after it has left."""
        return self._pool.held_tokens.get(self, 0)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else runs in the pool or waits for room in it."""
        return len(self._pool.held_tokens) == 1

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
        if not self.tokens:
            # Whoever holds nothing does not run: it has to exchange.
            return
        if self.is_alone:
            pool.hold(self, max(self.tokens, most_tokens))
        elif not pool.has_waiters:
            even_tokens = min(most_tokens, pool.window_tokens // len(pool.held_tokens))
            free_tokens = max(pool.window_tokens - pool.used_tokens, 0)
            pool.hold(self, max(self.tokens, min(even_tokens, self.tokens + free_tokens)))

    def shrink(self, tokens: int) -> None:
        """Gives back what it holds above `tokens` (≥ 0); no more than it holds is no change."""
        if tokens < self.tokens:
            self._pool.hold(self, tokens)
            self._pool.admit()

    async def exchange(self, tokens: int, *, timeout_s: float) -> None:
        """Makes it hold `tokens` (≥ 1), more or fewer, for another upstream request in place of the one before.

        What fits into the room that it holds is exchanged at once. For more it first gives back everything and then
        waits, before all entries and behind earlier exchanges: it holds nothing while it waits, so restarts cannot
        block each other however many wait. The upstream before must have ended. On any exception it holds nothing
        and may exchange again.

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
            return
        pool.hold(self, 0)
        await pool.wait(self, tokens, pool.exchanges, timeout_s)
        if self not in pool.held_tokens:
            raise RuntimeError("A seat left while it waited for an exchange.")

    def leave(self) -> None:
        """Gives everything back, for good; again is no change."""
        pool = self._pool
        if self in pool.held_tokens:
            pool.give_back(self)
            del pool.held_tokens[self]
            if not pool.held_tokens:
                pool.forget()

    async def __aenter__(self) -> Seat:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class _Waiter(NamedTuple):
    tokens: int
    turn: asyncio.Future[None]


_Queue = OrderedDict[Seat, _Waiter]


@dataclass(slots=True, kw_only=True, eq=False)
class _Pool:
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

    @property
    def has_waiters(self) -> bool:
        """Whether anybody waits for room."""
        return self._next() is not None

    def calls_back(self, seat: Seat) -> bool:
        """Whether what `seat` was lent is needed, with what other seats were lent, for the next one to be let in."""
        waiter = self._next()
        if waiter is None or not seat.lent_tokens:
            return False
        leaving_tokens = sum(each.lent_tokens for each in self.held_tokens if each.is_leaving)
        missing_tokens = waiter.tokens - (self.window_tokens - self.used_tokens) - leaving_tokens
        lent_tokens = sum(each.lent_tokens for each in self.held_tokens if not each.is_leaving)
        return 0 < missing_tokens <= lent_tokens

    def _next(self) -> _Waiter | None:
        waiters = (waiter for queue in (self.exchanges, self.entries) for waiter in queue.values())
        return next((waiter for waiter in waiters if not waiter.turn.done()), None)

    def fits(self, tokens: int, *, instead_of_tokens: int = 0) -> bool:
        """Whether `tokens` may be held, in place of some that are held: inside the window, or alone."""
        others_tokens = self.used_tokens - instead_of_tokens
        return others_tokens == 0 or others_tokens + tokens <= self.window_tokens

    def hold(self, seat: Seat, tokens: int) -> None:
        """Makes `seat` hold exactly `tokens`."""
        self.used_tokens += tokens - self.held_tokens[seat]
        self.held_tokens[seat] = tokens

    def admit(self) -> None:
        """Gives free room to those who wait, in their order, up to the first whose tokens do not fit."""
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

    async def wait(self, seat: Seat, tokens: int, queue: _Queue, timeout_s: float) -> None:
        """Returns when `seat`, which holds nothing, holds `tokens`; on any exception it still holds nothing."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        queue[seat] = _Waiter(tokens, turn)
        self.admit()
        if turn.done():
            return
        # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a finished future.
        timer = loop.call_later(timeout_s, self._expire, turn, tokens, self.clock())
        try:
            await turn
        except BaseException:
            # Also on cancellation: what was granted in the same moment would be lost.
            self.give_back(seat)
            raise
        finally:
            timer.cancel()

    def give_back(self, seat: Seat) -> None:
        """Makes `seat` neither hold nor wait for anything; an exchange that it waits for ends."""
        waiter = self.exchanges.pop(seat, None) or self.entries.pop(seat, None)
        if waiter is not None and not waiter.turn.done():
            waiter.turn.set_result(None)
        self.hold(seat, 0)
        self.admit()

    def _expire(self, turn: asyncio.Future[None], tokens: int, since_s: float) -> None:
        # Done: cancelled or admitted in this very turn of the loop.
        if not turn.done():
            turn.set_exception(
                Overloaded(
                    self.name,
                    tokens=tokens,
                    in_use_tokens=self.used_tokens,
                    window_tokens=self.window_tokens,
                    waited_s=self.clock() - since_s,
                )
            )
