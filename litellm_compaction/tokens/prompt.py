"""Our own count of a request: its rendered prompt if the template is this package's, else vocabulary and constants.

What is asked of tokenizers and templates is asked here and in `begun.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.templates.template import TemplateRefusal, shape, template
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.estimate import Own
from litellm_compaction.tokens.media import image_tokens, is_media
from litellm_compaction.tokens.texts import TextCounts

# How far such a count may be too low: rendered to the letter, rendered nearly so, by its vocabulary, by a stand-in.
EXACT_ERROR, _NEAR_ERROR, _VOCABULARY_ERROR, _STAND_IN_ERROR = 0.02, 0.05, 0.10, 0.35
# Of a script beyond ASCII a stand-in counts up to four times too much.
_OTHER_SCRIPT_RATIO = 0.5
# A rendered prompt is counted as a whole; what it is divided by needs no more of each text.
_WEIGHED_SHARE = 1 / 8
# Longer strings without any space are data, as base64 is.
_DATA_CHARS = 2048
# An end for documents made to be slow.
_MAX_VALUES = 100_000


class Prompt(NamedTuple):
    """A rendered request; `is_faithful` if no engine would refuse what it was rendered from."""

    text: str
    is_faithful: bool


def error_ratio(family: Family, own: Own) -> float:
    """By how much a count may be too low, before anything is known of its server."""
    if own.rendered:
        return EXACT_ERROR if family.exact else max(_NEAR_ERROR, family.error_ratio)
    if family.exact and not family.template:
        # OpenAI's models, of which nothing more is known than constants.
        return EXACT_ERROR
    return _VOCABULARY_ERROR if family.owns_vocabulary else _STAND_IN_ERROR


def own_count(family: Family, request: Request, texts: TextCounts, *, share: float = 1.0) -> Own:
    """Our own count of a request: 0.1 s per new MB in this thread. Raises on nothing in its messages and tools.

    Args:
        family: of the model; its vocabulary and template can be used.
        request: to be counted.
        texts: remembers what was counted.
        share: of each text is counted, and stands for the rest; 1 counts all of it.

    Raises:
        RecursionError: its extras are nested deeper than JSON is written.
    """
    prompt = render(family, request.messages, request.tools) if share == 1 else None
    weights = _weights(family, request, texts, share, share if prompt is None else _WEIGHED_SHARE)
    extras = [json.dumps(request.extras, ensure_ascii=False, default=str)] if request.extras else []
    extras_tokens = sum(texts.lengths(family, extras, share=share, is_quick=True))
    is_shown = prompt is not None and template(family.template).has("renders_tools")
    tools_share = _WEIGHED_SHARE if is_shown else share
    schemas = texts.lengths(family, list(map(_as_json, request.tools)), share=tools_share, is_quick=True)
    tools_tokens = family.costs.tools + sum(family.costs.tool + tokens for tokens in schemas) if schemas else 0.0
    common = Own(
        sizes=tuple(each.shown + each.thought + each.beside + each.media for each in weights),
        tools_tokens=tools_tokens,
        overhead_tokens=family.costs.request + extras_tokens,
        optional_tokens=extras_tokens,
        media=tuple(each.media for each in weights) if any(each.media for each in weights) else (),
        images=sum(each.images for each in weights),
        asks=bool(request.messages) and request.messages[-1].role == "user",
    )
    return (
        _by_constants(common, weights, family, request)
        if prompt is None
        else _divided(common, weights, family, prompt, _tokens_of(prompt, family, texts))
    )


def _by_constants(common: Own, weights: Sequence[_Weight], family: Family, request: Request) -> Own:
    has_system = bool(request.messages) and request.messages[0].is_system
    system_tokens = 0 if has_system else family.default_system_tokens
    # OpenAI's models have no template that could leave tools out.
    tools_tokens = 0.0 if family.name == "gpt" else common.tools_tokens
    optional = common.optional_tokens + system_tokens + tools_tokens + sum(each.optional for each in weights)
    return common._replace(
        overhead_tokens=common.overhead_tokens + system_tokens,
        optional_tokens=optional,
        exact=family.exact and not family.template and not optional and not common.media,
    )


def _divided(common: Own, weights: Sequence[_Weight], family: Family, prompt: Prompt, tokens: int) -> Own:
    """The count of a rendered prompt of so many tokens, divided as the constants divide theirs."""
    has_tools = template(family.template).has("renders_tools")
    tools_tokens, extras_tokens = common.tools_tokens, common.optional_tokens
    shares = sum(each.shown for each in weights) + family.costs.request + (tools_tokens if has_tools else 0.0)
    factor = tokens / max(1.0, shares)
    left_out = 0.0 if has_tools else tools_tokens
    is_whole = prompt.is_faithful and not any((extras_tokens, left_out, *(each.beside for each in weights)))
    return common._replace(
        sizes=tuple(each.shown * factor + each.beside + each.media for each in weights),
        tools_tokens=left_out or tools_tokens * factor,
        overhead_tokens=family.costs.request * factor + extras_tokens,
        optional_tokens=extras_tokens + left_out,
        rendered=True,
        exact=family.exact and is_whole and not common.media,
    )


def _tokens_of(prompt: Prompt, family: Family, texts: TextCounts) -> int:
    parts = vocabulary(family.vocabulary).split(prompt.text)
    return round(sum(texts.lengths(family, parts[::2], in_prompt=True))) + len(parts) // 2


class _Weight(NamedTuple):
    """The tokens of a message by vocabulary and constants.

    Attributes:
        shown: of what every template writes.
        thought: of reasoning before the person's newest word, which most templates leave out.
        optional: of what may not be in the server's count: thoughts, and the half of scripts that a stand-in divides.
        beside: of strings that no template gets to see as text.
        media: of images, sound and pages, and how many `images` these are.
    """

    shown: float
    thought: float
    optional: float
    beside: float
    media: float
    images: int


def _weights(family: Family, request: Request, texts: TextCounts, share: float, shown_share: float) -> list[_Weight]:
    groups = [_texts(message) for message in request.messages]
    besides = [_beside(message, family) for message in request.messages]
    left = iter(texts.lengths(family, [text for group in groups for text in group], share=shown_share))
    left_beside = iter(texts.lengths(family, [text for each in besides for text in each.texts], share=share))
    last_user = max((at for at, message in enumerate(request.messages) if message.role == "user"), default=-1)
    found: list[_Weight] = []
    for at, (message, group, beside) in enumerate(zip(request.messages, groups, besides, strict=True)):
        tokens = [next(left) for _ in group]
        thought = tokens[1] if at < last_user else 0.0
        shown = family.costs.message + len(message.calls) * family.costs.call + sum(tokens) - thought
        other = 0.0 if family.owns_vocabulary else _OTHER_SCRIPT_RATIO * _of_other_scripts(group, tokens)
        beside_tokens, media = sum(next(left_beside) for _ in beside.texts), float(sum(beside.media))
        found.append(_Weight(shown, thought, thought + other, beside_tokens, media, len(beside.media)))
    return found


def _texts(message: Message) -> list[str]:
    """All of a message that a template may write: its text, its reasoning, and the rest."""
    texts, name = [message.text, message.reasoning], message.raw.get("name")
    for call in message.calls:
        texts += (call.name, call.arguments)
    return [*texts, name] if isinstance(name, str) else texts


class _Beside(NamedTuple):
    """Parts of a message that no template gets to see as text: strings, and tokens of images, sound and pages."""

    texts: list[str]
    media: list[int]


def _beside(message: Message, family: Family) -> _Beside:
    found = _Beside(strings(message.raw.get("function_call")), [])
    content = message.raw.get("content")
    for part in content if message.other_parts and isinstance(content, list) else ():
        if is_media(part):
            limit_tokens, patch_px = family.image_tokens, family.image_patch_px
            found.media.append(image_tokens(part, limit_tokens=limit_tokens, patch_px=patch_px))
        elif not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            found.texts.extend(strings(part))
    return found


def _of_other_scripts(texts: Iterable[str], tokens: Iterable[float]) -> float:
    """The part of texts' tokens that is of characters beyond ASCII, of which each takes about three times as many."""
    found = 0.0
    for text, length in zip(texts, tokens, strict=True):
        if not text.isascii():
            others = len(text) - len(text.encode("ascii", "ignore"))
            found += length * 3 * others / (2 * others + len(text))
    return found


