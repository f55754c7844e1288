"""Admission: who runs in one loaded context, who waits, and that nobody waits forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from litellm_compaction.engine.sharing.pool import Admission, Seat
from litellm_compaction.errors import CompactionError, Overloaded
from tests.engine.bench import leaving, settled, usage

POOL = "qwen3-8b"
WINDOW_TOKENS = 100
LONG_S = 600.0
# What a test waits for things that must happen: reached only by a defect.
HANG_S = 60.0


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until a test moves it; `errors` are those that no task caught."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.errors.append(context))

    def time(self) -> float:
        """Seconds."""
        return self.now_s


class Desk:
    """Shorthands for one pool."""

    def __init__(self) -> None:
        self.admission = Admission()
        self.tasks: list[asyncio.Task[Any]] = []

    async def seat(
        self, tokens: int, most_tokens: int = 0, *, window_tokens: int = WINDOW_TOKENS, timeout_s: float = LONG_S
    ) -> Seat:
        """A seat that must be there at once."""
        entry = self.admission.enter(
            POOL, window_tokens=window_tokens, tokens=tokens, timeout_s=timeout_s, most_tokens=most_tokens
        )
        return await asyncio.wait_for(entry, HANG_S)

    async def started(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """`work` as a task that has run to its first wait."""
        task = asyncio.ensure_future(work)
        self.tasks.append(task)
        await settled()
        return task

    async def entry(self, tokens: int, *, window_tokens: int = WINDOW_TOKENS) -> asyncio.Task[Seat]:
        """A task that enters."""
        return await self.started(
            self.admission.enter(POOL, window_tokens=window_tokens, tokens=tokens, timeout_s=LONG_S)
        )

    async def exchange(self, seat: Seat, tokens: int) -> asyncio.Task[None]:
        """A task that exchanges."""
        return await self.started(seat.exchange(tokens, timeout_s=LONG_S))

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens in use, window, waiting."""
        return usage(self.admission, POOL)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """A desk whose waiters end with the test."""
    desk = Desk()
    yield desk
    for task in desk.tasks:
        task.cancel()
    await asyncio.gather(*desk.tasks, return_exceptions=True)


# Entering


async def test_fits_beside(desk: Desk) -> None:
    """What fits beside the others enters at once, up to the last token of the window."""
    first, second = await desk.seat(60), await desk.seat(40)
    assert (first.tokens, second.tokens) == (60, 40)
    assert desk.usage == (100, 100, 0)


async def test_does_not_fit(desk: Desk) -> None:
    """What does not fit waits until enough is given back."""
    first = await desk.seat(60)
    second = await desk.entry(41)
    assert desk.usage == (60, 100, 1)
    assert not second.done()
    first.release()
    assert (await second).tokens == 41
    assert desk.usage == (41, 100, 0)


async def test_no_overtaking(desk: Desk) -> None:
    """A small request that would fit does not overtake a large one that waits."""
    first = await desk.seat(60)
    large, small = await desk.entry(70), await desk.entry(1)
    assert desk.usage == (60, 100, 2)
    first.release()
    assert (await large).tokens + (await small).tokens == 71


async def test_admitted_together(desk: Desk) -> None:
    """All heads that fit are admitted by one leave, and the first that does not fit stops the rest."""
    first = await desk.seat(100)
    entries = [await desk.entry(tokens) for tokens in (30, 40, 50, 1)]
    first.release()
    await settled()
    assert [entry.done() for entry in entries] == [True, True, False, False]
    assert desk.usage == (70, 100, 2)


async def test_larger_than_window_alone(desk: Desk) -> None:
    """A request larger than the window enters an empty pool, and keeps everybody else out while it runs."""
    giant = await desk.seat(500)
    other = await desk.entry(1)
    assert desk.usage == (500, 100, 1)
    giant.release()
    assert (await other).tokens == 1


