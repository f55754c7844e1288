"""Real worker processes in front of one context: never over its window."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.engine.sharing.coordination import Coordination
from litellm_compaction.engine.sharing.pool import Admission
from tests.stores.made import file_board

POOL = "http://127.0.0.1:1234 qwen3-8b"
WINDOW_TOKENS = 1000
WORKERS, CLIENTS, ROUNDS = 3, 5, 6
HANG_S = 120.0


def _works(path: Path, told: Connection) -> None:
    """A worker whose clients hold room for some milliseconds each.

    It tells each of the intervals in which it surely held room: number, tokens, begin; and number, None, end.
    """

    async def client(admission: Admission, chance: random.Random) -> None:
        for _ in range(ROUNDS):
            number, tokens = chance.random(), chance.choice([50, 200, 400, 900])
            seat = await admission.enter(
                POOL, window_tokens=WINDOW_TOKENS, tokens=tokens, most_tokens=2 * tokens, timeout_s=HANG_S
            )
            try:
                told.send((number, seat.tokens, time.monotonic()))
                await asyncio.sleep(chance.choice([0, 0.002, 0.02]))
            finally:
                told.send((number, None, time.monotonic()))
                seat.release()

    async def run() -> None:
        coordination = Coordination(file_board(path, limit_s=HANG_S))
        admission = Admission(coordination=coordination)
        try:
            chances = [random.Random(number) for number in range(CLIENTS)]
            await asyncio.gather(*(client(admission, chance) for chance in chances))
        finally:
            await coordination.aclose()
        told.send("done")

    asyncio.run(run())


@dataclass
class Worker:
    """A process, and what it has told."""

    process: Any
    heard: Connection


@contextmanager
def working(path: Path) -> Iterator[Worker]:
    """A worker that is ended behind the block."""
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_works, args=(path, told))
    process.start()
    told.close()
    try:
        yield Worker(process, heard)
    finally:
        process.kill()
        process.join(HANG_S)


def _intervals(workers: list[Worker]) -> list[tuple[float, float, int]]:
    """Begin, end and tokens of all that the workers held, when all of them are done."""
    begun: dict[float, tuple[float, int]] = {}
    intervals: list[tuple[float, float, int]] = []
    for worker in workers:
        while worker.heard.poll(HANG_S):
            if (said := worker.heard.recv()) == "done":
                break
            number, tokens, when_s = said
            if tokens is None:
                since_s, tokens = begun.pop(number)
                intervals.append((since_s, when_s, tokens))
            else:
                begun[number] = (when_s, tokens)
        else:
            pytest.fail("a worker hangs")
        begun.clear()
    return intervals


def _most_tokens(intervals: list[tuple[float, float, int]]) -> int:
    """What was held at most at the same time; of one alone, which may hold more than the window, nothing."""
    most = 0
    for at_s, _, _ in intervals:
        held = [tokens for since_s, until_s, tokens in intervals if since_s <= at_s < until_s]
        most = max(most, sum(held) if len(held) > 1 else 0)
    return most


def test_workers_of_one_machine_never_outgrow_the_window(tmp_path: Path) -> None:
    """Three with five clients each, thirty answers a worker, in a context that seldom has room for two."""
    with ExitStack() as stack:
        workers = [stack.enter_context(working(tmp_path / "board")) for _ in range(WORKERS)]
        intervals = _intervals(workers)
    assert len(intervals) == WORKERS * CLIENTS * ROUNDS
    assert _most_tokens(intervals) <= WINDOW_TOKENS
    assert _most_tokens(intervals) > 0
