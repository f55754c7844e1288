"""What is in the SQLite file, and the statements that read and write it.

Called by `sqlite.py` with an open connection, in its thread; `write`s run inside a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.stores.protocol import EVENTS_TTL_S, MAX_EVENTS, MAX_PLOTS

Kind: TypeAlias = Literal["compaction", "fact"]

# What SQLite keeps around an entry's body: keys, numbers, two indices.
OVERHEAD_BYTES = 300
# SQLITE_MAX_VARIABLE_NUMBER was 999 until SQLite 3.32 (sqlite.org/limits.html).
_VARIABLES = 900
_EXPIRED_EVENTS_AT_ONCE = 16

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE entry (
            id INTEGER PRIMARY KEY,
            kind TEXT NOT NULL,
            scope TEXT NOT NULL,
            key TEXT NOT NULL,
            body BLOB NOT NULL,
            size_bytes INTEGER NOT NULL,
            created_s REAL NOT NULL,
            used_s REAL NOT NULL,
            used_order INTEGER NOT NULL,
            UNIQUE (kind, scope, key)
        )""",
        # All that eviction reads, with `entry_by_scope`, so that it never touches the bodies.
        "CREATE INDEX entry_by_use ON entry (used_order, used_s, size_bytes)",
        "CREATE TABLE usage (bytes INTEGER NOT NULL)",
        "INSERT INTO usage VALUES (0)",
        "CREATE TRIGGER entry_added AFTER INSERT ON entry BEGIN UPDATE usage SET bytes = bytes + new.size_bytes; END",
        "CREATE TRIGGER entry_gone AFTER DELETE ON entry BEGIN UPDATE usage SET bytes = bytes - old.size_bytes; END",
        """CREATE TRIGGER entry_resized AFTER UPDATE OF size_bytes ON entry
            BEGIN UPDATE usage SET bytes = bytes + new.size_bytes - old.size_bytes; END""",
    ),
    ("CREATE TABLE event (number INTEGER PRIMARY KEY AUTOINCREMENT, when_s REAL NOT NULL, body BLOB NOT NULL)",),
    ("CREATE TABLE setting (key TEXT PRIMARY KEY, body BLOB NOT NULL)",),
    (
        "CREATE TABLE plot (key TEXT PRIMARY KEY, when_s REAL NOT NULL, body BLOB NOT NULL)",
        "CREATE INDEX plot_by_time ON plot (when_s)",
    ),
    ("CREATE INDEX entry_by_scope ON entry (scope, used_order, size_bytes)",),
)

# One more than any before, in the order of use: clocks of several processes are not finer than requests.
_NEXT_ORDER = "(SELECT coalesce(max(used_order), 0) + 1 FROM entry)"

# A row that somebody else has written may hold any type in any column (sqlite.org/datatype3.html).
_WHOLE = (
    "typeof(body) = 'blob' AND typeof(used_s) = 'real'"
    " AND typeof(created_s) = 'real' AND typeof(size_bytes) = 'integer'"
)


class Entry(NamedTuple):
    """A row of `entry`."""

    id: int
    key: str
    body: bytes
    used_s: float


def find(connection: sqlite3.Connection, kind: Kind, scope: str, keys: Sequence[str]) -> list[Entry]:
    """The entries under `keys`, in no order, expired ones too."""
    found: list[Entry] = []
    for start in range(0, len(keys), _VARIABLES):
        some = keys[start : start + _VARIABLES]
        marks = ",".join("?" * len(some))
        rows = connection.execute(
            f"SELECT id, key, body, used_s FROM entry WHERE kind = ? AND scope = ? AND key IN ({marks}) AND {_WHOLE}",  # noqa: S608
            (kind, scope, *some),
        )
        found += map(Entry._make, rows)
    return found


def note_use(connection: sqlite3.Connection, *, ids: Sequence[int], now_s: float, expired_before_s: float) -> None:
    """Marks those that are alive as used now, the last of `ids` as the latest; deletes the expired ones."""
    for entry_id in ids:
        connection.execute("DELETE FROM entry WHERE id = ? AND used_s < ?", (entry_id, expired_before_s))
        connection.execute(
            f"UPDATE entry SET used_s = max(used_s, ?), used_order = {_NEXT_ORDER} WHERE id = ?",  # noqa: S608
            (now_s, entry_id),
        )


