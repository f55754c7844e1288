"""Admission: who runs in one loaded context, who waits, and that nobody waits forever."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from litellm_compaction.engine.sharing.admission import Admission, Seat
from litellm_compaction.errors import Overloaded
from tests.engine.bench import settled, usage

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


async def taken(
    admission: Admission, tokens: int, *, window_tokens: int = WINDOW_TOKENS, timeout_s: float = LONG_S
) -> Seat:
    """A new seat, when it holds so much."""
    seat = admission.seat(POOL)
    try:
        await seat.take(tokens, window_tokens=window_tokens, timeout_s=timeout_s)
    except BaseException:
        seat.release()
        raise
    return seat


async def test_a_stopped_answer_holds_its_room_until_its_server_knows() -> None:
    """Whoever leaves in the middle of one gives it back a moment later."""
    admission = Admission(stopping_s=0.0)
    seat = await taken(admission, 60)
    admission.release_later(seat)
    assert usage(admission, POOL).used_tokens == 60
    assert (await asyncio.wait_for(taken(admission, 60), HANG_S)).tokens == 60


@pytest.mark.parametrize("cancel_s", [0.5, 1.5], ids=["cancel first", "limit first"])
def test_cancelled_when_out_of_time(cancel_s: float) -> None:
    """A waiter whose time ends in the turn in which it is cancelled ends as cancelled and leaves no trace."""
    loop = ManualLoop()
    admission = Admission()

    async def scene() -> None:
        seat = await taken(admission, 60, timeout_s=1)
        entry = asyncio.ensure_future(taken(admission, 50, timeout_s=1))
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


# Everything together, against a plain account of the same rules


@dataclass(eq=False)
class Person:
    """Somebody in the queue, as the test sees it: numbered by arrival, waiting until then, without a seat before."""

    number: int
    wants_tokens: int
    until_s: float
    task: asyncio.Task[Any]
    seat: Seat | None = None
    tokens: int = 0
    most_tokens: int = 0


class AdmissionMachine(RuleBasedStateMachine):
    """Entries, restarts, leaves, cancellations, time limits and windows in any order."""

    @initialize(window_tokens=st.integers(20, 100))
    def open(self, window_tokens: int) -> None:
        """An empty pool."""
        self.loop = ManualLoop()
        self.admission = Admission()
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
            assert not self.admission.pools
            assert self.loop.errors == []
        finally:
            self.loop.close()

    def settle(self) -> None:
        """Runs every task that can run."""
        self.loop.run_until_complete(settled())

    def let_in(self) -> None:
        """The rules once more: heads that fit go in, restarts first, with more if none is left."""
        let_in: list[Person] = []
        for queue in (self.restarting, self.entering):
            while queue:
                used = sum(person.tokens for person in self.running)
                if used and used + queue[0].wants_tokens > self.window_tokens:
                    break
                person = queue.pop(0)
                person.tokens = person.wants_tokens
                self.running.append(person)
                let_in.append(person)
                if person.seat is None:
                    self.entered.append(person.number)
            if queue:
                break
        seats = len(self.running + self.idle)
        for person in let_in if not (self.restarting or self.entering) else ():
            free = max(self.window_tokens - sum(other.tokens for other in self.running), 0)
            most = person.most_tokens if seats == 1 else min(person.most_tokens, self.window_tokens // seats)
            person.tokens = max(person.tokens, most if seats == 1 else min(most, person.tokens + free))

    def account(self) -> None:
        """Lets in who may come in, here and there, and compares."""
        self.let_in()
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
        entry = taken(self.admission, tokens, window_tokens=self.window_tokens, timeout_s=limit_s)
        self.entering.append(Person(self.count, tokens, self.loop.now_s + limit_s, self.loop.create_task(entry)))
        self.count += 1
        self.account()

    @precondition(lambda self: self.running or self.idle)
    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 120), most=st.integers(0, 120), limit_s=st.integers(1, 20))
    def restart(self, pick: int, tokens: int, most: int, limit_s: int) -> None:
        """Somebody goes on, or tries that again, with what is needed and more where it is free."""
        person = self.picked(self.running + self.idle, pick)
        assert person.seat is not None
        asked = {"window_tokens": self.window_tokens, "timeout_s": limit_s, "most_tokens": most, "is_restart": True}
        person.task = self.loop.create_task(person.seat.take(tokens, **asked))  # type: ignore[arg-type]
        (self.running if person in self.running else self.idle).remove(person)
        person.tokens, person.wants_tokens, person.most_tokens = 0, tokens, most
        person.until_s = self.loop.now_s + limit_s
        self.restarting.append(person)
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
            self.restart(self.running.index(person), needed_tokens, 0, 20)
            assert head in self.running
        else:
            person.seat.must_give_way(None)

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
        if gone is not None:
            # Whoever hangs up hears of it in the next turn, and is still there in this one.
            self.let_in()
        for people in (self.running, self.restarting, self.entering):
            if person in people:
                people.remove(person)
        person.tokens = 0
        if person.seat is not None:
            self.idle.append(person)
        elif person.number in self.entered:
            self.entered.remove(person.number)
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
