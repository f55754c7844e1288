"""Tokens of a request by its family's formula: if no chat template is known, or it refuses the request.

It errs high, since text that only some templates render is counted. The tokens of a text are remembered by length and
hash, never by the text, for this formula and for rendered prompts (`rendered.py`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.tokenizers.families import FORMULA_ERROR, HEURISTIC, Family
from litellm_compaction.tokenizers.registry import is_loaded, token_length, vocabulary
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
# Longer strings without any space are data, as base64 is.
_DATA_CHARS = 2048
# An end for documents made to be slow.
_MAX_VALUES = 100_000
# 30,000 characters take 2 to 4 ms; more new text is counted outside the event loop's thread.
THREAD_NEW_CHARS = 30_000
# Hashes alone of this much take 0.5 to 1 ms.
_HASH_CHARS = 1_000_000
# About 260 bytes each (measured 2026-11-24).
_MAX_ENTRIES = 65_536
_SLICE_CHARS = 65_536
_DIGIT = re.compile(r"[0-9]")
_DIGIT_GROUP = re.compile(r"[0-9]{1,3}")
# Of a template, around each tool's schema.
_TOOL_TOKENS = 8
# The part of a family's instructions for tools that a template may do without.
_TOOLS_ALLOWANCE_RATIO = 0.5
# Characters beyond ASCII take about three times as many tokens of cl100k as others (12 languages, 2026-11).
_OTHER_WEIGHT = 3

# A text as it is, as a JSON string, as indented JSON; or as it is after a special token of a prompt.
Form: TypeAlias = Literal["plain", "escaped", "indented", "in prompt"]
_Key: TypeAlias = tuple[int, int]


class Written(NamedTuple):
    """A text, and how a template writes it."""

    text: str
    form: Form = "plain"


class Rendered(NamedTuple):
    """The cost of one message before tokenization.

    Attributes:
        texts: to be tokenized one by one.
        fixed_tokens: what the template puts around them, images included.
        image_tokens: the part of `fixed_tokens` that is an upper limit and may really be far smaller.
        reasoning: the text in `texts` that most templates leave out of older turns; "" if there is none.
    """

    texts: tuple[Written, ...]
    fixed_tokens: int
    image_tokens: int
    reasoning: str


def render_message(message: Message, family: Family) -> Rendered:
    """The cost of a message, malformed tool calls and unknown parts included."""
    is_result = message.role == "tool"
    first = Written(message.text, "escaped" if is_result and family.renders_most else "plain")
    fixed_tokens = family.message_tokens
    texts = [] if message.role in _USUAL_ROLES else [message.role]
    if is_result:
        fixed_tokens += family.result_tokens
        if family.renders_most:
            texts.append(message.call_id)
    if message.reasoning:
        texts.append(message.reasoning)
    for call in message.calls:
        fixed_tokens += family.call_tokens
        texts += (call.name, call.arguments, call.id) if family.renders_most else (call.name, call.arguments)
    name = message.raw.get("name")
    if isinstance(name, str):
        texts.append(name)
    legacy_call = message.raw.get("function_call")
    if legacy_call is not None:
        fixed_tokens += family.call_tokens
        texts += strings(legacy_call)
    others = beside(message, family)
    written = (first, *map(Written, texts), *others.texts)
    return Rendered(written, fixed_tokens + others.image_tokens, others.image_tokens, message.reasoning)


class Beside(NamedTuple):
    """Parts of a message that no template gets to see as text.

    Attributes:
        texts: of parts and fields of unknown kinds.
        image_tokens: of images, sound and pages, at most.
    """

    texts: tuple[Written, ...]
    image_tokens: int


def beside(message: Message, family: Family) -> Beside:
    """The parts of a message that are neither text nor tool calls."""
    texts: list[str] = []
    tokens = 0
    content = message.raw.get("content")
    for part in content if message.other_parts and isinstance(content, list) else ():
        fields = part if isinstance(part, Mapping) else {}
        if isinstance(part, str) or isinstance(fields.get("text"), str):
            continue
        if fields.get("type") in _MEDIA:
            tokens += image_tokens(part, limit_tokens=family.image_tokens, patch_px=family.image_patch_px)
        else:
            texts += strings(part)
    return Beside(tuple(map(Written, texts)), tokens)


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


class Measure(NamedTuple):
    """Numbers of some texts together.

    Attributes:
        tokens: of the vocabulary.
        digit_tokens: how many more they are if every digit stands alone (cl100k and o200k take three at once).
        chars: characters.
        other_chars: those of them beyond ASCII.
    """

    tokens: int
    digit_tokens: int = 0
    chars: int = 0
    other_chars: int = 0


class Lookup(NamedTuple):
    """Texts and what is known of them; texts[i] has keys[i] and known[i].

    Attributes:
        known: None for a text that has to be counted.
        new_chars: characters of the texts that have to be counted.
    """

    vocabulary_name: str
    texts: list[tuple[str, Form]]
    keys: list[_Key]
    known: list[Measure | None]
    new_chars: int


class TextCounts:
    """Measures by hash, least recently used ones forgotten; safe to use from several threads.

    Of texts in prompts only `tokens` are counted.
    """

    def __init__(self) -> None:
        self._entries: Bounded[_Key, Measure] = Bounded(_MAX_ENTRIES)
        self._lock = threading.Lock()
        self._asker = ""

    def of(self, asker: str) -> TextCounts:
        """The same memory and bound for another tenant, who finds only their own entries."""
        own = copy.copy(self)
        own._asker = asker
        return own

    async def get(self, vocabulary_name: str, groups: Sequence[Sequence[Written]]) -> list[Measure]:
        """One measure per group; known ones without a thread, long new ones in a thread."""
        if sum(len(text) for group in groups for text, _ in group) > _HASH_CHARS:
            return await asyncio.to_thread(self.get_now, vocabulary_name, groups)
        lookup = self.look_up(vocabulary_name, [text for group in groups for text in group])
        if lookup.new_chars > THREAD_NEW_CHARS or (lookup.new_chars and not is_loaded(vocabulary_name)):
            return _grouped(groups, await asyncio.to_thread(self.complete, lookup))
        return _grouped(groups, self.complete(lookup))

    def get_now(self, vocabulary_name: str, groups: Sequence[Sequence[Written]]) -> list[Measure]:
        """One measure per group, in this thread."""
        lookup = self.look_up(vocabulary_name, [text for group in groups for text in group])
        return _grouped(groups, self.complete(lookup))

    def look_up_in_prompt(self, vocabulary_name: str, texts: Iterable[str]) -> Lookup:
        """Looks up texts that stand after special tokens: about 0.5 ms per MB."""
        return self.look_up(vocabulary_name, list(zip(texts, repeat("in prompt"))))

    def look_up(self, vocabulary_name: str, texts: Sequence[tuple[str, Form]]) -> Lookup:
        # The interpreter's own hashes: 64 bit, seeded for this process, and kept in each string, so that a request that
        # is counted twice is read once. Another tenant's are other ones.
        own = hash((self._asker, vocabulary_name))
        keys = [(len(text), hash((own, form, text))) for text, form in texts]
        with self._lock:
            known = [self._entries.get(key) for key in keys]
            for key, measure in zip(keys, known, strict=True):
                if measure is not None:
                    self._entries.move_to_end(key)
        new_chars = sum(len(text) for (text, _), measure in zip(texts, known, strict=True) if measure is None)
        return Lookup(vocabulary_name, list(texts), keys, known, new_chars)

    def complete(self, lookup: Lookup) -> list[Measure]:
        """The measure of each text, counted in this thread if it is not known: about 0.1 s per MB."""
        missing = [index for index, measure in enumerate(lookup.known) if measure is None]
        if missing:
            counted = _counted(lookup.vocabulary_name, [lookup.texts[index] for index in missing])
            with self._lock:
                for index, measure in zip(missing, counted, strict=True):
                    lookup.known[index] = self._entries[lookup.keys[index]] = measure
        return [measure for measure in lookup.known if measure is not None]


def _grouped(groups: Sequence[Sequence[Written]], measures: Sequence[Measure]) -> list[Measure]:
    left = iter(measures)
    return [Measure(*map(sum, zip(Measure(0), *(next(left) for _ in group), strict=True))) for group in groups]


def _counted(vocabulary_name: str, texts: Sequence[tuple[str, Form]]) -> list[Measure]:
    if texts[0][1] == "in prompt":
        return list(map(Measure, vocabulary(vocabulary_name).lengths_in_prompt([text for text, _ in texts])))
    return [_measure(vocabulary_name, _as_written(text, form)) for text, form in texts]


def _measure(vocabulary_name: str, text: str) -> Measure:
    digit_tokens = 0
    # In slices, since a regex over megabytes would hold the interpreter lock, and with it the event loop.
    for start in range(0, len(text), _SLICE_CHARS):
        part = text[start : start + _SLICE_CHARS]
        digit_tokens += len(_DIGIT.findall(part)) - len(_DIGIT_GROUP.findall(part))
    return Measure(token_length(vocabulary_name, text), digit_tokens, len(text), _other_chars(text))


def _as_written(text: str, form: Form) -> str:
    if form == "escaped":
        return json.dumps(text, ensure_ascii=False)
    if form == "indented":
        try:
            # Four spaces, as Llama 3.1's template does it: the widest form that is in use.
            return json.dumps(json.loads(text), ensure_ascii=False, indent=4)
        except (RecursionError, ValueError):
            return text
    return text


async def by_formula(family: Family, request: Request, texts: TextCounts) -> RawCount:
    """The tokens of a request: its texts by the family's vocabulary, and constants for what stands around them."""
    rendered = [render_message(message, family) for message in request.messages]
    groups: list[Sequence[Written]] = [part.texts for part in rendered]
    if request.tools:
        groups.append(tools_text(request, family))
    measured = await texts.get(family.vocabulary, groups)
    raw_texts = [raw_tokens(measure, family) for measure in measured]
    sizes = [part.fixed_tokens + raw for part, raw in zip(rendered, raw_texts, strict=False)]
    # Upper limits: images, and reasoning, which most templates leave out of older turns.
    allowance = sum(
        part.image_tokens + raw * len(part.reasoning) / max(1, measure.chars)
        for part, measure, raw in zip(rendered, measured, raw_texts, strict=False)
    )
    tools_tokens = doubtful_tools_tokens = 0.0
    if request.tools:
        tools_tokens = tools_estimate(request, family, measured[-1])
        # OpenAI's models have no template that could leave them out.
        doubtful_tools_tokens = 0.0 if family.name == "gpt" else tools_tokens
        allowance += (tools_tokens - raw_texts[-1]) * _TOOLS_ALLOWANCE_RATIO
    overhead = family.request_tokens
    if not has_system(request):
        overhead += family.default_system_tokens
        allowance += family.default_system_tokens
    is_stand_in = not family.owns_vocabulary and family.vocabulary != HEURISTIC.vocabulary
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
        media=tuple(part.image_tokens for part in rendered) if any(part.image_tokens for part in rendered) else (),
        doubtful_tools_tokens=doubtful_tools_tokens,
    )


