"""Tokens of a request before any calibration: by its rendered prompt, or else by the family's formula.

What is counted at once and what in a thread is decided here, so that the event loop never waits long. The tokens of a
prompt's pieces are remembered by hash, so that the next turn counts only what is new: a key is a short text itself, or
the length and the hash of a longer one.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Request
from litellm_compaction.templates.template import chars_of, is_compiled, template
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import is_loaded, vocabulary
from litellm_compaction.tokenizers.vocabulary import Segment
from litellm_compaction.tokens.attribution import Scale, Shares, share
from litellm_compaction.tokens.calibration import EXACT_ERROR
from litellm_compaction.tokens.count import Fingerprints, RawCount
from litellm_compaction.tokens.formula import (
    Beside,
    Item,
    Measures,
    beside,
    by_formula,
    mix_of_prompt,
    strings,
    tools_estimate,
    tools_item,
)
from litellm_compaction.tokens.prompt import (
    Prompt,
    drops_tools,
    has_system,
    left_out_texts,
    render,
    texts_of,
    tool_prompts,
    tools_key,
)

# About 200 bytes each.
_MAX_ENTRIES = 65_536
_SHORT_CHARS = 64
_Key: TypeAlias = tuple[str, str, "str | tuple[int, int]"]
# Rendering and looking up this much takes 1 to 2 ms; more is done outside the event loop's thread.
_THREAD_CHARS, _THREAD_MESSAGES, _THREAD_MS = 200_000, 200, 2.0
# 30,000 new characters take 2 to 4 ms.
_THREAD_NEW_CHARS = 30_000
# The characters of so many are added up in about 1 ms.
_THREAD_TOOLS = 500
_MAX_TOOLS = 1024
# Images and arguments that are no JSON: the vocabulary and the rest of the prompt are exact all the same.
_PART_ERROR = 0.05


class Lookup(NamedTuple):
    """Texts and what is known of them.

    Attributes:
        texts: n.
        keys: one per text.
        lengths: tokens of each; None where it has to be counted.
        new_chars: characters of the texts that have to be counted.
    """

    texts: Sequence[str]
    keys: list[_Key]
    lengths: list[int | None]
    new_chars: int


class SegmentLengths:
    """Least recently used ones are forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: Bounded[_Key, int] = Bounded(_MAX_ENTRIES)
        self._lock = threading.Lock()
        self._asker = ""

    def of(self, asker: str) -> SegmentLengths:
        """The same memory and bound for another tenant, who finds only their own entries."""
        own = copy.copy(self)
        own._asker = asker
        return own

    def look_up(self, vocabulary_name: str, texts: Sequence[str]) -> Lookup:
        """What is known of texts that stand behind special tokens: about 0.5 ms per MB."""
        keys = [_key(self._asker, vocabulary_name, text) for text in texts]
        with self._lock:
            lengths = [self._entries.get(key) for key in keys]
            for key, length in zip(keys, lengths, strict=True):
                if length is not None:
                    self._entries.move_to_end(key)
        new_chars = sum(len(text) for text, length in zip(texts, lengths, strict=True) if length is None)
        return Lookup(texts, keys, lengths, new_chars)

    def complete(self, vocabulary_name: str, lookup: Lookup) -> list[int]:
        """Tokens of each text, counted in this thread where they are not known: about 0.1 s per MB."""
        missing = [index for index, length in enumerate(lookup.lengths) if length is None]
        if missing:
            counted = vocabulary(vocabulary_name).lengths_in_prompt([lookup.texts[index] for index in missing])
            with self._lock:
                for index, length in zip(missing, counted, strict=True):
                    lookup.lengths[index] = self._entries[lookup.keys[index]] = length
        return [length or 0 for length in lookup.lengths]


def _key(asker: str, vocabulary_name: str, text: str) -> _Key:
    if len(text) <= _SHORT_CHARS:
        return asker, vocabulary_name, text
    # The interpreter's own hash: 64 bit, seeded for this process, three times as fast as a digest of the bytes.
    return asker, vocabulary_name, (len(text), hash(text))


_ToolsKey: TypeAlias = tuple[str, str, bool, "str | int"]


