"""Estimates what servers make of requests, and learns from what they say (`known.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Request
from litellm_compaction.templates.template import chars_of
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import usable, usable_soon
from litellm_compaction.tokens.estimate import Estimate, Own, Prints, Span, estimated
from litellm_compaction.tokens.known import LEAST_RATIO, MOST_RATIO, Known, Protocol, fingerprints
from litellm_compaction.tokens.prompt import error_ratio, own_count
from litellm_compaction.tokens.texts import Place, TextCounts

# Hashes of more text than this, and tokens of more new text and of more messages, are made outside the event loop's
# thread: 1 ms, and 2 to 4 ms.
_THREAD_CHARS, _THREAD_NEW_CHARS, _THREAD_MESSAGES = 1_000_000, 30_000, 200
# Whole counts, of about 30 bytes per message.
_MAX_RECENT = 256
# Numbers so far below the least that we expect are those of cut prompts, if the prompts are longer than this.
_CUT_RATIO, _DOUBTFUL_RATIO, _LEAST_CUT_TOKENS = 0.85, 0.98, 1024
# A server may add a system message of its own to a short prompt.
# No template leaves out more of a prompt; a server whose number is lower does not count it.
_MOST_LEFT_OUT = 50
_MOST_ADDED_TOKENS = 512
# No model is loaded with a window that cuts so few.
_UNCUT_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A true count that the family does not explain: `ratio` is `actual` / `expected`."""

    expected: int
    actual: int
    ratio: float


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
        self._has_warned: Bounded[str, bool] = Bounded(_MAX_RECENT)

    async def count(self, target_key: str, family: Family, request: Request, *, asker: str = "") -> Estimate:
        """The tokens of a request. Raises on nothing in its messages and tools.

        Args:
            target_key: the deployment, whose server's numbers are used.
            family: of its model.
            request: to be sent.
            asker: the tenant (`Target.asker`); what was remembered of another's requests is not used.

        Raises:
            RecursionError: its extras are nested deeper than JSON is written.
        """
        family = await usable_soon(family)
        chars = _chars(request)
        prints = (
            await asyncio.to_thread(fingerprints, request, asker)
            if chars > _THREAD_CHARS
            else fingerprints(request, asker)
        )
        own = await self._own(family, request, prints, asker, chars)
        method = _method(family, rendered=own.rendered)
        told = self.known.prompt(target_key, method, prints, asks=own.asks)
        made = estimated(own, told, self._text(target_key, family, own), self.known.price(target_key))
        return replace(made, method=method, prints=prints)

    async def _own(self, family: Family, request: Request, prints: Prints, asker: str, chars: int) -> Own:
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
            own = await asyncio.to_thread(own_count, family, request, texts)
        else:
            own = own_count(family, request, texts)
        if keys:
            self._recent[keys[-1]] = own
        return own

    def _text(self, target_key: str, family: Family, own: Own) -> Span:
        method = _method(family, rendered=own.rendered)
        return self.known.text(target_key, method, own, error_ratio(family, own), is_own=family.owns_vocabulary)

    async def prepare(self, family: Family) -> None:
        """Loads vocabulary and templates, so that no request is the first one: some calls hold the interpreter lock."""
        await usable_soon(family)

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
            place: Place = "digits apart" if usual.single_digits else "alone"
            (tokens,) = texts.sampled(usual.vocabulary, [content], place)
            span = text or self._text(target_key, usual, Own((), rendered=bool(usual.template)))
            return ceil(tokens * max(1.0, span.usual))

        return count_text

    def learn(self, target_key: str, count: Estimate, prompt_tokens: int, *, label: str = "") -> Deviation | None:
        """Learns from the server's number for the request that `count` is of; `label` is for logs.

        Not learned: no number (≤ 0), a ratio that no vocabulary explains, and what was probably cut.

        Returns:
            A deviation if the number was refused, and the first time that an exact family is off by more than 5 %.
        """
        own_tokens = count.own.tokens
        if prompt_tokens <= 0 or own_tokens <= 0:
            return None
        self._compare(target_key, label, count, prompt_tokens)
        deviation = Deviation(
            expected=round(own_tokens), actual=prompt_tokens, ratio=prompt_tokens / max(1.0, own_tokens)
        )
        if prompt_tokens > MOST_RATIO * (own_tokens + count.own.hidden_tokens) + _MOST_ADDED_TOKENS:
            return deviation
        if prompt_tokens < _DOUBTFUL_RATIO * count.low and count.high > _UNCUT_TOKENS:
            # Far below what is expected: a window that is smaller than it said, or a server that counts so.
            if not self.explains(target_key, count, prompt_tokens):
                is_odd = deviation.ratio < LEAST_RATIO or self.is_suspicious(count, prompt_tokens)
                return deviation if is_odd else None
        else:
            self._note(target_key, count, prompt_tokens, is_sure=False)
        if (
            not count.own.exact
            or abs(deviation.ratio - 1) <= 0.05
            or own_tokens < 200
            or target_key in self._has_warned
        ):
            return None
        self._has_warned[target_key] = True
        return deviation

    def explains(self, target_key: str, count: Estimate, prompt_tokens: int) -> bool:
        """Learns a number far below ours if it is how this server counts, by another like it; returns True if so."""
        is_explained = self.known.explains(target_key, count, prompt_tokens)
        if is_explained:
            self._note(target_key, count, prompt_tokens, is_sure=False)
        return is_explained

    def _note(self, target_key: str, count: Estimate, prompt_tokens: int, *, is_sure: bool) -> None:
        self.known.note(target_key, count, prompt_tokens)
        self.known.note_prompt(target_key, count, prompt_tokens, is_sure=is_sure)

    def learn_ratio(self, target_key: str, count: Estimate, prompt_tokens: int) -> None:
        """Learns of a number that is of more than the prompt itself: an overflow's, in the middle of an answer."""
        if prompt_tokens > 0:
            self.known.note(target_key, replace(count, told=None), prompt_tokens)

    def take_over(self, target_key: str, count: Estimate, prompt_tokens: int) -> bool:
        """Learns the number of a prompt that the server cannot have cut: asked for, and shorter than its window.

        It is believed at once of this prompt, however far from ours: a template may leave out all the tools.

        Returns:
            False if no vocabulary explains the number.
        """
        own = count.own
        is_possible = (
            own.tokens
            < _MOST_LEFT_OUT * prompt_tokens
            <= _MOST_LEFT_OUT * MOST_RATIO * (own.tokens + own.hidden_tokens)
        )
        if not count.fingerprint or not is_possible:
            return False
        self._compare(target_key, "", count, prompt_tokens)
        self._note(target_key, count, prompt_tokens, is_sure=True)
        return True

    def _compare(self, target_key: str, label: str, count: Estimate, prompt_tokens: int) -> None:
        self.protocol.compare(target_key, label, count.fingerprint, prompt_tokens)
        if not self.protocol.is_believed(target_key):
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


def _method(family: Family, *, rendered: bool) -> str:
    """Rendered prompts say nothing about constants, nor one vocabulary about another."""
    return "|".join((family.name, family.vocabulary, family.template if rendered else ""))
