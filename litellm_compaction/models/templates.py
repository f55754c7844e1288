"""A model's chat template: compiled once, rendered in bounded time, and what it can render.

Called by `prompts.py`. The template may come from a stranger's model file, so it runs in jinja2's immutable sandbox,
with a limit on loops, on output, and on operators that make large values of small ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from litellm_compaction.core.messages import JsonObject, JsonValue

_FOLDER = Path(__file__).parent / "chat_templates"
# Every date has as many characters, and tokens, as this one.
_NOW = datetime(2026, 11, 21, 12, 34, 56, tzinfo=timezone.utc)
# gpt-oss looks at all later messages for each tool call: 2,000 messages with calls take 1,000,000 turns, 0.3 s.
_MAX_TURNS = 2_000_000
_MAX_SOURCE_CHARS = 256 * 1024
# Indented JSON is the widest form in use: about 4 times its compact form.
_MAX_GROWTH, _FREE_CHARS = 8, 1_000_000
_MAX_FACTOR_CHARS = 100_000

# Called at the beginning of each turn of a loop; a template that names it itself is refused.
_TICK = "turn_of_a_loop"

_NEEDLE = "zq7"
_USER: JsonObject = {"role": "user", "content": "x"}
_CALLS: tuple[JsonObject, ...] = (
    _USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {_NEEDLE: "y"}}, "id": "call00001"}],
    },
    {"role": "tool", "content": _NEEDLE + "r", "name": "f", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "x"},
    _USER,
)
_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": _NEEDLE,
        "description": "x",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}, "required": []},
    },
}


class TemplateRefusal(Exception):
    """The template did not take these messages, or took too long; its words are the message."""


class Template:
    """One chat template; may be used from several threads."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled: jinja2.Template | None = None
        self._last = (0.0, 1)
        self._fault = ""
        if len(source) > _MAX_SOURCE_CHARS or _TICK in source:
            self._fault = f"longer than {_MAX_SOURCE_CHARS} characters, or hostile"
            return
        try:
            self._compiled = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            self._fault = str(error)

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue], *, bos: str = "", eos: str = ""
    ) -> str:
        """The prompt, up to the beginning of an answer.

        Args:
            messages: in the shape that the template wants, never changed.
            tools: schemas; none are given to the template when empty.
            bos: text of the token that begins a prompt.
            eos: text of the token that ends an answer.

        Raises:
            TemplateRefusal: for any reason.
        """
        if self._compiled is None:
            raise TemplateRefusal(self._fault)
        values: dict[str, Any] = {
            "messages": list(messages),
            "bos_token": bos,
            "eos_token": eos,
            "add_generation_prompt": True,
            # As llama.cpp's server passes it unless told otherwise (facts, 2026-11).
            "enable_thinking": True,
            _TICK: _Ticks(),
        }
        if tools:
            values["tools"] = list(tools)
        begun = time.perf_counter()
        limit = _FREE_CHARS
        parts: list[str] = []
        size = 0
        try:
            for part in self._compiled.generate(values):
                parts.append(part)
                size += len(part)
                if size > limit:
                    limit = _limit_chars(messages, tools, size)
        except TemplateRefusal:
            raise
        except Exception as error:
            # A template is a program of its own and may raise anything.
            raise TemplateRefusal(f"{type(error).__name__}: {error}"[:500]) from error
        self._last = (1e3 * (time.perf_counter() - begun), max(1, len(messages)))
        return "".join(parts)

    def expected_ms(self, messages: int) -> float:
        """How long so many messages take, by the last rendering; some templates look at all messages for each one."""
        last_ms, last_messages = self._last
        return last_ms * max(1.0, messages / last_messages) ** 2

    @cached_property
    def renders_tools(self) -> bool:
        """Whether tool schemas end up in the prompt."""
        return _NEEDLE in self._attempt((_USER,), (_TOOL,))

    @cached_property
    def renders_calls(self) -> bool:
        """Whether tool calls and their results end up in the prompt."""
        rendered = self._attempt(_CALLS, (_TOOL,)) or self._attempt(_with_text_arguments(_CALLS), (_TOOL,))
        return _NEEDLE + "r" in rendered

    @cached_property
    def takes_objects(self) -> bool:
        """Whether arguments of tool calls are to be given as objects, as llama.cpp does where a template reads them."""
        rendered = self._attempt(_CALLS, (_TOOL,))
        return rendered.count(_NEEDLE) > self._attempt(_CALLS[:1], (_TOOL,)).count(_NEEDLE) and "y" in rendered

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message ends up in the prompt; otherwise llama.cpp puts it into the next message."""
        return _NEEDLE in self._attempt(({"role": "system", "content": _NEEDLE}, _USER), ())

    @cached_property
    def wants_short_ids(self) -> bool:
        """Whether ids of tool calls other than nine characters are refused, as Mistral's templates do."""
        return "length != 9" in self.source

    @cached_property
    def takes_developer(self) -> bool:
        """Whether the role developer is the template's own; llama.cpp calls it system for all but gpt-oss."""
        return "<|channel|>" in self.source

    def _attempt(self, messages: Sequence[JsonObject], tools: Sequence[JsonValue]) -> str:
        try:
            return self.render(messages, tools)
        except TemplateRefusal:
            return ""