async def test_larger_than_window_waits(desk: Desk) -> None:
    """A request larger than the window waits until the pool is empty."""
    first, second = await desk.seat(1), await desk.seat(1)
    giant = await desk.entry(500)
    first.release()
    await settled()
    assert not giant.done()
    second.release()
    assert (await giant).tokens == 500


async def test_pools_are_separate(desk: Desk) -> None:
    """A full pool keeps nobody out of another one."""
    await desk.seat(100)
    other = desk.admission.enter("gemma-3", window_tokens=50, tokens=50, timeout_s=0)
    assert (await other).tokens == 50
    assert usage(desk.admission, "gemma-3") == (50, 50, 0)


async def test_leave_twice(desk: Desk) -> None:
    """Leaving again changes nothing, also when the pool has been made anew since."""
    seat = await desk.seat(60)
    seat.release()
    seat.release()
    other = await desk.seat(50)
    seat.release()
    seat.shrink(0)
    assert (seat.tokens, other.tokens) == (0, 50)
    assert desk.usage == (50, 100, 0)


# Window changes


async def test_window_shrinks(desk: Desk) -> None:
    """A smaller window stops nobody who runs, and admits nobody until those who run fit into it."""
    first, second = await desk.seat(40), await desk.seat(40)
    late = await desk.entry(10, window_tokens=50)
    assert desk.usage == (80, 50, 1)
    assert (first.tokens, second.tokens) == (40, 40)
    first.release()
    assert (await late).tokens == 10


async def test_window_shrinks_below_one(desk: Desk) -> None:
    """Nobody enters beside a seat that is larger than the new window."""
    first = await desk.seat(80)
    late = await desk.entry(1, window_tokens=50)
    assert not late.done()
    first.shrink(49)
    assert (await late).tokens == 1


async def test_window_grows(desk: Desk) -> None:
    """A larger window admits those who wait, in their order, before the one who brought the news."""
    await desk.seat(100)
    second = await desk.entry(50)
    third = await desk.entry(60, window_tokens=200)
    assert second.done()
    assert not third.done()
    assert desk.usage == (150, 200, 1)


# What is lent, and called back


async def test_alone_a_seat_is_lent_everything(desk: Desk) -> None:
    """Over the window, too, as it may enter over it; whoever comes then waits."""
    first = await desk.seat(90, 120)
    assert first.tokens == 120
    second = await desk.entry(1)
    assert not second.done()


async def test_beside_others_a_seat_is_lent_an_even_part_of_what_is_free(desk: Desk) -> None:
    """Never more than is free, and never less than it holds."""
    first, second = await desk.seat(30), await desk.seat(55)
    await first.exchange(30, timeout_s=LONG_S, most_tokens=100)
    assert (first.tokens, second.tokens) == (45, 55)
    second.release()
    third = await desk.seat(20, 100)
    assert third.tokens == 50
    await third.exchange(50, timeout_s=LONG_S, most_tokens=10)
    assert desk.usage == (95, 100, 0)


async def test_nothing_is_lent_while_somebody_waits(desk: Desk) -> None:
    """It would have to be called back at once."""
    first, _ = await desk.seat(30), await desk.seat(30)
    waiting = await desk.entry(60)
    await first.exchange(30, timeout_s=LONG_S, most_tokens=40)
    assert (first.tokens, waiting.done()) == (30, False)


async def test_what_was_lent_is_called_back_for_who_waits(desk: Desk) -> None:
    """It goes on with what it needs, and the other one is let in; until then nobody is."""
    first = await desk.seat(30, 100)
    assert not first.must_give_way(60)
    entry = await desk.entry(40)
    assert (first.must_give_way(60), entry.done()) == (True, False)
    await first.exchange(60, timeout_s=LONG_S)
    assert (await entry).tokens == 40
    assert not first.must_give_way(60)


async def test_nobody_is_called_back_in_vain(desk: Desk) -> None:
    """Where what is lent would not do, it waits for an end; where nothing may be cut, too."""
    first = await desk.seat(30, 100)
    await desk.entry(40)
    assert not first.must_give_way(61)
    assert not first.must_give_way(None)


