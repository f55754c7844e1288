"""The settings in force right now: config.yaml's, with what was changed at run time on top.

Asked for every request to a guarded deployment, and answered from memory; the store is read at most once a second, by
the first request that finds the answer older than that. Without the settings page nothing is ever read. An overlay
says which settings can be changed while the proxy runs, how changes are kept, and what they make of config.yaml:
values in, values out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from pydantic import ValidationError

from litellm_compaction import config
from litellm_compaction.config import DeploymentSettings, Settings
from litellm_compaction.errors import CompactionError, ConfigError, StoreLate
from litellm_compaction.master_key import Seal
from litellm_compaction.stores import Store
from litellm_compaction.stores.patience import Patience

Value: TypeAlias = str | float

# What steers a compaction and can be taken back at any time. Never the store, time limits, or what a client may do.
CHANGEABLE: tuple[str, ...] = (
    "pruning_model",
    "strategy",
    "notices",
    "mode",
    "pre_request_ratio",
    "streaming_ratio",
    "target_ratio",
    "output_buffer_ratio",
)
_VERSION = 1
# A role is a word of LiteLLM's; whatever else a store holds there is not worth showing.
_MAX_ROLE_CHARS = 64
logger = logging.getLogger("litellm_compaction")
KEY = "settings"
# How long a change by another worker may stay unseen.
FRESH_S = 1.0
# A request waits no longer for a file than this; what is known counts then. A read takes 1 ms.
_WAIT_S = 0.1
# A store that failed is left in peace for so long.
_RETRY_S = 5.0


class Change(NamedTuple):
    """One key's value in place of the one in config.yaml.

    Attributes:
        when_s: wall clock, seconds since 1970.
        role: LiteLLM's role of whoever changed it; never a name or a key.
    """

    value: Value
    when_s: float
    role: str


@dataclass(frozen=True, slots=True)
class Overlay:
    """All changes by key; what is not in it follows config.yaml."""

    changes: Mapping[str, Change] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self, *, mac: str = "") -> str:
        """As it is kept in the store; `mac` signs the same without one."""
        changes = {key: self.changes[key]._asdict() for key in sorted(self.changes)}
        return json.dumps({"version": _VERSION, "changes": changes, **({"mac": mac} if mac else {})})

    def over(self, configured: Settings) -> Settings:
        """The settings in force.

        Raises:
            ConfigError: they do not fit together, or this version does not know a key or value.
        """
        if not self.changes:
            return configured
        problems = find_problems(configured, {key: change.value for key, change in self.changes.items()})
        if problems:
            raise ConfigError("; ".join(problems.values()))
        return Settings.model_validate(
            {**configured.model_dump(), **{key: change.value for key, change in self.changes.items()}}
        )

    def changed(self, configured: Settings, values: Mapping[str, Value], *, when_s: float, role: str) -> Overlay:
        """This overlay after somebody chose `values`: what config.yaml says anyway leaves no trace."""
        in_force = {key: change.value for key, change in self.changes.items()}
        changes = dict(self.changes)
        for key, value in values.items():
            if value == getattr(configured, key):
                changes.pop(key, None)
            elif value != in_force.get(key):
                changes[key] = Change(value, when_s, role[:_MAX_ROLE_CHARS])
        return Overlay(changes)

    def without(self, keys: Sequence[str]) -> Overlay:
        """This overlay with `keys` as config.yaml has them again."""
        return Overlay({key: change for key, change in self.changes.items() if key not in keys})


def overlay_from_json(text: str | None) -> Overlay:
    """The overlay that `to_json` wrote.

    Raises:
        ConfigError: another version wrote it, or it is damaged.
    """
    if text is None:
        return Overlay()
    try:
        found = json.loads(text)
        if found["version"] != _VERSION:
            raise ConfigError(f"written in format {found['version']!r}, this version reads {_VERSION}")
        changes = {
            str(key): Change(_value(change["value"]), float(change["when_s"]), str(change["role"])[:_MAX_ROLE_CHARS])
            for key, change in found["changes"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError("the saved changes cannot be read") from exc
    if any(not math.isfinite(change.when_s) for change in changes.values()):
        raise ConfigError("the saved changes cannot be read")
    return Overlay(changes)


def _mac_in(text: str | None) -> str:
    """What an overlay that could be read is signed with; "" for nothing."""
    mac = json.loads(text or "{}").get("mac")
    return mac if isinstance(mac, str) and mac.isascii() else ""


def find_problems(configured: Settings, values: Mapping[str, object]) -> dict[str, str]:
    """What is wrong with `values` in place of config.yaml's: texts by key; "" where several keys are to blame."""
    problems = {key: f"{key} cannot be changed while the proxy runs" for key in values if key not in CHANGEABLE}
    if problems:
        return problems
    try:
        Settings.model_validate({**configured.model_dump(), **values})
    except ValidationError as error:
        for found in error.errors():
            key = str(found["loc"][0]) if found["loc"] else ""
            message = str(found["msg"]).removeprefix("Value error, ")
            problems[key] = f"{key} = {values[key]}: {message}" if key in values else message
            if key in values and (allowed := allowed_values(key)):
                problems[key] += f" (allowed: {allowed})"
    return problems


def parsed(configured: Settings, values: Mapping[str, Value]) -> dict[str, Value]:
    """`values` as a form sends them, in the types of the settings; the caller knows that they have no problems."""
    settings = Settings.model_validate({**configured.model_dump(), **values})
    return {key: _value(getattr(settings, key)) for key in values}


def choices(key: str) -> tuple[str, ...]:
    """The words that a key may have; empty where it is a number or a model's name."""
    return config.choices(Settings.model_fields[key])


def is_number(key: str) -> bool:
    """Whether a key's value is a number."""
    return isinstance(Settings.model_fields[key].default, float)


def allowed_values(key: str) -> str:
    """The range or the words that a key may have, for people; "" for a model's name."""
    if found := choices(key):
        return ", ".join(found)
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{words[name]} {limit:g}"
        for limits in Settings.model_fields[key].metadata
        for name in ("ge", "gt", "le", "lt")
        if (limit := getattr(limits, name, None)) is not None
    ]
    return ", ".join(bounds)


def _value(value: object) -> Value:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError("neither text nor a number")
    return value


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
        secret: gives the proxy's master key, with which changes are signed; None where there is none.
        patience: with it; None for a file's.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        configured: Settings,
        store: Store,
        *,
        secret: Callable[[], str | None] = lambda: None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.configured = configured
        self._patience = patience or Patience(_WAIT_S)
        self.known = Known(None, Overlay(), configured)
        self._store = store
        self._seal = Seal(secret, b"settings")
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
            with contextlib.suppress(StoreLate):
                await self._patience.wait(self._reading)
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
        text = overlay.to_json(mac=self._mac(overlay))
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
            overlay = self._read_from(text)
            self._take(Known(text, overlay, overlay.over(self.configured)))
        except ConfigError as error:
            # Once for each text: the next read finds it known.
            logger.warning("settings_ignored %s; config.yaml holds; reset them at /compaction", error)
            self._take(Known(text, Overlay(), self.configured, ignored=str(error)))

    def _read_from(self, text: str | None) -> Overlay:
        overlay = overlay_from_json(text)
        mac = self._mac(overlay)
        if mac and overlay.changes and not hmac.compare_digest(mac, _mac_in(text)):
            raise ConfigError("the saved changes are not signed with this proxy's master key")
        return overlay

    def _mac(self, overlay: Overlay) -> str:
        return self._seal.mac(overlay.to_json().encode("utf-8", "surrogatepass")).hex()

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
