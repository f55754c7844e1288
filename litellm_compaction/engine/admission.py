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
- Every request is promised only the least with which it is worth beginning. What is free beyond that is lent to it:
  all of it to one that is alone, up to an even part beside others, nothing while another waits.
- What was lent is called back when another waits for it (`must_give_way`): an answer that can be cut is stopped at its
  next chunk, and goes on with what it needs. That costs it one more request; the other would else wait for its end. It
  is stopped only if that lets the next in the queue in, so none is cut in vain, and never twice for the same.
- Room is free when the server has stopped, not when the proxy has: whoever leaves says so (`Reservation.leave`).

`core/sharing.py` decides, for one process and for several that send to one context; `shared_pool.py` asks the others.
Where these cannot be reached, each process decides for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

from litellm_compaction.core.budget import margin_tokens
from litellm_compaction.core.sharing import Loan, Part, Verdict, Wish, settle
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
# Most answers are far shorter than their bound: no request waits longer for one that nobody reads.
_MOST_ABANDONED_S = 10.0
# What makes a model go on, and what the template puts around the answer so far.
_GOING_ON_TOKENS = 128
# Of the room with which an answer goes on whose share was too small; with so many even 256 tokens are a whole window.
_MAX_DOUBLINGS = 12
# Nobody is refused before the other processes have been asked, which takes a millisecond; a board that does not answer
# is given up before this.
_ANSWERED_S, _ANSWER_AGAIN_S = 3.5, 0.02
_MOST_WAIT_S = 86_400.0


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
        self._pools: dict[str, _Pool] = {}
        # Answers by instance where nothing is shared.
        self.present: Counter[str] = Counter()
        # Who gives the engine back to an answer that comes; not called for what is written ahead.
        self.make_way: Callable[[str], Coroutine[Any, Any, None]] | None = None

    def running(self, pool: str) -> int:
        """How many answers run or wait in `pool`, those of other processes included, as far as they are known."""
        place = self._pools.get(pool)
        return max(self.present[pool], len(place.seats) + place.others_seats if place is not None else 0)

    def is_idle(self, server: str) -> bool:
        """Whether no answer runs, waits or is about to at any instance of a server: they share its processor."""
        return not any(pool.startswith(f"{server} ") for pool in (*self._pools, *+self.present))

    async def enter(
        self, pool: str, *, window_tokens: int, tokens: int, timeout_s: float, most_tokens: int = 0
    ) -> Seat:
        """A seat that holds `tokens`, as soon as they fit beside the pool's other seats and it is this one's turn.

        Whoever holds a seat must not enter the same pool again (both would wait for each other): it exchanges. Not to
        be wrapped in `asyncio.wait_for`, which before Python 3.12 can lose the seat; `timeout_s` is the limit.

        Args:
            pool: the loaded instance; named in errors.
            window_tokens: its context length; the newest that anybody gave counts. A smaller one stops nobody who runs.
            tokens: prompt and what is reserved for the answer, ≥ 1. More than the whole window is admitted into an
                empty pool only: to refuse it is the budget's business.
            timeout_s: for the wait; with 0, room must be free now.
            most_tokens: up to so much it is lent of what is free, if nothing waits: alone all of it, else an even part.

        Raises:
            Overloaded: `timeout_s` is over.
        """
        place = self._pools.get(pool)
        if place is None:
            place = self._pools[pool] = _Pool(name=pool, clock=self._clock, forget=lambda: self._pools.pop(pool, None))
            if self._coordination is not None:
                place.shared = SharedPool(self._coordination, f"pool {shared_name(pool)}", place)
                place.beside_others = lambda: self._leave_to_others(pool)
        place.window_tokens = window_tokens
        seat = Seat(place)
        place.seats.append(seat)
        try:
            await place.wait(seat, tokens, timeout_s, most_tokens, is_restart=False)
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
        """Has a seat left when the server has stopped: after so long, or as soon as it notices a closed stream."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            seat.leave()
            return
        seat.leaves_at_s = loop.time() + (self.stopping_s if after_s is None else after_s)
        loop.call_at(seat.leaves_at_s, seat.leave)

    def usage(self, pool: str) -> Usage:
        """How full `pool` is, for metrics and `doctor`."""
        place = self._pools.get(pool)
        if place is None:
            return Usage(0, 0, 0)
        return Usage(place.used_tokens + place.others_tokens, place.window_tokens, len(place.waiting()))


class Seat:
    """One running request's share of a pool; used by one task at a time, left by whoever entered.

    Leave it when the server is done with the request: a closed upstream may still finish its prefill.

    Attributes:
        tokens: what it holds; 0 while it waits, after an exchange that failed, and after it has left.
        needed_tokens: what it would hold if it were stopped now and went on; None where its answer cannot be cut.
        gives_way: it was told to stop, so that what it was lent is as good as free.
        leaves_at_s: by the event loop's clock, where it is left when its server has stopped; else infinite.
        turn: set while it waits for `wanted_tokens`, or, if these are 0, for what it is lent beside its own.
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
        """Whether anybody else runs in the pool or may wait for room in it; asked for each chunk of each answer."""
        shared = self._pool.shared
        return len(self._pool.seats) > 1 or (shared is not None and (shared.others_seats > 0 or shared.is_waited_for))

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits for room in its pool."""
        return self._pool.has_waiters

    @property
    def lent_tokens(self) -> int:
        """How much it holds that it could do without, for now."""
        return 0 if self.needed_tokens is None else max(self.tokens - self.needed_tokens, 0)

    def must_give_way(self, needed_tokens: int | None) -> bool:
        """Whether it has to stop now, for one that waits; once it was told so, it is taken at its word.

        Args:
            needed_tokens: what it would hold if it were stopped now and went on; None where it cannot go on later.
        """
        is_news = self.needed_tokens is None and needed_tokens is not None
        self.needed_tokens = needed_tokens
        if needed_tokens is None:
            self.gives_way = False
        elif not self.gives_way and self._pool.has_waiters and (is_news or not self._pool.is_shared):
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
        waits, before all entries and behind earlier exchanges: it holds nothing while it waits, so restarts cannot
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

    def leave(self) -> None:
        """Gives everything back, for good; again is no change."""
        pool = self._pool
        if self in pool.seats:
            pool.seats.remove(self)
            pool.give_back(self)
            # Where there are others it is forgotten when they know.
            if not pool.seats and (pool.shared is None or pool.shared.has_ended):
                pool.forget()

    async def __aenter__(self) -> Seat:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


@dataclass(slots=True, kw_only=True, eq=False)
class _Pool:
    """One loaded context, and this process's part in it.

    Every change happens between two awaits, and ends in `changed`, which gives free room away at once: a woken task
    finds its tokens already held, so nobody can slip in before it. The rules are `core/sharing.py`'s, for one process
    and for several.

    Attributes:
        forget: called when the last seat has left.
        seats: all that have not left, also those that wait.
        shared: the other processes that send to it; None for none.
        beside_others: called where other processes were seen in it.
    """

    name: str
    clock: Callable[[], float]
    forget: Callable[[], object]
    window_tokens: int = 0
    seats: list[Seat] = field(default_factory=list)
    shared: SharedPool | None = None
    beside_others: Callable[[], object] | None = None
    _waits: int = 0
    _loans: dict[int, Seat] = field(default_factory=dict)

    @property
    def used_tokens(self) -> int:
        """Held by the seats of this process."""
        return sum(seat.tokens for seat in self.seats)

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
        return any(seat.wanted_tokens for seat in self.waiting()) or (
            self.shared is not None and self.shared.is_waited_for
        )

    def waiting(self) -> list[Seat]:
        """Seats in the order of their waits, without those that were cancelled and whose tasks have not run since."""
        waiting = (seat for seat in self.seats if seat.turn is not None and not seat.turn.done())
        return sorted(waiting, key=lambda seat: seat.number)

    def fits(self, tokens: int, *, instead_of_tokens: int) -> bool:
        """Whether `tokens` may be held in place of some that are held: inside the window, or alone."""
        others_tokens = self.used_tokens + self.others_tokens - instead_of_tokens
        return others_tokens == 0 or others_tokens + tokens <= self.window_tokens

    def changed(self) -> None:
        """Gives free room to those who wait, and calls back what was lent: here, or when the others have been asked."""
        if self.shared is not None:
            self.shared.wake()
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
            try:
                await turn
            except BaseException:
                # Also on cancellation: what was granted in the same moment would be lost.
                self.give_back(seat)
                raise
            finally:
                timer.cancel()
        seat.turn = None

    def stance(self) -> Stance:
        """What is held, lent and waited for."""
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
        return Stance(part, self.window_tokens, loans, tuple(more))

    def apply(self, verdict: Verdict) -> None:
        """Gives those who wait what all processes have agreed on, and tells those that have to give way."""
        tickets = {wish.number: wish.ticket for wish in verdict.part.wishes}
        waiting = {seat.number: seat for seat in self.waiting()}
        for number, seat in waiting.items():
            seat.ticket = tickets.get(number, seat.ticket)
        # In their order. Who is not in it came while the others were asked, and is answered by the next one.
        for number, tokens in verdict.grants.items():
            if (granted := waiting.get(number)) is not None and granted.turn is not None:
                granted.tokens = max(granted.tokens, tokens)
                granted.turn.set_result(None)
        for number in verdict.called_back:
            # It may have begun anew meanwhile.
            if self._loans[number].lent_tokens:
                self._loans[number].gives_way = True
        if verdict.others_seats and self.beside_others is not None:
            self.beside_others()

    def go_on_alone(self) -> None:
        """Decides for this process only."""
        stance = self.stance()
        self.apply(settle(stance.part, (), stance.window_tokens, loans=stance.loans, more=stance.more))

    def emptied(self) -> None:
        """Forgets the pool, now that the others know that nobody is left."""
        self.forget()

    def held_for_s(self) -> float:
        """How long it will be held at most, where nobody is served any more."""
        now_s = asyncio.get_running_loop().time()
        return max((seat.leaves_at_s - now_s for seat in self.seats if seat.tokens), default=0.0)

    def give_back(self, seat: Seat) -> None:
        """Makes `seat` neither hold nor wait for anything; an exchange that it waits for ends."""
        turn, seat.turn, seat.tokens = seat.turn, None, 0
        if turn is not None and not turn.done():
            turn.set_result(None)
        self.changed()

    def _expire(self, seat: Seat, turn: asyncio.Future[None], since_s: float) -> None:
        if turn.done():
            # Cancelled or admitted in this very turn of the loop.
            return
        if self.is_shared and not seat.ticket and self.clock() < since_s + _ANSWERED_S:
            # Whether there is room now is not known yet.
            asyncio.get_running_loop().call_later(_ANSWER_AGAIN_S, self._expire, seat, turn, since_s)
            return
        turn.set_exception(
            Overloaded(
                self.name,
                tokens=seat.wanted_tokens,
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
            return seat.must_give_way(None)
        again_tokens = guarded.count.tokens + generated_tokens + _GOING_ON_TOKENS
        margin = margin_tokens(again_tokens, guarded.count.error_ratio)
        return seat.must_give_way(again_tokens + margin + self._reserve_tokens(guarded))

    def stay(self) -> None:
        """Notes that an answer which was called back runs on: it could not go on later."""
        if self._seat is not None:
            self._seat.must_give_way(None)

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
        return max(self._admission.running(self._pool(window)) - 1, 0)

    def abandon(self) -> None:
        """Gives everything back when the server must have ended an answer that is no stream, and that nobody reads.

        It writes that to its end (a llama.cpp whose client had left a plain request, for half a minute; measured
        2026-11-22) and does not say when, so its bound at a slow machine's pace decides, and for 10 s at most.
        """
        seat = self._seat
        if seat is not None and not self._is_lent:
            self._count_seat(-1)
            self._seat = None
            self._admission.leave_later(seat, after_s=min(self._limit_tokens * _SLOW_S_PER_TOKEN, _MOST_ABANDONED_S))
        self.leave()

    def leave(self) -> None:
        """Gives everything back; what an answer holds that has just been stopped, when its server has noticed it."""
        if self._present_in:
            self._admission.present[self._present_in] -= 1
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
            self._admission.present[self._present_in] += 1

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