async def test_what_is_given_back_already_is_no_reason_to_call_back_more(desk: Desk) -> None:
    """It counts once: with what the other could do without it is still too little for who waits now."""
    other, leaving = await desk.seat(50), await desk.seat(20, 50)
    small = await desk.entry(25)
    assert leaving.must_give_way(20)
    small.cancel()
    await settled()
    await desk.entry(45)
    assert not other.must_give_way(40)


async def test_no_more_are_called_back_than_it_takes(desk: Desk) -> None:
    """The one that is asked first; what it gives back is counted before it has."""
    first, second = await desk.seat(10), await desk.seat(10, 100)
    await first.exchange(10, timeout_s=LONG_S, most_tokens=100)
    assert (first.tokens, second.tokens) == (50, 50)
    first.needed_tokens = second.needed_tokens = 20
    entry = await desk.entry(30)
    assert (first.must_give_way(20), second.must_give_way(20)) == (True, False)
    await first.exchange(20, timeout_s=LONG_S)
    assert (await entry).tokens == 30
    assert desk.usage == (100, 100, 0)


async def test_several_give_way_for_a_large_one(desk: Desk) -> None:
    """And who was told so stays at it, though the other one has left by itself meanwhile."""
    first, second = await desk.seat(10), await desk.seat(10, 100)
    await first.exchange(10, timeout_s=LONG_S, most_tokens=100)
    assert (first.tokens, second.tokens) == (50, 50)
    first.needed_tokens = second.needed_tokens = 20
    await desk.entry(60)
    assert (first.must_give_way(20), second.must_give_way(20)) == (True, True)
    second.release()
    assert first.must_give_way(20)


async def test_whoever_cannot_go_on_stays(desk: Desk) -> None:
    """It is not asked again; another one is."""
    first, second = await desk.seat(10), await desk.seat(10, 100)
    await first.exchange(10, timeout_s=LONG_S, most_tokens=100)
    assert (first.tokens, second.tokens) == (50, 50)
    first.needed_tokens = second.needed_tokens = 20
    await desk.entry(30)
    assert first.must_give_way(20)
    assert (first.must_give_way(None), second.must_give_way(20)) == (False, True)


async def test_a_stopped_answer_holds_its_room_until_its_server_knows() -> None:
    """Whoever leaves in the middle of one gives it back a moment later, in and outside of a running loop."""
    admission = Admission(stopping_s=0.0)
    seat = await admission.enter(POOL, window_tokens=WINDOW_TOKENS, tokens=60, timeout_s=LONG_S)
    admission.release_later(seat)
    assert usage(admission, POOL).used_tokens == 60
    entry = asyncio.ensure_future(admission.enter(POOL, window_tokens=WINDOW_TOKENS, tokens=60, timeout_s=LONG_S))
    seat = await asyncio.wait_for(entry, HANG_S)
    await asyncio.to_thread(admission.release_later, seat)
    assert usage(admission, POOL).used_tokens == 0


# Shrinking


async def test_shrink_admits(desk: Desk) -> None:
    """What a seat gives back goes to the head of the queue; shrinking to more is no change."""
    first = await desk.seat(100)
    entry = await desk.entry(50)
    first.shrink(200)
    assert desk.usage == (100, 100, 1)
    first.shrink(50)
    assert (await entry).tokens == 50
    assert desk.usage == (100, 100, 0)


# Exchanging


async def test_exchange_for_less(desk: Desk) -> None:
    """A restart that needs no more than its seat holds does not wait, not even for earlier restarts."""
    first, second = await desk.seat(60), await desk.seat(40)
    earlier = await desk.exchange(second, 50)
    await asyncio.wait_for(first.exchange(50, timeout_s=0), HANG_S)
    assert first.tokens == 50
    await earlier
    assert second.tokens == 50


