"""This package's chat templates: compiled once, as transformers does it, and rendered in bounded time.

None comes from a stranger, so they need no sandbox. Messages reach a template as llama.cpp's server hands them over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from litellm_compaction.core.messages import JsonObject, JsonValue, Message

_FOLDER = Path(__file__).parent / "jinja"
# Every date has as many characters, and tokens, as this one.
_NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
# JavaScript writes larger numbers with an exponent, llama.cpp from 1,000,000.
_MAX_WHOLE = 1e21
# More than any window holds; indented schemas of any depth would take all memory.
_MAX_CHARS = 16_000_000
# A request that takes longer is estimated by the family's constants; looked at each so many parts.
_MAX_RENDER_S, _PARTS_PER_LOOK = 2.0, 256
# If Gemma 4's template leaves the model's next turn out, llama.cpp begins it (common/parsers/gemma4.cpp).
_GEMMA_END, _GEMMA_BEGIN = "<turn|>\n", "<|turn>model\n"
# Mistral's templates refuse other ids.
_ID_CHARS = 9


class TemplateRefusal(Exception):
    """The template did not take these messages, or took too long; its words are the message."""


def _whole(text: str) -> float | int:
    """A number as llama.cpp's and JavaScript's engines write it: 1 for 1.0."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value


def _to_json(value: Any, *, ensure_ascii: bool = False, **layout: Any) -> str:
    """As transformers does it: no HTML escapes, characters beyond ASCII as they are."""
    text = json.dumps(value)
    if ".0" in text:
        value = json.loads(text, parse_float=_whole)
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


_ENVIRONMENT = jinja2.Environment(  # noqa: S701 - it writes prompts, no HTML
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.filters["string"] = lambda value: str(_whole(str(value)) if isinstance(value, float) else value)
_ENVIRONMENT.globals |= {"raise_exception": _raise_exception, "strftime_now": _NOW.strftime}


class Template:
    """One chat template, in Jinja; its traits are those that `tools/build_packs.py` finds and explains."""

    def __init__(self, source: str, traits: Collection[str] = ()) -> None:
        self.source = source
        self.traits = frozenset(traits)
        self._compiled = _ENVIRONMENT.from_string(source)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonValue],
        *,
        bos: str = "",
        eos: str = "",
        now: datetime | None = None,
    ) -> str:
        """The prompt, up to the beginning of an answer; raises TemplateRefusal for any reason.

        The messages are those of `shape`, and are never changed. No `now` if only a date's length matters.
        """
        # Engines think unless told otherwise (llama.cpp's tools/server).
        values: dict[str, Any] = {"messages": list(messages), "bos_token": bos, "eos_token": eos}
        values |= {"add_generation_prompt": True, "enable_thinking": True, "strftime_now": (now or _NOW).strftime}
        if tools:
            values["tools"] = list(map(_tool, tools))
        try:
            text = "".join(_bounded(self._compiled.generate(values)))
        except TemplateRefusal:
            raise
        except Exception as error:
            # A client's values meet a program of its own, which may raise anything.
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error
        return f"{text}{_GEMMA_BEGIN}" if text.endswith(_GEMMA_END) else text


@cache
def template(name: str) -> Template:
    """One of the templates that come with the package; compiled once, in 5–50 ms."""
    source = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return Template(source, json.loads((_FOLDER / "traits.json").read_text(encoding="utf-8"))[name])


def _tool(tool: JsonValue) -> JsonValue:
    """A tool as llama.cpp hands it to a template: name, description and parameters, and nothing else."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    described = {"description": function.get("description") or "", "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": {"name": function["name"], **described}}


def _bounded(writing: Iterable[str]) -> Iterator[str]:
    """The parts of a prompt as they are written. Raises TemplateRefusal if they take too long, or too much."""
    begun_s, chars = time.thread_time(), 0
    for number, part in enumerate(writing, 1):
        chars += len(part)
        if chars > _MAX_CHARS:
            raise TemplateRefusal(f"more than {_MAX_CHARS} characters")
        if number % _PARTS_PER_LOOK == 0 and time.thread_time() - begun_s > _MAX_RENDER_S:
            raise TemplateRefusal(f"more than {_MAX_RENDER_S} s")
        yield part


def shape(messages: Sequence[Message], chosen: Template) -> tuple[list[dict[str, Any]], bool]:
    """The messages as a template wants them, and if no engine would refuse what had to be changed for that.

    They are as many as there were, oldest first, or one fewer if the template knows no system message.
    """
    ids = [each.id for message in messages for each in message.calls]
    ids += [message.call_id for message in messages if message.role == "tool"]
    has_short_ids = "wants_short_ids" not in chosen.traits or all(len(each) == _ID_CHARS for each in ids)
    as_id = str if has_short_ids else lambda each: each[-_ID_CHARS:].rjust(_ID_CHARS, "0")
    shaped = [_shaped(message, chosen, as_id) for message in messages]
    # llama.cpp refuses arguments that are no JSON, others may not.
    is_faithful = "takes_objects" not in chosen.traits or not any(
        isinstance(call["function"]["arguments"], str) for raw in shaped for call in raw.get("tool_calls", ())
    )
    if shaped and shaped[0]["role"] == "system" and "takes_system" not in chosen.traits:
        system, *shaped = shaped
        if shaped:
            shaped[0] = {**shaped[0], "content": f"{system['content']}\n{shaped[0].get('content', '')}"}
    return shaped, has_short_ids and is_faithful


def _shaped(message: Message, chosen: Template, as_id: Callable[[str], str]) -> dict[str, Any]:
    role = "system" if message.role == "developer" and "takes_developer" not in chosen.traits else message.role
    raw: dict[str, Any] = {"role": role, "content": _content(message, chosen)}
    name = message.raw.get("name")
    if isinstance(name, str) and name:
        raw["name"] = name
    if message.call_id:
        raw["tool_call_id"] = as_id(message.call_id)
    for call in message.calls:
        arguments = _object(call.arguments) if "takes_objects" in chosen.traits else call.arguments
        said = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        raw.setdefault("tool_calls", []).append({**said, "id": as_id(call.id)} if call.id else said)
    if message.reasoning:
        _add_reasoning(raw, message.reasoning, chosen)
    return raw


def _object(arguments: str) -> JsonValue:
    try:
        found: JsonValue = json.loads(arguments)
    except (RecursionError, ValueError):
        return arguments
    return found


def _content(message: Message, chosen: Template) -> JsonValue:
    """The text, in its parts if the template joins them itself; llama.cpp joins them if there is an image."""
    parts = message.raw.get("content")
    if message.other_parts or "takes_parts" not in chosen.traits or not isinstance(parts, list):
        return message.text
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [{"type": "text", "text": text} for text in texts if isinstance(text, str)]


def _add_reasoning(raw: dict[str, Any], reasoning: str, chosen: Template) -> None:
    """Adds it as llama.cpp does, for gpt-oss and Ministral 3 in ways of their own."""
    if "thinks_in_blocks" in chosen.traits and raw["role"] in ("system", "assistant"):
        raw["content"] = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": raw["content"]}]
        return
    raw["reasoning_content"] = reasoning
    if "takes_developer" in chosen.traits:
        raw["thinking"] = reasoning
        if "tool_calls" in raw:
            del raw["content"]
