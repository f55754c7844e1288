"""A store that always works: a durable one while it can, this process's memory while it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.errors import StoreError, StoreLate, TooLargeForStore
from litellm_compaction.stores.memory import MemoryStore
from litellm_compaction.stores.patience import UNLIMITED, Patience
from litellm_compaction.stores.protocol import MAX_EVENTS, Join, Plot, Store, StoredCompaction, StoredEvent

logger = logging.getLogger("litellm_compaction")

# An outage is told once, not with every request; one that is still there after so long is told again.
_WARN_AGAIN_S = 3600.0
# One that comes and goes is not told each time.
_FLAPS_S = 60.0
_HAND_OVER_AGAIN_S = 5.0
_MOST_OWED_FACTS = 1000
# A process that ends tries as often: what missed the others by a moment is theirs.
_LAST_PAUSES_S = (0.0, 0.25, 0.5)
# What came too late for the request that asked, for its conversation's next turn.
_LATE_S, _LATE_BYTES = 600.0, 16 * 1024 * 1024

_Way: TypeAlias = Literal["reading", "writing"]
_Value = TypeVar("_Value")
_Unwritten: TypeAlias = "dict[tuple[str, str], _Value]"


@dataclass(slots=True)
class _Asked:
    """Whether somebody still waits for what was asked."""

    is_late: bool = False


class SteadyStore:
    """Reads from both stores, writes to the second what the first does not take; only deleting and settings raise.

    Without this a full disk or a missing right would cost a summary with every turn. What the spare took meanwhile is
    handed over as soon as the durable store works again, so that other processes find it too. May be used from several
    event loops as far as both stores may.

    For compactions and facts nobody waits longer than the patience lasts. What is asked for is a miss then, and is kept
    for the next turn when it comes; what is written is found here meanwhile, and goes to the spare where it fails. Who
    looks for the same conversation again is about to pay a summary for it, and waits as long as the store itself does.

    Args:
        durable: the store that the operator named.
        spare: takes over while that one fails.
        patience: with the durable one.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        durable: Store,
        spare: Store,
        *,
        patience: Patience = UNLIMITED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.durable = durable
        self.patience = patience
        self._spare = spare
        self._clock = clock
        self._late = MemoryStore(ttl_s=_LATE_S, max_bytes=_LATE_BYTES, clock=clock)
        self._looks: dict[tuple[object, ...], asyncio.Task[list[Compaction]]] = {}
        self._unwritten: _Unwritten[Compaction] = {}
        self._unwritten_facts: _Unwritten[str] = {}
        self._failing: set[_Way] = set()
        self._warned_s = -math.inf
        self._is_told = False
        # What the spare has and the durable one has not: facts by name, since nothing lists them, and by what they are
        # added to what is there, None where they take its place; how often it took.
        self._owed_facts: Bounded[tuple[str, str], Join | None] = Bounded(_MOST_OWED_FACTS)
        self._taken = 0
        self._handing_over: asyncio.Task[None] | None = None
        self._hand_over_s = -math.inf

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """What both have, the one that covers most first."""
        spare = await self._spare.find(scope, hashes)
        durable = await self._durable_ones(scope, hashes)
        unwritten = self._unwritten
        new = [unwritten[(scope, each)] for each in hashes if (scope, each) in unwritten] if unwritten else []
        if not spare and not new:
            return durable
        # What is in the spare came later.
        by_hash = {compaction.covered_hash: compaction for compaction in (*durable, *new, *spare)}
        return [by_hash[covered_hash] for covered_hash in reversed(hashes) if covered_hash in by_hash]

    def is_late(self, scope: str, hashes: Sequence[str]) -> bool:
        """Whether what the durable one has is still under way: `find` then waits for it."""
        return (asyncio.get_running_loop(), scope, *hashes[-1:]) in self._looks

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps it in one of the two."""

        async def keep() -> None:
            with _unwritten(self._unwritten, (scope, compaction.covered_hash), compaction):
                await self._write(lambda store: store.put(scope, compaction))

        with contextlib.suppress(StoreLate):
            await self.patience.wait(keep())

    async def get_fact(self, scope: str, key: str) -> str | None:
        """What the spare has, which is the newer, else the durable one; both where they are parts of one."""
        spare = await self._spare.get_fact(scope, key)
        join = self._owed_facts.get((scope, key))
        if spare is not None and join is None:
            return spare
        if (new := self._unwritten_facts.get((scope, key))) is not None:
            return new
        durable = await self._durable_fact(scope, key)
        return join(durable, spare) if join and durable is not None and spare is not None else durable or spare

    async def _durable_fact(self, scope: str, key: str) -> str | None:
        asked = _Asked()
        try:
            return await self.patience.wait(self._found_fact(scope, key, asked))
        except StoreLate:
            asked.is_late = True
            return await self._late.get_fact(scope, key)

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps it in one of the two."""

        async def keep() -> None:
            with _unwritten(self._unwritten_facts, (scope, key), text):
                if not await self._write(lambda store: store.put_fact(scope, key, text)):
                    self._owed_facts[(scope, key)] = None

        with contextlib.suppress(StoreLate):
            await self.patience.wait(keep())

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        """Adds to it in one of the two; gives `text` alone where nobody waits any longer."""

        async def keep() -> str:
            kept: list[str] = []

            async def merge(store: Store) -> None:
                kept.append(await store.merge_fact(scope, key, text, join))

            with _unwritten(self._unwritten_facts, (scope, key), text):
                if not await self._write(merge):
                    self._owed_facts[(scope, key)] = join
            return kept[0]

        try:
            return await self.patience.wait(keep())
        except StoreLate:
            return text

    async def get_setting(self, key: str) -> str | None:
        """The durable one's.

        Raises:
            StoreError: it cannot be read: whoever asks has to decide by which settings to go on.
        """
        return await self.durable.get_setting(key)

    async def put_setting(self, key: str, text: str) -> None:
        """Keeps it in the durable one: in the memory of this process, other workers would not follow it.

        Raises:
            StoreError: it is not kept.
        """
        await self.durable.put_setting(key, text)

    async def add_event(self, when_s: float, text: str) -> None:
        """Adds it to one of the two histories."""
        await self._write(lambda store: store.add_event(when_s, text), also=False)

    async def events(self, *, after: int = 0, limit: int = MAX_EVENTS, containing: str = "") -> list[StoredEvent]:
        """The durable history, the spare's while that cannot be read: their numbers do not mix."""
        try:
            found = await self.durable.events(after=after, limit=limit, containing=containing)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return await self._spare.events(after=after, limit=limit, containing=containing)
        self._works("reading")
        return found

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        """Keeps them in one of the two."""
        await self._write(lambda store: store.put_plots(plots))

    async def plots(self, *, containing: str = "") -> list[str]:
        """The durable ones, the spare's while those cannot be read."""
        try:
            found = await self.durable.plots(containing=containing)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return await self._spare.plots(containing=containing)
        self._works("reading")
        return found

    async def compactions(self) -> list[StoredCompaction]:
        """What both have, the spare's first."""
        spare = await self._spare.compactions()
        try:
            durable = await self.durable.compactions()
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return spare
        self._works("reading")
        # While something is handed over, both have it.
        known = {(stored.scope, stored.compaction.covered_hash) for stored in spare}
        return spare + [each for each in durable if (each.scope, each.compaction.covered_hash) not in known]

    async def delete(
        self, *, scope: str | None = None, unused_since_s: float | None = None, covered_hash: str | None = None
    ) -> int:
        """Forgets in both.

        Raises:
            StoreError: the durable one still has it, which whoever deletes must know.
        """
        # Else it would write what was just deleted.
        await self._until_handed_over()
        await self.patience.settle()
        await self._late.delete(scope=scope)
        count = await self._spare.delete(scope=scope, unused_since_s=unused_since_s, covered_hash=covered_hash)
        return count + await self.durable.delete(scope=scope, unused_since_s=unused_since_s, covered_hash=covered_hash)

    async def aclose(self) -> None:
        """Ends both, when what was begun is written; what only this process has is handed over where that can be."""
        await self._until_handed_over()
        await self.patience.settle()
        for pause_s in _LAST_PAUSES_S:
            if not self._taken:
                break
            await asyncio.sleep(pause_s)
            await self._hand_over()
        await self.durable.aclose()
        await self._spare.aclose()

    async def _durable_ones(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        key = (asyncio.get_running_loop(), scope, *hashes[-1:])
        if (look := self._looks.get(key)) is not None:
            return await asyncio.shield(look)
        asked = _Asked()
        look = asyncio.ensure_future(self._found(scope, hashes, asked))
        try:
            return await self.patience.wait(look)
        except StoreLate:
            asked.is_late = True
            self._looks[key] = look
            look.add_done_callback(lambda _: self._looks.pop(key, None))
            return await self._late.find(scope, hashes)

    async def _found(self, scope: str, hashes: Sequence[str], asked: _Asked) -> list[Compaction]:
        try:
            found = await self.durable.find(scope, hashes)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return []
        self._works("reading")
        if asked.is_late:
            for compaction in found:
                await self._late.put(scope, compaction)
        return found

    async def _found_fact(self, scope: str, key: str, asked: _Asked) -> str | None:
        try:
            found = await self.durable.get_fact(scope, key)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("reading", error)
            return None
        self._works("reading")
        if asked.is_late and found is not None:
            await self._late.put_fact(scope, key, found)
        return found

    async def _write(self, work: Callable[[Store], Awaitable[None]], *, also: bool = True) -> bool:
        """Has the durable store do something, else the spare; whether it was the durable one.

        Args:
            also: whether the spare follows while it has what is not handed over yet: else an older value of its would
                stand before the newer one.
        """
        try:
            await work(self.durable)
        except TooLargeForStore as error:
            logger.warning("store_refused %s; this process keeps it", error)
            await work(self._spare)
            return True
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._fails("writing", error)
            self._taken += 1
            await work(self._spare)
            return False
        if self._taken and also:
            await work(self._spare)
        self._works("writing")
        return True

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
        """Gives the durable store what the spare took for it; what does not go through is tried again later."""
        try:
            while taken := self._taken:
                await self._give_to_durable()
                self._failing.discard("writing")
                self._tell_recovery()
                # What failed meanwhile went to the spare again.
                if taken == self._taken:
                    self._taken = 0
                    self._owed_facts.clear()
                    await self._spare.delete()
        except Exception as error:  # noqa: BLE001 - in nobody's name; the spare still has it
            self._fails("writing", error)
        finally:
            self._handing_over = None

    async def _give_to_durable(self) -> None:
        durable, spare = self.durable, self._spare
        for stored in reversed(await spare.compactions()):
            with contextlib.suppress(TooLargeForStore):
                await durable.put(stored.scope, stored.compaction)
        for (scope, key), join in list(self._owed_facts.items()):
            if (text := await spare.get_fact(scope, key)) is not None:
                with contextlib.suppress(TooLargeForStore):
                    if join is None:
                        await durable.put_fact(scope, key, text)
                    else:
                        await durable.merge_fact(scope, key, text, join)
        # One whose answer was lost may have been written.
        known = {(event.when_s, event.text) for event in await durable.events()}
        for event in await spare.events():
            if (event.when_s, event.text) not in known:
                await durable.add_event(event.when_s, event.text)


@contextmanager
def _unwritten(values: _Unwritten[_Value], key: tuple[str, str], value: _Value) -> Generator[None, None, None]:
    """Has a value found while it is written."""
    values[key] = value
    try:
        yield
    finally:
        if values.get(key) is value:
            del values[key]
