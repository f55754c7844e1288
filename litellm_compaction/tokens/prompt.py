"""Our own count of a request: its rendered prompt if the template is this package's, else vocabulary and constants.

What is asked of tokenizers and templates is asked here and in `begun.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.templates.environment import TemplateRefusal
from litellm_compaction.templates.template import Template, shape, template
from litellm_compaction.tokenizers.families import Costs, Family
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokenizers.vocabulary import Vocabulary
from litellm_compaction.tokens.estimate import Own
from litellm_compaction.tokens.media import image_tokens
from litellm_compaction.tokens.texts import Place, TextCounts

# How far such a count may be too low: rendered to the letter, rendered nearly so, by its vocabulary, by a stand-in.
EXACT_ERROR, _NEAR_ERROR, _VOCABULARY_ERROR, _STAND_IN_ERROR = 0.02, 0.05, 0.10, 0.35
# Of a script beyond ASCII a stand-in counts up to four times too much.
_OTHER_SCRIPT_RATIO = 0.5
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
# Longer strings without any space are data, as base64 is.
_DATA_CHARS = 2048
# An end for documents made to be slow.
_MAX_VALUES = 100_000


class Prompt(NamedTuple):
    """A rendered request.

    Attributes:
        text: all of it.
        is_faithful: no engine would refuse what it was rendered from.
    """

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


def own_count(family: Family, request: Request, texts: TextCounts) -> Own:
    """Our own count of a request: 0.1 s per new MB in this thread. Raises on nothing in its messages and tools.

    Raises:
        RecursionError: its extras are nested deeper than JSON is written.
    """
    parts = _Parts.of(family, request, texts)
    prompt = render(family, request)
    if prompt is None:
        return parts.own(family)
    chosen = template(family.template)
    segments = vocabulary(family.vocabulary).split(prompt.text)
    shown = [segment.text for segment in segments if not segment.is_special]
    tokens = sum(texts.lengths(family.vocabulary, shown, "in prompt")) + len(segments) - len(shown)
    return parts.in_proportion(family, tokens, chosen, is_faithful=prompt.is_faithful)


class _Parts(NamedTuple):
    """The parts of a request by vocabulary and constants; entry i of each belongs to messages[i].

    Attributes:
        sizes: of what a template gets to see as text.
        thoughts: of them, reasoning before the person's newest word, which most templates leave out.
        beside: of parts that no template gets to see as text; media: of images, sound and pages.
        said: of text beside calls.
        other: of them all, of scripts beyond ASCII.
    """

    request: Request
    costs: Costs
    sizes: list[float]
    thoughts: list[float]
    beside: list[float]
    media: list[float]
    said: float
    other: float
    tools: float
    extras: float
    images: int

    @classmethod
    def of(cls, family: Family, request: Request, texts: TextCounts) -> _Parts:
        costs = family.costs
        tools = [_as_json(tool) for tool in request.tools]
        extras = [json.dumps(request.extras, ensure_ascii=False, default=str)] if request.extras else []
        groups = [_texts(message) for message in request.messages]
        beside = [_beside(message, family) for message in request.messages]
        flat = [text for group in groups for text in group]
        flat += [text for each in beside for text in each.texts]
        place: Place = "digits apart" if family.single_digits else "alone"
        lengths = [float(tokens) for tokens in texts.lengths(family.vocabulary, flat, place)]
        left = iter(lengths)
        (*added,) = texts.sampled(family.vocabulary, [*tools, *extras])
        last_user = max((at for at, message in enumerate(request.messages) if message.role == "user"), default=-1)
        sizes, thoughts, said = [], [], 0.0
        for at, (message, group) in enumerate(zip(request.messages, groups, strict=True)):
            tokens = [next(left) for _ in group]
            sizes.append(costs.message + len(message.calls) * costs.call + sum(tokens))
            thoughts.append(tokens[1] if at < last_user else 0.0)
            said += tokens[0] if message.calls else 0.0
        return cls(
            request=request,
            costs=costs,
            sizes=sizes,
            thoughts=thoughts,
            beside=[sum(next(left) for _ in each.texts) for each in beside],
            media=[each.media_tokens for each in beside],
            said=said,
            other=0.0 if family.owns_vocabulary else _OTHER_SCRIPT_RATIO * _of_other_scripts(flat, lengths),
            tools=sum(added[: len(tools)]) + (costs.tools + costs.tool * len(tools) if tools else 0),
            extras=sum(added[len(tools) :]),
            images=sum(len(message.other_parts) for message in request.messages)
            if any(e.media_tokens for e in beside)
            else 0,
        )

    def own(self, family: Family) -> Own:
        """The count by constants."""
        overhead, optional = self.costs.request + self.extras, self.extras + sum(self.thoughts) + self.other
        if not (self.request.messages and self.request.messages[0].is_system):
            overhead, optional = overhead + family.default_system_tokens, optional + family.default_system_tokens
        # OpenAI's models have no template that could leave tools out.
        optional += 0.0 if family.name == "gpt" else self.tools
        is_exact = family.exact and not family.template and not optional and not any(self.media)
        return Own(
            sizes=tuple(map(sum, zip(self.sizes, self.beside, self.media, strict=True))),
            tools_tokens=self.tools,
            overhead_tokens=overhead,
            optional_tokens=optional,
            media=self._media(),
            images=self.images,
            exact=is_exact,
            asks=self.asks,
        )

    def in_proportion(self, family: Family, tokens: int, chosen: Template, *, is_faithful: bool) -> Own:
        """The count of a rendered prompt of so many tokens, divided as the constants divide theirs."""
        has_tools = bool(self.request.tools) and chosen.has("renders_tools")
        hidden = 0.0 if chosen.has("renders_text_beside_calls") else self.said
        sizes = [max(0.0, size - thought) for size, thought in zip(self.sizes, self.thoughts, strict=True)]
        shares = [*sizes, self.tools if has_tools else 0.0, self.costs.request]
        factor = tokens / max(1.0, sum(shares))
        *shown, tools, overhead = (share * factor for share in shares)
        is_whole = is_faithful and not any((self.extras, *self.beside, *self.media))
        doubtful_tools = 0.0 if has_tools else self.tools
        return Own(
            sizes=tuple(map(sum, zip(shown, self.beside, self.media, strict=True))),
            tools_tokens=tools + doubtful_tools,
            overhead_tokens=overhead + self.extras,
            optional_tokens=self.extras + doubtful_tools,
            hidden_tokens=hidden,
            media=self._media(),
            images=self.images,
            rendered=True,
            exact=family.exact and is_whole and not hidden and not doubtful_tools,
            asks=self.asks,
        )

    @property
    def asks(self) -> bool:
        return bool(self.request.messages) and self.request.messages[-1].role == "user"

    def _media(self) -> tuple[float, ...]:
        return tuple(self.media) if any(self.media) else ()


def _texts(message: Message) -> list[str]:
    """All of a message that a template may write: its text, its reasoning, and the rest."""
    found = [message.text, message.reasoning]
    for call in message.calls:
        found += (call.name, call.arguments)
    name = message.raw.get("name")
    return [*found, name] if isinstance(name, str) else found


class _Beside(NamedTuple):
    texts: list[str]
    media_tokens: float


def _beside(message: Message, family: Family) -> _Beside:
    """Parts of a message that no template gets to see as text."""
    legacy_call = message.raw.get("function_call")
    texts, tokens = strings(legacy_call), 0
    content = message.raw.get("content")
    for part in content if message.other_parts and isinstance(content, list) else ():
        fields = part if isinstance(part, Mapping) else {}
        if isinstance(part, str) or isinstance(fields.get("text"), str):
            continue
        if fields.get("type") in _MEDIA:
            tokens += image_tokens(part, limit_tokens=family.image_tokens, patch_px=family.image_patch_px)
        else:
            texts += strings(part)
    return _Beside(texts, float(tokens))


def _of_other_scripts(texts: Sequence[str], lengths: Sequence[float]) -> float:
    """The part of texts' tokens that is of characters beyond ASCII, of which each takes about three times as many."""
    tokens = 0.0
    for text, length in zip(texts, lengths, strict=True):
        if not text.isascii():
            other = 3 * (len(text) - len(text.encode("ascii", "ignore")))
            tokens += length * other / (other + len(text) - other / 3)
    return tokens


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


def render(family: Family, request: Request) -> Prompt | None:
    """The prompt; None if the family has no template, or it refuses the request.

    Without tools if the template drops them. Loads the vocabulary and the template: up to 2 s.
    """
    if not family.template:
        return None
    chosen, words = template(family.template), vocabulary(family.vocabulary)
    if not chosen.has("renders_calls") and any(message.calls or message.role == "tool" for message in request.messages):
        # A server shows them in a way of its own, so that leaving them out would count too little.
        return None
    return rendered(chosen, words, request.messages, request.tools)


def rendered(
    chosen: Template,
    words: Vocabulary,
    messages: Sequence[Message],
    tools: Sequence[JsonValue],
    now: datetime | None = None,
) -> Prompt | None:
    """The prompt by a template and a vocabulary; None if the template refuses it."""
    shaped = shape(messages, chosen)
    try:
        text = chosen.render(shaped.messages, tools, bos=words.bos, eos=words.eos, now=now)
    except TemplateRefusal:
        return None
    if words.adds_bos and not text.startswith(words.bos):
        # The engine adds it to every prompt, and has taken it off the rendered one before (common/chat.cpp).
        text = words.bos + text
    return Prompt(text, shaped.is_faithful)
