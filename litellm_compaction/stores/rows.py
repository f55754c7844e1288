"""What every store is made of: rows by scope and key, which age or stay, and logs.

A backend implements `Rows` and nothing else: memory, SQLite, Redis, and one of these with memory to fall back on.
`store.py` keeps compactions, facts, settings, events and notes in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

# Rows of this scope are kept until they are replaced: they have no time to live and do not count for the bound.
SETTINGS = "settings"
LINES_TTL_S = 30 * 86_400.0
# What a backend keeps around a body: key, numbers, indices; at most 300 bytes in SQLite and Redis 7.0 (MEMORY USAGE,
# measured 2026-11-23), Python's objects rounded up.
OVERHEAD_BYTES = 500

# Makes a row's new body of the one that is kept, None for none, and of the backend's time in seconds. None deletes the
# row; the same body leaves it as it is. May be called more than once, from any thread, and again after an outage.
Change: TypeAlias = "Callable[[bytes | None, float], bytes | None]"


class Row(NamedTuple):
    """A body under a key.

    Attributes:
        created_s, used_s: by the backend's clock.
        size_bytes: its share of the bound; 0 for a setting.
    """

    scope: str
    key: str
    body: bytes
    created_s: float
    used_s: float
    size_bytes: int


class Line(NamedTuple):
    """A line of a log.

    Attributes:
        number: grows with every line, also across the processes that share a store.
        when_s: wall clock, seconds since 1970.
    """

    number: int
    when_s: float
    body: bytes


class Rows(Protocol):
    """Bytes by scope and key, and logs.

    All rows of a backend have one time to live, `ttl_s`, which begins anew with every use, and one bound, `max_bytes`,
    beyond which the scope that has most loses its least recently used ones; the newest row of all stays. Logs are
    bounded by number and age (`LINES_TTL_S`). Every method may raise `StoreError`, and nothing else; what a cancelled
    call has begun is finished.
    """

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        """Returns the rows that are alive, in the order of `keys`, and counts this as their use.

        Args:
            keys: may be thousands; of very many bytes the first rows are found.
        """

    async def put(self, scope: str, key: str, body: bytes) -> None:
        """Keeps a row in place of an earlier one, whose text does not stay on a disk."""

    async def change(self, scope: str, key: str, change: Change) -> None:
        """Replaces a row by what `change` makes of it, as one step of all processes; for what holds no text."""

    async def scan(self) -> list[Row]:
        """Returns all rows that are alive but settings, the most recently used first; this is no use of them."""

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        """Deletes rows but settings: of one scope or all, last used before a time or at any, under a key or any.

        Lines have no scope: those of before the time go if neither `scope` nor `key` is given.

        Returns:
            The keys of the rows that were deleted.
        """

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        """Adds a line to a log, of which the newest `most` are kept."""

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        """Returns the newest `most` lines with a number above `after` and these bytes in them, oldest first."""

    async def aclose(self) -> None:
        """Ends it; any number of times."""
