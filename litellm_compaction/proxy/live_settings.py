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

from pydantic import ValidationError

from litellm_compaction.config import LIVE, DeploymentSettings, Settings
from litellm_compaction.errors import CompactionError, ConfigError, StoreError
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")
KEY = "settings"
# A change by another worker may stay unseen for so long.
_FRESH_S = 1.0
# A request waits no longer for the store than this. A read takes 1 ms.
_WAIT_S = 0.1
# A store that failed is not asked again for so long.
_RETRY_S = 5.0


class WrongValues(ConfigError):
    """Values that settings cannot have: `problems` by key, "" if several keys are to blame."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{key}: {said}" if key else said for key, said in problems.items()))
        self.problems = dict(problems)


def with_values(configured: Settings, values: Mapping[str, object]) -> Settings:
    """Returns config.yaml's settings with some values in place of its own; None stands for its own.

    Raises:
        WrongValues: a key cannot be changed at run time, a value is none of its setting, or they do not fit together.
    """
    if fixed := {key: "cannot be changed while the proxy runs" for key in values if key not in LIVE}:
        raise WrongValues(fixed)
    chosen = {key: value for key, value in values.items() if value is not None}
    try:
        return configured.with_values(chosen)
    except ValidationError as error:
        problems = {
            str(wrong["loc"][0]) if wrong["loc"] else "": str(wrong["msg"]).removeprefix("Value error, ")
            for wrong in error.errors()
        }
        raise WrongValues(problems) from None


def chosen_values(text: str | None) -> dict[str, object]:
    """Returns the values in a store's text.

    Raises:
        ConfigError: another version wrote it, or it is damaged.
    """
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError("the saved changes cannot be read: damaged, or of another version")
    return values


class LiveSettings:
    """config.yaml's settings with the store's values on top.

    Attributes:
        settings: in force.
        values: those of them that were chosen at run time, by key.
        ignored: why saved values are not in force; "" if they are.
        failure: why the store could not be read last time; "" if it could.

    Args:
        configured: of config.yaml.
        store: holds the values for all workers; None for config.yaml's settings alone (`page: off`).
        clock: monotonic seconds.
    """

    def __init__(
        self, configured: Settings, store: Store | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.configured = self.settings = configured
        self.values: Mapping[str, object] = {}
        self.ignored = self.failure = ""
        self._text: str | None = None
        self._writes = 0
        self._store = store
        self._clock = clock
        self._stale_s = clock()
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    @property
    def is_asleep(self) -> bool:
        """The plug-in is off, and no page may switch it on."""
        return self._store is None and self.configured.mode == "off"

    async def current(self) -> Settings:
        """Returns settings no more than a second old; the last known ones if the store cannot be read."""
        if self._store is not None and self._clock() >= self._stale_s:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self.read())
            await asyncio.wait({self._reading}, timeout=_WAIT_S)
            if not self._reading.done():
                # The next request to wait for this read comes a second later.
                self._stale_s = self._clock() + _FRESH_S
        return self.settings

    async def read(self) -> None:
        """Reads the store, however long it takes; never raises."""
        if self._store is None:
            return
        writes = self._writes
        try:
            text = await self._store.get_setting(KEY)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._stale_s = self._clock() + _RETRY_S
            failure = str(error) if isinstance(error, CompactionError) else type(error).__name__
            if not self.failure:
                logger.warning("settings_not_read %s; those last known hold", failure)
            self.failure = failure
            return
        self._stale_s, self.failure = self._clock() + _FRESH_S, ""
        if text == self._text or self._writes != writes:
            # As known, or perhaps older than what was written here meanwhile.
            return
        self._text = text
        try:
            values = chosen_values(text)
            self._take(with_values(self.configured, values), values)
        except ConfigError as error:
            # Once for each text: the next read finds it known.
            logger.warning("settings_ignored %s; config.yaml holds; reset them at /compaction", str(error))
            self._take(self.configured, {}, ignored=str(error))

    async def write(self, changes: Mapping[str, object], *, role: str = "") -> bool:
        """Puts changes in force, here at once and in other workers within a second; returns False if there are none.

        Args:
            changes: values by key; None gives config.yaml's value back.
            role: LiteLLM's, of the visitor who changes them, for the log.

        Raises:
            WrongValues: one is none of its setting, or they do not fit together; nothing has changed.
            StoreError: they could not be saved; nothing has changed.
        """
        async with self._writing:
            await self.read()
            if self.failure:
                raise StoreError(self.failure)
            settings = with_values(self.configured, {**self.values, **changes})
            keys = {*self.values, *changes}
            values = {key: getattr(settings, key) for key in LIVE if key in keys}
            values = {key: value for key, value in values.items() if value != getattr(self.configured, key)}
            if values == self.values and not self.ignored:
                return False
            text = json.dumps(values)
            if self._store is not None:
                await self._store.put_setting(KEY, text)
            self._text = text
            self._writes += 1
            self._take(settings, values, by=f" by {role}" if role else "")
            return True

    def _take(self, settings: Settings, values: Mapping[str, object], *, ignored: str = "", by: str = "") -> None:
        before, self.settings = self.settings, settings
        self.values, self.ignored = values, ignored
        for key in LIVE:
            old, new = getattr(before, key), getattr(settings, key)
            if old != new:
                logger.info("settings_changed %s=%s (before: %s)%s", key, new, old, by)


def for_deployment(current: Settings, configured: Settings, own: DeploymentSettings) -> tuple[Settings, str]:
    """Returns the settings of a deployment, and why a change made at run time does not reach it ("" if it does).

    Raises:
        ConfigError: config.yaml contradicts itself, which its start has ruled out.
    """
    try:
        return current.for_deployment(own), ""
    except ConfigError as error:
        if current == configured:
            raise
        return configured.for_deployment(own), str(error)
