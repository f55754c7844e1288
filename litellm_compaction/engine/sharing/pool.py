"""One loaded context: which requests may run in it at the same time, and which is next.

LM Studio ≥ 0.4 shares the loaded context among its parallel slots, and when the running requests together outgrow it,
all of them die (lmstudio-bug-tracker 1628, 1757, 2201). So a request takes a seat before it is sent, and the seats of
a context never hold more than its window. `reservation.py` takes it for an answer, and says how much that needs.

A seat holds all that its request can come to: the prompt, and the `max_tokens` that the server was told. The server
would not know of a change, so a running seat never grows: an answer that comes to its bound goes on as another request
(`exchange`). Alone it gets all that it would like, beside others an even part, and while another waits the least with
which it is worth beginning. What it could do without is asked back when another waits (`must_give_way`): an answer that
can be cut is stopped at its next chunk, if that lets the next one in.

First come, first served, restarts first, over all processes that share a store: each writes down what it holds and what
the first of its requests that wait needs, and reads the same of the others, in one step before it lets any in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from litellm_compaction.engine.sharing.leases import RENEWED_EVERY_S, Leases, shared_name
from litellm_compaction.errors import Overloaded, StoreError

if TYPE_CHECKING:
    from litellm_compaction.engine.sharing.admission import Admission

logger = logging.getLogger("litellm_compaction")

# A request that waits longer is told of: to the operator, and to its client.
TOLD_AFTER_S = 10.0
# No request is refused before the other processes have been asked; a store that does not answer is given up first.
_ANSWERED_S, _ANSWER_AGAIN_S = 3.5, 0.02
_MOST_WAIT_S = 86_400.0
# Beside other processes one looks this often if there is room for one that waits, or if theirs wait.
_WAITING_S, _RUNNING_S = 0.1, 0.25


class Note(NamedTuple):
    """What one process tells the others of a context.

    Attributes:
        held_tokens: by its running requests.
        seats: requests that run or wait.
        wanted_tokens: by the first of those that wait, 0 for none.
        is_later: that one has not begun; restarts stand before it.
        ticket: its place among those of all processes.
    """

    held_tokens: int = 0
    seats: int = 0
    wanted_tokens: int = 0
    is_later: bool = False
    ticket: int = 0


class Seat:
    """One running request's share of a pool; used by one task at a time, left by the one that entered.

    Leave it when the server is done with the request: a closed upstream may still finish its prefill.

    Attributes:
        tokens: what it holds; 0 while it waits, after an exchange that failed, and after it has left.
        needed_tokens: what it would hold if it were stopped now and went on; None if its answer cannot be cut.
        gives_way: it was told to stop, so that what it could do without is as good as free.
        waits: for what; None if it does not.
    """

    __slots__ = ("_pool", "gives_way", "needed_tokens", "tokens", "waits")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.tokens = 0
        self.needed_tokens: int | None = None
        self.gives_way = False
        self.waits: _Wait | None = None

    @property
    def has_company(self) -> bool:
        """Returns True if others run in the pool or may wait for room; asked for each chunk of each answer."""
        pool = self._pool
        return len(pool.seats) > 1 or pool.others_seats > 0 or pool.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Returns True if a request waits for room in its pool."""
        return self._pool.is_waited_for

    @property
    def spare_tokens(self) -> int:
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
        and may exchange again. Up to `most_tokens` it may get, as in `Admission.enter`.

        Raises:
            Overloaded: `timeout_s` is over.
            RuntimeError: it has left, or waits already: an error of the caller.
        """
        pool = self._pool
        if self not in pool.seats or self.waits is not None:
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
        if self in self._pool.seats:
            self._pool.leave(self)


class _Wait:
    """One wait of a seat: for `tokens`, or, if these are 0, for what it may have on top of its own.

    Attributes:
        ticket: its place in the queue of all processes; 0 until it has one.
        turn: done when it is over.
    """

    __slots__ = ("is_later", "most_tokens", "seat", "ticket", "tokens", "turn")

    def __init__(self, seat: Seat, tokens: int, most_tokens: int, *, is_restart: bool) -> None:
        self.seat = seat
        self.tokens, self.most_tokens, self.is_later = tokens, most_tokens, not is_restart
        self.ticket = 0
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Decision(NamedTuple):
    """What a process does next.

    Attributes:
        note: its own from now on, which the others have to see before it moves.
        grants: the tokens that seats hold from now on, by their waits.
        stops: seats that have to give way.
        tickets: by wait.
        is_waited_for: a request waits that does not fit.
    """

    note: Note | None
    grants: dict[_Wait, int]
    stops: list[Seat]
    tickets: dict[_Wait, int]
    is_waited_for: bool


class Pool:
    """One loaded context, and this process's part in it.

    Every change happens between two awaits, and ends in `changed`, which gives free room away at once: a woken task
    finds its tokens already held, so none can slip in before it.

    Attributes:
        seats: all that have not left, also those that wait.
        others: the other processes' notes, as they were last heard.
        is_shared: nobody is let in before the others were asked.
    """

    def __init__(self, name: str, admission: Admission, leases: Leases | None) -> None:
        self.name = name
        self.window_tokens = 0
        self.seats: list[Seat] = []
        self.others: Sequence[Note] = ()
        self.is_waited_for = False
        self.is_shared = leases is not None
        self._admission = admission
        self._waits: list[_Wait] = []
        self._has_changed = asyncio.Event()
        self._telling = leases.tasks.begin(self._tell_others(leases)) if leases is not None else None

    @property
    def used_tokens(self) -> int:
        return sum(seat.tokens for seat in self.seats)

    @property
    def others_seats(self) -> int:
        return sum(note.seats for note in self.others)

    @property
    def others_tokens(self) -> int:
        return sum(note.held_tokens for note in self.others)

    def waiting(self) -> list[_Wait]:
        """Waits in their order, without those that were cancelled and whose tasks have not run since."""
        return [wait for wait in self._waits if not wait.turn.done()]

    def fits(self, tokens: int, *, instead_of_tokens: int) -> bool:
        """Returns True if `tokens` may be held in place of some that are held: inside the window, or alone."""
        beside_tokens = self.used_tokens + self.others_tokens - instead_of_tokens
        return beside_tokens == 0 or beside_tokens + tokens <= self.window_tokens

    def changed(self) -> None:
        """Gives free room to waiting requests, and asks some back: here, or when the others have been asked."""
        self._has_changed.set()
        if not self.is_shared:
            self._apply(self._decided(self.others), self.others)

    def leave(self, seat: Seat) -> None:
        self.seats.remove(seat)
        self._give_back(seat)
        # If there are others it is forgotten when they know.
        if not self.seats and (self._telling is None or self._telling.done()):
            self._admission.forget(self.name)

    async def wait(self, seat: Seat, tokens: int, timeout_s: float, most_tokens: int, *, is_restart: bool) -> None:
        """Returns when `seat` holds `tokens`, or more up to `most_tokens`; with 0 tokens, when it was given more.

        On any exception it holds nothing.
        """
        loop = asyncio.get_running_loop()
        wait = seat.waits = _Wait(seat, tokens, most_tokens, is_restart=is_restart)
        self._waits.append(wait)
        self.changed()
        if not wait.turn.done():
            # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a finished future.
            limit = loop.call_later(min(timeout_s, _MOST_WAIT_S), self._expire, wait, self._admission.clock())
            telling = loop.call_later(TOLD_AFTER_S, self._tell_operator, wait)
            try:
                await wait.turn
            except BaseException:
                # Also on cancellation: what was granted in the same moment would be lost.
                self._give_back(seat)
                raise
            finally:
                limit.cancel()
                telling.cancel()
        self._waits = [each for each in self._waits if each is not wait]
        seat.waits = None

    def _give_back(self, seat: Seat) -> None:
        """Makes `seat` neither hold nor wait for anything; an exchange that it waits for ends."""
        wait, seat.waits, seat.tokens = seat.waits, None, 0
        if wait is not None:
            self._waits.remove(wait)
            if not wait.turn.done():
                wait.turn.set_result(None)
        self.changed()

    def _decided(self, others: Sequence[Note]) -> _Decision:
        """What this process does beside the others; changes nothing."""
        waits = self.waiting()
        tickets = dict(_tickets(waits, others))
        used_tokens = self.used_tokens + sum(note.held_tokens for note in others)
        # Those that hold some and would like more stand outside of the queue: they have what they need.
        grants = {wait: wait.seat.tokens for wait in waits if not wait.tokens}
        missing_tokens = 0
        queue = [(wait.is_later, tickets[wait], wait.tokens, wait) for wait in waits if wait.tokens]
        theirs = [(note.is_later, note.ticket, note.wanted_tokens, None) for note in others if note.wanted_tokens]
        for _, _, tokens, wait in sorted((*queue, *theirs), key=lambda each: each[:2]):
            if used_tokens and used_tokens + tokens > self.window_tokens:
                missing_tokens = used_tokens + tokens - self.window_tokens
                break
            # Room for others' is theirs before they have heard of it.
            used_tokens += tokens
            if wait is not None:
                grants[wait] = tokens
        seats = len(self.seats) + sum(note.seats for note in others)
        for wait, tokens in grants.items() if not missing_tokens else ():
            free_tokens = max(self.window_tokens - used_tokens, 0)
            even_tokens = min(wait.most_tokens, self.window_tokens // max(seats, 1), tokens + free_tokens)
            grants[wait] = max(tokens, wait.most_tokens if seats <= 1 else even_tokens)
            used_tokens += grants[wait] - tokens
        held_tokens = self.used_tokens + sum(tokens - wait.seat.tokens for wait, tokens in grants.items())
        head = min((each for each in queue if each[3] not in grants), key=lambda each: each[:2], default=None)
        note = Note(held_tokens, len(self.seats), head[2], *head[:2]) if head else Note(held_tokens, len(self.seats))
        stops = list(_enough(self.seats, missing_tokens))
        return _Decision(note if self.seats else None, grants, stops, tickets, missing_tokens > 0)

    def _apply(self, decision: _Decision, others: Sequence[Note]) -> None:
        """Gives waiting requests what all processes have agreed on, and tells those that have to give way."""
        for wait, ticket in decision.tickets.items():
            wait.ticket = ticket
        for wait, tokens in decision.grants.items():
            # One that was cancelled while the others were asked gets nothing.
            if not wait.turn.done():
                wait.seat.tokens = tokens
                wait.turn.set_result(None)
        for seat in decision.stops:
            # It may have begun anew meanwhile.
            seat.gives_way = seat.spare_tokens > 0
        self.others, self.is_waited_for = others, decision.is_waited_for
        if self.others_seats:
            self._admission.are_beside_others(self.name)

    async def _tell_others(self, leases: Leases) -> None:
        """Tells this process's part to the others, and does what it may beside theirs, until its last seat has left."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._has_changed.clear()
                note, pause_s = await self._agreed(leases)
                if note is None and not self.seats:
                    return
                # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a change.
                timer = loop.call_later(pause_s, self._has_changed.set)
                try:
                    await self._has_changed.wait()
                finally:
                    timer.cancel()
        finally:
            # The process may end; a request that is still served is served by it alone.
            self.is_shared, self.others = False, ()
            self.changed()
            if not self.seats:
                self._admission.forget(self.name)

    async def _agreed(self, leases: Leases) -> tuple[Note | None, float]:
        """Asks the others and does what is allowed; gives its note and the seconds for which that holds."""

        def decide(bodies: Sequence[bytes]) -> tuple[bytes | None, tuple[_Decision, Sequence[Note]]]:
            others = list(_notes(bodies))
            decision = self._decided(others)
            return json.dumps(decision.note).encode() if decision.note is not None else None, (decision, others)

        try:
            decision, others = await leases.update(f"pool {shared_name(self.name)}", decide)
        except StoreError:
            self.is_shared = not leases.is_lost
            if self.is_shared:
                return Note(), _RUNNING_S
            self.others = ()
            self.changed()
            self._has_changed.clear()
            return (Note() if self.seats else None), RENEWED_EVERY_S
        self.is_shared = True
        self._apply(decision, others)
        if not others:
            return decision.note, RENEWED_EVERY_S
        return decision.note, _WAITING_S if self.waiting() else _RUNNING_S

    def _tell_operator(self, wait: _Wait) -> None:
        if not wait.turn.done():
            logger.warning(
                "waits_for_room model=%s tokens=%d in_use=%d window=%d answers=%d waited_s=%.0f",
                self.name.rpartition(" ")[2],
                wait.tokens,
                self.used_tokens + self.others_tokens,
                self.window_tokens,
                sum(each.tokens > 0 for each in self.seats) + self.others_seats,
                TOLD_AFTER_S,
            )

    def _expire(self, wait: _Wait, since_s: float) -> None:
        if wait.turn.done():
            # Cancelled or admitted in this very turn of the loop.
            return
        waited_s = self._admission.clock() - since_s
        if self.is_shared and not wait.ticket and waited_s < _ANSWERED_S:
            # It is not known yet if there is room now.
            asyncio.get_running_loop().call_later(_ANSWER_AGAIN_S, self._expire, wait, since_s)
            return
        wait.turn.set_exception(
            Overloaded(
                self.name,
                tokens=wait.tokens,
                in_use_tokens=self.used_tokens + self.others_tokens,
                window_tokens=self.window_tokens,
                waited_s=waited_s,
            )
        )


