"""Two processes that need the same summary: one makes it, and nothing that happens to it or to the board hurts both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from litellm_compaction.concurrency import ended
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.engine.sharing.leases import LEASE_S, Leases
from litellm_compaction.errors import StoreError
from tests.builders import chat
from tests.engine.bench import Bench, FakeAsk, RecordingStore
from tests.stores.made import MemoryBoard
from tests.virtual_time import played, run

WINDOW = 8192
LONG = chat(44, words=60)
HANG_S = 60.0


class BrokenBoard(MemoryBoard):
    """Fails when told."""

    is_broken = False

    async def update(self, *args: Any, **options: Any) -> Any:
        if self.is_broken:
            raise StoreError("the board is down")
        return await super().update(*args, **options)


class HangingBoard(MemoryBoard):
    """Answers nobody."""

    async def update(self, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(600)


class Pair:
    """Two processes with one store and one board, in virtual time."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.board = BrokenBoard(clock=clock)
        store = RecordingStore()
        self.asks = [FakeAsk(gate=asyncio.Event()) for _ in range(2)]
        self.benches = [Bench(store=store, board=self.board, ask=ask, clock=clock) for ask in self.asks]
        self.tasks: list[asyncio.Task[PreparedRequest]] = []

    def start(self, at: int, raw: Any = LONG, **settings: Any) -> asyncio.Task[PreparedRequest]:
        self.tasks.append(asyncio.create_task(self.benches[at].guard(raw, WINDOW, **settings)))
        return self.tasks[-1]

    def write(self, at: int) -> None:
        gate = self.asks[at].gate
        assert gate is not None
        gate.set()

    @property
    def calls(self) -> list[int]:
        return [len(ask.prompts) for ask in self.asks]


def together(test: Callable[[Pair], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test with two processes, in virtual time."""

    async def with_pair() -> None:
        pair = Pair()
        try:
            await test(pair)
        finally:
            await ended(pair.tasks)
            for each in pair.benches:
                await each.compactor.aclose()

    return played(test, with_pair)


@together
async def test_a_client_that_leaves_lets_the_other_process_make_it(pair: Pair) -> None:
    """At once, and not when the lease ends."""
    first = pair.start(0)
    await asyncio.wait_for(pair.asks[0].asked.wait(), HANG_S)
    second = pair.start(1)
    await asyncio.sleep(0.2)
    first.cancel()
    pair.write(1)
    prepared = await asyncio.wait_for(second, LEASE_S / 2)
    assert prepared.action == "compacted"
    assert pair.calls == [1, 1]


async def takes(leases: Leases, topic: str, held: AsyncExitStack) -> bool:
    """Returns True if it has the right to a topic, which it keeps as long as `held` is open."""

    async def look() -> str:
        return "by another"

    return await held.enter_async_context(leases.one_of_all(topic, look, limit_s=60)) is None


def test_a_right_ends_with_its_owner() -> None:
    """One that was killed says nothing any more: after its time another has it; a living one keeps it for hours."""

    async def owners() -> None:
        clock = asyncio.get_running_loop().time
        board = MemoryBoard(clock=clock)
        first, second = Leases(board, clock=clock), Leases(board, clock=clock)
        async with AsyncExitStack() as held:
            assert await takes(first, "right", held)
            assert not await takes(second, "right", held)
            assert await takes(second, "another", held)
            await asyncio.sleep(3600)
            assert not await takes(second, "right", held)
            # As `kill -9` ends it.
            first.board = MemoryBoard(clock=clock)
            await asyncio.sleep(LEASE_S - 3)
            assert not await takes(second, "right", held)
            await asyncio.sleep(4)
            assert await takes(second, "right", held)
            await first.aclose()
            await second.aclose()
            assert not board.topics

    run(owners())


def test_a_process_ends_whatever_its_board_does() -> None:
    """One that hangs is waited for two seconds, one that fails not at all."""

    async def end(broken: MemoryBoard) -> float:
        clock = asyncio.get_running_loop().time
        leases = Leases(MemoryBoard(clock=clock), clock=clock)
        async with AsyncExitStack() as held:
            assert await takes(leases, "right", held)
            leases.board = broken
            begun_s = clock()
            await leases.aclose()
            return clock() - begun_s

    assert run(end(HangingBoard())) <= 3
    assert run(end(BrokenBoard())) == 0


def test_a_board_that_fails_for_a_moment_gives_nobody_the_right() -> None:
    """Two would make the same summary: it is asked again soon, and lost only when it goes on failing.

    One that is lost is left alone for a moment, so that not every request waits for it in vain.
    """

    async def hiccup() -> None:
        clock = asyncio.get_running_loop().time
        board = BrokenBoard(clock=clock)
        one, other = Leases(board, clock=clock), Leases(board, clock=clock)
        async with AsyncExitStack() as held:
            assert await takes(one, "right", held)
            assert await takes(other, "else", held)
            await asyncio.sleep(8)
            board.is_broken = True
            assert not await takes(other, "right", held)
            await asyncio.sleep(0.5)
            assert not await takes(other, "right", held)
            assert not other.is_lost
            board.is_broken = False
            await asyncio.sleep(0.5)
            assert not await takes(other, "right", held)
            await asyncio.sleep(5)
            board.is_broken = True
            assert not await takes(other, "right", held)
            await asyncio.sleep(2)
            assert await takes(other, "right", held)
            assert other.is_lost
            board.is_broken = False
            topics = len(board.topics)
            for seconds in (0, 6):
                await asyncio.sleep(seconds)
                assert await takes(other, f"after {seconds}", held)
                assert other.is_lost == (len(board.topics) == topics) == (seconds == 0)
        for each in (one, other):
            await each.aclose()

    run(hiccup())
