"""Compiles a chat template as transformers does it: jinja2 for this package's own, its sandbox for others.

The sandbox keeps a stranger's template from reaching out, not from running for ever: that one runs in a process of its
own (`contained.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import soft_str

# Every date has as many characters, and tokens, as this one.
_NOW = datetime(2026, 11, 21, 12, 34, 56, tzinfo=timezone.utc)
# JavaScript writes larger numbers with an exponent, llama.cpp from 1,000,000.
_MAX_WHOLE = 1e21
# The filter for sums that are written; a template may use it as well.
_SUMMAND = "summand"
_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset({"split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower"}),
    LoopContext: frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"}),
}


class TemplateRefusal(Exception):
    """The template did not take these messages, or took too long; its words are the message."""


class _Namespace(Namespace):
    """Variables that templates change in loops and read so often there that jinja2's own way of reading them counts."""

    __getattribute__ = object.__getattribute__


class _Plain(jinja2.Environment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        # What templates ask for most, without an exception and the sandbox's questions for each.
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is _Namespace:
            # Nothing but what the template has put there.
            values = obj._Namespace__attrs
            return values[attribute] if attribute in values else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Has a template write its texts one after the other, so that a long one is the very text of its message."""
        tree = super()._parse(source, name, filename)
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [part for node in output.nodes for part in _parts(node)]
        tree.set_lineno(1)
        tree.set_environment(self)
        return tree


class _Sandbox(_Plain, ImmutableSandboxedEnvironment):
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        # What templates call most, likewise: macros, namespaces and the harmless methods.
        kind = type(__obj)
        if (
            kind is Macro
            or __obj is _Namespace
            or (kind is BuiltinMethodType and __obj.__name__ in _HARMLESS.get(type(__obj.__self__), ()))
        ):
            return __context.call(__obj, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks text for training and changes no prompt (transformers)."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment(*, is_own: bool) -> jinja2.Environment:
    """The environment that compiles a template.

    Args:
        is_own: its source is one of this package's, to the letter.
    """
    kind = _Plain if is_own else _Sandbox
    made = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    made.filters |= {"tojson": _to_json, "string": _string, _SUMMAND: _summand}
    made.globals["namespace"] = _Namespace
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _NOW.strftime
    return made


def _parts(written: nodes.Expr) -> list[nodes.Expr]:
    """Expressions that can be written one after the other in place of `~` and of sums."""
    if isinstance(written, nodes.Concat):
        return [part for node in written.nodes for part in _parts(node)]
    summands = _summands(written)
    if not any(map(_is_text, summands)):
        return [written]
    # All of it is text, since one constant is, or cannot be added up.
    return [node if _is_text(node) else nodes.Filter(node, _SUMMAND, [], [], None, None) for node in summands]


def _summands(node: nodes.Expr) -> list[nodes.Expr]:
    return _summands(node.left) + _summands(node.right) if isinstance(node, nodes.Add) else [node]


def _is_text(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _summand(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TemplateRefusal(f"a sum of text and {type(value).__name__}")


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
        return _whole_number(value)
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(element) for key, element in value.items()}
    return list(map(_with_whole_numbers, value)) if isinstance(value, (list, tuple)) else value


def _string(value: Any) -> str:
    return str(_whole_number(value)) if isinstance(value, float) else soft_str(value)


def _whole_number(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))
