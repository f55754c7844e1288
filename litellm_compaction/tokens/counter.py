"""Estimates what servers make of requests, counts running answers, and learns from what servers say (`known.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

from litellm_compaction.concurrency import Bounded, is_long, off_loop_if
from litellm_compaction.core.messages import Request
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import usable, usable_soon
from litellm_compaction.tokens.estimate import UNCONFIRMED_RATIO, Estimate, Own, Prints, Span, Told, estimated
from litellm_compaction.tokens.known import Known, Protocol, fingerprints, is_explained
from litellm_compaction.tokens.prompt import TextCounts, own_count, strings

# More text and more messages are counted outside the event loop's thread (2 to 4 ms); within it so much of one text.
_THREAD_CHARS, _THREAD_MESSAGES, _QUICK_CHARS = 30_000, 200, 131_072
# A running answer is counted by so many characters, once: chunks may have several tokens. Between two counts stands
# what the last pieces took, and never less than English takes.
_SETTLED_CHARS, _CHARS_PER_TOKEN = 256, 4.0
_MAX_RECENT = 256
# Numbers so far below the least that we expect are those of cut prompts, if the prompts are longer than this.
_CUT_RATIO, _DOUBTFUL_RATIO, _LEAST_CUT_TOKENS = 0.85, 0.98, 1024
# The least that a template makes of what stood before.
_SAME_BEGINNING_RATIO = 0.97
# No model is loaded with a window that cuts so few.
_UNCUT_TOKENS = 2048
# No vocabulary has a longer token (128 blanks in cl100k and o200k): more text for each token of the window never fits.
_MOST_CHARS_PER_TOKEN, _ALWAYS_COUNTED_CHARS = 256, 1_000_000


class TokenCounter:
    """Counts for any number of deployments, and remembers their servers' numbers."""

    def __init__(self) -> None:
        self.known = Known()
        self.protocol = Protocol()
        self._texts = TextCounts()
        self._recent: Bounded[tuple[Family, int], Own] = Bounded(_MAX_RECENT)

    async def count(
        self, target_key: str, family: Family, request: Request, *, asker: str = "", window_tokens: int = 0
    ) -> Estimate:
        """The tokens of a request, by the numbers of its deployment's server for this tenant, the `asker`.

        A part stands for all of a request that no window of so many tokens can hold; with 0 all of any is counted.
        """
        family = await usable_soon(family)
        chars = _chars(request)
        reach_chars = max(_MOST_CHARS_PER_TOKEN * window_tokens, _ALWAYS_COUNTED_CHARS) if window_tokens else chars
        counted = partial(self._own, family, request, asker, min(1.0, reach_chars / max(1, chars)))
        takes_long = chars > _THREAD_CHARS or len(request.messages) > _THREAD_MESSAGES or is_long(request.messages)
        own, prints = await off_loop_if(takes_long, counted)
        method = _method(family, rendered=own.rendered)
        told = self.known.prompt(target_key, method, prints, asks=own.asks)
        text = self._text(target_key, family, rendered=own.rendered)
        return estimated(own, told, text, self.known.price(target_key, method, own.amounts), method, prints)

    def _own(self, family: Family, request: Request, asker: str, share: float) -> tuple[Own, Prints]:
        prints = fingerprints(request, asker)
        key = (family, prints[-1] if prints else 0)
        # Two hooks count the same request.
        own = self._recent.get(key) or own_count(family, request, self._texts.of(asker), share=share)
        if prints:
            self._recent[key] = own
        return own, prints

    def _text(self, target_key: str, family: Family, *, rendered: bool) -> Span:
        return self.known.text(target_key, _method(family, rendered=rendered), family, rendered=rendered)

    def text_counter(
        self, target_key: str, family: Family, *, asker: str = "", text: Span | None = None
    ) -> Callable[[str], int]:
        """Counts texts without any template around them, as an estimate does whose `text` is given.

        In the caller's thread, 0.03 s at most: a part of a long text stands for all of it.
        """
        texts = self._texts.of(asker)

        def count_text(content: str) -> int:
            usual = usable(family)
            (tokens,) = texts.lengths(usual, [content], share=_QUICK_CHARS / max(1, len(content)))
            span = text or self._text(target_key, usual, rendered=bool(usual.template))
            return ceil(tokens * max(1.0, span.usual))

        return count_text

    def learn(
        self, target_key: str, count: Estimate, prompt_tokens: int, *, label: str = "", is_asked: bool = False
    ) -> bool:
        """Learns from the server's number for the request that `count` is of; `label` is for logs.

        Returns False for no number, one that no vocabulary explains, one below that of the prompt's beginning (some
        servers leave out what they had in their cache), and one far below what is expected, as of a window that is
        smaller than it said, until a second one agrees. One that `is_asked` for, of a prompt that the server cannot
        have cut, is believed at once however far from ours it is: a template may leave out all the tools.
        """
        is_likely, text, price = is_explained(count.own, prompt_tokens), *count.rates
        is_below = is_likely and self._contradicts(target_key, count, prompt_tokens)
        if is_asked:
            amounts = count.own.amounts
            least_tokens = (amounts.text - amounts.optional) * text.low + amounts.media * price.low
            is_taken = is_likely and bool(count.fingerprint) and not (is_below and prompt_tokens < least_tokens)
        else:
            is_low = prompt_tokens < _DOUBTFUL_RATIO * count.low and count.high > _UNCUT_TOKENS
            is_new = is_likely and not is_below
            is_taken = is_new and (not is_low or self.known.explains(target_key, count, prompt_tokens))
        if is_taken:
            if not self.protocol.compare(target_key, label, count.fingerprint, prompt_tokens):
                self.known.forget(target_key)
            self.known.note(target_key, count, prompt_tokens)
            self.known.note_prompt(target_key, count, Told(prompt_tokens, count.own.amounts), is_sure=is_asked)
        return is_taken

    def _contradicts(self, target_key: str, count: Estimate, prompt_tokens: int) -> bool:
        """Returns True if a number is less than that of the prompt's beginning with the least of the rest.

        The one that our own count does not explain is forgotten, if it is the beginning's.
        """
        told = count.told
        if told is None or told.doubt_tokens:
            return False
        new = count.own.amounts.since(told.amounts)
        least_tokens = max(0.0, new.text - new.optional) * count.rates[0].low if new.text > 0 else new.text
        if prompt_tokens >= _SAME_BEGINNING_RATIO * (told.tokens + least_tokens):
            return False
        if told.tokens > UNCONFIRMED_RATIO * (told.amounts.text + told.amounts.media):
            self.known.forget(target_key, count.prints[1:])
        return True

    def awaits_protocol(self, target_key: str, count: Estimate, request: Request) -> bool:
        """Returns True if LM Studio's protocol can tell more of a request: nothing of images, nor of reasoning."""
        own, told = count.own, count.told if count.is_counted else None
        # An answer to another prompt may have confirmed the protocol since.
        if told is not None and told.doubt_tokens <= self._protocols_doubt(target_key, count, told.tokens):
            return False
        is_said = own.rendered or not any(message.reasoning for message in request.messages)
        has_price = count.rates[1].is_confirmed or not own.images
        return bool(count.fingerprint) and is_said and has_price and self.protocol.is_believed(target_key)

    def take_protocols(self, target_key: str, count: Estimate, request: Request, prompt_tokens: int) -> None:
        """Learns a number of LM Studio's protocol; images as answers have priced them and reasoning are added to it."""
        own, extends = count.own, bool(request.extras) or any(message.reasoning for message in request.messages)
        beside = own.amounts.media * count.rates[1].usual + (own.optional_tokens if extends else 0.0)
        prompt_tokens += round(beside)
        if not beside:
            self.protocol.take(target_key, count.fingerprint, prompt_tokens)
        told = Told(prompt_tokens, own.amounts, self._protocols_doubt(target_key, count, prompt_tokens))
        self.known.note_prompt(target_key, count, told, is_sure=False)

    def _protocols_doubt(self, target_key: str, count: Estimate, prompt_tokens: int) -> int:
        """By how much a number of the protocol may be off, with the images that were added to it."""
        price, doubt_tokens = count.rates[1], self.protocol.doubt_tokens(target_key, prompt_tokens)
        return doubt_tokens + ceil(count.own.amounts.media * (price.high - price.usual))

    def is_suspicious(self, count: Estimate, prompt_tokens: int) -> bool:
        """Returns True if the server's number is so far below ours that it has probably cut the prompt."""
        return 0 < prompt_tokens < _CUT_RATIO * count.low and count.low >= _LEAST_CUT_TOKENS

    def may_be_cut(self, count: Estimate, prompt_tokens: int) -> bool:
        """Returns True if a part of the prompt may be missing by the server's number: the window says more."""
        return 0 < prompt_tokens < _DOUBTFUL_RATIO * count.tokens and count.tokens >= _LEAST_CUT_TOKENS


