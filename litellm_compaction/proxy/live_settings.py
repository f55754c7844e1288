"""The settings in force: config.yaml's, with the values that were chosen at run time on top.

Those are one JSON object in the store, read at most once a second, by the first request that finds them older than
that. Without the settings page nothing is ever read. The log says who changed what; the store has no signatures.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from litellm_compaction.concurrency import Kept
from litellm_compaction.config import LIVE, Settings, WrongSettings
from litellm_compaction.errors import CompactionError, ConfigError, StoreError
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")
KEY = "settings"
# A change by another worker may stay unseen for so long.
_FRESH_S = 1.0
# A request waits no longer for the store than this. A read takes 1 ms.
_WAIT_S = 0.1


def with_values(configured: Settings, values: Mapping[str, object]) -> Settings:
    """Config.yaml's settings with some values in place of its own, None for its own; or raises WrongSettings."""
    if fixed := [(key, f"{key} cannot be changed while the proxy runs.") for key in values if key not in LIVE]:
        raise WrongSettings("", *fixed)
    return configured.with_values({key: value for key, value in values.items() if value is not None})


def chosen_values(text: str | None) -> dict[str, object]:
    """The values in a store's text; a ConfigError says that another version wrote it, or that it is damaged."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError("the saved changes cannot be read: damaged, or of another version")
    return values


class InForce(NamedTuple):
    """The settings in force, and in a sentence why values that were saved are not, or may be older than the store's."""

    settings: Settings
    problem: str = ""
    text: str | None = None  # The store's.


class LiveSettings:
    """config.yaml's settings with the store's values on top; without a store config.yaml's alone (`page: off`)."""

    def __init__(
        self, configured: Settings, store: Store | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.configured = configured
        self._store = store
        self._kept: Kept[str, InForce] = Kept(self._read, lambda _: _FRESH_S, clock=clock)
        self._writing = asyncio.Lock()

    @property
    def in_force(self) -> InForce:
        """As last read."""
        return self._kept.last(KEY) or InForce(self.configured)

    async def current(self) -> Settings:
        """Returns settings no more than a second old; the last known ones if the store cannot be read."""
        read = None if self._store is None else await self._kept.soon(KEY, wait_s=_WAIT_S)
        return (read or self.in_force).settings

    async def read(self) -> InForce:
        """Reads the store, however long it takes; never raises."""
        return await self._kept.get(KEY, fresh=True)

    async def _read(self, key: str) -> InForce:
        before, event = self.in_force, "settings_ignored"
        try:
            text = None if self._store is None else await self._store.get_setting(KEY)
            if text == before.text and not before.problem:
                return before
            return InForce(with_values(self.configured, chosen_values(text)), text=text)
        except ConfigError as error:
            why = f"The saved changes are ignored, config.yaml holds: {error}. Saving replaces them."
            now = InForce(self.configured, why)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            said = str(error) if isinstance(error, CompactionError) else type(error).__name__
            event = "settings_not_read"
            now = before._replace(problem=f"The store cannot be read: {said}. Nothing can be saved.")
        if now != before:
            logger.warning("%s %s", event, now.problem)
        return now

    async def write(self, changes: Mapping[str, object], *, role: str = "") -> None:
        """Puts values in force, here at once and in other workers within a second; None gives config.yaml's back.

        `role` is LiteLLM's, of the visitor, for the log. After WrongSettings or a StoreError nothing has changed.
        """
        async with self._writing:
            if self._store is None:
                raise StoreError("without the page no settings are kept")
            # What cannot be read may not be written over, but what cannot be in force.
            await self._store.get_setting(KEY)
            own, old = (each.model_dump(include={*LIVE}) for each in (self.configured, (await self.read()).settings))
            new = with_values(self.configured, {**old, **changes}).model_dump(include={*LIVE})
            await self._store.put_setting(KEY, json.dumps({key: new[key] for key in LIVE if new[key] != own[key]}))
            await self.read()
            for key in [key for key in LIVE if new[key] != old[key]]:
                logger.info("settings_changed %s=%s (before: %s) by %s", key, new[key], old[key], role)
