"""A model's chat template: compiled once, rendered in bounded time, and what it can render.

The template may come from a stranger's model file: one that is none of this package's runs in a process of its own
(`contained.py`).

Messages reach a template in the shape in which an engine hands them over. The rules are llama.cpp's server's
(common/chat.cpp and common/parsers in llama-cpp-python 0.3.36): texts are joined by newlines unless the template does
it, arguments become objects if the template reads them, and so on.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from litellm_compaction.core.messages import JsonObject, JsonValue, Message
from litellm_compaction.templates.contained import Contained, Died
from litellm_compaction.templates.environment import TemplateRefusal, environment

_FOLDER = Path(__file__).parent / "jinja"
_MAX_SOURCE_CHARS = 256 * 1024
# Indented JSON is the widest form in use: about 4 times its compact form.
_MAX_GROWTH, _FREE_CHARS = 8, 1_000_000
# gpt-oss and Gemma 4 look at other messages for each tool call: 1,000 rounds of tools take 0.1 and 0.4 s. What takes
# longer is estimated by the family's formula; looked at each so many parts.
_MAX_RENDER_S, _PARTS_PER_LOOK = 2.0, 256
# Larger requests to a stranger's template are counted by the formula: nothing that clients send may end its process.
_MAX_REQUEST_BYTES = 16 * 2**20
# So often a template may take its process with it, which can be the request's or the machine's fault.
_MOST_DEATHS = 3
_RENDERED = f"{__name__}:rendered"

# llama.cpp takes this out of Mistral's templates, which would refuse an empty answer (common/chat.cpp,
# common_chat_templates_init).
_REFUSES_EMPTY = (
    "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
    "(message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}"
)
# If Gemma 4's template leaves the model's next turn out, llama.cpp begins it (common/parsers/gemma4.cpp).
_GEMMA_CALL, _GEMMA_END, _GEMMA_BEGIN = "'<|tool_call>call:'", "<turn|>\n", "<|turn>model\n"
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
_templates: dict[str, Template] = {}
_lock = threading.Lock()
# Mistral's templates refuse other ids.
_ID_CHARS = 9
# Of one part no template makes anything else than of the text alone.
_FEWEST_PARTS = 2


class Template:
    """One chat template; may be used from several threads."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled: jinja2.Template | None = None
        self._last = (0.0, 1)
        self._fault = ""
        self._begins_turns = _GEMMA_CALL in source
        if len(source) > _MAX_SOURCE_CHARS:
            self._fault = f"longer than {_MAX_SOURCE_CHARS} characters"
            return
        try:
            made = environment(is_own=source.strip() in _own_sources())
            self._compiled = made.from_string(source.replace(_REFUSES_EMPTY, "{%- if false %}"))
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            self._fault = str(error)

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue], *, bos: str = "", eos: str = ""
    ) -> str:
        """The prompt, up to the beginning of an answer; see `parts`."""
        return "".join(self.parts(messages, tools, bos=bos, eos=eos))

    def parts(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonValue],
        *,
        bos: str = "",
        eos: str = "",
        now: datetime | None = None,
    ) -> list[str]:
        """The prompt in the parts in which the template writes it: mostly the very texts of the messages.

        Args:
            messages: in the shape that the template wants, never changed.
            tools: schemas; none are given to the template when empty.
            bos: text of the token that begins a prompt.
            eos: text of the token that ends an answer.
            now: for templates that write the date; None if only its length matters.

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
            # As llama.cpp's server passes it unless told otherwise (tools/server, 2026-11).
            "enable_thinking": True,
        }
        if now is not None:
            values["strftime_now"] = now.strftime
        if tools:
            values["tools"] = list(map(_tool, tools))
        # Of this thread: on a busy machine a rendering may be interrupted for longer than it takes.
        begun_s = time.thread_time()
        limit = _FREE_CHARS
        parts: list[str] = []
        size = 0
        try:
            # What `generate` does, but for the traceback that it would mend.
            for part in self._compiled.root_render_func(self._compiled.new_context(values)):
                parts.append(part)
                size += len(part)
                if size > limit:
                    limit = _limit_chars(messages, tools, size)
                if len(parts) % _PARTS_PER_LOOK == 0:
                    _must_be_in_time(begun_s)
        except TemplateRefusal:
            raise
        except Exception as error:
            # A template is a program of its own and may raise anything.
            raise TemplateRefusal(f"{type(error).__name__}: {error}"[:500]) from error
        if self._begins_turns and "".join(parts[-2:]).endswith(_GEMMA_END):
            parts.append(_GEMMA_BEGIN)
        self._last = (1e3 * (time.thread_time() - begun_s), max(1, len(messages)))
        return parts

    def expected_ms(self, messages: int) -> float:
        """The expected time, by the last rendering; some templates look at all messages for each of them."""
        last_ms, last_messages = self._last
        return last_ms * max(1.0, messages / last_messages) ** 2

    @cached_property
    def is_usable(self) -> bool:
        """True if the simplest conversation can be rendered."""
        return bool(self._attempt((_USER,), ()))

    @cached_property
    def renders_tools(self) -> bool:
        """True if tool schemas end up in the prompt."""
        return _NEEDLE in self._attempt((_USER,), (_TOOL,))

    @cached_property
    def renders_calls(self) -> bool:
        """True if tool calls and their results end up in the prompt."""
        rendered = self._attempt(_CALLS, (_TOOL,)) or self._attempt(_with_text_arguments(_CALLS), (_TOOL,))
        return _NEEDLE + "r" in rendered

    @cached_property
    def renders_text_beside_calls(self) -> bool:
        """True if an answer's text ends up in the prompt although it has calls; in Llama 3.1's and Mistral's not."""
        says = tuple({**each, "content": f"{_NEEDLE}t"} if "tool_calls" in each else each for each in _CALLS)
        rendered = self._attempt(says, (_TOOL,)) or self._attempt(_with_text_arguments(says), (_TOOL,))
        return f"{_NEEDLE}t" in rendered

    @cached_property
    def takes_objects(self) -> bool:
        """True if arguments of tool calls are to be objects, as llama.cpp does if a template reads them."""
        rendered = self._attempt(_CALLS, (_TOOL,))
        return rendered.count(_NEEDLE) > self._attempt(_CALLS[:1], (_TOOL,)).count(_NEEDLE) and "y" in rendered

    @cached_property
    def takes_parts(self) -> bool:
        """True if content may be a list of texts; else llama.cpp joins them by newlines before."""
        parts = [{"type": "text", "text": f"{_NEEDLE}{letter}"} for letter in "ab"]
        rendered = self._attempt(({"role": "user", "content": parts},), ())
        return f"{_NEEDLE}a" in rendered and f"{_NEEDLE}b" in rendered and "'text'" not in rendered

    @cached_property
    def takes_system(self) -> bool:
        """True if a system message ends up in the prompt; else llama.cpp puts it into the next message."""
        return _NEEDLE in self._attempt(({"role": "system", "content": _NEEDLE}, _USER), ())

    @cached_property
    def wants_short_ids(self) -> bool:
        """True if ids of tool calls other than nine characters are refused, as Mistral's templates do."""
        return "length != 9" in self.source

    @cached_property
    def takes_developer(self) -> bool:
        """True if the role developer is the template's own; llama.cpp calls it system for all but gpt-oss."""
        return "<|channel|>" in self.source

    def _attempt(self, messages: Sequence[JsonObject], tools: Sequence[JsonValue]) -> str:
        try:
            return self.render(messages, tools)
        except TemplateRefusal:
            return ""


