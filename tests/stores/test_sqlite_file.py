"""The SQLite store's file: rights, versions, damage, disappearance, and other processes."""

from __future__ import annotations

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
from tests.stores.made import MemoryStore, SqliteStore, SteadyStore


@pytest.mark.skipif(os.name != "posix", reason="POSIX modes")
async def test_a_file_is_the_users_alone(path: Path, opened: Open) -> None:
    """As are its journal and its folder's index of it."""
    await opened().put("team", compaction("h"))
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}
    assert len(list(path.parent.iterdir())) == 3


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
        await store.put("team", compaction("i"))
    assert waits > 1
    for _ in range(3):
        waits = 0
        with pytest.raises(StoreError, match="locked"):
            await store.put("team", compaction("i"))
        assert waits == 0
    writer.execute("ROLLBACK")
    writer.close()
    await store.put("team", compaction("i"))


async def test_a_newer_version_is_left_alone(path: Path, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    """The store works in memory, one warning says why and what to do, and the file stays as it is."""
    await opened().put("team", compaction("h"))
    change(path, "PRAGMA user_version=99")
    before = path.read_bytes()
    store = SteadyStore(opened(), MemoryStore(ttl_s=1000, max_bytes=10_000))
    for name in ("a", "b"):
        await store.put("team", compaction(name))
        assert len(await store.find("team", [name])) == 1
    assert path.read_bytes() == before
    assert asides(path) == []
    [record] = caplog.records
    assert "schema version 99" in record.getMessage()
    assert "update it, or name another file in `store`" in record.getMessage()


async def test_another_programs_database_is_left_alone(path: Path, opened: Open) -> None:
    """Its tables are not ours to add to."""
    path.parent.mkdir()
    change(path, "CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program"):
        await opened().put("team", compaction("h"))
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    connection.close()


async def test_a_file_that_is_damaged_while_in_use_is_set_aside(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The call that finds out goes on with the fresh file; a second process follows."""
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
    assert len(asides(path)) == 1
    assert [record.getMessage().split()[0] for record in caplog.records] == ["store_corrupt", "store_file_replaced"]


async def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """As is one that cannot be written; it names the file."""
    (tmp_path / "file").touch()
    store = SqliteStore(tmp_path / "file" / "store.sqlite3", ttl_s=1, max_bytes=1024)
    with pytest.raises(StoreError, match=r"file.store\.sqlite3 cannot be used: "):
        await store.find("team", ["h"])
    with pytest.raises(StoreError, match="cannot be used"):
        await store.put("team", compaction("h"))
    await store.aclose()


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


async def test_a_disk_that_hangs_holds_nobody_up(opened: Open) -> None:
    """The first call gives up after its limit, the next ones at once, and when it answers all is well."""
    released = threading.Event()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        assert released.wait(60)
        return sqlite3.connect(*arguments, **options)

    store = opened(connect=connect, limit_s=0.05)
    with pytest.raises(StoreError, match=r"did not answer in 0\.05 s"):
        await store.put("team", compaction("h"))
    with pytest.raises(StoreError, match="still hangs"):
        await store.find("team", ["h"])
    released.set()
    await store.aclose()
    assert await opened().find("team", ["h"]) == [compaction("h")]


class Failing(sqlite3.Connection):
    """One whose statements fail with `said`, while it says something."""

    said = ""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        if Failing.said:
            raise sqlite3.OperationalError(Failing.said)
        return super().execute(*arguments)


@pytest.mark.parametrize(("failure", "connections"), [("disk I/O error", 2), ("database is locked", 1)])
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
    with pytest.raises(StoreError, match=failure):
        await store.compactions()
    monkeypatch.setattr(Failing, "said", "")
    assert await store.compactions() == []
    assert len(made) == connections
