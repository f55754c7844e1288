"""Where a stranger's chat template runs: jinja2's immutable sandbox with limits on time, loops and the size of values.

Used by `templates.py`. The sandbox alone keeps a template from reaching out, not from running for ever.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import soft_str

# Every date has as many characters, and tokens, as this one.
_NOW = datetime(2026, 11, 21, 12, 34, 56, tzinfo=timezone.utc)
# gpt-oss looks at all later messages for each tool call: 1,000 rounds of tools take 1,000,000 turns, 0.7 s. What takes
# longer is estimated by the family's formula.
_MAX_TURNS, _MAX_RENDER_S = 2_000_000, 4.0
_TURNS_PER_LOOK = 1024
_MAX_FACTOR_CHARS, _MAX_VALUE_CHARS = 100_000, 64_000_000
_MAX_INDENT, _MAX_INDENTED_CHARS = 16, 16_384
# JavaScript writes larger numbers with an exponent, llama.cpp from 1,000,000.
_MAX_WHOLE = 1e21

# Called for what loops go through, and for `~`; a template that names them itself is refused.
TICK, JOIN = "turn_of_a_loop", "joined_text"


class TemplateRefusal(Exception):
    """The template did not take these messages, or took too long; its words are the message."""


class Ticks:
    """Counts the turns of all loops of one rendering."""

    def __init__(self) -> None:
        self._left = _MAX_TURNS
        self._end_s = time.monotonic() + _MAX_RENDER_S

    def one(self) -> str:
        """Counts a turn; writes nothing."""
        self._left -= 1
        if self._left < 0:
            raise TemplateRefusal(f"more than {_MAX_TURNS} turns of loops")
        if self._left % _TURNS_PER_LOOK == 0 and time.monotonic() > self._end_s:
            raise TemplateRefusal(f"more than {_MAX_RENDER_S} s")
        return ""

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, counted as they are taken: a statement in its body takes ten times as long."""
        for value in values:
            self._left -= 1
            if self._left < 0 or self._left % _TURNS_PER_LOOK == 0:
                self._left += 1
                self.one()
            yield value


_DICT_ATTRIBUTES = frozenset(dir(dict))
# Methods of text that make any number of characters of one.
_GROWING = frozenset({"replace", "ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "join"})
_HARMLESS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset({"split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower"}),
    LoopContext: frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"}),
}


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What templates ask for most, without the sandbox's questions, which would take half of the time.
        kind = type(obj)
        if kind is str and attribute in _GROWING:
            if attribute != "replace":
                raise TemplateRefusal(f"the method {attribute} is not allowed")
            return partial(_replace, obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is Namespace and not attribute.startswith("_"):
            values = object.__getattribute__(obj, "_Namespace__attrs")
            return values[attribute] if attribute in values else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        if type(__obj) is Ticks:
            return __obj.each(args[0]) if args else __obj.one()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                _check_chars(len(left) + len(right))
            return left + right
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateRefusal(f"the operator {operator} is not allowed")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if (
                    isinstance(one, (str, list, tuple))
                    and isinstance(other, int)
                    and len(one) * other > _MAX_FACTOR_CHARS
                ):
                    raise TemplateRefusal("a product is too long")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            if not loop.recursive:
                loop.iter = nodes.Call(nodes.Name(TICK, "load"), [loop.iter], [], None, None)
                loop.iter.set_lineno(loop.lineno)
                loop.iter.set_environment(self)
                continue
            # It is called with other values from its own body.
            statement = nodes.ExprStmt(nodes.Call(nodes.Name(TICK, "load"), [], [], None, None))
            statement.set_lineno(loop.lineno)
            statement.set_environment(self)
            loop.body.insert(0, statement)
        for concat in tree.find_all(nodes.Concat):
            joined = nodes.Call(nodes.Name(JOIN, "load"), concat.nodes, [], None, None)
            joined.set_lineno(concat.lineno)
            joined.set_environment(self)
            concat.nodes = [joined]
        return tree


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks text for training and changes no prompt (transformers)."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment() -> jinja2.Environment:
    """What compiles a template as transformers does it, and runs it within limits."""
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    made.filters["tojson"] = _to_json
    made.filters["string"] = _string
    # These make any number of characters of one.
    for name in ("center", "format", "wordwrap"):
        made.filters.pop(name)
    made.filters["indent"] = _indent
    made.filters["join"] = _join_values
    made.filters["replace"] = _replace
    made.globals[JOIN] = _joined
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _NOW.strftime
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it: no HTML escapes, characters beyond ASCII as they are."""
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise TemplateRefusal(f"an indentation of {indent}")
    plain = json.dumps(value, ensure_ascii=False)
    if ".0" in plain:
        value = _with_whole_numbers(value)
        plain = json.dumps(value, ensure_ascii=False)
    # Tools are the same in every request of a conversation, and Python's own encoder, which indents, takes 0.1 ms for
    # each; what it would write depends on nothing but what the quick one does.
    if indent is not None and len(plain) <= _MAX_INDENTED_CHARS:
        return _indented(plain, ensure_ascii, indent, separators, sort_keys)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=512)
def _indented(plain: str, ensure_ascii: bool, indent: int, separators: tuple[str, str] | None, sort_keys: bool) -> str:
    value = json.loads(plain)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_whole_numbers(value: Any) -> Any:
    """A JSON value with 1 for 1.0, as llama.cpp's and JavaScript's engines write it."""
    if isinstance(value, float):
        return _whole_number(value)
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(element) for key, element in value.items()}
    return list(map(_with_whole_numbers, value)) if isinstance(value, (list, tuple)) else value


def _string(value: Any) -> str:
    """The filter `string`, which in llama.cpp's engine writes numbers as `tojson` does."""
    return str(_whole_number(value)) if isinstance(value, float) else soft_str(value)


def _whole_number(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value


def _check_chars(chars: int) -> None:
    if chars > _MAX_VALUE_CHARS:
        raise TemplateRefusal(f"a value of {chars} characters")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if len(width) > _MAX_INDENT if isinstance(width, str) else not 0 <= width <= _MAX_INDENT:
        raise TemplateRefusal(f"an indentation of {width}")
    return do_indent(text, width, first, blank)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = str(text)
    places = text.count(old) if count < 0 else min(count, text.count(old))
    _check_chars(len(text) + places * len(new))
    replaced: str = text.replace(old, new, count)
    return replaced


def _joined(*parts: Any) -> str:
    texts = list(map(str, parts))
    _check_chars(sum(map(len, texts)))
    return "".join(texts)


def _join_values(values: Any, separator: str = "", attribute: str | None = None) -> str:
    texts = [str(value[attribute] if attribute is not None else value) for value in values]
    _check_chars(sum(map(len, texts)) + len(texts) * len(separator))
    return separator.join(texts)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))