async def test_exchange_before_entries(desk: Desk) -> None:
    """A restart goes before entries that came earlier, restarts among each other in their order."""
    first, second, third = await desk.seat(40), await desk.seat(30), await desk.seat(30)
    entry = await desk.entry(61)
    late = [await desk.exchange(second, 70), await desk.exchange(third, 90)]
    assert desk.usage == (40, 100, 3)
    first.release()
    await late[0]
    assert not late[1].done()
    second.release()
    await late[1]
    assert not entry.done()
    third.release()
    assert (await entry).tokens == 61


async def test_exchange_gives_back(desk: Desk) -> None:
    """A restart that waits holds nothing: its room serves an earlier restart."""
    first, second, third = await desk.seat(30), await desk.seat(30), await desk.seat(40)
    earlier = await desk.exchange(first, 60)
    assert not earlier.done()
    later = await desk.exchange(second, 50)
    await earlier
    assert not later.done()
    assert (first.tokens, second.tokens, third.tokens) == (60, 0, 40)


async def test_exchange_after_window_shrank(desk: Desk) -> None:
    """After the window shrank even a restart that asks for less waits, until it fits beside the others."""
    first, second = await desk.seat(50), await desk.seat(50)
    entry = await desk.entry(1, window_tokens=60)
    restart = await desk.exchange(first, 40)
    assert desk.usage == (50, 60, 2)
    second.shrink(20)
    await restart
    assert first.tokens == 40
    assert not entry.done()


async def test_exchange_after_leave(desk: Desk) -> None:
    """A seat that has left cannot come back."""
    seat = await desk.seat(10)
    seat.release()
    with pytest.raises(RuntimeError, match="left"):
        await seat.exchange(20, timeout_s=LONG_S)
    assert desk.usage == (0, 0, 0)


@pytest.mark.parametrize("is_granted", [False, True])
async def test_leave_during_exchange(desk: Desk, is_granted: bool) -> None:
    """When somebody else leaves the seat, a waiting exchange ends with an error and nothing stays taken."""
    first, second = await desk.seat(50), await desk.seat(50)
    restart = await desk.exchange(second, 60)
    if is_granted:
        first.shrink(40)
        assert second.tokens == 60
    second.release()
    with pytest.raises(RuntimeError, match="left"):
        await restart
    assert desk.usage == (first.tokens, 100, 0)


async def test_exchange_twice_at_once(desk: Desk) -> None:
    """A seat waits for one exchange at a time; the second is refused and the first goes on."""
    first, second = await desk.seat(50), await desk.seat(50)
    restart = await desk.exchange(second, 60)
    with pytest.raises(RuntimeError, match="waited"):
        await second.exchange(10, timeout_s=LONG_S)
    first.release()
    await restart
    assert second.tokens == 60


@given(
    held=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    more=st.lists(st.integers(1, 200), min_size=5, max_size=5),
    newcomers=st.lists(st.integers(1, 200), max_size=3),
)
async def test_everybody_exchanges_at_once(held: list[int], more: list[int], newcomers: list[int]) -> None:
    """When all holders exchange for more at once, all are admitted, and then the entries in their order."""
    desk = Desk()
    seats = [await desk.seat(tokens) for tokens in held]
    filler = await desk.seat(WINDOW_TOKENS - sum(held)) if sum(held) < WINDOW_TOKENS else None
    order: list[int] = []

    async def enter(number: int, tokens: int) -> None:
        with leaving(await desk.admission.enter(POOL, window_tokens=WINDOW_TOKENS, tokens=tokens, timeout_s=LONG_S)):
            order.append(number)
            await settled(1)

    async def restart(number: int, seat: Seat, tokens: int) -> None:
        with leaving(seat):
            await seat.exchange(tokens, timeout_s=LONG_S)
            order.append(number)
            await settled(1)

    entries = [await desk.started(enter(10 + index, tokens)) for index, tokens in enumerate(newcomers)]
    # Not `desk.started`: all of them exchange in one turn of the loop, before anybody who is admitted runs.
    restarts = [
        asyncio.ensure_future(restart(index, seat, seat.tokens + extra))
        for index, (seat, extra) in enumerate(zip(seats, more, strict=False))
    ]
    await settled(1)
    if filler is not None:
        filler.release()
    await asyncio.wait_for(asyncio.gather(*entries, *restarts), HANG_S)
    # Several restarts may be admitted in the same turn, and then run in any order.
    assert sorted(order[: len(seats)]) == list(range(len(seats)))
    assert order[len(seats) :] == list(range(10, 10 + len(newcomers)))
    assert desk.usage == (0, 0, 0)


