"""Who has which room of a shared context, and when: a line a client, where a change of a number or a time is felt.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from bisect import bisect_left
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.concurrency import ended
from litellm_compaction.engine import Reservation
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.errors import DoesNotFit, Overloaded
from tests.builders import user
from tests.engine.bench import Bench
from tests.engine.sharing.test_leases import BrokenBoard
from tests.goldens.tellers import recorded
from tests.virtual_time import run

_FILE = Path(__file__).parent / "seats.txt"
_POOL, _WINDOW_TOKENS = "http://127.0.0.1:1234 qwen3-8b", 100


def _now() -> str:
    return f"{asyncio.get_running_loop().time():.2f}"


@pytest.mark.parametrize("case", ["alone", "three, one is killed", "two, the store fails"])
def test_the_seats_are_as_recorded(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of clients that come, wait, are called back, go on and leave by chance, the same in each run."""
    lines = [*run(_played(case)), *(record.getMessage() for record in caplog.records[:1])]
    assert lines == recorded(_FILE, case, lines)


async def _played(case: str) -> list[str]:
    clock, processes = asyncio.get_running_loop().time, ["alone", "two", "three"].index(case.split(",")[0].split()[0])
    board = BrokenBoard(clock=clock)
    leases = [Leases(board, clock=clock) for _ in range(processes and processes + 1)]
    admissions = [Admission(leases=each) for each in leases] or [Admission()]
    clients = [
        asyncio.ensure_future(_client(admissions[number % len(admissions)], random.Random(f"{case} {number}")))
        for number in range(7)
    ]
    await asyncio.sleep(15)
    if "killed" in case:
        # It says nothing any more, and goes on alone.
        leases[0].rows = BrokenBoard(clock=clock)
    board.is_broken = "fails" in case
    await asyncio.sleep(4)
    board.is_broken = False
    lines = await asyncio.gather(*clients)
    await ended(clients)
    for each in leases:
        await each.aclose()
    return lines


async def _client(admission: Admission, luck: random.Random) -> str:
    await asyncio.sleep(luck.uniform(0, 20))
    seat, words = admission.seat(_POOL), list[str]()
    tokens, timeout_s = luck.randint(5, 80), luck.choice([1.0, 12.0, 600.0])
    try:
        for leg in range(luck.randint(1, 3)):
            words.append(f"{_now()} asks for {tokens}")
            limits: dict[str, Any] = {"window_tokens": _WINDOW_TOKENS, "timeout_s": timeout_s}
            await seat.take(tokens, most_tokens=luck.randint(0, 120), is_restart=leg > 0, **limits)
            words.append(f"{_now()} has {seat.tokens}{' in company' * seat.has_company}")
            needed_tokens, tokens = luck.choice([None, luck.randint(1, 40)]), luck.randint(5, 80)
            for _ in range(luck.choice([20, 160, 360])):
                await asyncio.sleep(0.05)
                if seat.must_give_way(needed_tokens):
                    words.append(f"{_now()} gives way")
                    break
    except Overloaded:
        words.append(f"{_now()} gives up")
    admission.release_later(seat)
    return f"{', '.join(words)}, {_now()} leaves"


def test_the_rooms_are_as_recorded() -> None:
    """Bounds of answers in one context, one after the other; when their room is free; and what a summary takes."""

    async def lines() -> list[str]:
        cases = [(0, True, 1), *itertools.product((1, 2), (True, False), (1, 9))]
        bounds = [await _bounds(*case) for case in cases]
        ways = [*itertools.product(("pause", "release", "stopped"), (False, True))]
        ways += [("ended", False), ("abandon", True), ("stay", True), ("lost", True)]
        return [
            *bounds,
            *[await _left(*case) for case in ways],
            *[await _summed(*case) for case in ((0, False), (1, False), (1, True))],
        ]

    made = run(lines())
    assert made == recorded(_FILE, "rooms", made)


async def _bounds(parallel: int, is_watched: bool, answers: int) -> str:
    """Of three answers beside each other, which go on twice because their shares are spent."""
    scene, bounds = _Scene(parallel), list[str]()
    rooms = [await scene.room() for _ in range(3)]
    for limit_tokens in (100, 3600 // answers, 3000, 3000):
        for room in rooms:
            room.ended()
            try:
                given = {"is_watched": is_watched, "answers": answers}
                bounds.append(str(await room.acquire(scene.prepared, limit_tokens, **given)))
            except DoesNotFit as error:
                bounds.append(f"{error.needed_tokens} are needed")
            except Overloaded:
                bounds.append("none")
            room.was_cut(is_spent=limit_tokens > 100)
    await asyncio.sleep(1.5)
    beside, how = rooms[0].beside(scene.prepared.window), f"{answers} of {parallel}{' watched' * is_watched}"
    return f"{how}: {', '.join(bounds)}; {scene.used_tokens} used, {beside} beside"


async def _left(how: str, is_running: bool) -> str:
    """When another one has the room of one that leaves, and what is as good as free for it before."""
    scene, clock = _Scene(1), asyncio.get_running_loop().time
    room, other = await scene.room(), await scene.room()
    await room.acquire(scene.prepared, 4000, is_watched=True)
    waiting = asyncio.ensure_future(other.acquire(scene.prepared, 4000, is_watched=True))
    await asyncio.sleep(0.5)
    called = bisect_left(range(4096), True, key=partial(_is_at_peace, scene, room))
    if is_running:
        room.started()
    begun_s = clock()
    if how == "lost":
        del room
    elif (leaving := getattr(room, how)()) is not None:
        await leaving
    await asyncio.wait({waiting})
    bound = waiting.result() if not waiting.exception() else "none"
    return f"{how}{' of one that runs' * is_running}, called below {called}: {bound} after {clock() - begun_s:.2f}"


def _is_at_peace(scene: _Scene, room: Reservation, tokens: int) -> bool:
    """It has not to stop for another, with so many tokens written."""
    is_called = room.is_called_back(scene.prepared, tokens, can_be_cut=True)
    room.stay()
    return not is_called


async def _summed(parallel: int, leaves: bool) -> str:
    """What a summary takes, which has other readers than a client that leaves meanwhile."""
    scene, pools = _Scene(parallel), list[str]()
    room = await scene.room()
    async with room.for_summary(scene.prepared.window, 1000):
        if leaves:
            room.release()
        pools.append(f"{len(scene.pools)} of {scene.used_tokens}")
    for pause_s in (0, 0.8, 0.8):
        await asyncio.sleep(pause_s)
        pools.append(f"{len(scene.pools)} of {scene.used_tokens}")
    return f"summary{' of one that leaves' * leaves}: {', '.join(pools)}"


class _Scene:
    """An engine, and a request to a model whose context several share."""

    def __init__(self, parallel: int) -> None:
        self._bench, self._parallel = Bench(), parallel
        self.pools = self._bench.compactor.admission.pools

    async def room(self) -> Reservation:
        settings = {"admission": ("off", "pool", "auto")[min(self._parallel, 2)], "admission_timeout_s": 20}
        context = self._bench.context(4096, **settings)
        made = await self._bench.compactor.guard(self._bench.request([user("word " * 200)]), context)
        window = replace(made.window, parallel=max(self._parallel, 1))
        self.prepared = replace(made, measured=replace(made.measured, window=window))
        return self._bench.compactor.room(context)

    @property
    def used_tokens(self) -> int:
        return sum(pool.used_tokens for pool in self.pools.values())
