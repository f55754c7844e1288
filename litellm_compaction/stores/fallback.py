"""A store that always works: a durable one while it can, this process's memory while it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.errors import StoreError
from litellm_compaction.stores.protocol import MAX_EVENTS, Plot, Store, StoredCompaction, StoredEvent

logger = logging.getLogger("litellm_compaction")

# An outage is told once, not with every request; one that is still there after so long is told again.
_WARN_AGAIN_S = 3600.0


class SteadyStore:
    """Reads from both stores, writes to the second what the first does not take; only deleting and settings raise.

    Without this a full disk or a missing right would cost a summary with every turn.

    Args:
        durable: the store that the operator named.
        spare: takes over while that one fails.
        clock: monotonic seconds.
    """

    def __init__(self, durable: Store, spare: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.durable = durable
        self._spare = spare
        self._clock = clock
        self._warned_s: float | None = None

    async def find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        """What both have, the one that covers most first."""
        spare = await self._spare.find(scope, hashes)
        try:
            durable = await self.durable.find(scope, hashes)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            return spare
        if not spare:
            return durable
        # What is in the spare came later.
        by_hash = {compaction.covered_hash: compaction for compaction in (*durable, *spare)}
        return [by_hash[covered_hash] for covered_hash in reversed(hashes) if covered_hash in by_hash]

    async def put(self, scope: str, compaction: Compaction) -> None:
        """Keeps it in one of the two."""
        try:
            await self.durable.put(scope, compaction)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            await self._spare.put(scope, compaction)

    async def get_fact(self, scope: str, key: str) -> str | None:
        """What the spare has, which is the newer, else the durable one."""
        spare = await self._spare.get_fact(scope, key)
        if spare is not None:
            return spare
        try:
            return await self.durable.get_fact(scope, key)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            return None

    async def put_fact(self, scope: str, key: str, text: str) -> None:
        """Keeps it in one of the two."""
        try:
            await self.durable.put_fact(scope, key, text)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            await self._spare.put_fact(scope, key, text)

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
        try:
            await self.durable.add_event(when_s, text)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            await self._spare.add_event(when_s, text)

    async def events(self, *, after: int = 0, limit: int = MAX_EVENTS, containing: str = "") -> list[StoredEvent]:
        """The durable history, the spare's while that cannot be read: their numbers do not mix."""
        try:
            return await self.durable.events(after=after, limit=limit, containing=containing)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            return await self._spare.events(after=after, limit=limit, containing=containing)

    async def put_plots(self, plots: Sequence[Plot]) -> None:
        """Keeps them in one of the two."""
        try:
            await self.durable.put_plots(plots)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            await self._spare.put_plots(plots)

    async def plots(self, *, containing: str = "") -> list[str]:
        """The durable ones, the spare's while those cannot be read."""
        try:
            return await self.durable.plots(containing=containing)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            return await self._spare.plots(containing=containing)

    async def compactions(self) -> list[StoredCompaction]:
        """What both have, the spare's first."""
        spare = await self._spare.compactions()
        try:
            return spare + await self.durable.compactions()
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._warn(error)
            return spare

    async def delete(self, *, scope: str | None = None, unused_since_s: float | None = None) -> int:
        """Forgets in both.

        Raises:
            StoreError: the durable one still has it, which whoever deletes must know.
        """
        count = await self._spare.delete(scope=scope, unused_since_s=unused_since_s)
        return count + await self.durable.delete(scope=scope, unused_since_s=unused_since_s)

    async def aclose(self) -> None:
        """Ends both."""
        await self.durable.aclose()
        await self._spare.aclose()

    def _warn(self, error: Exception) -> None:
        now_s = self._clock()
        if self._warned_s is not None and now_s < self._warned_s + _WARN_AGAIN_S:
            return
        self._warned_s = now_s
        # Errors of others may quote what was stored.
        said = str(error) if isinstance(error, StoreError) else type(error).__name__
        logger.warning("store_failed %s; requests go on with the memory of this process", said)
