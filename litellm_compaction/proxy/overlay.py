"""Which settings can be changed while the proxy runs, how such changes are kept, and what they make of config.yaml.

Values in, values out: `live_settings.py` reads and writes them, the settings page shows them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import ValidationError

from litellm_compaction.config import Settings
from litellm_compaction.errors import ConfigError

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

    def to_json(self) -> str:
        """As it is kept in the store."""
        changes = {key: self.changes[key]._asdict() for key in sorted(self.changes)}
        return json.dumps({"version": _VERSION, "changes": changes})

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
    annotation = Settings.model_fields[key].annotation
    return tuple(str(choice) for choice in get_args(annotation)) if get_origin(annotation) is Literal else ()


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
