"""The exact prompt of a request, rendered: to be counted (`rendered.py`), or to be sent so that an answer goes on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request, parse_message, user_message, with_text
from litellm_compaction.templates.environment import TemplateRefusal
from litellm_compaction.templates.template import Template, has_odd_ids, shape, template
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokenizers.vocabulary import Segment, Vocabulary

_THINK_START, _THINK_END = "<think>", "</think>"
_NEEDLE = "zq7"
# Names of control tokens in the families that are known here, for models whose vocabulary is not.
_CONTROL = re.compile(r"<\|[^<>\s]*\|?>|<｜[^<>\s]*｜>|</?(?:s|bos|eos|\w+_of_\w+|think)>|\[/?[A-Z_]{2,}\]")


class Prompt(NamedTuple):
    """A rendered request.

    Attributes:
        text: all of it.
        is_faithful: no engine would refuse what it was rendered from.
    """

    text: str
    is_faithful: bool


class BegunPrompt(NamedTuple):
    """A prompt that ends inside an answer.

    Attributes:
        text: without the token with which the server begins every prompt itself.
        end_of_turn: the template's end of the answer; "" if it names no token for that.
    """

    text: str
    end_of_turn: str


def texts_of(text: str, segments: Sequence[Segment]) -> list[str]:
    """The ordinary texts among the segments of a prompt, in order."""
    return [text[segment.start : segment.end] for segment in segments if not segment.is_special]


def render(family: Family, request: Request) -> Prompt | None:
    """The prompt; None if the family has no template, or it refuses the request.

    Without tools if the template drops them (`drops_tools`). Loads the vocabulary and the template: up to 2 s.
    """
    if not family.template:
        return None
    chosen, words = template(family.template_for(tools=bool(request.tools))), vocabulary(family.vocabulary)
    if not chosen.renders_calls and any(message.calls or message.role == "tool" for message in request.messages):
        # A server shows them in a way of its own, so that leaving them out would count too little.
        return None
    return _render(chosen, words, request.messages, request.tools)


def renders_exactly(family: Family) -> bool:
    """Returns True if prompts can be rendered here exactly as the server does, so that it can go on inside them."""
    return family.exact and bool(family.template)


def begun_prompt(
    family: Family,
    messages: Sequence[Message],
    now: datetime,
    by_server: Sequence[str] = (),
    *,
    adds_bos: bool = True,
    closes: bool = False,
) -> BegunPrompt | None:
    """The prompt that ends with the last message, an answer that goes on; None if it cannot be known exactly.

    It is sent to servers that put no template around it and take the names of control tokens in it for these tokens, as
    they do when they render the template themselves. So none may stand in a message's text.

    Args:
        family: of the model.
        messages: of a request without tools; the last one is an assistant's, of text.
        now: the date, for templates that write it.
        by_server: `needed_renderings` as the server writes them, for models without a template here, too.
        adds_bos: the server puts the token that begins every prompt before it, if the vocabulary says so.
        closes: the last message is the model's thoughts, and the prompt ends behind them.
    """
    has_control = vocabulary(family.vocabulary).has_control if family.owns_vocabulary else _CONTROL.search
    texts = (text for message in messages for text in _texts(message))
    if any(message.other_parts for message in messages) or any(map(has_control, texts)):
        return None
    rendered = by_server or _rendered_here(family, messages, now, adds_bos=adds_bos)
    if not rendered:
        return None
    prompt, written, closed = rendered
    start = written.rfind(_NEEDLE)
    opening = _opening(prompt, written[:start]) if start >= 0 else None
    if opening is None:
        return None
    text = messages[-1].text
    if closes:
        begun = _closed(opening, text)
        if begun is None:
            return None
    else:
        begun = f"{opening}{text.lstrip() if opening[-1:].isspace() else text}"
    behind = closed.rpartition(_NEEDLE)[2]
    if family.owns_vocabulary:
        end = _end_of_turn(vocabulary(family.vocabulary), behind)
    else:
        found = _CONTROL.match(behind.lstrip())
        end = found[0] if found else ""
    return BegunPrompt(f"{prompt}{begun}", end)


def needed_renderings(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """The messages up to the answer, with a text that is found again in its place, and with a turn after it.

    The last message may be one that the server goes on with, so that nothing shows its end.
    """
    written = (*messages[:-1], with_text(messages[-1], _NEEDLE))
    return tuple(messages[:-1]), written, (*written, user_message("."))


def _rendered_here(
    family: Family, messages: Sequence[Message], now: datetime, *, adds_bos: bool
) -> tuple[str, str, str] | None:
    if not renders_exactly(family):
        return None
    chosen, words = template(family.template), vocabulary(family.vocabulary)
    if not chosen.renders_calls and any(message.calls or message.role == "tool" for message in messages[:-1]):
        return None
    before, written = (_render(chosen, words, each, (), now) for each in needed_renderings(messages)[:2])
    if before is None or written is None or not before.is_faithful:
        return None
    bos = words.bos if words.adds_bos and adds_bos else ""
    return before.text.removeprefix(bos), written.text.removeprefix(bos), written.text


def _texts(message: Message) -> Iterator[str]:
    """All that a template may write of a message."""
    yield from (message.text, message.reasoning)
    for call in message.calls:
        yield from (call.name, call.arguments)


def _opening(prompt: str, written: str) -> str | None:
    """The text between a prompt and an answer to it; None if the template does not show it.

    Args:
        prompt: up to where the model begins.
        written: the same as a template writes it before an earlier answer, past the name of a channel (gpt-oss) or the
            thoughts (Qwen 3: an empty block).
    """
    if written.startswith(prompt):
        return written[len(prompt) :]
    # Thoughts that the prompt has begun and earlier answers go without (DeepSeek R1, QwQ) are over.
    return f"\n{_THINK_END}\n\n" if prompt.rstrip().endswith(_THINK_START) else None


def _closed(opening: str, thoughts: str) -> str | None:
    """Thoughts in the empty block that a template writes before an answer; None if it writes none.

    The block's start stands in the prompt itself if the template has the model begin inside it (DeepSeek R1).
    """
    start, end, rest = opening.partition(_THINK_END)
    if not end or start.strip() not in ("", _THINK_START):
        return None
    begun = f"{_THINK_START}\n" if start.strip() else ""
    return f"{begun}{thoughts.strip()}\n{_THINK_END}{rest}"


def _end_of_turn(words: Vocabulary, behind: str) -> str:
    """The special token that follows an answer; "" if there is none."""
    segment = next(iter(words.split(behind.lstrip())), None)
    return behind.lstrip()[: segment.end] if segment is not None and segment.is_special else ""


def drops_tools(family: Family, request: Request) -> bool:
    """Returns True if the family's template drops a request's tools; servers may show them all the same."""
    return bool(request.tools) and not template(family.template_for(tools=True)).renders_tools


def left_out_texts(family: Family, request: Request) -> list[str]:
    """The texts beside calls if a family's template leaves them out; a server's own template may render them."""
    if template(family.template_for(tools=bool(request.tools))).renders_text_beside_calls:
        return []
    return [message.text for message in request.messages if message.calls and message.text]


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
    chosen: Template,
    words: Vocabulary,
    messages: Sequence[Message],
    tools: Sequence[JsonValue],
    now: datetime | None = None,
) -> Prompt | None:
    shaped = shape(messages, chosen, short_ids=chosen.wants_short_ids and has_odd_ids(messages))
    try:
        text = "".join(chosen.parts(shaped.messages, tools, bos=words.bos, eos=words.eos, now=now))
    except TemplateRefusal:
        return None
    if words.adds_bos and not text.startswith(words.bos):
        # The engine adds it to every prompt, and has taken it off the rendered one before (common/chat.cpp).
        text = words.bos + text
    return Prompt(text, shaped.is_faithful)


def has_system(request: Request) -> bool:
    return bool(request.messages) and request.messages[0].is_system


def tools_key(tools: Sequence[JsonValue]) -> str:
    """Equal for equal tools."""
    try:
        text = json.dumps(tools, default=str)
    except (RecursionError, ValueError):
        return ""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
