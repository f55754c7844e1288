"""The SQLite store's file: rights, versions, damage, disappearance, and other processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.errors import StoreError
from litellm_compaction.stores import open_existing, open_store, sqlite, sqlite_path
from litellm_compaction.stores.rows import MemoryRows
from litellm_compaction.stores.sqlite import MIGRATIONS
from litellm_compaction.stores.sqlite_file import SqliteFile
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore, SqliteStore, SteadyStore

Open = Callable[..., SqliteStore]
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX modes and open files")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "store.sqlite3"


@pytest.fixture
async def opened(path: Path) -> AsyncIterator[Open]:
    """Opens stores on the same file and ends them."""
    stores: list[SqliteStore] = []

    def make(**options: Any) -> SqliteStore:
        stores.append(SqliteStore(path, **{"ttl_s": 1000, "max_bytes": 10_000_000, **options}))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def change(path: Path, *statements: str) -> None:
    """Changes the file behind the store's back."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def asides(path: Path) -> list[Path]:
    return [each for each in path.parent.glob("*.corrupt-*") if not each.name.endswith(("-wal", "-shm"))]


async def test_what_was_put_is_there_after_a_restart(opened: Open) -> None:
    """Compactions, facts and events; the numbers of events go on."""
    first = opened()
    await first.put("team", compaction("h"))
    await first.put_fact("model", "ratio", "1.1")
    await first.add_event(1e12, "{}")
    await first.aclose()
    second = opened()
    assert await second.find("team", ["h"]) == [compaction("h")]
    assert await second.get_fact("model", "ratio") == "1.1"
    await second.add_event(1e12, "{}")
    one, two = await second.events()
    assert two.number > one.number


