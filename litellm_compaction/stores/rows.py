"""The base of every store: rows by scope and key, which age or stay, and logs.

A backend implements `Rows` and nothing else: memory, SQLite, Redis, and one of these with memory to fall back on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

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
    bounded by number and age (`LINES_TTL_S`). Every method may raise `StoreError`, and nothing else; a cancelled call
    finishes what it has begun.
    """

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        """Returns the rows that are alive, in the order of `keys`, and counts this as their use.

        Args:
            keys: may be thousands.
        """

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

        Lines have no scope: older ones go if neither `scope` nor `key` is given.

        Returns:
            The keys of the rows that were deleted.
        """

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        """Adds a line to a log, of which the newest `most` are kept."""

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        """Returns the newest `most` lines with a number above `after` and these bytes in them, oldest first."""

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> Rows:
        """Returns other rows at the same place, which end with these."""

    async def aclose(self) -> None:
        """Ends it; any number of times."""


_Key: TypeAlias = tuple[str, str]


class MemoryRows:
    """Rows in a dict, in the order of their last use."""

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._rows: OrderedDict[_Key, Row] = OrderedDict()
        self._bytes_by_scope: Counter[str] = Counter()
        self._settings: dict[str, Row] = {}
        self._logs: dict[str, deque[Line]] = {}
        self._last_number = 0

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        if scope == SETTINGS:
            return [self._settings[key] for key in keys if key in self._settings]
        return [row for key in keys if (row := self._used((scope, key))) is not None]

    async def put(self, scope: str, key: str, body: bytes) -> None:
        now_s = self._clock()
        if scope == SETTINGS:
            self._settings[key] = Row(scope, key, body, now_s, now_s, 0)
            return
        self._drop((scope, key))
        size_bytes = OVERHEAD_BYTES + len(key) + len(body)
        self._rows[scope, key] = Row(scope, key, body, now_s, now_s, size_bytes)
        self._bytes_by_scope[scope] += size_bytes
        while self._bytes_by_scope.total() > self._max_bytes and len(self._rows) > 1:
            # One tenant's records take nothing from tenants with fewer.
            [(largest, _)] = self._bytes_by_scope.most_common(1)
            oldest = next(name for name in self._rows if name[0] == largest)
            self._drop(oldest if oldest != (scope, key) else next(iter(self._rows)))

    async def change(self, scope: str, key: str, change: Change) -> None:
        row = self._used((scope, key))
        before = row and row.body
        after = change(before, self._clock())
        if after is None:
            self._drop((scope, key))
        elif after != before:
            await self.put(scope, key, after)

    async def scan(self) -> list[Row]:
        alive_since_s = self._clock() - self._ttl_s
        return [row for row in reversed(self._rows.values()) if row.used_s >= alive_since_s]

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        limit_s = math.inf if before_s is None else before_s
        doomed = [
            row
            for row in self._rows.values()
            if scope in (None, row.scope) and key in (None, row.key) and row.used_s < limit_s
        ]
        for row in doomed:
            self._drop((row.scope, row.key))
        if scope is None and key is None:
            for log, lines in self._logs.items():
                self._logs[log] = deque((line for line in lines if line.when_s >= limit_s), lines.maxlen)
        return [row.key for row in doomed]

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        self._last_number += 1
        self._logs.setdefault(log, deque(maxlen=most)).append(Line(self._last_number, when_s, body))

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        since_s = self._clock() - LINES_TTL_S
        young = (line for line in self._logs.get(log, ()) if line.number > after and line.when_s >= since_s)
        return [line for line in young if containing in line.body][-most:]

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> MemoryRows:
        return MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes, clock=self._clock)

    async def aclose(self) -> None:
        for held in (self._rows, self._settings, self._logs, self._bytes_by_scope):
            held.clear()

    def _used(self, name: _Key) -> Row | None:
        row, now_s = self._rows.get(name), self._clock()
        if row is None or row.used_s < now_s - self._ttl_s:
            self._drop(name)
            return None
        self._rows[name] = row = row._replace(used_s=now_s)
        self._rows.move_to_end(name)
        return row

    def _drop(self, name: _Key) -> None:
        if (row := self._rows.pop(name, None)) is not None:
            self._bytes_by_scope[row.scope] -= row.size_bytes


# An outage is logged once, not with every request; again if it lasts so long.
_WARN_AGAIN_S = 3600.0
# One that comes and goes is not logged each time.
_FLAPS_S = 60.0
_HAND_OVER_AGAIN_S = 5.0
# A process that ends tries as often: a write that missed the others by a moment is theirs.
_LAST_PAUSES_S = (0.0, 0.25, 0.5)


class SteadyRows:
    """Uses the durable backend, and memory while it fails. Only settings, `change` and `delete` raise.

    Without this a full disk or a missing right would cost a summary with every turn. Rows that were put in an outage
    are put again as soon as the durable backend works, so that other processes find them too; lines stay here.
    """

    def __init__(self, durable: Rows, spare: Rows, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.durable = durable
        self._spare = spare
        self._clock = clock
        self._is_told = False
        self._warned_s = self._tried_s = -math.inf
        # The number of rows that the spare took for the durable backend.
        self._owed = 0
        self._handing_over: asyncio.Task[None] | None = None

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        if scope == SETTINGS:
            # The memory of one process would let workers go their own ways.
            settings = await self.durable.find(scope, keys)
            # They are read again and again, and so tell first that an outage is over.
            self._works()
            return settings
        spare = await self._spare.find(scope, keys)
        # What was put in an outage came later.
        rows = {row.key: row for row in [*await self._either(lambda rows: rows.find(scope, keys)), *spare]}
        return [rows[key] for key in keys if key in rows]

    async def put(self, scope: str, key: str, body: bytes) -> None:
        if scope == SETTINGS:
            return await self.durable.put(scope, key, body)
        try:
            await self.durable.put(scope, key, body)
        except TooLargeForStore as error:
            logger.warning("store_refused %s; this process keeps it", error)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails(error)
            self._owed += 1
        else:
            self._works()
            if not self._owed:
                return None
            # Otherwise an older one of the spare's would stand before it.
        return await self._spare.put(scope, key, body)

    async def change(self, scope: str, key: str, change: Change) -> None:
        if self._owed:
            await self._until_handed_over()
            await self._hand_over()
        if self._owed:
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
        # Otherwise it would write what was just deleted.
        await self._until_handed_over()
        deleted = await self._spare.delete(scope=scope, before_s=before_s, key=key)
        return deleted + await self.durable.delete(scope=scope, before_s=before_s, key=key)

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        await self._either(lambda rows: rows.append(log, when_s, body, most=most))

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        return await self._either(lambda rows: rows.tail(log, after=after, most=most, containing=containing))

    async def aclose(self) -> None:
        await self._until_handed_over()
        for pause_s in _LAST_PAUSES_S:
            if self._owed:
                await asyncio.sleep(pause_s)
                await self._hand_over()
        await self.durable.aclose()
        await self._spare.aclose()

    async def _either(self, job: Callable[[Rows], Awaitable[_Result]]) -> _Result:
        """Returns what the durable backend gives, or else the spare."""
        try:
            result = await job(self.durable)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails(error)
            return await job(self._spare)
        self._works()
        return result

    def _fails(self, error: Exception) -> None:
        now_s = self._clock()
        if now_s < self._warned_s + (_WARN_AGAIN_S if self._is_told else _FLAPS_S):
            return
        self._warned_s, self._is_told = now_s, True
        # Errors of others may quote stored text.
        said = str(error) if isinstance(error, StoreError) else type(error).__name__
        logger.warning("store_failed %s; requests go on with the memory of this process", said)

    def _works(self) -> None:
        """Puts again what is owed, behind the call that found the durable backend at work."""
        if not self._owed and self._is_told:
            self._is_told = False
            logger.info("store_recovered requests go on with the store")
        if self._owed and self._handing_over is None and self._clock() >= self._tried_s + _HAND_OVER_AGAIN_S:
            self._tried_s = self._clock()
            self._handing_over = asyncio.ensure_future(self._hand_over())

    async def _until_handed_over(self) -> None:
        task = self._handing_over
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({task})

    async def _hand_over(self) -> None:
        """Puts the spare's rows into the durable backend; those that fail are tried again later."""
        try:
            while owed := self._owed:
                for row in reversed(await self._spare.scan()):
                    with contextlib.suppress(TooLargeForStore):
                        await self.durable.put(row.scope, row.key, row.body)
                # Puts that failed meanwhile went to the spare again.
                if owed == self._owed:
                    self._owed = 0
                    await self._spare.delete()
            self._works()
        except Exception as error:  # noqa: BLE001 - in no request's name; the spare still has it
            self._fails(error)
        finally:
            self._handing_over = None