def tools_text(request: Request, family: Family) -> tuple[Written]:
    """A request's tool schemas as JSON, in the client's order."""
    form: Form = "plain" if family.name in ("gpt", "heuristic") else "indented"
    try:
        return (Written(json.dumps(request.tools, ensure_ascii=False, default=str), form),)
    except (RecursionError, ValueError):
        return (Written("\n".join(strings(request.tools)), form),)


def tools_estimate(request: Request, family: Family, measure: Measure) -> float:
    """The most that tools take if a template does not say it; `measure` is of their `tools_text`."""
    around_each = _TOOL_TOKENS if family.tools_tokens else 0
    return raw_tokens(measure, family) + family.tools_tokens + around_each * len(request.tools)


def raw_tokens(measure: Measure, family: Family) -> float:
    """Tokens of a text in the family's vocabulary, or about as many by its stand-in."""
    return measure.tokens * family.text_ratio + (measure.digit_tokens if family.single_digits else 0)


def mix_of(measures: Iterable[Measure], family: Family) -> Mix:
    """The mix of some texts."""
    measure = Measure(*map(sum, zip(Measure(0), *measures, strict=True)))
    is_split = family.single_digits and not family.owns_vocabulary
    digit_share = measure.digit_tokens / raw_tokens(measure, family) if is_split and measure.digit_tokens else 0.0
    return Mix(_other_share(measure.chars, measure.other_chars), digit_share)


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
    """measures[i] belongs to messages[i]."""
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
            media_tokens=part.image_tokens,
        )
        profile = profile.plus(one)
    return profile
