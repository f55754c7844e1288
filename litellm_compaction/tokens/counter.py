"""Estimates what servers make of requests, and learns from what they say (`known.py`, `protocol.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Request
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import usable, usable_soon
from litellm_compaction.tokens.estimate import Estimate, Own, Prints, Span, Told, estimated
from litellm_compaction.tokens.known import MOST_RATIO, Known, fingerprints
from litellm_compaction.tokens.prompt import error_ratio, own_count
from litellm_compaction.tokens.protocol import Protocol
from litellm_compaction.tokens.texts import TextCounts

# Hashes of more text than this, and tokens of more new text and of more messages, are made outside the event loop's
# thread: 1 ms, and 2 to 4 ms.
_THREAD_CHARS, _THREAD_NEW_CHARS, _THREAD_MESSAGES = 1_000_000, 30_000, 200
# Whole counts, of about 30 bytes per message.
_MAX_RECENT = 256
# Numbers so far below the least that we expect are those of cut prompts, if the prompts are longer than this.
_CUT_RATIO, _DOUBTFUL_RATIO, _LEAST_CUT_TOKENS = 0.85, 0.98, 1024
# No template leaves out more of a prompt; a server whose number is lower does not count it. It may add a system message
# of its own to a short one.
_MOST_LEFT_OUT, _MOST_ADDED_TOKENS = 50, 512
# No model is loaded with a window that cuts so few.
_UNCUT_TOKENS = 2048
# No vocabulary has a longer token (128 blanks in cl100k and o200k), so more text than this for each token of the window
# fits by no count: all of it would only cost time, 0.15 s a megabyte.
_MOST_CHARS_PER_TOKEN, _ALWAYS_COUNTED_CHARS = 256, 1_000_000


class TokenCounter:
    """Counts for any number of deployments, and remembers their servers' numbers.

    Attributes:
        known: what these have said.
        protocol: LM Studio's, held against its answers.
    """

    def __init__(self) -> None:
        self.known = Known()
        self.protocol = Protocol()
        self._texts = TextCounts()
        self._recent: Bounded[tuple[Family, int], Own] = Bounded(_MAX_RECENT)

    async def count(
        self, target_key: str, family: Family, request: Request, *, asker: str = "", window_tokens: int = 0
    ) -> Estimate:
        """The tokens of a request. Raises on nothing in its messages and tools.

        Args:
            target_key: the deployment, whose server's numbers are used.
            family: of its model.
            request: to be sent.
            asker: the tenant (`Target.asker`); what was remembered of another's requests is not used.
            window_tokens: a part stands for all of a request that no such window can hold; 0 counts all of any.

        Raises:
            RecursionError: its extras are nested deeper than JSON is written.
        """
        family = await usable_soon(family)
        chars = _chars(request)
        reach_chars = max(_MOST_CHARS_PER_TOKEN * window_tokens, _ALWAYS_COUNTED_CHARS) if window_tokens else chars
        is_long = chars > _THREAD_CHARS
        prints = await asyncio.to_thread(fingerprints, request, asker) if is_long else fingerprints(request, asker)
        own = await self._own(family, request, prints, asker, chars, min(1.0, reach_chars / max(1, chars)))
        method = _method(family, rendered=own.rendered)
        told = self.known.prompt(target_key, method, prints, asks=own.asks)
        made = estimated(own, told, self._text(target_key, family, own), self.known.price(target_key))
        return replace(made, method=method, prints=prints)

    async def _own(self, family: Family, request: Request, prints: Prints, asker: str, chars: int, share: float) -> Own:
        """Remembers whole counts, since two hooks count the same request."""
        keys = [(family, entry) for entry in prints]
        if keys and (found := self._recent.get(keys[-1])) is not None:
            self._recent.move_to_end(keys[-1])
            return found
        # Of a request that goes on from one that was counted only the newest messages are new.
        begun = next((at for at in range(len(keys) - 2, 0, -1) if keys[at] in self._recent), 0)
        new_chars = sum(len(message.text) for message in request.messages[begun:]) if begun else chars
        texts = self._texts.of(asker)
        if new_chars > _THREAD_NEW_CHARS or len(request.messages) > _THREAD_MESSAGES:
            own = await asyncio.to_thread(own_count, family, request, texts, share=share)
        else:
            own = own_count(family, request, texts)
        if keys:
            self._recent[keys[-1]] = own
        return own

    def _text(self, target_key: str, family: Family, own: Own) -> Span:
        method = _method(family, rendered=own.rendered)
        return self.known.text(target_key, method, own, error_ratio(family, own), is_own=family.owns_vocabulary)

    def text_counter(
        self, target_key: str, family: Family, *, asker: str = "", text: Span | None = None
    ) -> Callable[[str], int]:
        """Counts texts by themselves, without any template around them: in the caller's thread, 0.03 s at most.

        Of a long text eight pieces stand for all of it: whatever is sent is counted as a request before. It counts as
        an estimate does whose `text` is given.
        """
        texts = self._texts.of(asker)

        def count_text(content: str) -> int:
            usual = usable(family)
            (tokens,) = texts.lengths(usual, [content], is_quick=True)
            span = text or self._text(target_key, usual, Own((), rendered=bool(usual.template)))
            return ceil(tokens * max(1.0, span.usual))

        return count_text

    def learn(self, target_key: str, count: Estimate, prompt_tokens: int, *, label: str = "") -> bool:
        """Learns from the server's number for the request that `count` is of; `label` is for logs.

        Returns:
            False if it does not: no number (≤ 0), a ratio that no vocabulary explains, and a number far below what is
            expected, of which a window that is smaller than it said may be the reason, until a second one agrees.
        """
        if prompt_tokens <= 0 or count.own.tokens <= 0:
            return False
        is_low = prompt_tokens < _DOUBTFUL_RATIO * count.low and count.high > _UNCUT_TOKENS
        if is_low and not self.known.explains(target_key, count, prompt_tokens):
            return False
        self._compare(target_key, label, count, prompt_tokens)
        if prompt_tokens > MOST_RATIO * count.own.tokens + _MOST_ADDED_TOKENS:
            return False
        self._note(target_key, count, prompt_tokens, is_sure=False)
        return True

    def take_over(self, target_key: str, count: Estimate, prompt_tokens: int) -> bool:
        """Learns the number of a prompt that the server cannot have cut: asked for, and shorter than its window.

        It is believed at once of this prompt, however far from ours: a template may leave out all the tools.

        Returns:
            False if no vocabulary explains the number.
        """
        own_tokens = count.own.tokens
        if not count.fingerprint or not own_tokens / _MOST_LEFT_OUT < prompt_tokens <= MOST_RATIO * own_tokens:
            return False
        self._compare(target_key, "", count, prompt_tokens)
        self._note(target_key, count, prompt_tokens, is_sure=True)
        return True

    def take_protocols(self, target_key: str, count: Estimate, prompt_tokens: int, *, is_whole: bool) -> None:
        """Learns a number of LM Studio's protocol, in part of ours unless it `is_whole`."""
        doubt_tokens = self.protocol.take(target_key, count.fingerprint, prompt_tokens, is_whole=is_whole)
        told = Told(prompt_tokens, count.own.amounts, doubt_tokens)
        self.known.note_prompt(target_key, count, told, is_sure=False)

    def learn_ratio(self, target_key: str, count: Estimate, prompt_tokens: int) -> None:
        """Learns of a number that is of more than the prompt itself: an overflow's, in the middle of an answer."""
        if prompt_tokens > 0:
            self.known.note(target_key, replace(count, told=None), prompt_tokens)

    def _note(self, target_key: str, count: Estimate, prompt_tokens: int, *, is_sure: bool) -> None:
        self.known.note(target_key, count, prompt_tokens)
        self.known.note_prompt(target_key, count, Told(prompt_tokens, count.own.amounts), is_sure=is_sure)

    def _compare(self, target_key: str, label: str, count: Estimate, prompt_tokens: int) -> None:
        if not self.protocol.compare(target_key, label, count.fingerprint, prompt_tokens):
            self.known.forget_doubted(target_key)

    def is_suspicious(self, count: Estimate, prompt_tokens: int) -> bool:
        """Returns True if the server's number is so far below ours that it has probably cut the prompt."""
        return 0 < prompt_tokens < _CUT_RATIO * count.low and count.low >= _LEAST_CUT_TOKENS

    def may_be_cut(self, count: Estimate, prompt_tokens: int) -> bool:
        """Returns True if a part of the prompt may be missing by the server's number: it is below what we expect.

        That alone alarms of nothing, since a stand-in counts far too much of some texts: its window says more.
        """
        return 0 < prompt_tokens < _DOUBTFUL_RATIO * count.tokens and count.tokens >= _LEAST_CUT_TOKENS


def _chars(request: Request) -> int:
    chars = chars_of(request.tools) if request.tools else 0
    chars += chars_of(request.extras) if request.extras else 0
    for message in request.messages:
        chars += len(message.text) + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)
    return chars


def chars_of(value: Any) -> int:
    """About how many characters are in a value, without following values that nest too deep."""
    total = 0
    open_values: list[Any] = [value]
    while open_values:
        current = open_values.pop()
        # `dict` first: an abstract class is ten times slower to ask.
        if isinstance(current, str):
            total += len(current)
        elif isinstance(current, (dict, Mapping)):
            open_values += current.values()
            total += 16 * len(current)
        elif isinstance(current, (list, tuple)):
            open_values += current
        else:
            total += 8
    return total


def _method(family: Family, *, rendered: bool) -> str:
    """Rendered prompts say nothing about constants, nor one vocabulary about another."""
    return "|".join((family.name, family.vocabulary, family.template if rendered else ""))