class GeneratedTokens:
    """Counts a running answer, each text of it once, in pieces that end between words; `of` a text counts it alone."""

    def __init__(self, of: Callable[[str], int]) -> None:
        self.of = of
        self.tokens = 0
        self._counted_tokens = self._counted_chars = 0
        self._pending = ""

    def add(self, text: str) -> None:
        """Takes a delta: text, reasoning, or the arguments of a tool call."""
        self._pending += text
        if len(self._pending) >= _SETTLED_CHARS:
            self._settle(self._pending.rfind(" ", len(self._pending) - _SETTLED_CHARS // 2))
        chars_per_token = min(_CHARS_PER_TOKEN, self._counted_chars / max(1, self._counted_tokens) or _CHARS_PER_TOKEN)
        self.tokens = self._counted_tokens + round(len(self._pending) / chars_per_token)

    def exact(self) -> int:
        """The tokens so far, with the last piece counted too."""
        self._settle(0)
        self.tokens = self._counted_tokens
        return self._counted_tokens

    def _settle(self, end: int) -> None:
        piece, self._pending = (self._pending[:end], self._pending[end:]) if end > 0 else (self._pending, "")
        self._counted_tokens += self.of(piece) if piece else 0
        self._counted_chars += len(piece)


def _chars(request: Request) -> int:
    """About how many characters are in a request."""
    chars = sum(map(len, strings([request.tools, request.extras])))
    for message in request.messages:
        chars += len(message.text) + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)
    return chars


def _method(family: Family, *, rendered: bool) -> str:
    """Rendered prompts say nothing about constants, nor one vocabulary or load about another."""
    return "|".join((family.name, family.vocabulary, family.template if rendered else "", str(family.load)))
