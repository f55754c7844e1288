"""Two processes that need the same summary: one makes it, and nothing that happens to it or to the board hurts both."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from litellm_compaction.engine.sharing.leases import LEASE_S, Leases
from litellm_compaction.errors import StoreError
from tests.builders import chat
from tests.engine.bench import Bench, FakeAsk, RecordingStore
from tests.stores.made import MemoryBoard
from tests.virtual_time import in_virtual_time


class BrokenBoard(MemoryBoard):
    """Fails when told."""

    is_broken = False

    async def change(self, *args: Any) -> None:
        if self.is_broken:
            raise StoreError("the board is down")
        await super().change(*args)


@in_virtual_time
async def test_a_client_that_leaves_lets_the_other_process_make_its_summary() -> None:
    """At once, and not when the lease ends."""
    clock = asyncio.get_running_loop().time
    store, board = RecordingStore(), MemoryBoard(clock=clock)
    asks = [FakeAsk(gate=asyncio.Event()) for _ in range(2)]
    benches = [Bench(store=store, board=board, ask=ask, clock=clock) for ask in asks]
    first = asyncio.create_task(benches[0].guard(chat(44, words=60), 8192))
    await asks[0].asked.wait()
    second = asyncio.create_task(benches[1].guard(chat(44, words=60), 8192))
    await asyncio.sleep(0.2)
    assert not asks[1].asked.is_set()
    first.cancel()
    assert asks[1].gate is not None
    asks[1].gate.set()
    assert (await asyncio.wait_for(second, LEASE_S / 2)).action == "compacted"
    assert [len(ask.prompts) for ask in asks] == [1, 1]
    for bench in benches:
        await bench.compactor.aclose()


async def takes(leases: Leases, topic: str, held: AsyncExitStack) -> bool:
    """Returns True if it has the right to a topic, which it keeps as long as `held` is open."""

    async def look() -> str:
        return "by another"

    return await held.enter_async_context(leases.one_of_all(topic, look, limit_s=60)) is None


@in_virtual_time
async def test_a_right_ends_with_its_owner() -> None:
    """One that was killed says nothing any more: after its time another has it; a living one keeps it for hours."""
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
        first.rows = MemoryBoard(clock=clock)
        await asyncio.sleep(LEASE_S - 3)
        assert not await takes(second, "right", held)
        await asyncio.sleep(4)
        assert await takes(second, "right", held)
    await asyncio.sleep(60)
    assert not board.topics
    for each in (first, second):
        await each.aclose()


@in_virtual_time
async def test_a_board_that_fails_for_a_moment_gives_nobody_the_right() -> None:
    """Two would make the same summary: it is asked again soon, and lost only when it goes on failing.

    One that is lost is left alone for a moment, so that not every request waits for it in vain.
    """
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
