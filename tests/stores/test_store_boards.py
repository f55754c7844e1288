"""What every board does; what only a file can do or suffer."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from litellm_compaction.stores import Board
from tests.engine.bench import Clock
from tests.stores.made import MemoryBoard, RedisStore, file_board
from tests.stores.servers import Server, any_program, running

LEASE_S = 10.0
HANG_S = 60.0


def says(body: bytes | None) -> Callable[[Sequence[bytes]], tuple[bytes | None, list[bytes]]]:
    """Leaves a note, and tells what the others' notes are."""
    return lambda others: (body, sorted(others))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A real one, of whatever kind the machine has."""
    with running(any_program()) as started:
        yield started


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def boards(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Board, Board, Clock]]:
    """Two processes' boards and their time."""
    clock = Clock()
    if request.param == "memory":
        memory = MemoryBoard(clock=clock)
        opened: tuple[Board, Board] = (memory, memory)
    elif request.param == "sqlite":
        opened = (file_board(tmp_path / "board", clock=clock), file_board(tmp_path / "board", clock=clock))
    else:
        url = f"{request.getfixturevalue('server').url}?prefix={tmp_path.name}"
        one, other = (Board(RedisStore(url, limit_s=HANG_S, clock=clock).rows) for _ in range(2))
        opened = (one, other)
    yield (*opened, clock)
    for board in opened:
        await board.aclose()


async def test_each_sees_the_notes_of_the_others(boards: tuple[Board, Board, Clock]) -> None:
    """Under the same topic, and never its own."""
    first, second, _ = boards
    assert await first.update("pool", "a", says(b"1"), lease_s=LEASE_S) == []
    assert await second.update("pool", "b", says(b"2"), lease_s=LEASE_S) == [b"1"]
    assert await first.update("pool", "a", says(b"3"), lease_s=LEASE_S) == [b"2"]
    assert await second.update("pool", "c", says(None), lease_s=LEASE_S) == [b"2", b"3"]
    assert await second.update("other", "b", says(b"4"), lease_s=LEASE_S) == []
    # A note is taken back by its writer alone.
    await second.update("pool", "b", says(None), lease_s=LEASE_S)
    assert await second.update("pool", "b", says(None), lease_s=LEASE_S) == [b"3"]
    await first.update("pool", "a", says(None), lease_s=LEASE_S)
    assert await second.update("pool", "b", says(None), lease_s=LEASE_S) == []


async def test_a_note_lives_for_its_lease(boards: tuple[Board, Board, Clock]) -> None:
    """From when it was last renewed, whether or not it said anything new."""
    first, second, clock = boards
    await first.update("pool", "a", says(b"1"), lease_s=LEASE_S)
    clock.now_s += 8
    await first.update("pool", "a", says(b"1"), lease_s=LEASE_S)
    clock.now_s += 9
    assert await second.update("pool", "b", says(None), lease_s=LEASE_S) == [b"1"]
    await first.update("pool", "a", says(b"1"), lease_s=1)
    clock.now_s += 1.1
    assert await second.update("pool", "b", says(None), lease_s=LEASE_S) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a file board is."""
    return tmp_path / "folder" / "store.sqlite3"


async def test_a_file_board_is_the_users_alone(path: Path) -> None:
    """Though no text is in it."""
    board = file_board(path)
    await board.update("pool", "a", says(b"1"), lease_s=LEASE_S)
    assert os.name != "posix" or {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}
    await board.aclose()
