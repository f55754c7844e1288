"""Which requests may run in one loaded context at the same time, and which is next.

LM Studio ≥ 0.4 shares the loaded context among its parallel slots, and when the running requests together outgrow it,
all of them die (lmstudio-bug-tracker 1628, 1757, 2201). So the seats of a context never hold more than its window.

A seat holds all that its request can come to: the prompt, and the `max_tokens` that the server was told, which never
change. Alone it gets all that it would like, beside others an even part, and while another waits the least with which
it is worth beginning. What it could do without is asked back then (`must_give_way`): an answer that can be cut is
stopped at its next chunk, if that lets the next one in, and goes on as another request.

First come, first served, restarts first, over all processes that share a store: each writes down what it holds and what
the first of its requests that wait needs, and reads the same of the others, in one step before it lets any in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from litellm_compaction.engine.sharing.leases import RENEWED_EVERY_S, Leases, shared_name
from litellm_compaction.errors import Overloaded, StoreError

logger = logging.getLogger("litellm_compaction")

# A request that waits longer is told of: to the operator, and to its client.
TOLD_AFTER_S = 10.0
# No request is refused before the other processes have been asked; a store that does not answer is given up first.
_ANSWERED_S = 3.5
# Beside other processes one looks this often if there is room for one that waits, or if theirs wait.
_WAITING_S, _RUNNING_S = 0.1, 0.25
# A llama.cpp whose stream was closed is idle after half a second.
_STOPPING_S = 0.6

MakeWay: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


class Note(NamedTuple):
    """One process's word to the others about a context."""

    held_tokens: int  # By its running requests.
    seats: int  # Requests that run or wait.
    wanted_tokens: int  # By the first of those that wait, 0 for none.
    is_later: bool  # That one has not begun; restarts stand before it.
    ticket: int  # Its place among those of all processes.


class Seat:
    """One answer's share of a context, for one upstream request after another; used by one task at a time.

    Attributes:
        owner: whose it is; `Admission.holds` knows it by that.
        tokens: what it holds; 0 while it waits, after a wait that failed, and after it has left.
        needed_tokens: what it would hold if it were stopped now and went on; None if its answer cannot be cut.
        gives_way: it was told to stop, so that what it could do without is as good as free.
        wanted_tokens, most_tokens, is_later, ticket, turn: of its last wait, which is over when `turn` is done.
        left: done when it has left.
    """

    def __init__(self, pool: Pool, owner: object) -> None:
        self._pool, self.owner = pool, owner
        self.tokens = self.wanted_tokens = self.most_tokens = self.ticket = 0
        self.needed_tokens: int | None = None
        self.gives_way = self.is_later = False
        self.turn, self.left = (asyncio.get_running_loop().create_future() for _ in range(2))
        self.turn.set_result(None)

    @property
    def waits(self) -> bool:
        return not self.turn.done()

    @property
    def has_company(self) -> bool:
        """Others run in the context, or may wait for room; asked for each chunk of each answer."""
        return len(self._pool.seats) > 1 or bool(self._pool.others) or self.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        return self._pool.missing_tokens > 0

    @property
    def spare_tokens(self) -> int:
        """The part that it could do without, for now."""
        return 0 if self.needed_tokens is None else max(self.tokens - self.needed_tokens, 0)

    def must_give_way(self, needed_tokens: int | None) -> bool:
        """Returns True if it has to stop now, for one that waits; once it was told so, it is taken at its word."""
        self.needed_tokens = needed_tokens
        self.gives_way = self.gives_way and needed_tokens is not None
        self._pool.call_back()
        return self.gives_way

    async def take(
        self, tokens: int, *, window_tokens: int, timeout_s: float, most_tokens: int, is_restart: bool
    ) -> None:
        """Waits until it holds `tokens` (≥ 1) in place of what it holds, for another upstream request.

        It holds nothing while it waits, so restarts cannot block each other, nor after an exception; an `Overloaded`
        says that the time is over. Not to be wrapped in `asyncio.wait_for`, which before Python 3.12 can lose the room.

        Args:
            tokens: of the prompt and the answer's reserve; more than the window is let into an empty context only.
            most_tokens: up to so much it gets of what is free, if nothing waits: alone all of it, else an even part.
            is_restart: its answer has begun: before all that have not, after earlier restarts.
        """
        pool, loop = self._pool, asyncio.get_running_loop()
        since_s, pool.window_tokens = loop.time(), window_tokens
        self.tokens, self.gives_way, self.needed_tokens = 0, False, None
        self.wanted_tokens, self.most_tokens, self.is_later = tokens, most_tokens, not is_restart
        self.ticket, self.turn = 0, loop.create_future()
        pool.begins_wait()
        try:
            limit_s = max(timeout_s, _ANSWERED_S) if pool.is_shared else timeout_s
            # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a finished future.
            if self.waits:
                await asyncio.wait({self.turn}, timeout=min(limit_s, TOLD_AFTER_S))
            if self.waits and limit_s > TOLD_AFTER_S:
                text = "waits_for_room model=%s tokens=%d in_use=%d window=%d answers=%d waited_s=%.0f"
                model, in_use_tokens = pool.name.rpartition(" ")[2], pool.used_tokens
                logger.warning(text, model, tokens, in_use_tokens, window_tokens, pool.answers, TOLD_AFTER_S)
                await asyncio.wait({self.turn}, timeout=limit_s - TOLD_AFTER_S)
        except BaseException:
            # What was granted in the same moment would be lost.
            self._give_back()
            raise
        if self.waits:
            self._give_back()
            numbers = {"tokens": tokens, "in_use_tokens": pool.used_tokens, "window_tokens": window_tokens}
            raise Overloaded(pool.name, **numbers, waited_s=loop.time() - since_s)

    def release(self) -> None:
        """Gives everything back, for good; again is no change."""
        if not self.left.done():
            self.left.set_result(None)
            self._pool.seats.remove(self)
            self._give_back()
            self._pool.end_if_empty()

    def _give_back(self) -> None:
        self.tokens = 0
        if self.waits:
            self.turn.set_result(None)
        self._pool.changed()


