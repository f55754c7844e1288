"""What a failure of one call means for the calls after it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.errors import StoreError
from litellm_compaction.stores.sqlite_file import SqliteFile


@pytest.mark.parametrize(("failure", "opened"), [("disk I/O error", 2), ("database is locked", 1)])
def test_a_file_is_opened_anew_after_its_disk_has_failed(tmp_path: Path, failure: str, opened: int) -> None:
    """What stands in the connection's memory may not be what is on the disk any more; a lock says nothing of that."""
    connections: list[sqlite3.Connection] = []

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connections.append(sqlite3.connect(*arguments, **options))
        return connections[-1]

    def fail(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError(failure)

    def answer(connection: sqlite3.Connection) -> int:
        return int(connection.execute("SELECT 7").fetchone()[0])

    file = SqliteFile(tmp_path / "store.sqlite3", [["CREATE TABLE kept (text)"]], create=True, connect=connect)
    assert file.read(answer) == 7
    with pytest.raises(StoreError, match=failure):
        file.read(fail)
    assert file.read(answer) == 7
    assert len(connections) == opened
    file.close()
