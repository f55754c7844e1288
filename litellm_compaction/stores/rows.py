"""The base of every store: rows by scope and key, which age or stay, and logs.

A backend implements `Rows` and nothing else: SQLite in a file or in memory, Redis, and one of them with memory to fall
back on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from litellm_compaction.concurrency import Bounded
from litellm_compaction.errors import StoreError, TooLargeForStore

logger = logging.getLogger("litellm_compaction")
_Result = TypeVar("_Result")

# Rows of this scope are kept until they are replaced: they have no time to live and do not count for the bound.
SETTINGS = "settings"
LINES_TTL_S = 30 * 86_400.0
# The overhead of a body in a backend: key, numbers, indices; at most 300 bytes in SQLite and Redis (MEMORY USAGE),
# Python's objects rounded up.
OVERHEAD_BYTES = 500

# Makes a row's new body of the old one, None for none, and of the backend's time in seconds. None deletes the row; the
# same body leaves it as it is. May be called more than once, from any thread.
Change: TypeAlias = "Callable[[bytes | None, float], bytes | None]"


class Row(NamedTuple):
    """A body under a key; times are by the backend's clock."""

    scope: str
    key: str
    body: bytes
    created_s: float
    used_s: float
    size_bytes: int  # Its share of the bound; 0 for a setting.


class Line(NamedTuple):
    """A line of a log."""

    number: int  # It grows with every line, also across the processes that share a store.
    when_s: float  # Seconds since 1970.
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "surrogatepass")


class Rows(Protocol):
    """Bytes by scope and key, and logs.

    All rows of a backend have one time to live, `ttl_s`, which begins anew with every use, of those `beside` only when
    they are written, and one bound, `max_bytes`, beyond which the scope that has most loses its least recently used
    ones; the newest row of all stays. Logs are bounded by number and age (`LINES_TTL_S`). Every method may raise
    `StoreError`, and nothing else; a cancelled call finishes what it has begun.
    """

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        """Returns the rows that are alive, in the order of `keys`, maybe thousands, and counts this as their use."""

    async def put(self, scope: str, key: str, body: bytes) -> None:
        """Keeps a row, of a byte at least, in place of an earlier one, whose text does not stay on a disk."""

    async def change(self, scope: str, key: str, change: Change) -> None:
        """Replaces a row by the result of `change`, as one step of all processes; for rows without text."""

    async def scan(self) -> list[Row]:
        """Returns all rows that are alive but settings, the most recently used first; this is no use of them."""

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        """Deletes rows but settings: of one scope or all, last used before a time or at any, under a key or any.

        Lines have no scope: older ones go if neither `scope` nor `key` is given. Returns the keys of the rows.
        """

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        """Adds a line to a log, of which the newest `most` are kept."""

    async def tail(self, log: str, *, most: int, containing: bytes = b"") -> list[Line]:
        """Returns the newest `most` lines with these bytes in them, oldest first."""

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> Rows:
        """Returns other rows at the same place, which are open as long as these."""

    async def aclose(self) -> None:
        """Ends it; any number of times."""


# An outage is logged once, not with every request; again if it lasts so long.
_WARN_AGAIN_S = 3600.0
# One that comes and goes is not logged each time.
_FLAPS_S = 60.0
# So many rows one call hands over, every so many seconds.
_HANDED_OVER, _HANDED_OVER_EVERY_S, _MOST_OWED = 64, 5.0, 100_000