# Time limits


async def test_entry_out_of_time() -> None:
    """A wait that is over raises an error that names model, tokens, use, window, time and what to change."""
    desk = Desk()
    desk.admission = Admission(clock=iter([1000.0, 1012.34]).__next__)
    await desk.seat(60)
    with pytest.raises(Overloaded) as caught:
        await desk.seat(50, timeout_s=0.001)
    error = caught.value
    assert isinstance(error, CompactionError)
    assert (error.model, error.tokens, error.in_use_tokens, error.window_tokens) == (POOL, 50, 60, 100)
    assert error.waited_s == pytest.approx(12.34)
    for part in (POOL, "50 tokens", "60 of its 100 tokens", "12.3 s", "parallel", "context length"):
        assert part in str(error)
    assert "`admission_timeout_s`" in str(error)
    assert desk.usage == (60, 100, 0)


async def test_out_of_time_wakes_next(desk: Desk) -> None:
    """When the head of the queue gives up, the next one that fits is admitted."""
    await desk.seat(60)
    large = await desk.started(desk.admission.enter(POOL, window_tokens=WINDOW_TOKENS, tokens=50, timeout_s=0.001))
    small = await desk.entry(40)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(large, HANG_S)
    assert (await asyncio.wait_for(small, HANG_S)).tokens == 40


async def test_out_of_time_with_room(desk: Desk) -> None:
    """A limit of 0 admits what fits now."""
    assert (await desk.seat(100, timeout_s=0)).tokens == 100


async def test_exchange_out_of_time(desk: Desk) -> None:
    """A seat whose restart found no room in time holds nothing, may try again, and still has to leave."""
    first, second = await desk.seat(50), await desk.seat(50)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(second.exchange(60, timeout_s=0), HANG_S)
    assert second.tokens == 0
    assert desk.usage == (50, 100, 0)
    await asyncio.wait_for(second.exchange(50, timeout_s=0), HANG_S)
    assert second.tokens == 50
    first.release()
    second.release()
    assert desk.usage == (0, 0, 0)


# Cancellation


Wait = Callable[[Desk, Seat], Awaitable["asyncio.Task[Any]"]]


async def _enter(desk: Desk, _seat: Seat) -> asyncio.Task[Any]:
    return await desk.entry(60)


async def _exchange(desk: Desk, seat: Seat) -> asyncio.Task[Any]:
    return await desk.exchange(seat, 60)


@asynccontextmanager
async def _cancelled(task: asyncio.Task[Any]) -> AsyncIterator[None]:
    """The moment between the cancellation and the task's next turn; then the task must end as cancelled."""
    assert task.cancel()
    yield
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), HANG_S)
    assert task.cancelled()


@pytest.mark.parametrize("wait", [_enter, _exchange])
async def test_cancelled_while_waiting(desk: Desk, wait: Wait) -> None:
    """A cancelled waiter leaves no trace and wakes the next one."""
    first, second = await desk.seat(45), await desk.seat(5)
    task = await wait(desk, second)
    next_one = await desk.entry(50)
    async with _cancelled(task):
        pass
    assert (await asyncio.wait_for(next_one, HANG_S)).tokens == 50
    assert desk.usage == (first.tokens + second.tokens + 50, 100, 0)


