"""Tokens of a request before any calibration: by its rendered prompt, or else by the family's formula.

What is counted at once and what in a thread is decided here, so that the event loop never waits long.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import NamedTuple, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Request
from litellm_compaction.templates.template import chars_of, is_compiled, template
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import is_loaded, vocabulary
from litellm_compaction.tokenizers.vocabulary import Segment
from litellm_compaction.tokens.attribution import Scale, share
from litellm_compaction.tokens.calibration import EXACT_ERROR
from litellm_compaction.tokens.count import Fingerprints, RawCount
from litellm_compaction.tokens.formula import (
    THREAD_NEW_CHARS,
    Lookup,
    TextCounts,
    Written,
    beside,
    by_formula,
    mix_of_prompt,
    strings,
    tools_estimate,
    tools_text,
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

# Rendering and looking up this much takes 1 to 2 ms; more is done outside the event loop's thread.
_THREAD_CHARS, _THREAD_MESSAGES, _THREAD_MS = 200_000, 200, 2.0
# The characters of so many are added up in about 1 ms.
_THREAD_TOOLS = 500
_MAX_TOOLS = 1024
# Images and arguments that are no JSON: the vocabulary and the rest of the prompt are exact all the same.
_PART_ERROR = 0.05


_ToolsKey: TypeAlias = tuple[str, str, bool, "str | int"]


class Counting:
    """Counts requests and remembers the pieces that it has counted."""

    def __init__(self) -> None:
        self.texts = TextCounts()
        self._tools: Bounded[_ToolsKey, int] = Bounded(_MAX_TOOLS)
        self._lock = threading.Lock()

    def of(self, asker: str) -> Counting:
        """The same memory and bounds for another tenant, who finds only their own pieces."""
        own = copy.copy(self)
        own.texts = self.texts.of(asker)
        return own

    async def count(self, family: Family, request: Request, prints: Fingerprints = ()) -> RawCount:
        """The tokens of a request. Never raises on its content.

        Args:
            family: counts them.
            request: what is sent.
            prints: of the request, by which its tools are remembered.
        """
        found = await self._by_prompt(family, request, prints) if family.template else None
        return found if found is not None else await by_formula(family, request, self.texts)

    async def _by_prompt(self, family: Family, request: Request, prints: Fingerprints) -> RawCount | None:
        if not _is_quick(family, request):
            return await asyncio.to_thread(self._by_prompt_now, family, request, prints)
        begun = self._begin(family, request)
        if begun is None:
            return None
        new_chars = begun.lookup.new_chars + begun.left_out.new_chars
        if new_chars > THREAD_NEW_CHARS or not self._knows_tools(family, request, prints):
            return await asyncio.to_thread(self._finish, family, request, prints, begun)
        return self._finish(family, request, prints, begun)

    def _by_prompt_now(self, family: Family, request: Request, prints: Fingerprints) -> RawCount | None:
        begun = self._begin(family, request)
        return self._finish(family, request, prints, begun) if begun is not None else None

    def _begin(self, family: Family, request: Request) -> _Begun | None:
        prompt = render(family, request)
        if prompt is None:
            return None
        segments = vocabulary(family.vocabulary).split(prompt.text)
        lookup = self.texts.look_up_in_prompt(family.vocabulary, texts_of(prompt.text, segments))
        left_out = self.texts.look_up_in_prompt(family.vocabulary, left_out_texts(family, request))
        return _Begun(prompt, segments, lookup, left_out)

    def _finish(self, family: Family, request: Request, prints: Fingerprints, begun: _Begun) -> RawCount:
        lengths = [measure.tokens for measure in self.texts.complete(begun.lookup)]
        is_without_tools = drops_tools(family, request)
        tools_tokens: float = 0 if is_without_tools else self._tools_tokens(family, request, prints)
        shares = share(request, begun.prompt.text, Scale(begun.segments, lengths), round(tools_tokens))
        sizes: list[float] = list(shares.sizes)
        media = [0] * len(sizes)
        is_whole = begun.prompt.is_faithful
        for index, message in enumerate(request.messages):
            legacy_call = message.raw.get("function_call")
            if not message.other_parts and legacy_call is None:
                continue
            is_whole = False
            more = beside(message, family)
            (measure,) = self.texts.get_now(family.vocabulary, [(*more.texts, *map(Written, strings(legacy_call)))])
            sizes[index] += more.image_tokens + measure.tokens
            media[index] = more.image_tokens
        counted = RawCount(
            sizes=tuple(sizes),
            tools_tokens=shares.tools_tokens,
            overhead_tokens=shares.overhead_tokens,
            allowance_tokens=float(shares.reasoning_tokens + sum(media)),
            error_ratio=EXACT_ERROR if family.exact and is_whole else max(_PART_ERROR, family.error_ratio),
            rendered=True,
            exact=family.exact and is_whole and not begun.left_out.texts,
            mix=mix_of_prompt(begun.prompt.text),
            media=tuple(media) if any(media) else (),
            left_out_tokens=sum(measure.tokens for measure in self.texts.complete(begun.left_out)),
        )
        if not is_without_tools:
            return counted
        # What a server shows of tools that the template drops is unknown, so they count high; the messages stay exact.
        (measure,) = self.texts.get_now(family.vocabulary, [tools_text(request, family)])
        tools_tokens = tools_estimate(request, family, measure)
        return counted._replace(tools_tokens=tools_tokens, doubtful_tools_tokens=tools_tokens, exact=False)

    def _tools_tokens(self, family: Family, request: Request, prints: Fingerprints) -> int:
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
            with_tools, without = (self._prompt_tokens(family, prompt.text) for prompt in prompts)
            tokens = max(0, with_tools - without)
        with self._lock:
            self._tools[key] = tokens
        return tokens

    def _knows_tools(self, family: Family, request: Request, prints: Fingerprints) -> bool:
        return (
            not request.tools
            or _tools_key(family, request, prints) in self._tools
            or (drops_tools(family, request) and _chars(request) <= THREAD_NEW_CHARS)
        )

    def _prompt_tokens(self, family: Family, text: str) -> int:
        segments = vocabulary(family.vocabulary).split(text)
        lookup = self.texts.look_up_in_prompt(family.vocabulary, texts_of(text, segments))
        return sum(measure.tokens for measure in self.texts.complete(lookup)) + len(segments) - len(lookup.texts)


class _Begun(NamedTuple):
    """A rendered request."""

    prompt: Prompt
    segments: list[Segment]
    lookup: Lookup
    left_out: Lookup


def _is_quick(family: Family, request: Request) -> bool:
    """Returns True if rendering may be done on the event loop."""
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


def _chars(request: Request) -> int:
    chars = chars_of(request.tools) if request.tools else 0
    for message in request.messages:
        chars += len(message.text) + len(message.reasoning)
        for call in message.calls:
            chars += len(call.arguments)
    return chars
