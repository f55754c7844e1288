"""Stores in one SQLite file, and how they are opened."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.errors import StoreError
from litellm_compaction.stores import open_store, sqlite_path
from litellm_compaction.stores.sqlite import MemoryRows
from tests.stores.compactions import compaction
from tests.stores.conftest import Open, asides


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


async def test_the_file_has_a_bound_too(opened: Open, path: Path) -> None:
    """Room of what was forgotten is used again; of a bound that is lowered nobody waits for all that it takes away."""
    store = opened(max_bytes=200_000)
    for number in range(150):
        await store.put("team", compaction(f"h{number}", text="x" * 5000))
    await store.aclose()
    assert path.stat().st_size < 400_000
    lower = opened(max_bytes=20_000)
    await lower.put("team", compaction("last"))
    assert len(await lower.compactions()) == 34 + 1 - 16
    with pytest.raises(StoreError, match="closed"):
        await store.find("team", ["h"])


@pytest.mark.parametrize(
    ("url", "data_home", "expected"),
    [
        ("sqlite://", "/data", "/data/litellm_compaction/store.sqlite3"),
        ("sqlite://", "relative", "/h/.local/share/litellm_compaction/store.sqlite3"),
        ("sqlite://", "", "/h/.local/share/litellm_compaction/store.sqlite3"),
        ("sqlite:////var/lib/store.db", "/data", "/var/lib/store.db"),
        ("sqlite:///some/store.db", "/data", str(Path.cwd() / "some/store.db")),
        ("sqlite:///~/store.db", "/data", str(Path.home() / "store.db")),
    ],
)
@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="other platforms have folders of their own")
def test_urls_name_files(url: str, data_home: str, expected: str) -> None:
    """As SQLAlchemy reads them, but that no path is the default file: in XDG_DATA_HOME if that is absolute."""
    assert sqlite_path(url, {"XDG_DATA_HOME": data_home, "HOME": "/h"}) == Path(expected)


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
    store = open_store(f"sqlite:///{path}", ttl_s=1, max_bytes=1024, is_proxy=False)
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
        open_store("memory://", ttl_s=1, max_bytes=1024, is_proxy=False)
