"""This package's chat templates: compiled once, rendered in bounded time.

Messages reach a template in the shape in which an engine hands them over. The rules are llama.cpp's server's
(common/chat.cpp and common/parsers in llama-cpp-python 0.3.36): texts are joined by newlines unless the template does
it, arguments become objects if the template reads them, and so on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jinja2

from litellm_compaction.core.messages import JsonObject, JsonValue, Message
from litellm_compaction.errors import CompactionError
from litellm_compaction.templates.environment import ENVIRONMENT, TemplateRefusal

_FOLDER = Path(__file__).parent / "jinja"
# Indented JSON is the widest form in use: about 4 times its compact form, more if it is nested deep.
_MAX_GROWTH, _FREE_CHARS = 8, 1_000_000
# gpt-oss and Gemma 4 look at other messages for each tool call: 1,000 rounds of tools take 0.1 and 0.4 s. A request
# that takes longer is estimated by the family's formula; looked at each so many parts.
_MAX_RENDER_S, _PARTS_PER_LOOK = 2.0, 256
# If Gemma 4's template leaves the model's next turn out, llama.cpp begins it (common/parsers/gemma4.cpp).
_GEMMA_END, _GEMMA_BEGIN = "<turn|>\n", "<|turn>model\n"
# Mistral's templates refuse other ids.
_ID_CHARS = 9
# Of one part no template makes anything else than of the text alone.
_FEWEST_PARTS = 2


# By `tools/build_packs.py`, which tries each template:
# renders_tools: tool schemas end up in the prompt. renders_calls: so do tool calls and their results.
# renders_text_beside_calls: so does an answer's text that has calls; in Llama 3.1's and Mistral's not.
# takes_objects: arguments of tool calls are to be objects, as llama.cpp does if a template reads them.
# takes_parts: content may be a list of texts; else llama.cpp joins them by newlines before.
# takes_system: a system message ends up in the prompt; else llama.cpp puts it into the next message.
# wants_short_ids: ids of tool calls other than nine characters are refused, as Mistral's templates do.
# takes_developer: the role developer is the template's own; llama.cpp calls it system for all but gpt-oss.
# thinks_in_blocks: reasoning is a part of the content (Ministral 3).
Trait: TypeAlias = Literal[
    "renders_tools",
    "renders_calls",
    "renders_text_beside_calls",
    "takes_objects",
    "takes_parts",
    "takes_system",
    "wants_short_ids",
    "takes_developer",
    "thinks_in_blocks",
]


class Template:
    """One chat template: its source in Jinja, and its traits; may be used from several threads."""

    def __init__(self, source: str, traits: Collection[Trait] = ()) -> None:
        self.source = source
        self.traits = frozenset(traits)
        self._compiled = ENVIRONMENT.from_string(source)

    def has(self, trait: Trait) -> bool:
        return trait in self.traits

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonValue],
        *,
        bos: str = "",
        eos: str = "",
        now: datetime | None = None,
    ) -> str:
        """The prompt, up to the beginning of an answer.

        Args:
            messages: in the shape that the template wants, never changed.
            tools: schemas; none are given to the template when empty.
            bos: text of the token that begins a prompt.
            eos: text of the token that ends an answer.
            now: for templates that write the date; None if only its length matters.

        Raises:
            TemplateRefusal: for any reason.
        """
        values: dict[str, Any] = {
            "messages": list(messages),
            "bos_token": bos,
            "eos_token": eos,
            "add_generation_prompt": True,
            # As llama.cpp's server passes it unless told otherwise (tools/server).
            "enable_thinking": True,
        }
        if now is not None:
            values["strftime_now"] = now.strftime
        if tools:
            values["tools"] = list(map(_tool, tools))
        try:
            # What `generate` does, but for the traceback that it would mend.
            writing = self._compiled.root_render_func(self._compiled.new_context(values))
            text = "".join(_bounded(writing, messages, tools))
        except TemplateRefusal:
            raise
        except Exception as error:
            # A client's values meet a program of its own, which may raise anything.
            raise TemplateRefusal(f"{type(error).__name__}: {error}"[:500]) from error
        return f"{text}{_GEMMA_BEGIN}" if text.endswith(_GEMMA_END) else text


@cache
def template(name: str) -> Template:
    """One of the templates that come with the package; compiled once, in 5–50 ms.

    Raises:
        CompactionError: its file, or its row in the list of traits, is missing or damaged.
    """
    try:
        source = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        traits = json.loads((_FOLDER / "traits.json").read_text(encoding="utf-8"))[name]
        return Template(source, traits)
    except (OSError, KeyError, ValueError, jinja2.TemplateError) as error:
        raise CompactionError(
            f"{name}.jinja cannot be read ({type(error).__name__}): reinstall litellm-compaction."
        ) from error


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


def _bounded(writing: Iterable[str], messages: Sequence[JsonObject], tools: Sequence[JsonValue]) -> list[str]:
    """The parts of a prompt as they are written.

    Raises:
        TemplateRefusal: they take too long, or are much more than what was given.
    """
    begun_s = time.thread_time()
    limit = _FREE_CHARS
    parts: list[str] = []
    size = 0
    for part in writing:
        parts.append(part)
        size += len(part)
        if size > limit:
            limit = _FREE_CHARS + _MAX_GROWTH * (chars_of(messages) + chars_of(tools))
            if size > limit:
                raise TemplateRefusal(f"more than {limit} characters")
        if len(parts) % _PARTS_PER_LOOK == 0 and time.thread_time() - begun_s > _MAX_RENDER_S:
            raise TemplateRefusal(f"more than {_MAX_RENDER_S} s")
    return parts


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


def shape(messages: Sequence[Message], chosen: Template) -> Shaped:
    """The messages as the template wants them: n, oldest first."""
    ids = (call_id for message in messages for call_id in _ids(message))
    has_short_ids = not chosen.has("wants_short_ids") or all(len(call_id) == _ID_CHARS for call_id in ids)
    shaped: list[JsonObject] = []
    is_faithful = has_short_ids
    for message in messages:
        raw, is_like = _shaped(message, chosen, str if has_short_ids else _short)
        shaped.append(raw)
        is_faithful = is_faithful and is_like
    if shaped and shaped[0]["role"] == "system" and not chosen.has("takes_system"):
        (system, *following), shaped = shaped, []
        if following:
            text = f"{system['content']}\n{following[0].get('content', '')}"
            shaped = [{**following[0], "content": text}, *following[1:]]
    return Shaped(shaped, is_faithful)


def _ids(message: Message) -> Iterator[str]:
    yield from (call.id for call in message.calls)
    if message.role == "tool":
        yield message.call_id


def _shaped(message: Message, chosen: Template, as_id: Callable[[str], str]) -> tuple[JsonObject, bool]:
    """One message, and if no engine would refuse it."""
    role = "system" if message.role == "developer" and not chosen.has("takes_developer") else message.role
    raw: dict[str, JsonValue] = {"role": role, "content": _content(message, chosen)}
    name, is_faithful = message.raw.get("name"), True
    if isinstance(name, str) and name:
        raw["name"] = name
    if message.call_id:
        raw["tool_call_id"] = as_id(message.call_id)
    calls: list[JsonValue] = []
    for call in message.calls:
        arguments: JsonValue = call.arguments
        if chosen.has("takes_objects"):
            try:
                arguments = json.loads(call.arguments)
            except (RecursionError, ValueError):
                # llama.cpp refuses the request, others may not.
                is_faithful = False
        said: JsonObject = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        calls.append({**said, "id": as_id(call.id)} if call.id else said)
    if calls:
        raw["tool_calls"] = calls
    if message.reasoning:
        _add_reasoning(raw, message.reasoning, chosen)
    return raw, is_faithful


def _content(message: Message, chosen: Template) -> JsonValue:
    """The text, in its parts if the template joins them itself; llama.cpp joins them if there is an image."""
    parts = message.raw.get("content")
    if not isinstance(parts, list) or len(parts) < _FEWEST_PARTS or message.other_parts:
        return message.text
    if not chosen.has("takes_parts"):
        return message.text
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [{"type": "text", "text": text} for text in texts if isinstance(text, str)]


def _add_reasoning(raw: dict[str, JsonValue], reasoning: str, chosen: Template) -> None:
    """Adds it as llama.cpp does, for gpt-oss and Ministral 3 in ways of their own."""
    if chosen.has("thinks_in_blocks") and raw["role"] in ("system", "assistant"):
        raw["content"] = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": raw["content"]}]
        return
    raw["reasoning_content"] = reasoning
    if chosen.has("takes_developer"):
        raw["thinking"] = reasoning
        if "tool_calls" in raw:
            del raw["content"]


def _short(call_id: str) -> str:
    if len(call_id) == _ID_CHARS:
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return f"{int.from_bytes(digest, 'big') % 10**_ID_CHARS:0{_ID_CHARS}d}"
