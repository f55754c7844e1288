"""Where a stranger's chat template runs: jinja2's immutable sandbox with limits on time, loops and the size of values.

Used by `template.py`. The sandbox alone keeps a template from reaching out, not from running for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from functools import partial
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from litellm_compaction.templates import filters
from litellm_compaction.templates.filters import TemplateRefusal, check_chars

# Every date has as many characters, and tokens, as this one.
_NOW = datetime(2026, 11, 21, 12, 34, 56, tzinfo=timezone.utc)
# gpt-oss looks at all later messages for each tool call: 1,000 rounds of tools take 1,000,000 turns, 0.7 s. What takes
# longer is estimated by the family's formula.
_MAX_TURNS, _MAX_RENDER_S = 2_000_000, 4.0
_TURNS_PER_LOOK = 1024
_MAX_FACTOR_CHARS = 100_000

# Called for what loops go through; a template that names it itself is refused.
TICK = "turn_of_a_loop"
# Filters for `~` and for sums that are written; a template may use them as well.
_JOINED, _SUMMAND = "joined", "summand"
_SIZED = frozenset({list, tuple, dict, str, range})
_DICT_ATTRIBUTES = frozenset(dir(dict))
# Methods of text that make any number of characters of one.
_GROWING = frozenset({"replace", "ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "join"})
_HARMLESS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset({"split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower"}),
    LoopContext: frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"}),
}


class Ticks:
    """Counts the turns of all loops of one rendering."""

    def __init__(self) -> None:
        self._left = _MAX_TURNS
        self._end_s = time.monotonic() + _MAX_RENDER_S

    def take(self, turns: int) -> str:
        """Counts some turns, at most as many as there are between two looks at the clock; writes nothing."""
        before = self._left
        self._left -= turns
        if before // _TURNS_PER_LOOK != self._left // _TURNS_PER_LOOK:
            self._look()
        return ""

    def each(self, values: Any) -> Iterable[Any]:
        """The values of a loop: of a short one all counted now, of others as they are taken."""
        if type(values) in _SIZED and len(values) <= _TURNS_PER_LOOK:
            self.take(len(values))
            return values  # type: ignore[no-any-return]
        return self._each(values)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._left -= 1
            if self._left < 0 or self._left % _TURNS_PER_LOOK == 0:
                self._look()
            yield value

    def _look(self) -> None:
        if self._left < 0:
            raise TemplateRefusal(f"more than {_MAX_TURNS} turns of loops")
        if time.monotonic() > self._end_s:
            raise TemplateRefusal(f"more than {_MAX_RENDER_S} s")


class _Namespace(Namespace):
    """What templates change in loops, and read so often there that jinja2's own way of reading it counts.

    With that, Gemma 4's takes 1.15 to 1.4 times as long (2026-11-23).
    """

    __getattribute__ = object.__getattribute__


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    # For what macros and blocks write.
    concat = staticmethod(filters.concat)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What templates ask for most, without the sandbox's questions: they make a rendering take 1.2 times (Llama 3.1)
        # to 4 times (Gemma 4) as long, 11 times at 450 messages (2026-11-23).
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _GROWING:
            if attribute != "replace":
                raise TemplateRefusal(f"the method {attribute} is not allowed")
            return partial(filters.replace, obj)
        if kind is _Namespace:
            # Nothing but what the template has put there.
            values = obj._Namespace__attrs
            return values[attribute] if attribute in values else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        kind = type(__obj)
        if kind is Ticks:
            return __obj.each(args[0]) if args else __obj.take(1)
        # What templates call most, likewise: macros, namespaces and the harmless methods (1.5 times for Gemma 4).
        if (
            kind is Macro
            or __obj is _Namespace
            or (kind is BuiltinMethodType and __obj.__name__ in _HARMLESS.get(type(__obj.__self__), ()))
        ):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                check_chars(len(left) + len(right))
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
                loop.iter = _tick([loop.iter])
                continue
            # It is called with other values from its own body.
            loop.body.insert(0, nodes.ExprStmt(_tick([])))
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [part for node in output.nodes for part in _parts(node)]
        for concat in tree.find_all(nodes.Concat):
            first, *others = concat.nodes
            concat.nodes = [_filter(_JOINED, first, others)]
        tree.set_lineno(1)
        tree.set_environment(self)
        return tree


def _tick(values: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.Name(TICK, "load"), values, [], None, None)


def _parts(written: nodes.Expr) -> list[nodes.Expr]:
    """What can be written one after the other in place of `~` and of sums, without a copy of what is long in them."""
    if isinstance(written, nodes.Concat):
        return [part for node in written.nodes for part in _parts(node)]
    summands = _summands(written)
    if not any(map(_is_text, summands)):
        return [written]
    # All of it is text, since one constant is, or cannot be added up.
    return [node if _is_text(node) else _filter(_SUMMAND, node, []) for node in summands]


def _summands(node: nodes.Expr) -> list[nodes.Expr]:
    return _summands(node.left) + _summands(node.right) if isinstance(node, nodes.Add) else [node]


def _is_text(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _filter(name: str, node: nodes.Expr, others: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, name, others, [], None, None)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks text for training and changes no prompt (transformers)."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment() -> jinja2.Environment:
    """What compiles a template as transformers does it, and runs it within limits."""
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    made.filters |= {
        "tojson": filters.to_json,
        "string": filters.string,
        "trim": filters.trim,
        "indent": filters.indent,
        "join": filters.join_values,
        "replace": filters.replace,
        _JOINED: filters.joined,
        _SUMMAND: filters.summand,
    }
    # These make any number of characters of one.
    for name in ("center", "format", "wordwrap"):
        made.filters.pop(name)
    made.globals["namespace"] = _Namespace
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _NOW.strftime
    return made


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))
