"""The tables of settings as docs/settings.md must show them; `python -m tests.settings_table` prints them."""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from litellm_compaction.config import DeploymentSettings, Settings, choices

_UNITS = {
    "_ratio": "share 0–1",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "_ms": "ms",
    "_s": "seconds",
    "_messages": "messages",
    "_restarts": "restarts",
    "context_length": "tokens",
}


def table(settings: type[BaseModel]) -> str:
    """A Markdown table of all fields, in the order of their definition."""
    is_global = settings is Settings
    rows = [
        f"| `{name}` | `{_default(field)}` | {_unit(name, field)} | {' '.join((field.description or '').split())} |"
        if is_global or name not in Settings.model_fields
        else f"| `{name}` | `not set` | {_unit(name, field)} | as the global setting |"
        for name, field in settings.model_fields.items()
    ]
    return "\n".join(["| key | default | unit or values | what it does |", "|---|---|---|---|", *rows])


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)


def _unit(name: str, field: FieldInfo) -> str:
    words = ("true", "false") if bool in (field.annotation, *get_args(field.annotation)) else choices(field)
    if words:
        return " / ".join(f"`{word}`" for word in words)
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


if __name__ == "__main__":
    print(table(Settings), table(DeploymentSettings), sep="\n\n")
