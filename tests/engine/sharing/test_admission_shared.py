"""Several processes that send to one loaded context: their seats together keep the rules of one process's."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.concurrency import ended
from litellm_compaction.engine.sharing.admission import Admission, Seat
from litellm_compaction.engine.sharing.leases import LEASE_S, Leases, shared_name
from litellm_compaction.errors import Overloaded
from tests.stores.made import MemoryBoard
from tests.virtual_time import run

POOL = "http://127.0.0.1:1234 qwen3-8b"
WINDOW_TOKENS = 100
LONG_S = 600.0


class SlowBoard(MemoryBoard):
    """Others may be faster while it answers."""

    delay_s = 0.0

    async def change(self, *args: Any) -> None:
        await super().change(*args)
        await asyncio.sleep(self.delay_s)


@dataclass
class Fleet:
    """Processes that share a board, in one loop in virtual time."""

    admissions: list[Admission]
    board: SlowBoard
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


async def _with_fleet(processes: int, test: Callable[[Fleet], Coroutine[Any, Any, None]]) -> None:
    clock = asyncio.get_running_loop().time
    board = SlowBoard(clock=clock)
    leases = [Leases(board, clock=clock) for _ in range(processes)]
    fleet = Fleet([Admission(leases=each) for each in leases], board, leases)
    try:
        await test(fleet)
    finally:
        await ended(fleet.tasks)
        for each in leases:
            await each.aclose()


def test_a_process_that_is_killed_delays_others_by_its_lease() -> None:
    """What it held and what it waited for is gone then."""

    async def killed(fleet: Fleet) -> None:
        await fleet.enter(0, 90)
        fleet.started(fleet.enter(0, 50))
        await asyncio.sleep(3)
        waiting = fleet.started(fleet.enter(1, 80))
        await asyncio.sleep(1)
        # As `kill -9` does it: it says nothing any more.
        fleet.leases[0].rows = SlowBoard(clock=fleet.board.clock)
        killed_s = asyncio.get_running_loop().time()
        await waiting
        assert 0 < asyncio.get_running_loop().time() - killed_s <= LEASE_S + 1

    run(_with_fleet(2, killed))


def test_nobody_overtakes_one_that_waits_in_another_process() -> None:
    """Though there would be room for it; both go in when there is room for both."""

    async def queue(fleet: Fleet) -> None:
        running = await fleet.enter(0, 60)
        large = fleet.started(fleet.enter(0, 80))
        await asyncio.sleep(1)
        small = fleet.started(fleet.enter(1, 20))
        await asyncio.sleep(5)
        assert not large.done()
        assert not small.done()
        running.release()
        assert [(await each).tokens for each in (large, small)] == [80, 20]

    run(_with_fleet(2, queue))


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
            held = [seat.tokens for each in fleet.admissions for place in each.pools.values()
                    for seat in place.seats if seat.tokens]  # fmt: skip
            assert sum(held) <= WINDOW_TOKENS or len(held) == 1
            if given_up and chance.random() < 0.01:
                given_up.pop().cancel()
            assert asyncio.get_running_loop().time() < 5000, "somebody starves"
        for each in clients:
            assert each.cancelled() or each.exception() is None
        await asyncio.sleep(5)
        assert not fleet.board.topics
        assert not any(each.pools for each in fleet.admissions)

    run(_with_fleet(processes, watched))
