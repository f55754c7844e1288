"""A board in a SQLite file beside the store's, for the processes of one machine.

A file of its own: what is written every second must neither wait for a summary that is stored nor wear its file out,
and a damaged one costs nothing.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from litellm_compaction.stores.board import MAX_LEASE_S, RENEWED_RATIO, Decide
from litellm_compaction.stores.sqlite_file import Connect, SqliteFile
from litellm_compaction.stores.sqlite_thread import FileThread

_Result = TypeVar("_Result")

# It takes well under a millisecond. A request waits for a disk that hangs once, and less than an answer is late by that
# an overflow ends; a machine that is overloaded has to be waited for.
LIMIT_S = 3.0

_MIGRATIONS = (
    (
        """CREATE TABLE note (
            topic TEXT NOT NULL,
            name TEXT NOT NULL,
            body BLOB NOT NULL,
            until_s REAL NOT NULL,
            PRIMARY KEY (topic, name)
        ) WITHOUT ROWID""",
    ),
)


class SqliteBoard:
    """Notes in a file, read and written by one thread; opened by the first call, made anew where it is damaged.

    Args:
        path: need not exist.
        clock: seconds, monotonic, of which all processes see the same: Python's is the machine's own
            (docs.python.org, `time.monotonic`: system-wide since 3.5), and stands still while the machine sleeps.
        connect: opens a database.
        limit_s: seconds after which a call is no longer waited for.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = sqlite3.connect,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._clock = clock
        self._file = SqliteFile(path, _MIGRATIONS, create=True, connect=connect)
        self._thread = FileThread(self._file, limit_s=limit_s)

    async def update(self, topic: str, name: str, decide: Decide[_Result], *, lease_s: float) -> _Result:
        """Reads what others have written, and replaces one's own note."""

        def change(connection: sqlite3.Connection) -> _Result:
            now_s = self._clock()
            rows = connection.execute("SELECT name, body, until_s FROM note WHERE topic = ?", (topic,)).fetchall()
            alive = [(bytes(body), each) for each, body, until_s in rows if now_s < until_s <= now_s + MAX_LEASE_S]
            mine, result = decide([body for body, each in alive if each != name])
            before, until_s = next(((body, until_s) for each, body, until_s in rows if each == name), (None, now_s))
            if mine is None:
                if before is not None:
                    connection.execute("DELETE FROM note WHERE topic = ? AND name = ?", (topic, name))
            elif mine != before or not now_s + (1 - RENEWED_RATIO) * lease_s < until_s <= now_s + lease_s:
                connection.execute(
                    "INSERT OR REPLACE INTO note VALUES (?, ?, ?, ?)", (topic, name, mine, now_s + lease_s)
                )
                connection.execute("DELETE FROM note WHERE until_s <= ? OR until_s > ?", (now_s, now_s + MAX_LEASE_S))
            return result

        return await self._thread.run(lambda: self._file.write(change))

    async def aclose(self) -> None:
        """Finishes what has begun and closes the file."""
        await self._thread.aclose()
