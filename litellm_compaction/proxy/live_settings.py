"""The settings in force right now: config.yaml's, with what was changed at run time on top.

The guards ask for every request to a guarded deployment, and are answered from memory; the store is read at most once
a second, by the first request that finds the answer older than that. Without the settings page nothing is ever read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from litellm_compaction.config import DeploymentSettings, Settings
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.proxy.overlay import Overlay, overlay_from_json
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")

KEY = "settings"
# How long a change by another worker may stay unseen.
FRESH_S = 1.0
# A request waits no longer for the store than this; what is known counts then. A read of a local file takes 1 ms.
_WAIT_S = 0.1
# A store that failed is left in peace for so long.
_RETRY_S = 5.0


class SettingsSource(Protocol):
    """Who knows the settings in force."""

    @property
    def configured(self) -> Settings:
        """What config.yaml says."""

    @property
    def is_asleep(self) -> bool:
        """Whether the plug-in is off and stays off."""

    async def current(self) -> Settings:
        """The settings in force, no more than a second old."""


class FixedSettings:
    """config.yaml's settings and nothing else: `page: off`."""

    def __init__(self, configured: Settings) -> None:
        self.configured = configured

    @property
    def is_asleep(self) -> bool:
        """Whether config.yaml says `mode: off`."""
        return self.configured.mode == "off"

    async def current(self) -> Settings:
        """config.yaml's."""
        return self.configured


class Known(NamedTuple):
    """What is known of the changes made at run time.

    Attributes:
        text: as the store has it; None without any.
        overlay: what of it is in force.
        settings: config.yaml's with `overlay` on top.
        ignored: why a saved overlay is not in force; "" where it is.
        failure: why the store could not be read or written last time; "" where it could.
    """

    text: str | None
    overlay: Overlay
    settings: Settings
    ignored: str = ""
    failure: str = ""


class LiveSettings:
    """config.yaml's settings with the store's overlay on top.

    Args:
        configured: of config.yaml.
        store: where the overlay is, for all workers.
        clock: monotonic seconds.
    """

    def __init__(self, configured: Settings, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.configured = configured
        self.known = Known(None, Overlay(), configured)
        self._store = store
        self._clock = clock
        self._stale_s: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_warned_of_failure = False

    @property
    def is_asleep(self) -> bool:
        """Never: the page may switch the plug-in on."""
        return False

    async def current(self) -> Settings:
        """The settings in force; of a store that cannot be read, those that were last known."""
        if self._stale_s is None or self._clock() >= self._stale_s:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self._read())
            await asyncio.wait({self._reading}, timeout=_WAIT_S)
        return self.known.settings

    async def read(self) -> Known:
        """What the store has now, however long it takes; for the page."""
        await self._read()
        return self.known

    async def write(self, overlay: Overlay) -> None:
        """Puts `overlay` in force, here at once and in other workers within a second.

        Raises:
            ConfigError: it does not fit together.
            StoreError: it could not be saved, so nothing has changed.
        """
        settings = overlay.over(self.configured)
        text = overlay.to_json()
        await self._store.put_setting(KEY, text)
        self._take(Known(text, overlay, settings))

    async def _read(self) -> None:
        try:
            text = await self._store.get_setting(KEY)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._stale_s = self._clock() + _RETRY_S
            failure = str(error) if isinstance(error, CompactionError) else type(error).__name__
            self.known = self.known._replace(failure=failure)
            if not self._is_warned_of_failure:
                self._is_warned_of_failure = True
                logger.warning("settings_not_read %s; those last known hold", failure)
            return
        self._is_warned_of_failure = False
        if text == self.known.text:
            self._stale_s = self._clock() + FRESH_S
            self.known = self.known._replace(failure="")
            return
        try:
            overlay = overlay_from_json(text)
            self._take(Known(text, overlay, overlay.over(self.configured)))
        except ConfigError as error:
            # Once for each text: the next read finds it known.
            logger.warning("settings_ignored %s; config.yaml holds; reset them at /compaction", error)
            self._take(Known(text, Overlay(), self.configured, ignored=str(error)))

    def _take(self, known: Known) -> None:
        before = self.known.settings
        self.known = known
        self._stale_s = self._clock() + FRESH_S
        after = known.settings
        for key in type(after).model_fields:
            if getattr(before, key) != getattr(after, key):
                logger.info("settings_changed %s=%s (before: %s)", key, getattr(after, key), getattr(before, key))


def for_deployment(current: Settings, configured: Settings, own: DeploymentSettings) -> tuple[Settings, str]:
    """The settings of a deployment, and why a change made at run time does not reach it ("" where it does).

    Raises:
        ConfigError: config.yaml contradicts itself, which its start has ruled out.
    """
    try:
        return current.for_deployment(own), ""
    except ConfigError as error:
        if current == configured:
            raise
        return configured.for_deployment(own), str(error)