class SteadyRows:
    """Uses the durable backend, and memory while it fails. Only settings, `change` and `delete` raise.

    Without this a full disk or a missing right would cost a summary with every turn. Calls that find the durable
    backend at work again put there what was put in an outage, so that other processes find it too; lines stay here.
    """

    def __init__(self, durable: Rows, spare: Rows, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.durable = durable
        self._spare = spare
        self._clock = clock
        self._is_told = self._is_spare_used = False
        self._warned_s = self._tried_s = -math.inf
        # The names of rows that the spare took for the durable backend.
        self._owed: Bounded[tuple[str, str], None] = Bounded(_MOST_OWED)

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        if scope == SETTINGS:
            # The memory of one process would let workers go their own ways.
            settings = await self.durable.find(scope, keys)
            # They are read again and again, and so tell first that an outage is over.
            await self._works()
            return settings
        rows = await self._either(lambda rows: rows.find(scope, keys))
        # What was put in an outage came later.
        spare = await self._spare.find(scope, keys) if self._is_spare_used else []
        by_key = {row.key: row for row in [*rows, *spare]}
        return [by_key[key] for key in keys if key in by_key]

    async def put(self, scope: str, key: str, body: bytes) -> None:
        if scope == SETTINGS:
            return await self.durable.put(scope, key, body)
        try:
            await self.durable.put(scope, key, body)
        except TooLargeForStore as error:
            logger.warning("store_refused %s; this process keeps it", error)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails(error)
            self._owed[scope, key] = None
        else:
            if (scope, key) not in self._owed:
                if self._is_spare_used:
                    await self._spare.delete(scope=scope, key=key)
                return await self._works()
        self._is_spare_used = True
        return await self._spare.put(scope, key, body)

    async def change(self, scope: str, key: str, change: Change) -> None:
        if (scope, key) in self._owed:
            await self._hand_over([(scope, key)])
        if (scope, key) in self._owed:
            raise StoreError("the store has not taken back yet what was put in an outage")
        await self.durable.change(scope, key, change)

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> Rows:
        return self.durable.beside(part, ttl_s=ttl_s, max_bytes=max_bytes)

    async def scan(self) -> list[Row]:
        spare = {(row.scope, row.key): row for row in await self._spare.scan()}
        durable = await self._either(lambda rows: rows.scan())
        return [*spare.values(), *(row for row in durable if (row.scope, row.key) not in spare)]

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        deleted = await self._spare.delete(scope=scope, before_s=before_s, key=key)
        return deleted + await self.durable.delete(scope=scope, before_s=before_s, key=key)

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        await self._either(lambda rows: rows.append(log, when_s, body, most=most))

    async def tail(self, log: str, *, most: int, containing: bytes = b"") -> list[Line]:
        return await self._either(lambda rows: rows.tail(log, most=most, containing=containing))

    async def aclose(self) -> None:
        await self._hand_over(list(self._owed))
        await self.durable.aclose()

    async def _either(self, job: Callable[[Rows], Awaitable[_Result]]) -> _Result:
        """Returns what the durable backend gives, or else the spare."""
        try:
            result = await job(self.durable)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails(error)
            return await job(self._spare)
        await self._works()
        return result

    def _fails(self, error: Exception) -> None:
        now_s = self._clock()
        if now_s < self._warned_s + (_WARN_AGAIN_S if self._is_told else _FLAPS_S):
            return
        self._warned_s, self._is_told = now_s, True
        # Errors of others may quote stored text.
        said = str(error) if isinstance(error, StoreError) else type(error).__name__
        logger.warning("store_failed %s; requests go on with the memory of this process", said)

    async def _works(self) -> None:
        """Hands over some of what is owed, now that the durable backend is known to work."""
        if self._owed and self._clock() >= self._tried_s + _HANDED_OVER_EVERY_S:
            self._tried_s = self._clock()
            await self._hand_over(list(self._owed)[:_HANDED_OVER])
        if self._is_told and not self._owed:
            self._is_told = False
            logger.info("store_recovered requests go on with the store")

    async def _hand_over(self, names: Sequence[tuple[str, str]]) -> None:
        """Puts some of the spare's rows into the durable backend, until one fails."""
        try:
            for scope, key in names:
                with contextlib.suppress(TooLargeForStore):
                    for row in await self._spare.find(scope, [key]):
                        await self.durable.put(scope, key, row.body)
                        if not await self._spare.delete(scope=scope, key=key):
                            # It was deleted meanwhile.
                            await self.durable.delete(scope=scope, key=key)
                self._owed.pop((scope, key), None)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails(error)
