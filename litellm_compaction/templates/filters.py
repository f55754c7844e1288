"""What chat templates may do with texts and JSON, within limits on the size of values.

Given to templates by `sandbox.py`, in place of jinja2's own filters where there are any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.filters import do_indent
from markupsafe import soft_str

_MAX_VALUE_CHARS = 64_000_000
_MAX_INDENT = 16
# JavaScript writes larger numbers with an exponent, llama.cpp from 1,000,000.
_MAX_WHOLE = 1e21


class TemplateRefusal(Exception):
    """The template did not take these messages, or took too long; its words are the message."""


def check_chars(chars: int) -> None:
    """Refuses a value that is too long.

    Raises:
        TemplateRefusal: it is.
    """
    if chars > _MAX_VALUE_CHARS:
        raise TemplateRefusal(f"a value of {chars} characters")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it: no HTML escapes, characters beyond ASCII as they are."""
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise TemplateRefusal(f"an indentation of {indent}")
    if ".0" in json.dumps(value, ensure_ascii=False):
        value = _with_whole_numbers(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_whole_numbers(value: Any) -> Any:
    """A JSON value with 1 for 1.0, as llama.cpp's and JavaScript's engines write it."""
    if isinstance(value, float):
        return _whole_number(value)
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(element) for key, element in value.items()}
    return list(map(_with_whole_numbers, value)) if isinstance(value, (list, tuple)) else value


def string(value: Any) -> str:
    """The filter `string`, which in llama.cpp's engine writes numbers as `tojson` does."""
    return str(_whole_number(value)) if isinstance(value, float) else soft_str(value)


def _whole_number(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """The filter `indent`, of bounded width."""
    if len(width) > _MAX_INDENT if isinstance(width, str) else not 0 <= width <= _MAX_INDENT:
        raise TemplateRefusal(f"an indentation of {width}")
    return do_indent(text, width, first, blank)


def replace(text: Any, old: str, new: str, count: int = -1) -> str:
    """The filter and the method `replace`."""
    text = str(text)
    places = text.count(old) if count < 0 else min(count, text.count(old))
    check_chars(len(text) + places * len(new))
    replaced: str = text.replace(old, new, count)
    return replaced


def summand(value: Any) -> str:
    """A value of a sum that also has a constant text in it, so that all of it is text, or is refused."""
    if isinstance(value, str):
        return value
    raise TemplateRefusal(f"a sum of text and {type(value).__name__}")


def trim(value: Any, chars: str | None = None) -> str:
    """The filter `trim`; the very same text where there is nothing to trim, so that its hash is known."""
    return (value if isinstance(value, str) else soft_str(value)).strip(chars)


def concat(parts: Iterable[str]) -> str:
    """What a macro or a block has written."""
    texts = parts if isinstance(parts, list) else list(parts)
    check_chars(sum(map(len, texts)))
    return "".join(texts)


def joined(*parts: Any) -> str:
    """The operator `~`."""
    return concat(map(str, parts))


def join_values(values: Any, separator: str = "", attribute: str | None = None) -> str:
    """The filter `join`."""
    texts = [str(value[attribute] if attribute is not None else value) for value in values]
    check_chars(sum(map(len, texts)) + len(texts) * len(separator))
    return separator.join(texts)
