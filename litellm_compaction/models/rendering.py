"""What of a message or a tool schema ends up in the prompt: which texts, and how many tokens around them.

Called by `counter.py`. Nothing is tokenized here. Errs high: what only some templates render is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.messages import JsonValue, Message
from litellm_compaction.models.families import Family
from litellm_compaction.models.images import image_tokens

_USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Parts that a model sees as images, sound or pages: their data is never text.
_MEDIA = frozenset(
    {
        "image_url",
        "image",
        "input_image",
        "image_file",
        "input_audio",
        "audio",
        "video_url",
        "video",
        "file",
        "input_file",
    }
)
# Longer strings without any space are data: nobody's words are that long, and base64 is.
_DATA_CHARS = 2048
# An end for documents made to be slow.
_MAX_VALUES = 100_000


# How the template writes the first of some texts: as it is, as a JSON string, as indented JSON.
Form: TypeAlias = Literal["plain", "escaped", "indented"]


class Rendered(NamedTuple):
    """The cost of one message before tokenization.

    Attributes:
        texts: to be tokenized one by one.
        form: how the first of them is written.
        fixed_tokens: what the template puts around them, images included.
        allowance_tokens: the part of `fixed_tokens` that is an upper limit and may really be far smaller.
        reasoning: the text in `texts` that most templates leave out of older turns; "" when there is none.
    """

    texts: tuple[str, ...]
    form: Form
    fixed_tokens: int
    allowance_tokens: int
    reasoning: str


def render_message(message: Message, family: Family) -> Rendered:
    """What a message costs, malformed tool calls and unknown parts included."""
    texts = [message.text]
    form: Form = "plain"
    fixed_tokens = family.message_tokens
    if message.role not in _USUAL_ROLES:
        texts.append(message.role)
    if message.is_system:
        fixed_tokens += family.system_tokens
    elif message.role == "assistant":
        fixed_tokens += family.assistant_tokens
    elif message.role == "tool":
        fixed_tokens += family.result_tokens
        if family.escapes_results:
            form = "escaped"
        if family.renders_ids:
            texts.append(message.call_id)
    if message.reasoning:
        texts.append(message.reasoning)
    for call in message.calls:
        fixed_tokens += family.call_tokens
        texts += (call.name, call.arguments, call.id) if family.renders_ids else (call.name, call.arguments)
    name = message.raw.get("name")
    if isinstance(name, str):
        texts.append(name)
    legacy_call = message.raw.get("function_call")
    if legacy_call is not None:
        fixed_tokens += family.call_tokens
        texts += strings(legacy_call)
    others = beside(message, family)
    texts += others.texts
    return Rendered(tuple(texts), form, fixed_tokens + others.image_tokens, others.image_tokens, message.reasoning)


class Beside(NamedTuple):
    """What a message holds that no template gets to see as text.

    Attributes:
        texts: of parts and fields that nobody knows.
        image_tokens: of images, sound and pages, at most.
    """

    texts: tuple[str, ...]
    image_tokens: int


def beside(message: Message, family: Family) -> Beside:
    """The parts of a message that are neither text nor tool calls."""
    texts: list[str] = []
    tokens = 0
    for part in _other_parts(message):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _MEDIA:
            tokens += image_tokens(part, limit_tokens=family.image_tokens, patch_px=family.image_patch_px)
        else:
            texts += strings(part)
    return Beside(tuple(texts), tokens)


def tools_text(tools: Sequence[JsonValue]) -> str:
    """The tool schemas as JSON on one line, in the client's order."""
    try:
        return json.dumps(tools, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "\n".join(strings(tools))


def written(texts: Sequence[str], form: Form) -> list[str]:
    """The texts as a template writes them."""
    if form == "escaped":
        return [json.dumps(texts[0], ensure_ascii=False), *texts[1:]]
    if form == "indented":
        try:
            # Four spaces, as Llama 3.1's template does it: the widest form that is in use.
            return [json.dumps(json.loads(texts[0]), ensure_ascii=False, indent=4), *texts[1:]]
        except (RecursionError, ValueError):
            return list(texts)
    return list(texts)


def strings(value: JsonValue) -> list[str]:
    """Every key, string and number inside a JSON value, without data URIs and base64; for any depth."""
    found: list[str] = []
    open_values: list[JsonValue] = [value]
    while open_values and len(found) < _MAX_VALUES:
        current = open_values.pop()
        if isinstance(current, str):
            if not _is_data(current):
                found.append(current)
        elif isinstance(current, Mapping):
            open_values += current.values()
            found += map(str, current)
        elif isinstance(current, Sequence):
            open_values += current
        elif current is not None:
            found.append(str(current))
    return found


def _other_parts(message: Message) -> list[JsonValue]:
    content = message.raw.get("content")
    if not message.other_parts or not isinstance(content, list):
        return []
    return [
        part
        for part in content
        if not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("text"), str))
    ]


def _is_data(text: str) -> bool:
    if text.startswith("data:"):
        return True
    return len(text) > _DATA_CHARS and text.isascii() and " " not in text and "\n" not in text[:_DATA_CHARS]
