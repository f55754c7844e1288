"""The base of every store: rows by scope and key, which age or stay, and logs.

A backend implements `Rows` and nothing else: memory, SQLite, Redis, and one of these with memory to fall back on.
`store.py` keeps compactions, facts, settings, events and notes in them. `SteadyRows` are a durable backend while it
works, and memory while it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from litellm_compaction.concurrency import Bounded
from litellm_compaction.errors import StoreError, TooLargeForStore

_Result = TypeVar("_Result")

# Rows of this scope are kept until they are replaced: they have no time to live and do not count for the bound.
SETTINGS = "settings"
LINES_TTL_S = 30 * 86_400.0
# The overhead of a body in a backend: key, numbers, indices; at most 300 bytes in SQLite and Redis 7.0 (MEMORY USAGE,
# measured 2026-11-23), Python's objects rounded up.
OVERHEAD_BYTES = 500

# Makes a row's new body of the old one, None for none, and of the backend's time in seconds. None deletes the row; the
# same body leaves it as it is. May be called more than once, from any thread, and again after an outage.
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
            keys: may be thousands; of very many bytes the first rows are found.
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
        self._logs: dict[str, deque[Line]] = defaultdict(deque)
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
            oldest = next(each for each in self._rows if each[0] == largest)
            self._drop(oldest if oldest != (scope, key) else next(iter(self._rows)))

    async def change(self, scope: str, key: str, change: Change) -> None:
        row = self._used((scope, key))
        before = None if row is None else row.body
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
        doomed = [
            row
            for row in self._rows.values()
            if (scope is None or row.scope == scope)
            and (before_s is None or row.used_s < before_s)
            and (key is None or row.key == key)
        ]
        for row in doomed:
            self._drop((row.scope, row.key))
        if scope is None and key is None:
            for log, lines in self._logs.items():
                self._logs[log] = deque(line for line in lines if before_s is not None and line.when_s >= before_s)
        return [row.key for row in doomed]

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        self._last_number += 1
        lines = self._logs[log]
        lines.append(Line(self._last_number, when_s, body))
        while len(lines) > most:
            lines.popleft()

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        since_s = self._clock() - LINES_TTL_S
        newest = (
            line
            for line in reversed(self._logs[log])
            if line.number > after and line.when_s >= since_s and containing in line.body
        )
        return list(islice(newest, most))[::-1]

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> MemoryRows:
        return MemoryRows(ttl_s=ttl_s, max_bytes=max_bytes, clock=self._clock)

    async def aclose(self) -> None:
        for kept in (self._rows, self._settings, self._logs, self._bytes_by_scope):
            kept.clear()

    def _used(self, name: _Key) -> Row | None:
        row, now_s = self._rows.get(name), self._clock()
        if row is None:
            return None
        if row.used_s < now_s - self._ttl_s:
            self._drop(name)
            return None
        self._rows[name] = row = row._replace(used_s=now_s)
        self._rows.move_to_end(name)
        return row

    def _drop(self, name: _Key) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._bytes_by_scope[row.scope] -= row.size_bytes
            if not self._bytes_by_scope[row.scope]:
                del self._bytes_by_scope[row.scope]


logger = logging.getLogger("litellm_compaction")

# An outage is logged once, not with every request; again if it lasts so long.
_WARN_AGAIN_S = 3600.0
# One that comes and goes is not logged each time.
_FLAPS_S = 60.0
_HAND_OVER_AGAIN_S = 5.0
# Rows that are changed in an outage, and the newest changes of each, which are repeated after it.
_MOST_CHANGED, _MOST_CHANGES = 1000, 8
# A process that ends tries as often: a write that missed the others by a moment is theirs.
_LAST_PAUSES_S = (0.0, 0.25, 0.5)

_Way: TypeAlias = Literal["reading", "writing"]


class SteadyRows:
    """Uses the durable backend and falls back to memory when it fails. Only `delete` and settings raise.

    Without this a full disk or a missing right would cost a summary with every turn. Rows of an outage are handed over
    as soon as the durable backend works again, so that other processes find them too; lines stay in this process.
    """

    def __init__(self, durable: Rows, spare: Rows, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.durable = durable
        self._spare = spare
        self._clock = clock
        self._failing: set[_Way] = set()
        self._warned_s = -math.inf
        self._is_told = False
        # The number of writes that the spare took for the durable one.
        self._taken = 0
        self._changes: Bounded[tuple[str, str], tuple[Change, ...]] = Bounded(_MOST_CHANGED)
        self._handing_over: asyncio.Task[None] | None = None
        self._hand_over_s = -math.inf

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        if scope == SETTINGS:
            # The memory of one process would let workers go their own ways.
            found = await self.durable.find(scope, keys)
            # They are read again and again, and so tell first that an outage is over.
            self._works("reading")
            return found
        spare = await self._spare.find(scope, keys)
        durable = await self._either("reading", lambda rows: rows.find(scope, keys))
        if not spare or "reading" in self._failing:
            return durable
        rows = {row.key: row for row in durable}
        for row in spare:
            # It came later; or it is to be added to what is there.
            changes = self._changes.get((scope, row.key), ()) if row.key in rows else ()
            body = rows[row.key].body if changes else row.body
            for change in changes:
                body = change(body, row.used_s) or body
            rows[row.key] = row._replace(body=body)
        return [rows[key] for key in keys if key in rows]

    async def put(self, scope: str, key: str, body: bytes) -> None:
        if scope == SETTINGS:
            await self.durable.put(scope, key, body)
        elif await self._write(lambda rows: rows.put(scope, key, body)) and (scope, key) in self._changes:
            self._changes[scope, key] = (lambda _kept, _now_s: body,)

    async def change(self, scope: str, key: str, change: Change) -> None:
        # What was put in the outage is handed over as it is then, with what was added.
        is_put = (scope, key) not in self._changes and bool(self._taken and await self._spare.find(scope, [key]))
        if await self._write(lambda rows: rows.change(scope, key, change)) and not is_put:
            made = self._changes.get((scope, key), ())
            self._changes[scope, key] = (*made, change)[-_MOST_CHANGES:]

    def beside(self, part: str, *, ttl_s: float, max_bytes: int) -> Rows:
        return self.durable.beside(part, ttl_s=ttl_s, max_bytes=max_bytes)

    async def scan(self) -> list[Row]:
        spare = await self._spare.scan()
        durable = await self._either("reading", lambda rows: rows.scan())
        # While something is handed over, both have it.
        known = {(row.scope, row.key) for row in spare}
        return spare + [row for row in durable if (row.scope, row.key) not in known]

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        # Otherwise it would write what was just deleted.
        await self._until_handed_over()
        deleted = await self._spare.delete(scope=scope, before_s=before_s, key=key)
        return deleted + await self.durable.delete(scope=scope, before_s=before_s, key=key)

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        await self._either("writing", lambda rows: rows.append(log, when_s, body, most=most))

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        return await self._either("reading", lambda rows: rows.tail(log, after=after, most=most, containing=containing))

    async def aclose(self) -> None:
        await self._until_handed_over()
        for pause_s in _LAST_PAUSES_S:
            if not self._taken:
                break
            await asyncio.sleep(pause_s)
            await self._hand_over()
        await self.durable.aclose()
        await self._spare.aclose()

    async def _either(self, way: _Way, job: Callable[[Rows], Awaitable[_Result]]) -> _Result:
        """Returns what the durable backend gives, or else the spare."""
        try:
            result = await job(self.durable)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails(way, error)
            return await job(self._spare)
        self._works(way)
        return result

    async def _write(self, job: Callable[[Rows], Awaitable[None]]) -> bool:
        """Makes the durable backend do something, or else the spare; returns True if the spare has to hand it over."""
        try:
            await job(self.durable)
        except TooLargeForStore as error:
            logger.warning("store_refused %s; this process keeps it", error)
            await job(self._spare)
            return False
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("writing", error)
            self._taken += 1
            await job(self._spare)
            return True
        if is_owed := self._taken > 0:
            # Otherwise an older value of the spare's would stand before the newer one.
            await job(self._spare)
        self._works("writing")
        return is_owed

    def _fails(self, way: _Way, error: Exception) -> None:
        self._failing.add(way)
        now_s = self._clock()
        if now_s < self._warned_s + (_WARN_AGAIN_S if self._is_told else _FLAPS_S):
            return
        self._warned_s, self._is_told = now_s, True
        # Errors of others may quote stored text.
        said = str(error) if isinstance(error, StoreError) else type(error).__name__
        logger.warning("store_failed %s; requests go on with the memory of this process", said)

    def _works(self, way: _Way) -> None:
        self._failing.discard(way)
        if self._taken and self._handing_over is None and self._clock() >= self._hand_over_s:
            self._hand_over_s = self._clock() + _HAND_OVER_AGAIN_S
            self._handing_over = asyncio.ensure_future(self._hand_over())
        self._tell_recovery()

    def _tell_recovery(self) -> None:
        if self._is_told and not self._failing:
            self._is_told = False
            logger.info("store_recovered requests go on with the store")

    async def _until_handed_over(self) -> None:
        task = self._handing_over
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({task})

    async def _hand_over(self) -> None:
        """Gives the durable backend the spare's writes for it; those that fail are tried again later."""
        try:
            while taken := self._taken:
                for row in reversed(await self._spare.scan()):
                    with contextlib.suppress(TooLargeForStore):
                        await self._give(row)
                self._failing.discard("writing")
                self._tell_recovery()
                # Writes that failed meanwhile went to the spare again.
                if taken == self._taken:
                    self._taken = 0
                    self._changes.clear()
                    await self._spare.delete()
        except Exception as error:  # noqa: BLE001 - in no request's name; the spare still has it
            self._fails("writing", error)
        finally:
            self._handing_over = None

    async def _give(self, row: Row) -> None:
        if changes := self._changes.get((row.scope, row.key)):
            for change in changes:
                await self.durable.change(row.scope, row.key, change)
        else:
            await self.durable.put(row.scope, row.key, row.body)