class Counting:
    """Counts requests and remembers the pieces that it has counted."""

    def __init__(self) -> None:
        self.measures = Measures()
        self._segments = SegmentLengths()
        self._tools: Bounded[_ToolsKey, int] = Bounded(_MAX_TOOLS)
        self._lock = threading.Lock()

    def of(self, asker: str) -> Counting:
        """The same memory and bounds for another tenant, who finds only their own pieces."""
        own = copy.copy(self)
        own.measures, own._segments = self.measures.of(asker), self._segments.of(asker)
        return own

    async def count(self, family: Family, request: Request, prints: Fingerprints = ()) -> RawCount:
        """The tokens of a request. Never raises on its content.

        Args:
            family: counts them.
            request: what is sent.
            prints: of the request, by which its tools are remembered.
        """
        found = await self._by_prompt(family, request, prints)
        return found if found is not None else await by_formula(family, request, self.measures)

    async def _by_prompt(self, family: Family, request: Request, prints: Fingerprints) -> RawCount | None:
        if not family.template:
            return None
        if not _is_quick(family, request):
            return await asyncio.to_thread(self._by_prompt_now, family, request, prints)
        begun = self._begin(family, request, prints)
        if begun is None:
            return None
        new_chars = begun.lookup.new_chars + begun.left_out.new_chars
        if new_chars > _THREAD_NEW_CHARS or not self._knows_tools(family, request, prints):
            return await asyncio.to_thread(self._finish, family, request, begun)
        return self._finish(family, request, begun)

    def _by_prompt_now(self, family: Family, request: Request, prints: Fingerprints) -> RawCount | None:
        begun = self._begin(family, request, prints)
        return self._finish(family, request, begun) if begun is not None else None

    def _begin(self, family: Family, request: Request, prints: Fingerprints) -> _Begun | None:
        prompt = render(family, request)
        if prompt is None:
            return None
        segments = vocabulary(family.vocabulary).split(prompt.text)
        lookup = self._segments.look_up(family.vocabulary, texts_of(prompt.text, segments))
        left_out = self._segments.look_up(family.vocabulary, left_out_texts(family, request))
        besides = [_beside(index, request, family) for index in _with_more(request)]
        return _Begun(prompt, prints, segments, lookup, left_out, besides)

    def _finish(self, family: Family, request: Request, begun: _Begun) -> RawCount:
        lengths = self._segments.complete(family.vocabulary, begun.lookup)
        scale = Scale(begun.segments, lengths)
        is_without_tools = drops_tools(family, request)
        tools_tokens = 0 if is_without_tools else self._tools_tokens(family, request, begun.prints)
        shares = share(request, begun.prompt.text, scale, tools_tokens)
        counted = self._with_besides(family, shares, begun)
        return self._with_tools(family, request, counted) if is_without_tools else counted

    def _with_tools(self, family: Family, request: Request, counted: RawCount) -> RawCount:
        """`counted` with tools that the template drops: what a server shows of them instead is unknown, so count high.

        Only they are an estimate; the messages are as exact as ever.
        """
        (measure,) = self.measures.get_now(family.vocabulary, [tools_item(request, family)])
        tools_tokens = tools_estimate(request, family, measure)
        return counted._replace(tools_tokens=tools_tokens, doubtful_tools_tokens=tools_tokens, exact=False)

    def _with_besides(self, family: Family, shares: Shares, begun: _Begun) -> RawCount:
        sizes: list[float] = list(shares.sizes)
        allowance = float(shares.reasoning_tokens)
        media = [0.0] * len(sizes)
        for index, more in begun.besides:
            (measure,) = self.measures.get_now(family.vocabulary, [Item(more.texts)])
            sizes[index] += more.image_tokens + measure.tokens
            media[index] = more.image_tokens
            allowance += more.image_tokens
        is_whole = begun.prompt.is_faithful and not begun.besides
        return RawCount(
            sizes=tuple(sizes),
            tools_tokens=shares.tools_tokens,
            overhead_tokens=shares.overhead_tokens,
            allowance_tokens=allowance,
            error_ratio=EXACT_ERROR if family.exact and is_whole else max(_PART_ERROR, family.error_ratio),
            rendered=True,
            exact=family.exact and is_whole and not begun.left_out.texts,
            mix=mix_of_prompt(begun.prompt.text),
            media=tuple(media) if any(media) else (),
            left_out_tokens=sum(self._segments.complete(family.vocabulary, begun.left_out)),
        )

    def _tools_tokens(self, family: Family, request: Request, prints: Fingerprints) -> int:
        """What a request's tools take, remembered by their text."""
        if not request.tools:
            return 0
        key = _tools_key(family, request, prints)
        with self._lock:
            known = self._tools.get(key)
        if known is not None:
            return known
        prompts = tool_prompts(family, request)
        tokens = 0
        if prompts is not None:
            with_tools, without = (self._prompt_tokens(family, prompt) for prompt in prompts)
            tokens = max(0, with_tools - without)
        with self._lock:
            self._tools[key] = tokens
        return tokens

    def _knows_tools(self, family: Family, request: Request, prints: Fingerprints) -> bool:
        return (
            not request.tools
            or _tools_key(family, request, prints) in self._tools
            or (drops_tools(family, request) and _chars(request) <= _THREAD_NEW_CHARS)
        )

    def _prompt_tokens(self, family: Family, prompt: Prompt) -> int:
        segments = vocabulary(family.vocabulary).split(prompt.text)
        texts = texts_of(prompt.text, segments)
        lengths = self._segments.complete(family.vocabulary, self._segments.look_up(family.vocabulary, texts))
        return sum(lengths) + len(segments) - len(texts)


class _Begun(NamedTuple):
    """A rendered request."""

    prompt: Prompt
    prints: Fingerprints
    segments: list[Segment]
    lookup: Lookup
    left_out: Lookup
    besides: list[tuple[int, Beside]]


def _is_quick(family: Family, request: Request) -> bool:
    """Whether rendering may be done on the event loop."""
    name = family.template_for(tools=bool(request.tools))
    if not is_loaded(family.vocabulary) or not is_compiled(name):
        return False
    messages = len(request.messages)
    if (
        messages > _THREAD_MESSAGES
        or len(request.tools) > _THREAD_TOOLS
        or template(name).expected_ms(messages) > _THREAD_MS
    ):
        return False
    return _chars(request) <= _THREAD_CHARS


def _tools_key(family: Family, request: Request, prints: Fingerprints) -> _ToolsKey:
    # The first fingerprint stands for the tools, and has been made already.
    tools = prints[0] if prints else tools_key(request.tools)
    return family.template_for(tools=True), family.vocabulary, has_system(request), tools


def _with_more(request: Request) -> list[int]:
    """The messages that hold something besides text and tool calls."""
    return [
        index
        for index, message in enumerate(request.messages)
        if message.other_parts or message.raw.get("function_call") is not None
    ]


def _beside(index: int, request: Request, family: Family) -> tuple[int, Beside]:
    message = request.messages[index]
    more = beside(message, family)
    return index, more._replace(texts=(*more.texts, *strings(message.raw.get("function_call"))))


def _chars(request: Request) -> int:
    chars = chars_of(request.tools) if request.tools else 0
    for message in request.messages:
        chars += len(message.text) + len(message.reasoning)
        for call in message.calls:
            chars += len(call.arguments)
    return chars