def _as_json(tool: JsonValue) -> str:
    try:
        return json.dumps(tool, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "\n".join(strings(tool))


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


def _is_data(text: str) -> bool:
    if text.startswith("data:"):
        return True
    return len(text) > _DATA_CHARS and text.isascii() and " " not in text and "\n" not in text[:_DATA_CHARS]


def render(
    family: Family, messages: Sequence[Message], tools: Sequence[JsonValue], now: datetime | None = None
) -> Prompt | None:
    """The prompt, without tools if the template drops them; None if the family has none, or it refuses the request.

    Loads the vocabulary and the template: up to 2 s. With `now` for templates that write the date.
    """
    if not family.template:
        return None
    chosen, words = template(family.template), vocabulary(family.vocabulary)
    if not chosen.has("renders_calls") and any(message.calls or message.role == "tool" for message in messages):
        # A server shows them in a way of its own, so that leaving them out would count too little.
        return None
    shaped, is_faithful = shape(messages, chosen)
    try:
        text = chosen.render(shaped, tools, bos=words.bos, eos=words.eos, now=now)
    except TemplateRefusal:
        return None
    if words.adds_bos and not text.startswith(words.bos):
        # The engine adds it to every prompt, and has taken it off the rendered one before (common/chat.cpp).
        text = words.bos + text
    return Prompt(text, is_faithful)