def put(connection: sqlite3.Connection, kind: Kind, scope: str, key: str, body: bytes, now_s: float) -> bool:
    """Adds an entry, or replaces the one under the same key, and says which."""
    same = connection.execute("SELECT 1 FROM entry WHERE kind = ? AND scope = ? AND key = ?", (kind, scope, key))
    is_replaced = same.fetchone() is not None
    connection.execute(
        "INSERT INTO entry (kind, scope, key, body, size_bytes, created_s, used_s, used_order)"  # noqa: S608
        f" VALUES (?, ?, ?, ?, ?, ?, ?, {_NEXT_ORDER})"
        " ON CONFLICT (kind, scope, key) DO UPDATE SET body = excluded.body, size_bytes = excluded.size_bytes,"
        " created_s = excluded.created_s, used_s = excluded.used_s, used_order = excluded.used_order",
        (kind, scope, key, body, len(body) + OVERHEAD_BYTES, now_s, now_s),
    )
    return is_replaced


def put_back(connection: sqlite3.Connection, now_s: float) -> None:
    """Marks as used now what was used at a time that has not come: the clock has been set back.

    Else it would outlive its time by as much, and everything that was used behind it with it (`evict`).
    """
    connection.execute("UPDATE entry SET used_s = :now_s WHERE used_s > :now_s", {"now_s": now_s})


def evict(connection: sqlite3.Connection, *, expired_before_s: float, max_bytes: int) -> bool:
    """Deletes what is expired; then of the scope that has most the least recently used, until the bound holds.

    So one tenant's records take nothing from those who have fewer. The last used entry of all stays.

    Returns:
        Whether anything was deleted.
    """
    used = connection.execute("SELECT bytes FROM usage").fetchone()
    if used is None or not isinstance(used[0], int):
        raise sqlite3.DatabaseError("the table `usage` is damaged")
    excess_bytes = used[0] - max_bytes
    doomed: list[tuple[int]] = []
    older = "used_order < (SELECT max(used_order) FROM entry)"
    rows = connection.execute(f"SELECT id, used_s, size_bytes FROM entry WHERE {older} ORDER BY used_order")  # noqa: S608
    for entry_id, used_s, size_bytes in rows:
        if used_s >= expired_before_s:
            break
        doomed.append((entry_id,))
        excess_bytes -= size_bytes
    connection.executemany("DELETE FROM entry WHERE id = ?", doomed)
    if excess_bytes > 0:
        crowded = _of_the_largest(connection, older, excess_bytes)
        connection.executemany("DELETE FROM entry WHERE id = ?", crowded)
        doomed += crowded
    return bool(doomed)


def _of_the_largest(connection: sqlite3.Connection, older: str, excess_bytes: int) -> list[tuple[int]]:
    """The entries, each of the scope that has most left, that have to go for `excess_bytes`."""
    left = dict(connection.execute(f"SELECT scope, sum(size_bytes) FROM entry WHERE {older} GROUP BY scope"))  # noqa: S608
    oldest = f"SELECT id, size_bytes FROM entry WHERE scope = ? AND {older} ORDER BY used_order"  # noqa: S608
    cursors: dict[str, sqlite3.Cursor] = {}
    found: list[tuple[int]] = []
    while excess_bytes > 0 and left:
        scope = max(left, key=left.__getitem__)
        if scope not in cursors:
            cursors[scope] = connection.execute(oldest, (scope,))
        row = cursors[scope].fetchone()
        if row is None:
            del left[scope]
            continue
        found.append((row[0],))
        left[scope] -= row[1]
        excess_bytes -= row[1]
    return found


