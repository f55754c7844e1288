"""The exact prompt of a request: rendered, and cut at special tokens, ready to be counted.

Called by `counting.py`. Whatever a template refuses gives no count here, and is estimated there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request, parse_message, user_message
from litellm_compaction.models.families import Family
from litellm_compaction.models.template_filters import TemplateRefusal
from litellm_compaction.models.template_messages import has_odd_ids, shape
from litellm_compaction.models.templates import Template, template
from litellm_compaction.models.tokenizers import vocabulary
from litellm_compaction.models.vocabularies import Segment, Vocabulary


class Prompt(NamedTuple):
    """A rendered request.

    Attributes:
        text: all of it.
        parts: the same, as the template has written it.
        is_faithful: no engine would refuse what it was rendered from.
    """

    text: str
    parts: list[str]
    is_faithful: bool


def texts_of(text: str, segments: Sequence[Segment]) -> list[str]:
    """The ordinary texts among the segments of a prompt, in order."""
    return [text[segment.start : segment.end] for segment in segments if not segment.is_special]


def render(family: Family, request: Request) -> Prompt | None:
    """The prompt; None where the family has no template, or it refuses the request or drops its tools.

    Loads the vocabulary and the template when needed: up to 2 s.
    """
    if not family.template:
        return None
    chosen, words = template(family.template_for(tools=bool(request.tools))), vocabulary(family.vocabulary)
    if request.tools and not chosen.renders_tools:
        return None
    if not chosen.renders_calls and any(message.calls or message.role == "tool" for message in request.messages):
        # A server shows them in a way of its own, so that leaving them out would count too little.
        return None
    return _render(chosen, words, request.messages, request.tools)


def tool_prompts(family: Family, request: Request) -> tuple[Prompt, Prompt] | None:
    """A tiny conversation with the request's tools and without: the difference is what the tools take."""
    chosen, words = template(family.template_for(tools=True)), vocabulary(family.vocabulary)
    messages: tuple[Message, ...] = (user_message("x"),)
    if has_system(request) and chosen.takes_system:
        messages = (parse_message({"role": "system", "content": "x"}), *messages)
    with_tools = _render(chosen, words, messages, request.tools)
    without = _render(chosen, words, messages, ())
    return (with_tools, without) if with_tools is not None and without is not None else None


def _render(
    chosen: Template, words: Vocabulary, messages: Sequence[Message], tools: Sequence[JsonValue]
) -> Prompt | None:
    shaped = shape(messages, chosen, short_ids=chosen.wants_short_ids and has_odd_ids(messages))
    try:
        parts = chosen.parts(shaped.messages, tools, bos=words.bos, eos=words.eos)
    except TemplateRefusal:
        return None
    text = "".join(parts)
    if words.adds_bos and not text.startswith(words.bos):
        # The engine adds it to every prompt, and has taken it off the rendered one before (common/chat.cpp).
        parts.insert(0, words.bos)
        text = words.bos + text
    return Prompt(text, parts, shaped.is_faithful)


def has_system(request: Request) -> bool:
    """Whether the request begins with a system message."""
    return bool(request.messages) and request.messages[0].is_system


def tools_key(tools: Sequence[JsonValue]) -> str:
    """Equal for equal tools."""
    try:
        text = json.dumps(tools, default=str)
    except (RecursionError, ValueError):
        return ""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