@pytest.mark.parametrize("wait", [_enter, _exchange])
async def test_cancelled_when_admitted(desk: Desk, wait: Wait) -> None:
    """A waiter cancelled after its admission, before it could run, gives the room to the next one."""
    first, second = await desk.seat(90), await desk.seat(10)
    task = await wait(desk, second)
    next_one = await desk.entry(80)
    first.release()
    assert desk.usage[0] >= 60
    async with _cancelled(task):
        pass
    assert (await asyncio.wait_for(next_one, HANG_S)).tokens == 80
    assert desk.usage == (80 + second.tokens, 100, 0)


@pytest.mark.parametrize("wait", [_enter, _exchange])
async def test_room_beside_a_cancelled_head(desk: Desk, wait: Wait) -> None:
    """Room that comes free between a waiter's cancellation and its end goes to the next one, not to it."""
    first, second = await desk.seat(90), await desk.seat(10)
    task = await wait(desk, second)
    next_one = await desk.entry(80)
    async with _cancelled(task):
        first.release()
        assert desk.usage == (80 + second.tokens, 100, 0)
    assert (await next_one).tokens == 80


@pytest.mark.parametrize("cancel_s", [0.5, 1.5], ids=["cancel first", "limit first"])
def test_cancelled_when_out_of_time(cancel_s: float) -> None:
    """A waiter whose time ends in the turn in which it is cancelled ends as cancelled and leaves no trace."""
    loop = ManualLoop()
    admission = Admission(clock=loop.time)

    async def scene() -> None:
        seat = await admission.enter(POOL, window_tokens=100, tokens=60, timeout_s=1)
        entry = asyncio.ensure_future(admission.enter(POOL, window_tokens=100, tokens=50, timeout_s=1))
        await settled()
        loop.call_later(cancel_s, entry.cancel)
        loop.now_s = 2.0
        await settled()
        assert entry.cancelled()
        assert usage(admission, POOL) == (60, 100, 0)
        assert loop.errors == []
        seat.release()

    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()


# Memory


async def test_pools_are_forgotten(desk: Desk) -> None:
    """A pool without seats and waiters is forgotten, however the last one went."""
    pools = desk.admission._pools
    seat = await desk.seat(60)
    with pytest.raises(Overloaded):
        await desk.seat(50, timeout_s=0)
    waiting = await desk.entry(50)
    waiting.cancel()
    await settled()
    assert list(pools) == [POOL]
    seat.release()
    assert not pools


async def test_pool_of_a_waiting_exchange_stays(desk: Desk) -> None:
    """A seat that holds nothing keeps its pool: otherwise its return and a newcomer would not see each other."""
    first, second = await desk.seat(60), await desk.seat(40)
    restart = await desk.exchange(second, 80)
    restart.cancel()
    await settled()
    first.release()
    await second.exchange(80, timeout_s=0)
    newcomer = await desk.entry(30)
    assert not newcomer.done()


# Everything together, against a plain account of the same rules


@dataclass(eq=False)
class Person:
    """Somebody at the desk, as the test sees it.

    Attributes:
        number: in the order of arrival.
        wants_tokens: what is waited for.
        until_s: when the wait ends.
        task: enters, or exchanges.
        seat: None before entering.
    """

    number: int
    wants_tokens: int
    until_s: float
    task: asyncio.Task[Any]
    seat: Seat | None = None
    tokens: int = 0


