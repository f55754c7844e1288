"""Several processes that send to one loaded context: their seats together keep the rules of one process's."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.concurrency import ended
from litellm_compaction.engine.sharing.admission import Admission, Seat
from litellm_compaction.engine.sharing.leases import LEASE_S, Leases, shared_name
from litellm_compaction.errors import Overloaded, StoreError
from tests.stores.made import MemoryBoard
from tests.virtual_time import played, run

POOL = "http://127.0.0.1:1234 qwen3-8b"
WINDOW_TOKENS = 100
LONG_S = 600.0


class CountedBoard(MemoryBoard):
    """A board that knows how often it was asked, and fails when told."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.asked = 0
        self.is_broken = False
        self.delay_s = 0.0
        self.delays_s: Iterator[float] = itertools.repeat(0.0)

    async def update(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        if self.is_broken:
            raise StoreError("the board is down")
        # Others may be faster meanwhile, before it and behind it.
        await asyncio.sleep(next(self.delays_s))
        result = await super().update(*args, **options)
        await asyncio.sleep(self.delay_s or next(self.delays_s))
        return result


@dataclass
class Fleet:
    """Processes that share a board, in one loop in virtual time."""

    admissions: list[Admission]
    board: CountedBoard
    leases: list[Leases]
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def enter(self, at: int, tokens: int, most_tokens: int = 0, *, timeout_s: float = LONG_S) -> Seat:
        seat = self.admissions[at].seat(POOL)
        try:
            await seat.take(tokens, window_tokens=WINDOW_TOKENS, most_tokens=most_tokens, timeout_s=timeout_s)
        except BaseException:
            seat.release()
            raise
        return seat

    def started(self, measured: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(measured)
        self.tasks.append(task)
        return task

    def kill(self, at: int) -> None:
        """Ends a process as `kill -9` does: it says nothing any more."""
        self.leases[at].board = CountedBoard(self.board.clock)

    @property
    def used_tokens(self) -> int:
        """In all processes together, as they know it themselves."""
        return sum(each.held().tokens for each in self.admissions)


def together(
    processes: int = 2,
) -> Callable[[Callable[[Fleet], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Runs a test with so many processes, in virtual time."""
    return lambda test: played(test, lambda: _with_fleet(processes, test))


async def _with_fleet(processes: int, test: Callable[[Fleet], Coroutine[Any, Any, None]]) -> None:
    clock = asyncio.get_running_loop().time
    board = CountedBoard(clock)
    leases = [Leases(board, clock=clock) for _ in range(processes)]
    fleet = Fleet([Admission(leases=each) for each in leases], board, leases)
    try:
        await test(fleet)
    finally:
        await ended(fleet.tasks)
        for each in leases:
            await each.aclose()


@together()
async def test_a_process_that_is_killed_delays_others_by_its_lease(fleet: Fleet) -> None:
    """What it held and what it waited for is gone then."""
    await fleet.enter(0, 90)
    fleet.started(fleet.enter(0, 50))
    await asyncio.sleep(3)
    waiting = fleet.started(fleet.enter(1, 80))
    await asyncio.sleep(1)
    fleet.kill(0)
    killed_s = asyncio.get_running_loop().time()
    await waiting
    waited_s = asyncio.get_running_loop().time() - killed_s
    assert 0 < waited_s <= LEASE_S + 1


@together()
async def test_a_client_that_leaves_while_it_is_let_in_gives_all_back(fleet: Fleet) -> None:
    """Its room was told to the others already."""
    fleet.board.delay_s = 0.5
    entry = fleet.started(fleet.enter(0, 100))
    await asyncio.sleep(0.2)
    entry.cancel()
    await asyncio.sleep(5)
    assert fleet.used_tokens == 0
    assert (await fleet.enter(1, 100)).tokens == 100
    assert not fleet.admissions[0]._pools


def test_each_machine_has_its_own_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes on several machines may share a store, and no server that they name so."""
    names: list[set[str]] = [set(), set()]
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        for each, address in zip(names, ("http://localhost:1234 qwen", "http://gpu.lan:1234 qwen"), strict=True):
            each.add(shared_name(address))
    assert [len(each) for each in names] == [2, 1]


@given(seed=st.integers(0, 1 << 32), processes=st.integers(2, 4), delay_s=st.sampled_from([0.0, 0.001, 0.3]))
def test_everybody_is_served_and_never_over_the_window(seed: int, processes: int, delay_s: float) -> None:
    """Clients of several processes that wait, are lent to, called back, go on, leave and give up in any order."""

    async def client(fleet: Fleet, chance: random.Random) -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.05, 1, 5, 20]))
        at, tokens = chance.randrange(processes), chance.randint(1, 110)
        limit_s = chance.choice([0.5, 3.0, 1e6, 1e6])
        try:
            seat = await fleet.enter(at, tokens, chance.randint(0, 150), timeout_s=limit_s)
        except Overloaded:
            return
        try:
            for _ in range(chance.randint(0, 4)):
                needed_tokens = chance.choice([None, chance.randint(1, 60)])
                for _ in range(chance.choice([1, 10, 60])):
                    await asyncio.sleep(0.2)
                    if seat.must_give_way(needed_tokens):
                        break
                tokens, most_tokens = chance.randint(1, 110), chance.randint(0, 150)
                limits: dict[str, Any] = {"window_tokens": WINDOW_TOKENS, "timeout_s": limit_s}
                await seat.take(tokens, most_tokens=most_tokens, is_restart=True, **limits)
        except Overloaded:
            return
        finally:
            seat.release()

    async def watched(fleet: Fleet) -> None:
        fleet.board.delay_s = delay_s
        chance = random.Random(seed)
        clients = [fleet.started(client(fleet, chance)) for _ in range(chance.randint(2, 14))]
        given_up = chance.sample(clients, len(clients) // 5)
        while not all(each.done() for each in clients):
            await asyncio.sleep(0.03)
            held = [seat.tokens for each in fleet.admissions for place in each._pools.values()
                    for seat in place.seats if seat.tokens]  # fmt: skip
            assert sum(held) <= WINDOW_TOKENS or len(held) == 1
            if given_up and chance.random() < 0.01:
                given_up.pop().cancel()
            assert asyncio.get_running_loop().time() < 5000, "somebody starves"
        for each in clients:
            assert each.cancelled() or each.exception() is None
        await asyncio.sleep(5)
        assert not fleet.board.topics
        assert not any(each._pools for each in fleet.admissions)

    run(_with_fleet(processes, watched))
