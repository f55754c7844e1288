"""Stores in one SQLite file, and how they are opened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from litellm_compaction.errors import CompactionError, StoreError
from litellm_compaction.stores import board_of, open_store, sqlite_path
from tests.stores.compactions import compaction
from tests.stores.conftest import Open, asides


async def test_the_file_has_a_bound_too(opened: Open, path: Path) -> None:
    """Room of what was forgotten is used again; of a bound that is lowered nobody waits for all that it takes away."""
    store = opened(max_bytes=200_000)
    for number in range(150):
        await store.put("team", compaction(f"h{number}", text="x" * 5000))
    await store.aclose()
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_size < 400_000
    assert path.read_bytes()[68:72] == b"lmcs", "as file(1) shows it"
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
        ("sqlite:////var/lib/store.db", "/data", "/var/lib/store.db"),
        ("sqlite:///some/store.db", "/data", str(Path.cwd() / "some/store.db")),
        ("sqlite:///~/store.db", "/data", str(Path.home() / "store.db")),
    ],
)
@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="other platforms have folders of their own")
def test_urls_name_files(url: str, data_home: str, expected: str) -> None:
    """As SQLAlchemy reads them, but that no path is the default file: in XDG_DATA_HOME if that is absolute."""
    assert sqlite_path(url, {"XDG_DATA_HOME": data_home, "HOME": "/h", "LOCALAPPDATA": "/w"}) == Path(expected)


async def test_a_look_changes_nothing(path: Path) -> None:
    """An operator's commands make no file and repair none."""
    store = open_store(f"sqlite:///{path}", ttl_s=1, max_bytes=1024, is_proxy=False)
    with pytest.raises(StoreError, match="there is no store at"):
        await store.compactions()
    assert not path.parent.exists()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        await store.compactions()
    assert asides(path) == []
    await store.aclose()
    with pytest.raises(StoreError, match="lives in the proxy's process"):
        open_store("memory://", ttl_s=1, max_bytes=1024, is_proxy=False)


def test_what_has_no_place(caplog: pytest.LogCaptureFixture) -> None:
    """Without a home folder a proxy goes on with its memory, and says so; an operator gets an error."""
    assert board_of(open_store("sqlite:///~nobody.here/store", ttl_s=1, max_bytes=1024)) is None
    assert "there is no home folder; requests go on with the memory of this process" in caplog.text
    bad = {"sqlite:///~nobody.here/store": "no home folder", "redis": "no proxy", "redis://h:0": "allowed: redis://"}
    for url, said in bad.items():
        with pytest.raises(CompactionError, match=said):
            open_store(url, ttl_s=1, max_bytes=1024, is_proxy=False)