class StrangersTemplate(Template):
    """A template out of a stranger's file: `parts` waits for another process, so it belongs into a thread."""

    def __init__(self, source: str, process: Contained | None = None) -> None:
        self.source = source
        self._process = process or _PROCESS
        self._deaths = 0

    def parts(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonValue],
        *,
        bos: str = "",
        eos: str = "",
        now: datetime | None = None,
    ) -> list[str]:
        """As `Template.parts`."""
        if not self.source or len(self.source) > _MAX_SOURCE_CHARS:
            raise TemplateRefusal(f"longer than {_MAX_SOURCE_CHARS} characters, or empty")
        if self._deaths >= _MOST_DEATHS:
            raise TemplateRefusal("it has taken too much time or memory before")
        try:
            asked = json.dumps([self.source, list(messages), list(tools), bos, eos, now and now.isoformat()]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefusal(f"{type(error).__name__}: it cannot be written as JSON") from error
        if len(asked) > _MAX_REQUEST_BYTES:
            raise TemplateRefusal(f"more than {_MAX_REQUEST_BYTES} bytes of messages")
        try:
            answer: object = json.loads(self._process.run(_RENDERED, asked))
        except (Died, ValueError, RecursionError) as error:
            self._deaths += 1
            raise TemplateRefusal("it has taken too much time or memory") from error
        except OSError as error:
            raise TemplateRefusal(f"no process can be started: {error.strerror}") from error
        match answer:
            case [*parts]:
                return list(map(str, parts))
            case {"refusal": str(words)}:
                raise TemplateRefusal(words[:500])
        raise TemplateRefusal("it said nothing that can be read")

    def expected_ms(self, messages: int) -> float:
        """Never so short that the event loop could wait for it."""
        return math.inf

    def look(self) -> bool:
        """Finds out all that is asked about it later, also on the event loop; returns True if it is usable."""
        return self.is_usable and None not in (
            self.renders_tools,
            self.renders_calls,
            self.renders_text_beside_calls,
            self.takes_objects,
            self.takes_parts,
            self.takes_system,
        )


# All strangers' templates share one: they wait for each other, and cost 20 MB together.
_PROCESS = Contained()


def rendered(asked: bytes) -> bytes:
    """Answers one request of `StrangersTemplate.parts` in the process."""
    source, messages, tools, bos, eos, now = json.loads(asked)
    try:
        when = datetime.fromisoformat(now) if now else None
        return json.dumps(_compiled(source).parts(messages, tools, bos=bos, eos=eos, now=when)).encode()
    except TemplateRefusal as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from error
        return json.dumps({"refusal": str(error)[:500]}).encode()


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    return Template(source)


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
    """Makes a template that was read elsewhere known under a name, looked at and ready."""
    with _lock:
        if name in _templates and _templates[name].source == source:
            return
    made: Template
    if source.strip() in _own_sources():
        made = Template(source)
    else:
        made = StrangersTemplate(source)
        made.look()
    with _lock:
        _templates[name] = made


@cache
def _own_sources() -> frozenset[str]:
    return frozenset(path.read_text(encoding="utf-8").strip() for path in _FOLDER.glob("*.jinja"))


def is_template(name: str, source: str) -> bool:
    """Returns True if a template that is known under a name says the same as a source."""
    return bool(name) and template(name).source.strip() == source.strip()


def is_compiled(name: str) -> bool:
    """Returns True if `template(name)` returns at once."""
    return name in _templates


def _tool(tool: JsonValue) -> JsonValue:
    """A tool as llama.cpp hands it to a template: name, description and parameters, and nothing else."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {},
        },
    }


def _must_be_in_time(begun_s: float) -> None:
    if time.thread_time() - begun_s > _MAX_RENDER_S:
        raise TemplateRefusal(f"more than {_MAX_RENDER_S} s")


def _limit_chars(messages: Sequence[JsonObject], tools: Sequence[JsonValue], size: int) -> int:
    """The bound of a prompt, in characters.

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


def chars_of(value: Any) -> int:
    """About how many characters are in a value, without following values that nest too deep."""
    total = 0
    open_values: list[Any] = [value]
    while open_values:
        current = open_values.pop()
        # `dict` first: an abstract class is ten times slower to ask.
        if isinstance(current, str):
            total += len(current)
        elif isinstance(current, (dict, Mapping)):
            open_values += current.values()
            total += 16 * len(current)
        elif isinstance(current, (list, tuple)):
            open_values += current
        else:
            total += 8
    return total


class Shaped(NamedTuple):
    """Messages for a template.

    Attributes:
        messages: as many as there were, or one fewer if the template knows no system message.
        is_faithful: nothing had to be changed that an engine would have refused.
    """

    messages: list[JsonObject]
    is_faithful: bool


def shape(messages: Sequence[Message], template: Template, *, short_ids: bool = False) -> Shaped:
    """The messages as the template wants them.

    Args:
        messages: n, oldest first.
        template: what they are for.
        short_ids: ids of tool calls are replaced by nine digits, each by its own.
    """
    shaped: list[JsonObject] = []
    is_faithful = not short_ids
    thinks_in_blocks = "[SYSTEM_PROMPT]" in template.source and "[THINK]" in template.source
    for message in messages:
        role = message.role
        if role == "developer" and not template.takes_developer:
            role = "system"
        raw: dict[str, JsonValue] = {"role": role, "content": _content(message, template)}
        if message.reasoning:
            raw["reasoning_content"] = message.reasoning
        name = message.raw.get("name")
        if isinstance(name, str) and name:
            raw["name"] = name
        if message.call_id:
            raw["tool_call_id"] = _short(message.call_id) if short_ids else message.call_id
        if message.calls:
            calls: list[JsonValue] = []
            for call in message.calls:
                arguments: JsonValue = call.arguments
                if template.takes_objects:
                    try:
                        arguments = json.loads(call.arguments)
                    except (RecursionError, ValueError):
                        # llama.cpp refuses the request, others may not.
                        is_faithful = False
                calls.append(_call(call.name, arguments, _short(call.id) if short_ids else call.id))
            raw["tool_calls"] = calls
        if message.reasoning:
            _adapt(raw, thinks_in_blocks=thinks_in_blocks, is_harmony=template.takes_developer)
        shaped.append(raw)
    if shaped and shaped[0]["role"] == "system" and not template.takes_system:
        shaped = _without_system(shaped)
    return Shaped(shaped, is_faithful)


def has_odd_ids(messages: Sequence[Message]) -> bool:
    """Returns True if a tool call or its result has an id that Mistral's templates refuse."""
    return any(
        len(call_id) != _ID_CHARS
        for message in messages
        for call_id in (*(call.id for call in message.calls), *((message.call_id,) if message.role == "tool" else ()))
    )


def _content(message: Message, template: Template) -> JsonValue:
    """The text, in its parts if the template joins them itself; llama.cpp joins them if there is an image."""
    parts = message.raw.get("content")
    if not isinstance(parts, list) or len(parts) < _FEWEST_PARTS or message.other_parts or not template.takes_parts:
        return message.text
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [{"type": "text", "text": text} for text in texts if isinstance(text, str)]


def _call(name: str, arguments: JsonValue, call_id: str) -> JsonObject:
    call: dict[str, JsonValue] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id:
        call["id"] = call_id
    return call


def _adapt(raw: dict[str, JsonValue], *, thinks_in_blocks: bool, is_harmony: bool) -> None:
    """Adapts reasoning as llama.cpp does for single families: gpt-oss, Ministral 3."""
    reasoning = raw["reasoning_content"]
    if is_harmony:
        raw["thinking"] = reasoning
        if "tool_calls" in raw:
            del raw["content"]
    if thinks_in_blocks and raw["role"] in ("system", "assistant"):
        raw["content"] = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": raw["content"]}]
        del raw["reasoning_content"]


def _without_system(shaped: list[JsonObject]) -> list[JsonObject]:
    if len(shaped) < 2:
        return []
    first, second = shaped[0], shaped[1]
    return [{**second, "content": f"{first['content']}\n{second.get('content', '')}"}, *shaped[2:]]


def _short(call_id: str) -> str:
    if len(call_id) == _ID_CHARS:
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return f"{int.from_bytes(digest, 'big') % 10**_ID_CHARS:0{_ID_CHARS}d}"
