"""The messages of a request in the shape in which an engine hands them to a chat template.

Called by `prompts.py`. The rules are llama.cpp's server's (common/chat.cpp and common/parsers in llama-cpp-python
0.3.36): texts are joined by newlines unless the template does it, arguments become objects where the template reads
them, and so on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from litellm_compaction.core.messages import JsonObject, JsonValue, Message
from litellm_compaction.models.templates import Template

# Mistral's templates refuse other ids.
_ID_CHARS = 9
# Of one part no template makes anything else than of the text alone.
_FEWEST_PARTS = 2


class Shaped(NamedTuple):
    """Messages for a template.

    Attributes:
        messages: as many as there were, or one fewer where the template knows no system message.
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
    """Whether a tool call or its result has an id that Mistral's templates refuse."""
    return any(
        len(call_id) != _ID_CHARS
        for message in messages
        for call_id in (*(call.id for call in message.calls), *((message.call_id,) if message.role == "tool" else ()))
    )


def _content(message: Message, template: Template) -> JsonValue:
    """The text, in its parts where the template joins them itself; llama.cpp joins them where there is an image."""
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
    """What llama.cpp does with reasoning for single families: gpt-oss, Ministral 3."""
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