class AdmissionMachine(RuleBasedStateMachine):
    """Entries, exchanges, loans, leaves, cancellations, time limits and windows in any order."""

    @initialize(window_tokens=st.integers(20, 100))
    def open(self, window_tokens: int) -> None:
        """An empty pool."""
        self.loop = ManualLoop()
        self.admission = Admission(clock=self.loop.time)
        self.window_tokens = window_tokens
        self.count = 0
        self.running: list[Person] = []
        self.idle: list[Person] = []
        self.restarting: list[Person] = []
        self.entering: list[Person] = []
        self.entered: list[int] = []
        self.before: dict[Person, int] = {}

    def teardown(self) -> None:
        """Everybody goes; nothing may stay."""
        if not hasattr(self, "loop"):
            return
        try:
            for person in (*self.restarting, *self.entering):
                person.task.cancel()
            self.settle()
            for person in (*self.running, *self.idle, *self.restarting):
                assert person.seat is not None
                person.seat.release()
            assert usage(self.admission, POOL) == (0, 0, 0)
            assert not self.admission._pools
            assert self.loop.errors == []
        finally:
            self.loop.close()

    def settle(self) -> None:
        """Runs every task that can run."""
        self.loop.run_until_complete(settled())

    def account(self) -> None:
        """The rules once more: heads that fit go in, restarts first; then compares."""
        for queue in (self.restarting, self.entering):
            while queue:
                used = sum(person.tokens for person in self.running)
                if used and used + queue[0].wants_tokens > self.window_tokens:
                    break
                person = queue.pop(0)
                person.tokens = person.wants_tokens
                self.running.append(person)
                if person.seat is None:
                    self.entered.append(person.number)
            if queue:
                break
        self.settle()
        for person in self.running:
            assert person.task.done()
            if person.seat is None:
                person.seat = person.task.result()

    def picked(self, people: list[Person], pick: int) -> Person:
        """One of them."""
        return people[pick % len(people)]

    @rule(tokens=st.integers(1, 120), window=st.none() | st.integers(20, 100), limit_s=st.integers(1, 20))
    def enter(self, tokens: int, window: int | None, limit_s: int) -> None:
        """Somebody comes, with news about the window or without."""
        self.window_tokens = window if window is not None else self.window_tokens
        entry = self.admission.enter(POOL, window_tokens=self.window_tokens, tokens=tokens, timeout_s=limit_s)
        self.entering.append(Person(self.count, tokens, self.loop.now_s + limit_s, self.loop.create_task(entry)))
        self.count += 1
        self.account()

    @precondition(lambda self: self.running or self.idle)
    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 120), limit_s=st.integers(1, 20))
    def exchange(self, pick: int, tokens: int, limit_s: int) -> None:
        """Somebody restarts, or tries a restart again."""
        person = self.picked(self.running + self.idle, pick)
        assert person.seat is not None
        person.task = self.loop.create_task(person.seat.exchange(tokens, timeout_s=limit_s))
        others = sum(other.tokens for other in self.running if other is not person)
        if tokens <= person.tokens and (others == 0 or others + tokens <= self.window_tokens):
            person.tokens = tokens
        else:
            (self.running if person in self.running else self.idle).remove(person)
            person.tokens, person.wants_tokens, person.until_s = 0, tokens, self.loop.now_s + limit_s
            self.restarting.append(person)
        self.account()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 120))
    def lend(self, pick: int, tokens: int) -> None:
        """A seat goes on with what it has, and more: everything alone, else of what is free while nobody waits."""
        person = self.picked(self.running, pick)
        assert person.seat is not None
        if len(self.running) > 1 and sum(other.tokens for other in self.running) > self.window_tokens:
            return
        waiting, seats = self.restarting + self.entering, len(self.running + self.idle + self.restarting)
        free = max(self.window_tokens - sum(other.tokens for other in self.running), 0)
        held = person.tokens
        if not waiting:
            most = tokens if seats == 1 else min(tokens, self.window_tokens // seats, person.tokens + free)
            person.tokens = max(person.tokens, most)
        person.task = self.loop.create_task(person.seat.exchange(held, timeout_s=20, most_tokens=tokens))
        self.account()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 50), needed_tokens=st.integers(1, 120))
    def is_called_back(self, pick: int, needed_tokens: int) -> None:
        """An answer that can be cut is told to stop exactly where that lets the next one in; then it does, or stays."""
        person = self.picked(self.running, pick)
        assert person.seat is not None
        head = next(iter(self.restarting + self.entering), None)
        used = sum(other.tokens for other in self.running)
        lent = max(person.tokens - needed_tokens, 0)
        lets_in = head is not None and lent > 0 and used - lent + head.wants_tokens <= self.window_tokens
        assert person.seat.must_give_way(needed_tokens) is lets_in
        if lets_in and pick % 2:
            self.exchange(self.running.index(person), needed_tokens, 20)
            assert head in self.running
        else:
            person.seat.must_give_way(None)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 120))
    def shrink(self, pick: int, tokens: int) -> None:
        """An answer needs less than was reserved."""
        person = self.picked(self.running, pick)
        assert person.seat is not None
        person.seat.shrink(tokens)
        person.tokens = min(person.tokens, tokens)
        self.account()

    @precondition(lambda self: self.running or self.idle)
    @rule(pick=st.integers(0, 50))
    def leave(self, pick: int) -> None:
        """An answer ends."""
        person = self.picked(self.running + self.idle, pick)
        assert person.seat is not None
        person.seat.release()
        (self.running if person in self.running else self.idle).remove(person)
        self.account()

    @precondition(lambda self: self.restarting or self.entering)
    @rule(pick=st.integers(0, 50), how=st.sampled_from(["before", "after", "alone"]), leaver=st.integers(0, 50))
    def cancel(self, pick: int, how: Literal["before", "after", "alone"], leaver: int) -> None:
        """A client hangs up while it waits; in the same turn, before or after, a seat may become free."""
        person = self.picked(self.restarting + self.entering, pick)
        gone = self.picked(self.running, leaver) if self.running and how != "alone" else None
        if gone is not None:
            self.running.remove(gone)
            assert gone.seat is not None
            if how == "before":
                gone.seat.release()
        person.task.cancel()
        if gone is not None and how == "after":
            assert gone.seat is not None
            gone.seat.release()
        if person in self.restarting:
            self.restarting.remove(person)
            self.idle.append(person)
        else:
            self.entering.remove(person)
        self.account()
        assert person.task.cancelled()

    @precondition(lambda self: self.restarting or self.entering)
    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        """Time passes: whoever has waited too long goes with an error, one after the other."""
        for _ in range(seconds):
            self.loop.now_s += 1
            late = [p for p in (*self.restarting, *self.entering) if p.until_s <= self.loop.now_s]
            # Limits that end in the same second fire in no promised order: what matters is who is left.
            self.settle()
            for person in late:
                if person.task.done() and person.task.exception() is None:
                    continue  # admitted by the one that went before it in the same second
                assert isinstance(person.task.exception(), Overloaded)
                if person in self.restarting:
                    self.restarting.remove(person)
                    self.idle.append(person)
                else:
                    self.entering.remove(person)
            self.account()

    @invariant()
    def agrees(self) -> None:
        """Seats, sum, window and queue are what the plain account says."""
        if not hasattr(self, "loop"):
            return
        used = sum(person.tokens for person in self.running)
        waiting = len(self.restarting) + len(self.entering)
        if self.running or self.idle or waiting:
            assert usage(self.admission, POOL) == (used, self.window_tokens, waiting)
        else:
            assert usage(self.admission, POOL) == (0, 0, 0)
        for person in self.running:
            assert person.seat is not None
            assert person.seat.tokens == person.tokens
        assert not any(person.task.done() for person in (*self.restarting, *self.entering))

    @invariant()
    def inside_the_window(self) -> None:
        """The sum is inside the window, or one runs alone, or the window shrank and since then nobody took more."""
        if not hasattr(self, "loop"):
            return
        now = {person: person.seat.tokens for person in self.running if person.seat is not None}
        if sum(now.values()) > self.window_tokens and len(now) > 1:
            assert all(tokens <= self.before.get(person, 0) for person, tokens in now.items())
        self.before = now

    @invariant()
    def in_order(self) -> None:
        """Entries are admitted in the order in which they came."""
        if hasattr(self, "loop"):
            assert self.entered == sorted(self.entered)

    @invariant()
    def somebody_runs(self) -> None:
        """Nobody waits for an empty pool: that would be a deadlock."""
        if hasattr(self, "loop") and (self.restarting or self.entering):
            assert self.running


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(
    max_examples=settings().max_examples * 5 // 2, stateful_step_count=40, deadline=None
)