def compactions(connection: sqlite3.Connection, alive_since_s: float) -> list[tuple[str, bytes, float, float, int]]:
    """(scope, body, created_s, used_s, size_bytes) of every compaction, the most recently used first."""
    return connection.execute(
        "SELECT scope, body, created_s, used_s, size_bytes FROM entry"  # noqa: S608
        f" WHERE kind = 'compaction' AND used_s >= ? AND {_WHOLE} ORDER BY used_order DESC",
        (alive_since_s,),
    ).fetchall()


def delete(
    connection: sqlite3.Connection, scope: str | None, unused_since_s: float | None, covered_hash: str | None = None
) -> int:
    """Deletes what matches, events and plots too where no scope is named; how many compactions there were among it."""
    matches = "(:scope IS NULL OR scope = :scope) AND (:before_s IS NULL OR used_s < :before_s)"
    matches += " AND (:key IS NULL OR (kind = 'compaction' AND key = :key))"
    values = {"scope": scope, "before_s": unused_since_s, "key": covered_hash}
    counted = connection.execute(f"SELECT count(*) FROM entry WHERE kind = 'compaction' AND {matches}", values)  # noqa: S608
    count: int = counted.fetchone()[0]
    connection.execute(f"DELETE FROM entry WHERE {matches}", values)  # noqa: S608
    if scope is None:
        for table in ("event", "plot"):
            connection.execute(f"DELETE FROM {table} WHERE :before_s IS NULL OR when_s < :before_s", values)  # noqa: S608
    return count


def get_setting(connection: sqlite3.Connection, key: str) -> bytes | None:
    """The body under `key`."""
    row = connection.execute("SELECT body FROM setting WHERE key = ?", (key,)).fetchone()
    return None if row is None else bytes(row[0])


def put_setting(connection: sqlite3.Connection, key: str, body: bytes) -> None:
    """Adds a setting, or replaces the one under the same key."""
    connection.execute("INSERT OR REPLACE INTO setting (key, body) VALUES (?, ?)", (key, body))


def add_event(connection: sqlite3.Connection, when_s: float, body: bytes, now_s: float) -> None:
    """Adds an event; the oldest go beyond the number, and expired ones a few at a time."""
    number = connection.execute("INSERT INTO event (when_s, body) VALUES (?, ?)", (when_s, body)).lastrowid
    connection.execute("DELETE FROM event WHERE number <= ?", ((number or 0) - MAX_EVENTS,))
    connection.execute(
        "DELETE FROM event WHERE when_s < ? AND number IN (SELECT number FROM event ORDER BY number LIMIT ?)",
        (now_s - EVENTS_TTL_S, _EXPIRED_EVENTS_AT_ONCE),
    )


def events(
    connection: sqlite3.Connection, after: int, limit: int, containing: bytes, now_s: float
) -> list[tuple[int, float, bytes]]:
    """(number, when_s, body) of the newest whose body contains these bytes, oldest first."""
    rows = connection.execute(
        "SELECT number, when_s, body FROM event WHERE number > ? AND when_s >= ? AND instr(body, ?)"
        " ORDER BY number DESC LIMIT ?",
        (after, now_s - EVENTS_TTL_S, containing, max(0, limit)),
    ).fetchall()
    return rows[::-1]


def put_plots(connection: sqlite3.Connection, rows: Sequence[tuple[str, float, bytes]], now_s: float) -> None:
    """Adds (key, when_s, body) of plots, or replaces those under the same key; the oldest and the expired ones go."""
    connection.executemany("INSERT OR REPLACE INTO plot (key, when_s, body) VALUES (?, ?, ?)", rows)
    connection.execute(
        "DELETE FROM plot WHERE when_s < ?"
        " OR key IN (SELECT key FROM plot ORDER BY when_s DESC, key LIMIT -1 OFFSET ?)",
        (now_s - EVENTS_TTL_S, MAX_PLOTS),
    )


def plots(connection: sqlite3.Connection, containing: bytes, now_s: float) -> list[bytes]:
    """The bodies that contain these bytes, the newest first."""
    rows = connection.execute(
        "SELECT body FROM plot WHERE when_s >= ? AND instr(body, ?) ORDER BY when_s DESC, key",
        (now_s - EVENTS_TTL_S, containing),
    )
    return [bytes(row[0]) for row in rows]
