"""The tables of settings as docs/settings.md must show them; `python -m tests.cli.settings_table` prints them."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from litellm_compaction.config import DeploymentSettings, Settings

_UNITS = {
    "_ratio": "share 0–1",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "_ms": "ms",
    "_s": "seconds",
    "_messages": "messages",
    "_restarts": "restarts",
    "_calls": "calls",
    "context_length": "tokens",
}


def table(settings: type[BaseModel]) -> str:
    """A Markdown table of all fields, in the order of their definition."""
    rows = [
        f"| `{name}` | `{_default(field)}` | {_unit(name, field)} | {field.description or 'as the global setting'} |"
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
    choices = _choices(field.annotation)
    if choices:
        return " / ".join(f"`{choice}`" for choice in choices)
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def _choices(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    if annotation is bool or bool in get_args(annotation):
        return ("true", "false")
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


if __name__ == "__main__":
    print(table(Settings), table(DeploymentSettings), sep="\n\n")
