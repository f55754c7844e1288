"""The SQLite store's file: rights, versions, damage, disappearance, and other processes."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.errors import StoreError
from tests.stores.compactions import compaction
from tests.stores.conftest import Open, asides, change
from tests.virtual_time import Complaints


@pytest.mark.skipif(os.name != "posix", reason="POSIX modes")
async def test_a_file_is_the_users_alone(path: Path, opened: Open) -> None:
    """As are its journal and its folder's index of it; those that were others' to read are closed at the next start."""
    for _ in range(2):
        await opened().put("team", compaction("h"))
        assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}
        assert (len(list(path.parent.iterdir())), stat.S_IMODE(path.parent.stat().st_mode)) == (3, 0o700)
        for each in path.parent.iterdir():
            each.chmod(0o644)


async def test_a_locked_file_is_written_as_soon_as_it_is_free(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that keeps the lock costs one write its patience, and those behind it none."""
    store, waits, sleep = opened(), 0, time.sleep

    def slept(seconds: float) -> None:
        nonlocal waits
        waits += 1
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", slept)
    await store.put("team", compaction("h"))
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        await store.add_event(1.0, "{}")
    assert waits > 1
    for _ in range(3):
        waits = 0
        with pytest.raises(StoreError, match="locked"):
            await store.put("team", compaction("i"))
        assert waits == 0
    assert await store.find("team", ["h"]) == [compaction("h")]
    writer.execute("ROLLBACK")
    writer.close()
    await store.put("team", compaction("i"))


async def test_a_change_is_one_step_of_all_processes(path: Path, opened: Open) -> None:
    """Nobody writes between its look and its write."""

    def changed(*_: object) -> bytes:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            change(path, "PRAGMA busy_timeout=0", "BEGIN IMMEDIATE")
        return b"1"

    await opened().rows.change("topic", "row", changed)


async def test_a_newer_version_is_left_alone(path: Path, opened: Open) -> None:
    """The error says why and what to do, and the file stays as it is."""
    await opened().put("team", compaction("h"))
    change(path, "PRAGMA user_version=9")
    before, store = path.read_bytes(), opened()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"version 9 and .* knows 8: update it, or name another file in `store`"):
            await store.put("team", compaction("i"))
    assert (path.read_bytes(), asides(path)) == (before, [])


async def test_another_programs_database_is_left_alone(path: Path, opened: Open) -> None:
    """Its tables are not ours to add to."""
    path.parent.mkdir(parents=True)
    change(path, "CREATE TABLE theirs (x)")
    before, store = path.read_bytes(), opened()
    for _ in range(2):
        with pytest.raises(StoreError, match="another program"):
            await store.put("team", compaction("h"))
    assert path.read_bytes() == before


async def test_a_file_that_is_damaged_while_in_use_is_set_aside(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The call that finds out goes on with the fresh file; a second process follows.

    The copy goes with any purge, since nobody knows whose text it holds, and after the time of a record.
    """
    store, other = opened(), opened()
    for number in range(200):
        await store.put("team", compaction(f"h{number}", text="x" * 1000))
    assert len(await other.find("team", ["h0"])) == 1
    change(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096 * 8)
        file.write(b"\xff" * 4096 * 16)
    assert await other.compactions() == []
    await store.put("team", compaction("new"))
    await other.put("team", compaction("newer"))
    assert len(await store.find("team", ["new", "newer"])) == 2
    [copy] = asides(path)
    await store.delete(scope="team", covered_hash="new")
    assert copy.exists()
    await store.delete(scope="other")
    assert not copy.exists()
    for used_s in (time.time(), 0.0):
        copy.touch()
        os.utime(copy, (used_s, used_s))
        await store.put("team", compaction("h"))
        assert copy.exists() is (used_s > 0)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["store_corrupt", "store_file_replaced"]


async def test_a_disk_that_hangs_holds_nobody_up(opened: Open) -> None:
    """The first call gives up after its limit, the next ones at once; its late failure is nobody's any more."""
    released, complaints = threading.Event(), Complaints()

    def connect(*_: Any, **__: Any) -> sqlite3.Connection:
        assert released.wait(60)
        raise OSError("late")

    store = opened(connect=connect, limit_s=0.05)
    left = asyncio.ensure_future(store.find("team", ["h"]))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(StoreError, match=r"did not answer in 0\.05 s"):
        await store.put("team", compaction("h"))
    with pytest.raises(StoreError, match="still hangs"):
        await store.find("team", ["h"])
    released.set()
    await store.aclose()
    del left
    assert complaints.heard() == []


class Failing(sqlite3.Connection):
    """One whose statements fail with `said`, while it says something."""

    said = ""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        if Failing.said:
            raise sqlite3.OperationalError(Failing.said)
        return super().execute(*arguments)


@pytest.mark.parametrize(
    ("failure", "connections"), [("disk I/O error", 2), ("database is locked", 1), ("no such table", 3)]
)
async def test_a_file_is_opened_anew_after_its_disk_has_failed(
    opened: Open, monkeypatch: pytest.MonkeyPatch, failure: str, connections: int
) -> None:
    """What stands in the connection's memory may not be what is on the disk any more; a lock says nothing of that."""
    made: list[Failing] = []

    def connect(*arguments: Any, **options: Any) -> Failing:
        made.append(sqlite3.connect(*arguments, **options, factory=Failing))
        return made[-1]

    store = opened(connect=connect)
    assert await store.compactions() == []
    monkeypatch.setattr(Failing, "said", failure)
    with pytest.raises(StoreError, match=rf"store\.sqlite3 cannot be used: {failure}"):
        await store.compactions()
    monkeypatch.setattr(Failing, "said", "")
    assert await store.compactions() == []
    assert len(made) == connections


async def test_a_full_disk_leaves_what_is_there(opened: Open, path: Path) -> None:
    """What does not fit is an error, what was there is found, and the file is not damaged."""

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = sqlite3.connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count=30")
        return connection

    store = opened(connect=connect)
    await store.put("team", compaction("small"))
    with pytest.raises(StoreError, match="full"):
        await store.put("team", compaction("large", text="x" * 300_000))
    assert await store.find("team", ["small", "large"]) == [compaction("small")]
    await store.aclose()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
