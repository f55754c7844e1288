"""Compiles this package's chat templates as transformers does it; none comes from a stranger, so without a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import jinja2
from markupsafe import soft_str

# Every date has as many characters, and tokens, as this one.
_NOW = datetime(2026, 11, 21, 12, 34, 56, tzinfo=timezone.utc)
# JavaScript writes larger numbers with an exponent, llama.cpp from 1,000,000.
_MAX_WHOLE = 1e21
_DICT_ATTRIBUTES = frozenset(dir(dict))


class TemplateRefusal(Exception):
    """The template did not take these messages, or took too long; its words are the message."""


class _Environment(jinja2.Environment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        # What templates ask for most, without an exception for each.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it: no HTML escapes, characters beyond ASCII as they are."""
    if ".0" in json.dumps(value, ensure_ascii=False):
        value = _with_whole_numbers(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_whole_numbers(value: Any) -> Any:
    """A JSON value with 1 for 1.0, as llama.cpp's and JavaScript's engines write it."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(element) for key, element in value.items()}
    return list(map(_with_whole_numbers, value)) if isinstance(value, (list, tuple)) else value


def _string(value: Any) -> str:
    return str(_with_whole_numbers(value)) if isinstance(value, float) else soft_str(value)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


def _made() -> jinja2.Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters |= {"tojson": _to_json, "string": _string}
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _NOW.strftime
    return made


ENVIRONMENT = _made()
