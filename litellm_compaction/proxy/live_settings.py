"""The settings in force: config.yaml's, with the changes that were made at run time on top.

Answered from memory; the store is read at most once a second, by the first request that finds the answer older than
that. Without the settings page nothing is ever read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import Field, StrictFloat, StrictStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from litellm_compaction.config import LIVE, DeploymentSettings, Settings, choices
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.master_key import Seal
from litellm_compaction.stores import SettingStore

Value: TypeAlias = StrictStr | StrictFloat

logger = logging.getLogger("litellm_compaction")
KEY = "settings"
# A role is a word of LiteLLM's; a store may hold anything there.
_MAX_ROLE_CHARS = 64
# A change by another worker may stay unseen for so long.
_FRESH_S = 1.0
# A request waits no longer for the store than this. A read takes 1 ms.
_WAIT_S = 0.1
# A store that failed is not asked again for so long.
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Change:
    """One key's value in place of the one in config.yaml.

    Attributes:
        when_s: wall clock, seconds since 1970.
        role: LiteLLM's, of the visitor who changed it; never a name or a key.
    """

    value: Value
    when_s: Annotated[float, Field(allow_inf_nan=False)]
    role: Annotated[str, Field(max_length=_MAX_ROLE_CHARS)]


class WrongValues(ConfigError):
    """Values that settings cannot have: `problems` by key, "" if several keys are to blame."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.problems = dict(problems)


def with_values(configured: Settings, values: Mapping[str, object]) -> Settings:
    """config.yaml's settings with some values in place of its own.

    Raises:
        WrongValues: a key cannot be changed at run time, a value is none of its setting, or they do not fit together.
    """
    if fixed := {key: f"{key} cannot be changed while the proxy runs" for key in values if key not in LIVE}:
        raise WrongValues(fixed)
    try:
        return Settings.model_validate({**configured.model_dump(), **values})
    except ValidationError as error:
        problems = {}
        for found in error.errors():
            key = str(found["loc"][0]) if found["loc"] else ""
            message = str(found["msg"]).removeprefix("Value error, ")
            problems[key] = f"{key} = {values[key]}: {message}" if key in values else message
            if key in values and (allowed := allowed_values(Settings.model_fields[key])):
                problems[key] += f" (allowed: {allowed})"
        raise WrongValues(problems) from None


def allowed_values(field: FieldInfo) -> str:
    """The range or the words that a setting may have, for people; "" for a name of the operator's."""
    if found := choices(field):
        return ", ".join(found)
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [(word, getattr(part, name, None)) for part in field.metadata for name, word in words.items()]
    return ", ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class Overlay:
    """All changes by key; other settings follow config.yaml."""

    changes: Mapping[str, Change] = field(default_factory=dict)
    version: Literal[1] = 1

    @property
    def values(self) -> dict[str, str | float]:
        return {key: change.value for key, change in self.changes.items()}

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def over(self, configured: Settings) -> Settings:
        """The settings in force.

        Raises:
            ConfigError: they do not fit together, or this version does not know a key or value.
        """
        return with_values(configured, self.values) if self.changes else configured

    def changed(self, configured: Settings, values: Mapping[str, str | float], *, when_s: float, role: str) -> Overlay:
        """This overlay after `values` were chosen; those of config.yaml leave no trace."""
        changes = dict(self.changes)
        for key, value in values.items():
            if value == getattr(configured, key):
                changes.pop(key, None)
            elif value != self.values.get(key):
                changes[key] = Change(value, when_s, role[:_MAX_ROLE_CHARS])
        return Overlay(changes)

    def without(self, keys: Sequence[str]) -> Overlay:
        return Overlay({key: change for key, change in self.changes.items() if key not in keys})


_ADAPTER = TypeAdapter(Overlay)


def overlay_from_json(text: str | None) -> Overlay:
    """The overlay that `to_json` wrote.

    Raises:
        ConfigError: another version wrote it, or it is damaged.
    """
    if text is None:
        return Overlay()
    try:
        return _ADAPTER.validate_python(json.loads(text))
    except (ValueError, RecursionError):
        raise ConfigError("the saved changes cannot be read: damaged, or of another version") from None


