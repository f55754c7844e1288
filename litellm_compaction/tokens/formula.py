"""Tokens of a request by its family's formula: where no chat template is known, or it refuses the request.

Which texts of a message or a tool schema end up in the prompt, and how many tokens stand around them, is said here for
all families; it errs high, since what only some templates render is counted. What a vocabulary makes of a text is
remembered by lengths and hashes, never by the text, and is computed where it stalls nobody.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.tokenizers.families import FORMULA_ERROR, HEURISTIC, Family
from litellm_compaction.tokenizers.registry import is_loaded, token_length
from litellm_compaction.tokens.calibration import Mix
from litellm_compaction.tokens.count import RawCount
from litellm_compaction.tokens.growth import Profile
from litellm_compaction.tokens.media import image_tokens
from litellm_compaction.tokens.prompt import has_system

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
# 30,000 characters take 2 to 4 ms; more new text is counted outside the event loop's thread.
_THREAD_CHARS = 30_000
# Hashes alone of this much take 0.5 to 1 ms.
_HASH_CHARS = 1_000_000
# About 370 bytes each (measured 2026-11-23).
_MAX_ENTRIES = 65_536
_SLICE_CHARS = 65_536
_DIGIT = re.compile(r"[0-9]")
_DIGIT_GROUP = re.compile(r"[0-9]{1,3}")
_Key = tuple[str, str, Form, tuple[int, ...], tuple[int, ...]]
# The part of a family's instructions for tools that a template may do without.
_TOOLS_ALLOWANCE_RATIO = 0.5
# Characters beyond ASCII take about three times as many tokens of cl100k as others (12 languages, 2026-11).
_OTHER_WEIGHT = 3


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


class Measure(NamedTuple):
    """What is known of some texts together.

    Attributes:
        tokens: of the vocabulary.
        digit_tokens: how many more they are where every digit stands alone (cl100k and o200k take three at once).
        chars: characters.
        other_chars: those of them beyond ASCII.
    """

    tokens: int
    digit_tokens: int
    chars: int
    other_chars: int


class Item(NamedTuple):
    """Texts that are measured together."""

    texts: tuple[str, ...]
    form: Form = "plain"


class Measures:
    """Measures by hash, least recently used ones forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: Bounded[_Key, Measure] = Bounded(_MAX_ENTRIES)
        self._lock = threading.Lock()
        self._asker = ""

    def of(self, asker: str) -> Measures:
        """The same memory and bound for another tenant, who finds only their own entries."""
        own = copy.copy(self)
        own._asker = asker
        return own

    async def get(self, vocabulary_name: str, items: Sequence[Item]) -> list[Measure]:
        """One measure per item; known ones without a thread, long new ones in a thread."""
        chars = sum(len(text) for item in items for text in item.texts)
        if chars > _HASH_CHARS:
            return await asyncio.to_thread(self.get_now, vocabulary_name, items)
        keys = [_key(self._asker, vocabulary_name, item) for item in items]
        known = self._known(keys)
        new_chars = sum(
            sum(map(len, item.texts)) for item, measure in zip(items, known, strict=True) if measure is None
        )
        if new_chars > _THREAD_CHARS or (new_chars and not is_loaded(vocabulary_name)):
            return await asyncio.to_thread(self._complete, vocabulary_name, items, keys, known)
        return self._complete(vocabulary_name, items, keys, known)

    def get_now(self, vocabulary_name: str, items: Sequence[Item]) -> list[Measure]:
        """One measure per item, in this thread."""
        keys = [_key(self._asker, vocabulary_name, item) for item in items]
        return self._complete(vocabulary_name, items, keys, self._known(keys))

    def _known(self, keys: Sequence[_Key]) -> list[Measure | None]:
        with self._lock:
            found = [self._entries.get(key) for key in keys]
            for key, measure in zip(keys, found, strict=True):
                if measure is not None:
                    self._entries.move_to_end(key)
        return found

    def _complete(
        self, vocabulary_name: str, items: Sequence[Item], keys: Sequence[_Key], known: Sequence[Measure | None]
    ) -> list[Measure]:
        result: list[Measure] = []
        for item, key, measure in zip(items, keys, known, strict=True):
            if measure is None:
                measure = _measure(vocabulary_name, item)
                with self._lock:
                    self._entries[key] = measure
            result.append(measure)
        return result


def _key(asker: str, vocabulary_name: str, item: Item) -> _Key:
    # The interpreter's own hashes: 64 bit, seeded for this process, and kept in each string, so that a request that is
    # counted twice is read once.
    return asker, vocabulary_name, item.form, tuple(map(len, item.texts)), tuple(map(hash, item.texts))


def _measure(vocabulary_name: str, item: Item) -> Measure:
    tokens = digit_tokens = chars = other_chars = 0
    for text in written(item.texts, item.form):
        tokens += token_length(vocabulary_name, text)
        chars += len(text)
        # In slices, since a regex over megabytes would hold the interpreter lock, and with it the event loop.
        for start in range(0, len(text), _SLICE_CHARS):
            part = text[start : start + _SLICE_CHARS]
            digit_tokens += len(_DIGIT.findall(part)) - len(_DIGIT_GROUP.findall(part))
        other_chars += _other_chars(text)
    return Measure(tokens, digit_tokens, chars, other_chars)


