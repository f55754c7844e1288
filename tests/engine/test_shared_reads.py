"""What one worker has just found unchanged is not read again by the others; whatever they say, no window is older."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.engine.coordination import Coordination
from litellm_compaction.engine.shared_reads import SharedReads
from litellm_compaction.errors import WindowOutdated
from litellm_compaction.stores.board import Board, Look, MemoryBoard
from litellm_compaction.windows.windows import Target, Windows
from tests import virtual_time
from tests.windows.fake_lmstudio import BASE, Clock, FakeLMStudio, v1_model

CACHE_S = 5.0
TARGET = Target(key="id", model="qwen/qwen3-8b", api_base=BASE, api_key="k", context_length=None, is_lmstudio=True)


class Fleet:
    """Workers of one board, each with a client of its own.

    Args:
        servers: of the workers, which all call theirs by the same name.
    """

    def __init__(self, servers: Sequence[FakeLMStudio], *, board: Board | None = None, clock: Any = None) -> None:
        self.clock = clock or Clock()
        self.board = board or MemoryBoard(clock=self.clock)
        self.servers = servers
        self.workers: list[Windows] = []
        self.coordinations: list[Coordination] = []
        for server in servers:
            http = httpx.AsyncClient(transport=httpx.MockTransport(server.handle))
            self.workers.append(Windows(cache_s=CACHE_S, http=http, clock=self.clock))
            self.coordinations.append(Coordination(self.board, clock=self.clock))
            self.workers[-1].hear(SharedReads(self.coordinations[-1], clock=self.clock))

    async def window(self, worker: int, *, fresh: bool = False) -> int:
        """Its window in tokens, when what it tells others is told."""
        tokens = (await self.workers[worker].resolve(TARGET, fresh=fresh)).tokens
        for _ in range(10):
            await asyncio.sleep(0)
        return tokens

    def reads(self, server: int = 0) -> int:
        return len(self.servers[server].requests)


def served(tokens: int = 8192) -> FakeLMStudio:
    server = FakeLMStudio()
    server.list_v1(v1_model(_=tokens))
    return server


async def test_four_workers_list_the_models_about_as_often_as_one() -> None:
    """Each of them reads for itself at first, and once a minute."""
    server = served()
    fleet = Fleet([server] * 4)
    for step in range(2400):
        assert await fleet.window(step % 4) == 8192
        fleet.clock.now_s += 0.1
    # 240 s: 48 reads by one worker, 192 by four that know nothing of each other.
    assert fleet.reads() < 70


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(("ask", "ask", "ask", "ask anew", "reload")),
            st.sampled_from((0.0, 0.3, 1.0, 4.9, 5.0)),
        ),
        max_size=60,
    )
)
def test_no_window_is_older_than_the_setting_says(steps: list[tuple[int, str, float]]) -> None:
    """Whoever has read it: the server has said so within `window_cache_s` (promise B4)."""

    async def play() -> None:
        server = served(4096)
        fleet, said = Fleet([server] * 3), [(0.0, 4096)]
        for worker, step, pause_s in steps:
            now_s = fleet.clock.now_s
            if step == "reload":
                said.append((now_s, 4096 if said[-1][1] == 2048 else 2048))
                server.list_v1(v1_model(_=said[-1][1]))
            else:
                tokens = await fleet.window(worker, fresh=step == "ask anew")
                ends = [*(when_s for when_s, _ in said[1:]), float("inf")]
                lately = {each for (_, each), end_s in zip(said, ends, strict=True) if end_s > now_s - CACHE_S}
                assert tokens in lately
                assert step == "ask" or tokens == said[-1][1]
            fleet.clock.now_s += pause_s

    asyncio.run(play())


async def test_who_doubts_its_window_asks_the_server() -> None:
    """After an overflow, whatever the others have read a moment ago; and after a failed read."""
    server = served()
    fleet = Fleet([server] * 2)
    for worker in (0, 1, 0, 1):
        await fleet.window(worker)
        fleet.clock.now_s += CACHE_S - 1
    server.list_v1(v1_model(_=2048))
    fleet.workers[1].invalidate(TARGET)
    assert await fleet.window(1) == 2048
    server.list_v1(v1_model(_=8192))
    fleet.clock.now_s += CACHE_S
    assert [await fleet.window(worker) for worker in (0, 1)] == [8192] * 2
    server.down = httpx.ConnectError("refused")
    fleet.clock.now_s += CACHE_S
    # The smaller of the last two numbers, and none where there has been one only.
    assert await fleet.window(1) == 2048
    with pytest.raises(WindowOutdated):
        await fleet.window(0)


async def test_another_server_by_the_same_name_is_not_believed() -> None:
    """As behind a name that means another machine elsewhere: what the other says is no number of ours."""
    servers = [served(8192), served(4096)]
    fleet = Fleet(servers)
    for step in range(200):
        assert await fleet.window(step % 2) == (8192, 4096)[step % 2]
        fleet.clock.now_s += 0.25
    assert [fleet.reads(number) for number in (0, 1)] >= [10, 10]


async def test_one_that_said_just_the_same_is_found_out_within_a_minute() -> None:
    """Two servers by one name, one of which is loaded anew: each worker looks for itself once in a while."""
    servers = [served(8192), served(8192)]
    fleet = Fleet(servers)
    for step in range(80):
        await fleet.window(step % 2)
        fleet.clock.now_s += 0.25
    servers[1].list_v1(v1_model(_=2048))
    for _ in range(240):
        fleet.clock.now_s += 0.125
        await fleet.window(0)
        fleet.clock.now_s += 0.125
        tokens = await fleet.window(1)
    assert tokens == 2048


class Told(MemoryBoard):
    """Says what a test wants."""

    notes: Sequence[str] = ()

    async def look(self, topic: str, name: str) -> Look:
        return Look(1000.0, [note.encode("utf-8", "surrogateescape") for note in self.notes])


ODD = {
    "empty": "",
    "a word": "x",
    "no time": "{digest}",
    "a bad time": "{digest} x",
    "nan": "{digest} nan",
    "endless": "{digest} inf",
    "to come": "{digest} 1001",
    "bytes": "\udcff 999",
}


@pytest.mark.parametrize("note", ODD.values(), ids=ODD)
async def test_notes_that_nobody_can_have_written_are_no_read(note: str) -> None:
    """Damaged, or of a time that has not come, alone or beside a good one: the server is asked."""
    server, board = served(), Told()
    fleet = Fleet([server], board=board)
    await fleet.window(0)
    [digest] = [each.digest for each in fleet.workers[0]._listings._servers.values()]
    for notes, reads in (
        ([note], 2),
        (["{digest} 999"], 2),
        (["{digest} 999", note], 3),
        (["{digest} 994"], 4),
        (["{digest} 999", "another 994"], 4),
    ):
        board.notes = [each.replace("{digest}", digest) for each in notes]
        fleet.clock.now_s += CACHE_S
        assert await fleet.window(0) == 8192
        assert fleet.reads() == reads


class Hanging(MemoryBoard):
    """Answers nobody."""

    looks = 0

    async def look(self, topic: str, name: str) -> Look:
        self.looks += 1
        await asyncio.sleep(3600)
        raise AssertionError


def test_a_board_that_hangs_is_not_waited_for() -> None:
    """20 ms at the most with each read; windows are read as without it."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        board, server = Hanging(), served()
        fleet = Fleet([server], board=board, clock=loop.time)
        await fleet.window(0)
        waited_s = []
        for _ in range(4):
            await asyncio.sleep(CACHE_S + 0.1)
            begun_s = loop.time()
            await fleet.window(0)
            waited_s.append(loop.time() - begun_s)
        assert fleet.reads() == 5
        assert max(waited_s) <= 0.02
        assert sum(waited > 0 for waited in waited_s) == board.looks == 4
        await fleet.coordinations[0].aclose()

    virtual_time.run(play())
