"""Rows that always work: a durable backend while it can, this process's memory while it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.errors import StoreError, TooLargeForStore
from litellm_compaction.stores.rows import SETTINGS, Change, Line, Row, Rows

logger = logging.getLogger("litellm_compaction")

# An outage is told once, not with every request; one that is still there after so long is told again.
_WARN_AGAIN_S = 3600.0
# One that comes and goes is not told each time.
_FLAPS_S = 60.0
_HAND_OVER_AGAIN_S = 5.0
# Rows that are changed in an outage, and the newest changes of each, which are made again behind it.
_MOST_CHANGED, _MOST_CHANGES = 1000, 8
# A process that ends tries as often: what missed the others by a moment is theirs.
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
        # How often the spare took what the durable one has not.
        self._taken = 0
        self._changes: Bounded[tuple[str, str], tuple[Change, ...]] = Bounded(_MOST_CHANGED)
        self._handing_over: asyncio.Task[None] | None = None
        self._hand_over_s = -math.inf

    async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
        if scope == SETTINGS:
            # The memory of one process would let workers go their own ways.
            return await self.durable.find(scope, keys)
        spare = await self._spare.find(scope, keys)
        try:
            durable = await self.durable.find(scope, keys)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return spare
        self._works("reading")
        if not spare:
            return durable
        found = {row.key: row for row in durable}
        for row in spare:
            # It came later; or it is to be added to what is there.
            changes = self._changes.get((scope, row.key), ()) if row.key in found else ()
            body = found[row.key].body if changes else row.body
            for change in changes:
                body = change(body, row.used_s) or body
            found[row.key] = row._replace(body=body)
        return [found[key] for key in keys if key in found]

    async def put(self, scope: str, key: str, body: bytes) -> None:
        if scope == SETTINGS:
            await self.durable.put(scope, key, body)
        elif await self._write(lambda rows: rows.put(scope, key, body)) and (scope, key) in self._changes:
            self._changes[scope, key] = (lambda _kept, _now_s: body,)

    async def change(self, scope: str, key: str, change: Change) -> None:
        if await self._write(lambda rows: rows.change(scope, key, change)):
            made = self._changes.get((scope, key), ())
            self._changes[scope, key] = (*made, change)[-_MOST_CHANGES:]

    async def scan(self) -> list[Row]:
        spare = await self._spare.scan()
        try:
            durable = await self.durable.scan()
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return spare
        self._works("reading")
        # While something is handed over, both have it.
        known = {(row.scope, row.key) for row in spare}
        return spare + [row for row in durable if (row.scope, row.key) not in known]

    async def delete(
        self, *, scope: str | None = None, before_s: float | None = None, key: str | None = None
    ) -> list[str]:
        # Else it would write what was just deleted.
        await self._until_handed_over()
        deleted = await self._spare.delete(scope=scope, before_s=before_s, key=key)
        return deleted + await self.durable.delete(scope=scope, before_s=before_s, key=key)

    async def append(self, log: str, when_s: float, body: bytes, *, most: int) -> None:
        try:
            await self.durable.append(log, when_s, body, most=most)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("writing", error)
            await self._spare.append(log, when_s, body, most=most)
        else:
            self._works("writing")

    async def tail(self, log: str, *, after: int = 0, most: int, containing: bytes = b"") -> list[Line]:
        try:
            found = await self.durable.tail(log, after=after, most=most, containing=containing)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return await self._spare.tail(log, after=after, most=most, containing=containing)
        self._works("reading")
        return found

    async def aclose(self) -> None:
        await self._until_handed_over()
        for pause_s in _LAST_PAUSES_S:
            if not self._taken:
                break
            await asyncio.sleep(pause_s)
            await self._hand_over()
        await self.durable.aclose()
        await self._spare.aclose()

    async def _write(self, job: Callable[[Rows], Awaitable[None]]) -> bool:
        """Has the durable backend do something, else the spare; returns True if it is the spare's to hand over."""
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
            # Else an older value of the spare's would stand before the newer one.
            await job(self._spare)
        self._works("writing")
        return is_owed

    def _fails(self, way: _Way, error: Exception) -> None:
        self._failing.add(way)
        now_s = self._clock()
        if now_s < self._warned_s + (_WARN_AGAIN_S if self._is_told else _FLAPS_S):
            return
        self._warned_s, self._is_told = now_s, True
        # Errors of others may quote what was stored.
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
        """Gives the durable backend what the spare took for it; what does not go through is tried again later."""
        try:
            while taken := self._taken:
                for row in reversed(await self._spare.scan()):
                    with contextlib.suppress(TooLargeForStore):
                        await self._give(row)
                self._failing.discard("writing")
                self._tell_recovery()
                # What failed meanwhile went to the spare again.
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