@posix
async def test_nobody_else_can_read_it(opened: Open, path: Path) -> None:
    """0600 for the file and its two companions, 0700 for the folder, also where the file was open to others."""
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o644)
    store = opened()
    await store.put("team", compaction("h"))
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == dict.fromkeys(["store.sqlite3", "store.sqlite3-wal", "store.sqlite3-shm"], 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@posix
async def test_the_folder_is_made_for_the_user_alone(opened: Open, path: Path) -> None:
    """0700, whatever the process's umask would allow."""
    await opened().put("team", compaction("h"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_readers_do_not_wait_for_a_writer(opened: Open, path: Path) -> None:
    """The journal is WAL: found while another process holds the write lock."""
    store = opened()
    await store.put("team", compaction("h"))
    writer = sqlite3.connect(path, isolation_level=None)
    assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    writer.execute("BEGIN IMMEDIATE")
    assert await store.find("team", ["h"]) == [compaction("h")]
    with pytest.raises(StoreError, match="locked"):
        await store.put("team", compaction("other"))
    writer.execute("ROLLBACK")
    # For some seconds nobody waits for the lock again.
    with pytest.raises(StoreError, match="locked"):
        await store.put("team", compaction("other"))
    writer.close()
    assert await opened().find("team", ["h"]) == [compaction("h")]


async def test_a_locked_file_is_written_again_after_a_while(path: Path) -> None:
    """One failed wait pays for ten seconds, then the lock is tried again."""
    now_s = 0.0
    file = SqliteFile(path, MIGRATIONS, create=True, clock=lambda: now_s)
    file.write(lambda connection: connection.execute("UPDATE usage SET bytes = 0"))
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        file.write(lambda connection: None)
    writer.execute("ROLLBACK")
    writer.close()
    now_s = 9.9
    with pytest.raises(StoreError, match="locked"):
        file.write(lambda connection: None)
    now_s = 10.1
    file.write(lambda connection: None)
    file.close()


async def test_an_older_version_is_migrated(opened: Open, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held is still there, and the new tables too."""
    older = opened()
    await older.put("team", compaction("h"))
    await older.aclose()
    before = sqlite3.connect(path)
    (version,) = before.execute("PRAGMA user_version").fetchone()
    before.close()
    newer = (*MIGRATIONS, ("CREATE TABLE another (x)",))
    monkeypatch.setattr(sqlite, "MIGRATIONS", newer)
    store = opened()
    assert await store.find("team", ["h"]) == [compaction("h")]
    await store.add_event(1e12, "{}")
    assert len(await store.events()) == 1
    await store.aclose()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (version + 1,)
    assert connection.execute("SELECT count(*) FROM another").fetchone() == (0,)
    connection.close()


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


@pytest.mark.parametrize("version", range(1, 6))
async def test_a_file_of_a_build_before_the_release_is_set_aside(path: Path, opened: Open, version: int) -> None:
    """Its tables are others; the store works at once, and what was there is not deleted."""
    path.parent.mkdir()
    change(path, "CREATE TABLE compaction (x)", "PRAGMA application_id=0x6C6D6373", f"PRAGMA user_version={version}")
    with pytest.raises(StoreError, match=f"schema version {version} is of a build before the first release"):
        await opened(create=False).find("team", ["h"])
    assert asides(path) == []
    store = opened()
    await store.put("team", compaction("h"))
    assert await store.find("team", ["h"]) == [compaction("h")]
    [aside] = asides(path)
    kept = sqlite3.connect(aside)
    assert kept.execute("SELECT count(*) FROM compaction").fetchone() == (0,)
    kept.close()


async def test_another_programs_database_is_left_alone(path: Path, opened: Open) -> None:
    """Its tables are not ours to add to."""
    path.parent.mkdir()
    change(path, "CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program"):
        await opened().put("team", compaction("h"))
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    connection.close()


async def test_a_damaged_file_is_set_aside(opened: Open, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At start: one warning, a fresh file, and the damaged one kept for whoever wants to look."""
    path.parent.mkdir()
    path.write_bytes(b"this is no database, but long enough to be taken for one" * 100)
    store = opened()
    await store.put("team", compaction("h"))
    assert await store.find("team", ["h"]) == [compaction("h")]
    [aside] = asides(path)
    assert aside.read_bytes().startswith(b"this is no database")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("store_corrupt ")


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


async def test_an_unreadable_row_is_dropped(opened: Open, path: Path) -> None:
    """The others are found, and a new one takes its place."""
    store = opened()
    for name in ("a", "b"):
        await store.put("team", compaction(name))
    await store.put_fact("model", "ratio", "1")
    change(path, "UPDATE entry SET body = x'ff00' WHERE key IN ('c:a', 'f:ratio')")
    assert [each.covered_hash for each in await store.find("team", ["a", "b"])] == ["b"]
    assert [each.compaction.covered_hash for each in await store.compactions()] == ["b"]
    assert await store.get_fact("model", "ratio") is None
    await store.put("team", compaction("a"))
    assert len(await store.find("team", ["a", "b"])) == 2


@posix
async def test_a_file_that_is_deleted_while_in_use_is_made_anew(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; what comes later is found, and survives a restart."""
    store = opened()
    await store.put("team", compaction("before"))
    for each in path.parent.iterdir():
        each.unlink()
    assert await store.find("team", ["before"]) == []
    await store.put("team", compaction("after"))
    await store.aclose()
    assert await opened().find("team", ["before", "after"]) == [compaction("after")]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["store_file_replaced"]


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


async def test_a_cancelled_put_is_finished(opened: Open) -> None:
    """The summary is paid for; whoever asked for it may have gone."""
    begun, released = threading.Event(), threading.Event()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        begun.set()
        assert released.wait(60)
        return sqlite3.connect(*arguments, **options)

    store = opened(connect=connect)
    task = asyncio.create_task(store.put("team", compaction("h")))
    assert await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    assert await store.find("team", ["h"]) == [compaction("h")]


async def test_the_event_loop_does_not_wait_for_the_disk(opened: Open) -> None:
    """Another task runs while the store's thread is held up."""
    released = threading.Event()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        assert released.wait(60)
        return sqlite3.connect(*arguments, **options)

    store = opened(connect=connect)
    task = asyncio.create_task(store.put("team", compaction("h")))
    # Only a loop that runs can release it.
    asyncio.get_running_loop().call_soon(released.set)
    await task


def test_a_store_serves_several_event_loops(path: Path) -> None:
    """One after the other, and at once."""
    store = SqliteStore(path, ttl_s=1000, max_bytes=1_000_000)
    found: list[int] = []

    async def use(name: str) -> None:
        await store.put("team", compaction(name))
        found.append(len(await store.find("team", [name])))

    asyncio.run(use("a"))
    threads = [threading.Thread(target=lambda name=name: asyncio.run(use(name))) for name in "bcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(store.aclose())
    assert found == [1] * 4


async def test_an_ended_store_is_an_error(opened: Open) -> None:
    """Not a hang, and not a file that is opened again."""
    store = opened()
    await store.put("team", compaction("h"))
    await store.aclose()
    with pytest.raises(StoreError, match="closed"):
        await store.find("team", ["h"])


def test_a_store_that_nobody_ends_closes_its_file(path: Path) -> None:
    """When it is collected, or the process ends: SQLite's journal is then folded in."""
    store = SqliteStore(path, ttl_s=1000, max_bytes=1_000_000)
    asyncio.run(store.put("team", compaction("h")))
    assert Path(f"{path}-wal").exists()
    # Until its thread has taken up the next thing, it holds on to the last one.
    asyncio.run(store.rows._thread.run(int))
    del store
    gc.collect()
    assert not Path(f"{path}-wal").exists()


_WRITER = """
import asyncio, sys
from pathlib import Path
from tests.stores.compactions import compaction
from tests.stores.made import SqliteStore

async def main(path, name):
    store = SqliteStore(Path(path), ttl_s=1000, max_bytes=10_000_000)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(100):
        await store.put("team", compaction(f"{name}{number}"))
        assert await store.find("team", [f"{name}{number}"])
        await store.add_event(1e12, "{}")
    if name == "a":
        await store.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_may_make_the_file_while_it_is_looked_at(path: Path) -> None:
    """Its schema is read as of one moment: an empty file that has tables a moment later is no other program's."""

    class Raced(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if "sqlite_master" in statement and not raced:
                raced.append(statement)
                # Where the file is being read it has to wait, here for nothing.
                with contextlib.suppress(StoreError, sqlite3.Error):
                    other = sqlite3.connect(path, timeout=0, isolation_level=None)
                    try:
                        other.executescript("CREATE TABLE x (a); PRAGMA application_id=7;")
                    finally:
                        other.close()
            return super().execute(statement, *values)

    raced: list[str] = []
    file = SqliteFile(path, MIGRATIONS, create=True, connect=Raced)
    file.write(lambda connection: None)
    file.close()
    assert raced


async def test_two_processes_share_a_file(opened: Open, path: Path) -> None:
    """Both make it at the same moment, write a hundred each, and one never closes it: all is there, in order."""
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _WRITER, str(path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for name in "ab"
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert [child.communicate(timeout=300)[1] for child in children] == ["", ""]
    finally:
        for child in children:
            child.kill()
            child.wait()
    store = opened()
    hashes = [f"{name}{number}" for name in "ab" for number in range(100)]
    assert len(await store.find("team", hashes)) == 200
    assert len(await store.events()) == 200


async def test_deleted_text_is_gone_from_the_disk(opened: Open, path: Path) -> None:
    """Not only from the index: no file holds it any more, and the file has shrunk."""
    store = opened()
    for number in range(50):
        await store.put("team", compaction(f"h{number}", text=f"the secret {number} " * 200))
    size_bytes = path.stat().st_size + Path(f"{path}-wal").stat().st_size
    assert await store.delete() == 50
    assert not any(b"the secret" in each.read_bytes() for each in path.parent.iterdir())
    assert sum(each.stat().st_size for each in path.parent.iterdir()) < size_bytes / 2
    await store.put("team", compaction("h"))
    assert len(await store.find("team", ["h"])) == 1


async def test_the_file_has_a_bound_too(opened: Open, path: Path) -> None:
    """Room of what was forgotten is used again: the file stays near the bound on what is in it."""
    store = opened(max_bytes=1_000_000)
    for number in range(1000):
        await store.put("team", compaction(f"h{number}", text="x" * 5000))
    await store.aclose()
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite://", "/data/litellm_compaction/store.sqlite3"),
        ("sqlite:////var/lib/store.db", "/var/lib/store.db"),
        ("sqlite:///some/store.db", str(Path.cwd() / "some/store.db")),
        ("sqlite:///~/store.db", str(Path.home() / "store.db")),
    ],
)
@posix
def test_urls_name_files(url: str, expected: str) -> None:
    """As SQLAlchemy reads them, but that no path is the default file."""
    assert sqlite_path(url, {"XDG_DATA_HOME": "/data", "HOME": "/h"}) == Path(expected)


@pytest.mark.parametrize("url", ["mysql://localhost", "sqlite:///", "sqlite://host/db", "sqlite", ""])
def test_other_urls_are_errors(url: str) -> None:
    """They are named, with what is allowed."""
    with pytest.raises(StoreError, match=r"store '.*: memory://, sqlite://"):
        open_store(url, ttl_s=1, max_bytes=1024)


async def test_a_store_is_opened_by_its_url(tmp_path: Path) -> None:
    """In the folder that the environment names, and only when it is used."""
    environ = {"LITELLM_COMPACTION_HOME": str(tmp_path / "home")}
    store = open_store("sqlite://", ttl_s=1000, max_bytes=1_000_000, environ=environ)
    assert list(tmp_path.iterdir()) == []
    await store.put("team", compaction("h"))
    await store.aclose()
    assert (tmp_path / "home" / "store.sqlite3").is_file()
    memory = open_store("memory://", ttl_s=1, max_bytes=1024)
    assert isinstance(memory.rows, MemoryRows)
    await memory.aclose()


async def test_a_look_changes_nothing(path: Path) -> None:
    """An operator's commands make no file and repair none."""
    store = open_existing(f"sqlite:///{path}", ttl_s=1, max_bytes=1024)
    with pytest.raises(StoreError, match="there is no store at"):
        await store.compactions()
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        await store.compactions()
    assert asides(path) == []
    await store.aclose()
    with pytest.raises(StoreError, match="lives in the proxy's process"):
        open_existing("memory://", ttl_s=1, max_bytes=1024)