async def by_formula(family: Family, request: Request, measures: Measures) -> RawCount:
    """The tokens of a request: its texts by the family's vocabulary, and constants for what stands around them.

    Args:
        family: counts them.
        request: what is sent.
        measures: of texts, remembered.
    """
    rendered = [render_message(message, family) for message in request.messages]
    items = [Item(part.texts, part.form) for part in rendered]
    if request.tools:
        items.append(tools_item(request, family))
    measured = await measures.get(family.vocabulary, items)
    raw_texts = [raw_tokens(measure, family) for measure in measured]
    sizes = [part.fixed_tokens + raw for part, raw in zip(rendered, raw_texts, strict=False)]
    allowance = sum(map(_allowance, rendered, measured, raw_texts))
    tools_tokens = doubtful_tools_tokens = 0.0
    if request.tools:
        tools_tokens = tools_estimate(request, family, measured[-1])
        around = tools_tokens - raw_texts[-1]
        # OpenAI's models have no template that could leave them out.
        doubtful_tools_tokens = 0.0 if family.name == "gpt" else tools_tokens
        allowance += around * _TOOLS_ALLOWANCE_RATIO
    overhead = family.request_tokens
    is_stand_in = not family.owns_vocabulary and family.vocabulary != HEURISTIC.vocabulary
    if not has_system(request):
        overhead += family.default_system_tokens
        allowance += family.default_system_tokens
    return RawCount(
        sizes=tuple(sizes),
        tools_tokens=tools_tokens,
        overhead_tokens=overhead,
        allowance_tokens=allowance,
        error_ratio=max(FORMULA_ERROR, family.error_ratio) if family.template else family.error_ratio,
        rendered=False,
        exact=family.exact and not family.template and allowance == 0,
        mix=mix_of(measured, family),
        profile=_profile(request, rendered, measured) if is_stand_in else None,
        media=tuple(part.allowance_tokens for part in rendered) if any(map(_has_media, rendered)) else (),
        doubtful_tools_tokens=doubtful_tools_tokens,
    )


def tools_item(request: Request, family: Family) -> Item:
    """A request's tools, to be measured."""
    return Item((tools_text(request.tools),), "plain" if family.name in ("gpt", "heuristic") else "indented")


def tools_estimate(request: Request, family: Family, measure: Measure) -> float:
    """What tools take where a template does not say it, at the upper end.

    Args:
        request: has them.
        family: counts them.
        measure: of its `tools_item`.
    """
    return raw_tokens(measure, family) + family.tools_tokens + family.tool_tokens * len(request.tools)


def raw_tokens(measure: Measure, family: Family) -> float:
    """Tokens of a text in the family's vocabulary, or about as many by its stand-in."""
    return measure.tokens * family.text_ratio + (measure.digit_tokens if family.single_digits else 0)


def mix_of(measures: Iterable[Measure], family: Family) -> Mix:
    """The mix of some texts."""
    chars = other_chars = digit_tokens = 0
    tokens = 0.0
    for measure in measures:
        chars += measure.chars
        other_chars += measure.other_chars
        digit_tokens += measure.digit_tokens
        tokens += raw_tokens(measure, family)
    is_split = family.single_digits and not family.owns_vocabulary
    return Mix(_other_share(chars, other_chars), digit_tokens / tokens if is_split and digit_tokens else 0.0)


def mix_of_prompt(text: str) -> Mix:
    """The mix of a prompt that a template has written, for a family whose vocabulary splits digits as it does."""
    return Mix(_other_share(len(text), _other_chars(text)), 0.0)


def _other_chars(text: str) -> int:
    """Characters beyond ASCII: 1 ms per MB."""
    return 0 if text.isascii() else len(text) - len(text.encode("ascii", "ignore"))


def _other_share(chars: int, other_chars: int) -> float:
    weighted = _OTHER_WEIGHT * other_chars
    return weighted / (weighted + chars - other_chars) if other_chars else 0.0


def _profile(request: Request, rendered: Sequence[Rendered], measures: Sequence[Measure]) -> Profile:
    """What messages consist of; measures[i] belongs to messages[i]."""
    profile = Profile(messages=len(rendered))
    for message, part, measure in zip(request.messages, rendered, measures, strict=False):
        per_char = measure.tokens / max(1, measure.chars)
        one = Profile(
            tokens=measure.tokens,
            digit_tokens=measure.digit_tokens,
            other_chars=measure.other_chars,
            calls=len(message.calls),
            said_tokens=len(message.text) * per_char if message.calls else 0.0,
            reasoning_tokens=len(part.reasoning) * per_char,
            media_tokens=part.allowance_tokens,
        )
        profile = profile.plus(one)
    return profile


def _has_media(part: Rendered) -> bool:
    return part.allowance_tokens > 0


def _allowance(part: Rendered, measure: Measure, tokens: float) -> float:
    """Upper limits in a message: images, and reasoning, which most templates leave out of older turns."""
    return part.allowance_tokens + tokens * len(part.reasoning) / max(1, measure.chars)