class _Decision(NamedTuple):
    """A process's decision, once the others have its `note`: the tokens that seats get, by their turns."""

    note: Note | None
    grants: dict[asyncio.Future[None], int]
    missing_tokens: int


def _decided(window_tokens: int, seats: Sequence[Seat], others: Sequence[Note]) -> _Decision:
    """Decides for the process of `seats` beside the others; changes nothing but that each wait gets its place."""
    waiting = [seat for seat in seats if seat.waits]
    last = max((*(seat.ticket for seat in waiting), *(note.ticket for note in others)), default=0)
    for seat in waiting:
        last += not seat.ticket
        seat.ticket = seat.ticket or last
    held_tokens = sum(seat.tokens for seat in seats)
    used_tokens, missing_tokens = held_tokens + sum(note.held_tokens for note in others), 0
    granted: dict[Seat, int] = {}
    queue = [(seat.is_later, seat.ticket, seat.wanted_tokens, seat) for seat in waiting]
    theirs = [(note.is_later, note.ticket, note.wanted_tokens, None) for note in others if note.wanted_tokens]
    for _, _, tokens, next_seat in sorted((*queue, *theirs), key=lambda each: each[:2]):
        if used_tokens and used_tokens + tokens > window_tokens:
            missing_tokens = used_tokens + tokens - window_tokens
            break
        # Room for others' is theirs before they have heard of it.
        used_tokens += tokens
        if next_seat is not None:
            granted[next_seat] = tokens
    count = len(seats) + sum(note.seats for note in others)
    for seat, tokens in granted.items() if not missing_tokens else ():
        part_tokens = min(window_tokens // count, tokens + max(window_tokens - used_tokens, 0))
        granted[seat] = max(tokens, seat.most_tokens if count == 1 else min(seat.most_tokens, part_tokens))
        used_tokens += granted[seat] - tokens
    head = min((each[:3] for each in queue if each[3] not in granted), default=(False, 0, 0))
    note = Note(held_tokens + sum(granted.values()), len(seats), head[2], *head[:2]) if seats else None
    return _Decision(note, {seat.turn: tokens for seat, tokens in granted.items()}, missing_tokens)


class Pool:
    """One loaded context, and this process's part in it.

    Every change happens between two awaits, and ends in `changed`, which gives free room away at once: a woken task
    finds its tokens already held, so none can slip in before it.
    """

    def __init__(self, name: str, admission: Admission, leases: Leases | None) -> None:
        self.name = name
        # The next request of any process does not fit by so many; 0 if none waits.
        self.window_tokens = self.missing_tokens = 0
        # All that have not left, also those that wait; and what the other processes have said last.
        self.seats: list[Seat] = []
        self.others: Sequence[Note] = ()
        self.is_shared = False  # Nobody is let in before the others were asked.
        self._admission, self._leases = admission, leases
        self._has_changed = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    @property
    def used_tokens(self) -> int:
        return sum(seat.tokens for seat in self.seats) + sum(note.held_tokens for note in self.others)

    @property
    def answers(self) -> int:
        """The number that runs or waits, of all processes that are known."""
        return len(self.seats) + sum(note.seats for note in self.others)

    def begins_wait(self) -> None:
        """A seat waits: the other processes are asked from now on, until the last seat has left."""
        if self._leases is not None and self._telling is None:
            self.is_shared, self._telling = True, self._leases.tasks.begin(self._tell_others(self._leases))
        self.changed()

    def changed(self) -> None:
        """Gives free room to waiting requests, and asks some back: here, or when the others have been asked."""
        self._has_changed.set()
        if self.is_shared:
            self.missing_tokens = 0
        else:
            self._apply(_decided(self.window_tokens, self.seats, ()), ())

    def call_back(self) -> None:
        """Has the first seats give way that could do without what the next request misses, if all together could."""
        able = [seat for seat in self.seats if seat.spare_tokens and not seat.gives_way]
        missing_tokens = self.missing_tokens - sum(seat.spare_tokens for seat in self.seats if seat.gives_way)
        if missing_tokens > sum(seat.spare_tokens for seat in able):
            return
        for seat in able:
            seat.gives_way = missing_tokens > 0
            missing_tokens -= seat.spare_tokens

    def end_if_empty(self) -> None:
        # If there are others it is forgotten when they know.
        if not self.seats and (self._telling is None or self._telling.done()):
            self._admission.pools.pop(self.name, None)

    def _apply(self, decision: _Decision, others: Sequence[Note]) -> None:
        """Gives waiting requests what all processes have agreed on, and tells those that have to give way."""
        for seat in self.seats:
            # One that was cancelled while the others were asked gets nothing.
            if seat.waits and seat.turn in decision.grants:
                seat.tokens = decision.grants[seat.turn]
                seat.turn.set_result(None)
        self.others, self.missing_tokens = others, decision.missing_tokens
        self.call_back()

    async def _tell_others(self, leases: Leases) -> None:
        """Tells the others, and does what it may beside them, until the last seat has left."""
        loop = asyncio.get_running_loop()
        try:
            while (pause_s := await self._agreed(leases)) is not None:
                timer = loop.call_later(pause_s, self._has_changed.set)
                await self._has_changed.wait()
                timer.cancel()
        finally:
            # The process may end; a request that is still served is served by it alone.
            self.is_shared, self.others = False, ()
            self.changed()
            if not self.seats:
                self._admission.pools.pop(self.name, None)

    async def _agreed(self, leases: Leases) -> float | None:
        """Asks the others and does what is allowed; the seconds for which that holds, None if no seat is left."""

        def decide(bodies: Sequence[str]) -> tuple[str | None, tuple[_Decision, Sequence[Note]]]:
            # In the store's thread.
            others = list(_notes(bodies))
            decision = _decided(self.window_tokens, list(self.seats), others)
            return json.dumps(decision.note) if decision.note is not None else None, (decision, others)

        self._has_changed.clear()
        try:
            decision, others = await leases.update(f"pool {shared_name(self.name)}", decide)
        except StoreError:
            self.is_shared = not leases.is_lost
            if self.is_shared:
                return _RUNNING_S
            self.changed()
            self._has_changed.clear()
            return RENEWED_EVERY_S if self.seats else None
        self.is_shared = True
        self._apply(decision, others)
        if decision.note is None and not self.seats:
            return None
        if not others:
            return RENEWED_EVERY_S
        if self._admission.turns and self._admission.make_way is not None:
            # What is written ahead ends while another process's answer is there: it has the engine at once as well.
            leases.tasks.begin(self._admission.make_way(self.name.partition(" ")[0]))
        return _WAITING_S if any(seat.waits for seat in self.seats) else _RUNNING_S


def _notes(bodies: Iterable[str]) -> Iterator[Note]:
    """The others' notes; what cannot be understood is as if it were not there."""
    for body in bodies:
        with contextlib.suppress(ValueError, TypeError):
            held, seats, wanted, is_later, ticket = json.loads(body)
            yield Note(max(int(held), 0), max(int(seats), 0), max(int(wanted), 0), bool(is_later), max(int(ticket), 0))


class Admission:
    """Seats by context, and who is there, for one event loop.

    A server generates on for `stopping_s` at most after its stream was closed; `leases` are of the processes that send
    to the same contexts, None for no others.
    """

    def __init__(self, *, stopping_s: float = _STOPPING_S, leases: Leases | None = None) -> None:
        self.stopping_s, self._leases = stopping_s, leases
        # Gives the engine back to an answer that comes, where something is written ahead; not called for that itself.
        self.make_way: MakeWay | None = None
        self.turns: Mapping[str, object] = {}
        self.pools: dict[str, Pool] = {}

    def seat(self, pool: str, owner: object = None) -> Seat:
        """Returns a seat in a context, `pool`, that errors name: an answer is there, and holds nothing yet."""
        if pool not in self.pools:
            self.pools[pool] = Pool(pool, self, self._leases)
        seat = Seat(self.pools[pool], owner)
        self.pools[pool].seats.append(seat)
        return seat

    def holds(self, owner: object) -> bool:
        """Returns True if a seat of `owner` holds room."""
        return any(seat.tokens and seat.owner is owner for pool in self.pools.values() for seat in pool.seats)

    def is_idle(self, server: str) -> bool:
        """Returns True if no answer runs, waits or is about to at any instance of a server: they share a processor."""
        return not any(pool.startswith(f"{server} ") for pool in self.pools)

    async def after_those_present(self, pool: str, timeout_s: float) -> None:
        """Waits until all answers have left that are there now: a server of one slot takes them in turn."""
        if pool in self.pools and (seats := self.pools[pool].seats):
            await asyncio.wait({seat.left for seat in seats}, timeout=timeout_s)

    def release_later(self, seat: Seat, *, after_s: float | None = None) -> None:
        """Has a seat left when the server has stopped: after so long, or as soon as it notices a closed stream."""
        asyncio.get_running_loop().call_later(self.stopping_s if after_s is None else after_s, seat.release)