def _tickets(waits: Iterable[_Wait], others: Sequence[Note]) -> Iterator[tuple[_Wait, int]]:
    """Gives each wait its place: behind all that have one."""
    waits = list(waits)
    last = max((*(wait.ticket for wait in waits), *(note.ticket for note in others)), default=0)
    for wait in waits:
        last += not wait.ticket
        yield wait, wait.ticket or last


def _enough(seats: Iterable[Seat], missing_tokens: int) -> Iterator[Seat]:
    """The first seats that give back so much together; none where all of them could not."""
    able = [seat for seat in seats if seat.spare_tokens and not seat.gives_way]
    missing_tokens -= sum(seat.spare_tokens for seat in seats if seat.gives_way)
    if missing_tokens > sum(seat.spare_tokens for seat in able):
        return
    for seat in able:
        if missing_tokens <= 0:
            return
        missing_tokens -= seat.spare_tokens
        yield seat


def _notes(bodies: Sequence[bytes]) -> Iterator[Note]:
    """The others' notes; what cannot be understood is as if it were not there."""
    for body in bodies:
        with contextlib.suppress(ValueError, TypeError):
            held, seats, wanted, is_later, ticket = json.loads(body)
            yield Note(max(int(held), 0), max(int(seats), 0), max(int(wanted), 0), bool(is_later), max(int(ticket), 0))