class Known(NamedTuple):
    """The changes that were made at run time, as far as they are known.

    Attributes:
        text: in the store; None without any.
        overlay: the part of it that is in force.
        settings: config.yaml's with `overlay` on top.
        ignored: why a saved overlay is not in force; "" if it is.
        failure: why the store could not be read last time; "" if it could.
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
        store: holds the overlay for all workers; None for config.yaml's settings alone (`page: off`).
        secret: gives the proxy's master key, with which changes are signed; None if there is none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        configured: Settings,
        store: SettingStore | None = None,
        *,
        secret: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.configured = configured
        self.known = Known(None, Overlay(), configured)
        self._store = store
        self._seal = Seal(secret, b"settings")
        self._clock = clock
        self._stale_s: float | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_asleep(self) -> bool:
        """The plug-in is off, and no page may switch it on."""
        return self._store is None and self.configured.mode == "off"

    async def current(self) -> Settings:
        """No more than a second old; the last known ones if the store cannot be read."""
        if self._store is not None and (self._stale_s is None or self._clock() >= self._stale_s):
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self._read(self._store))
            await asyncio.wait({self._reading}, timeout=_WAIT_S)
            if not self._reading.done():
                # The next request to wait for this read comes a second later.
                self._stale_s = self._clock() + _FRESH_S
        return self.known.settings

    async def read(self) -> Known:
        """Reads the store, however long it takes; for the page."""
        if self._store is not None:
            await self._read(self._store)
        return self.known

    async def write(self, overlay: Overlay) -> None:
        """Puts `overlay` in force, here at once and in other workers within a second.

        Raises:
            ConfigError: it does not fit together.
            StoreError: it could not be saved, so nothing has changed.
        """
        settings = overlay.over(self.configured)
        text = f"{overlay.to_json()}\n{self._mac(overlay.to_json())}"
        if self._store is not None:
            await self._store.put_setting(KEY, text)
        self._take(Known(text, overlay, settings))

    async def _read(self, store: SettingStore) -> None:
        try:
            text = await store.get_setting(KEY)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, requests go on
            self._stale_s = self._clock() + _RETRY_S
            failure = str(error) if isinstance(error, CompactionError) else type(error).__name__
            if not self.known.failure:
                logger.warning("settings_not_read %s; those last known hold", failure)
            self.known = self.known._replace(failure=failure)
            return
        if text == self.known.text:
            self._stale_s = self._clock() + _FRESH_S
            self.known = self.known._replace(failure="")
            return
        try:
            overlay = self._verified(text)
            self._take(Known(text, overlay, overlay.over(self.configured)))
        except ConfigError as error:
            # Once for each text: the next read finds it known.
            logger.warning("settings_ignored %s; config.yaml holds; reset them at /compaction", error)
            self._take(Known(text, Overlay(), self.configured, ignored=str(error)))

    def _verified(self, text: str | None) -> Overlay:
        """The overlay in a store's text: a line of JSON, and one with its signature."""
        plain, _, sent = (text or "").partition("\n")
        overlay = overlay_from_json(plain if text is not None else None)
        mac = self._mac(plain)
        if mac and overlay.changes and not hmac.compare_digest(mac.encode(), sent.encode(errors="replace")):
            raise ConfigError("the saved changes are not signed with this proxy's master key")
        return overlay

    def _mac(self, text: str) -> str:
        return self._seal.mac(text.encode(errors="replace")).hex()

    def _take(self, known: Known) -> None:
        before = self.known.settings
        self.known = known
        self._stale_s = self._clock() + _FRESH_S
        after = known.settings
        for key in type(after).model_fields:
            if getattr(before, key) != getattr(after, key):
                logger.info("settings_changed %s=%s (before: %s)", key, getattr(after, key), getattr(before, key))


def for_deployment(current: Settings, configured: Settings, own: DeploymentSettings) -> tuple[Settings, str]:
    """The settings of a deployment, and why a change made at run time does not reach it ("" if it does).

    Raises:
        ConfigError: config.yaml contradicts itself, which its start has ruled out.
    """
    try:
        return current.for_deployment(own), ""
    except ConfigError as error:
        if current == configured:
            raise
        return configured.for_deployment(own), str(error)