_templates: dict[str, Template] = {}
_lock = threading.Lock()


def template(name: str) -> Template:
    """One of the templates that come with the package, or one that was added; compiled once, in 5–50 ms.

    Raises:
        KeyError: no such template.
    """
    found = _templates.get(name)
    if found is None:
        with _lock:
            found = _templates.get(name)
            if found is None:
                path = _FOLDER / f"{name}.jinja"
                if not path.is_file():
                    raise KeyError(name)
                found = _templates[name] = Template(path.read_text(encoding="utf-8"))
    return found


def add_template(name: str, source: str) -> None:
    """Makes a template that was read elsewhere known under a name."""
    with _lock:
        if name not in _templates or _templates[name].source != source:
            _templates[name] = Template(source)


def is_compiled(name: str) -> bool:
    """Whether `template(name)` returns at once."""
    return name in _templates


def _limit_chars(messages: Sequence[JsonObject], tools: Sequence[JsonValue], size: int) -> int:
    """How long a prompt may become.

    Raises:
        TemplateRefusal: it is longer already.
    """
    limit = _FREE_CHARS + _MAX_GROWTH * (chars_of(messages) + chars_of(tools))
    if size > limit:
        raise TemplateRefusal(f"more than {limit} characters")
    return limit


def _with_text_arguments(messages: Sequence[JsonObject]) -> list[JsonObject]:
    plain: list[JsonObject] = json.loads(json.dumps(messages).replace(f'{{"{_NEEDLE}": "y"}}', f'"{_NEEDLE}"'))
    return plain


class _Ticks:
    """Counts the turns of all loops of one rendering."""

    def __init__(self) -> None:
        self._left = _MAX_TURNS

    def __call__(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise TemplateRefusal(f"more than {_MAX_TURNS} turns of loops")
        return ""


_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset({"split", "rsplit", "strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower"}),
    LoopContext: frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"}),
}


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What templates ask for most, without the sandbox's questions, which would take half of the time.
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
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
        for loop in tree.find_all(nodes.For):
            statement = nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None))
            statement.set_lineno(loop.lineno)
            statement.set_environment(self)
            loop.body.insert(0, statement)
        return tree


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks text for training and changes no prompt (transformers)."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    # Both make any number of characters of one.
    environment.filters.pop("center")
    environment.filters.pop("format")
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _NOW.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it: no HTML escapes, characters beyond ASCII as they are."""
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateRefusal(f"an indentation of {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


def chars_of(value: Any) -> int:
    """About how many characters are in a value, without following what nests too deep."""
    total = 0
    open_values: list[Any] = [value]
    while open_values:
        current = open_values.pop()
        if isinstance(current, str):
            total += len(current)
        elif isinstance(current, Mapping):
            open_values += current.values()
            total += 16 * len(current)
        elif isinstance(current, (list, tuple)):
            open_values += current
        else:
            total += 8
    return total
