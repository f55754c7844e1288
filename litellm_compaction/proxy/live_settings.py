"""The settings in force: config.yaml's, with the values that were chosen at run time on top.

Those are one JSON object in the store, read at most once a second, by the first request that finds them older than
that. Without the settings page nothing is ever read. The log says who changed what; the store has no signatures.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from litellm_compaction.concurrency import Kept
from litellm_compaction.config import LIVE, DeploymentSettings, Settings
from litellm_compaction.errors import CompactionError, ConfigError, StoreError
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")
KEY = "settings"
# A change by another worker may stay unseen for so long.
_FRESH_S = 1.0
# A request waits no longer for the store than this. A read takes 1 ms.
_WAIT_S = 0.1
_NAMES = re.compile(rf"\b(?:{'|'.join(LIVE)})\b")


class WrongValues(ConfigError):
    """Values that settings cannot have: `problems` has a sentence by setting."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(dict.fromkeys(problems.values())))
        self.problems = dict(problems)


def with_values(configured: Settings, values: Mapping[str, object]) -> Settings:
    """Returns config.yaml's settings with some values in place of its own, None for its own; or raises WrongValues."""
    if problems := {key: f"{key} cannot be changed while the proxy runs." for key in values if key not in LIVE}:
        raise WrongValues(problems)
    try:
        return configured.with_values({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        for wrong in error.errors():
            said = f"{wrong['msg'].removeprefix('Value error, ')}."
            if wrong["loc"]:
                key = str(wrong["loc"][0])
                problems[key] = f"{LIVE[key].label}: “{str(values[key])[:100]}”: {said}"
            else:
                # A contradiction stands under no key, and names the settings itself.
                problems |= dict.fromkeys(_NAMES.findall(said), said)
        raise WrongValues(problems) from None


def chosen_values(text: str | None) -> dict[str, object]:
    """Returns the values in a store's text; a ConfigError says that another version wrote it, or that it is damaged."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError("the saved changes cannot be read: damaged, or of another version")
    return values


class InForce(NamedTuple):
    """The settings in force, and the store's `text` that they come from.

    `ignored` says why saved values are not in force, and `failure` why the store could not be read last time.
    """

    settings: Settings
    text: str | None = None
    ignored: str = ""
    failure: str = ""


class LiveSettings:
    """config.yaml's settings with the store's values on top; without a store config.yaml's alone (`page: off`)."""

    def __init__(
        self, configured: Settings, store: Store | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.configured = configured
        self._store = store
        self._kept: Kept[str, InForce] = Kept(self._read, lambda _: _FRESH_S, most=1, clock=clock)
        self._writing = asyncio.Lock()

    @property
    def in_force(self) -> InForce:
        """As last read."""
        return self._kept.last(KEY) or InForce(self.configured)

    @property
    def is_asleep(self) -> bool:
        """The plug-in is off, and no page may switch it on."""
        return self._store is None and self.configured.mode == "off"

    async def current(self) -> Settings:
        """Returns settings no more than a second old; the last known ones if the store cannot be read."""
        known = None if self._store is None else await self._kept.soon(KEY, wait_s=_WAIT_S)
        return (known or self.in_force).settings

    async def read(self) -> InForce:
        """Reads the store, however long it takes; never raises."""
        return await self._kept.get(KEY, fresh=True)

    async def _read(self, key: str) -> InForce:
        before, text = self.in_force, None
        try:
            text = await self._store.get_setting(key) if self._store is not None else None
            if text == before.text:
                return before._replace(failure="")
            return InForce(with_values(self.configured, chosen_values(text)), text)
        except ConfigError as error:
            # Once for each text: the next read finds it known.
            logger.warning("settings_ignored %s; config.yaml holds; reset them at /compaction", str(error))
            return InForce(self.configured, text, ignored=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            failure = str(error) if isinstance(error, CompactionError) else type(error).__name__
            if not before.failure:
                logger.warning("settings_not_read %s; those last known hold", failure)
            return before._replace(failure=failure)

    async def write(self, changes: Mapping[str, object], *, role: str = "") -> None:
        """Puts values in force, here at once and in other workers within a second; None gives config.yaml's back.

        `role` is LiteLLM's, of the visitor, for the log. After WrongValues or a StoreError nothing has changed.
        """
        async with self._writing:
            before = await self.read()
            if before.failure or self._store is None:
                raise StoreError(before.failure)
            old = {key: getattr(before.settings, key) for key in LIVE}
            settings = with_values(self.configured, {**old, **changes})
            new = {key: getattr(settings, key) for key in LIVE}
            chosen = {key: value for key, value in new.items() if value != getattr(self.configured, key)}
            await self._store.put_setting(KEY, json.dumps(chosen))
            await self.read()
            for key in [key for key in LIVE if new[key] != old[key]]:
                logger.info("settings_changed %s=%s (before: %s) by %s", key, new[key], old[key], role)


def for_deployment(current: Settings, configured: Settings, own: DeploymentSettings) -> tuple[Settings, str]:
    """Returns the settings of a deployment, and why a change made at run time does not reach it ("" if it does)."""
    try:
        return current.for_deployment(own), ""
    except ConfigError as error:
        if current == configured:
            raise
        return configured.for_deployment(own), str(error)
