"""Remembers what servers have counted: exact prompts, the ratios of text and images, and if a protocol was right.

One odd number cannot refuse a client for good: a lesson widens an interval and moves its middle only if a second number
agrees, sixteen newer ones replace it, and a refusal asks the server about the very prompt first (`engine/servers.py`).
Used between two awaits only, so that it needs no lock; threads that count texts only read.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from math import ceil, inf
from statistics import median

from litellm_compaction.concurrency import Bounded, Rests
from litellm_compaction.core.messages import Request
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.estimate import Amounts, Estimate, Own, Prints, Span, Told

logger = logging.getLogger("litellm_compaction")

# Wildcard deployments get their model names from clients, so the number of targets needs an end.
_MAX_TARGETS, _MAX_PROMPTS = 4096, 16_384
_KEPT_RATIOS, _KEPT_PRICES = 16, 8
# Beside more doubt of the text a number says nothing of images. None costs more: an icon may, as much as a page.
_MOST_DOUBT, _MOST_IMAGE_TOKENS = 0.25, 4096
# Prices so near to each other may be one for all.
_ONE_PRICE_RATIO = 1.15
# Of fewer tokens a number says nothing of a ratio; no vocabulary explains one outside these bounds.
_LEAST_TOKENS = 200
_LEAST_RATIO, _MOST_RATIO = 0.3, 4.0
# No template leaves out more of a prompt; a server whose number is lower does not count it. It may add a system message
# of its own to a short one.
_MOST_LEFT_OUT, _MOST_ADDED_TOKENS = 50, 512
# Of each other two numbers below every bound, of prompts of so different sizes, are no accident: a cut has one size.
_SAME_RATIO, _OTHER_SIZE_RATIO = 0.03, 1.25
# Beyond what was seen: after two numbers, after seven, after more, and for an own vocabulary if all are alike.
_SLACKS, _OWN_SLACK = ((3, 0.30), (8, 0.15), (inf, 0.08)), 0.02
# Of a request that its template refused, and the least that is made of a stand-in's tokens.
_REFUSED_ERROR, _STAND_IN_RATIO = 0.10, 0.45
# A protocol may leave out the token that begins a prompt, or the beginning of the answer. Until an answer has shown
# that it is right a part of its number is in doubt.
_MOST_CONSTANT_TOKENS, _SAME_COUNT_RATIO, _UNCONFIRMED_RATIO = 32, 0.02, 0.2
_DOUBTED_S = 3600.0


def _kind(method: str, amounts: Amounts) -> tuple[str, int]:
    return method.rpartition("|")[2], int(amounts.media / max(1.0, amounts.images)).bit_length()


def fingerprints(request: Request, asker: str) -> Prints:
    """Entry i stands for the first i messages, to the letter, with tools and extras; empty for what is no JSON.

    The same request of two tenants (`asker`) has no entry in common, so that the count and the time of one's request do
    not tell what the other has sent.
    """
    try:
        entries = [hash((asker, json.dumps([request.tools, request.tool_choice, request.extras])))]
        for message in request.messages:
            # A plain text without a copy.
            content = message.raw.get("content")
            rest = {**message.raw, "content": None} if isinstance(content, str) else message.raw
            entries.append(hash((entries[-1], content if isinstance(content, str) else "", json.dumps(rest))))
    except (RecursionError, TypeError, ValueError):
        return ()
    return tuple(entries)


def is_explained(own: Own, tokens: int) -> bool:
    """Returns True if some vocabulary, price of images and template make so many tokens of what we count."""
    most_tokens = _MOST_RATIO * own.tokens + own.images * _MOST_IMAGE_TOKENS + _MOST_ADDED_TOKENS
    return own.tokens / _MOST_LEFT_OUT < tokens <= most_tokens


class Known:
    """The numbers of all servers."""

    def __init__(self) -> None:
        self._prompts: Bounded[tuple[str, str, bool, int], Told] = Bounded(_MAX_PROMPTS)
        self._ratios: Bounded[tuple[str, str], deque[float]] = Bounded(_MAX_TARGETS)
        self._odd: Bounded[tuple[str, str], tuple[float, float]] = Bounded(_MAX_TARGETS)
        # To our estimate, and for each; by load, with which a method ends, and size.
        self._prices: Bounded[tuple[str, tuple[str, int]], deque[tuple[float, float]]] = Bounded(_MAX_TARGETS)

    def prompt(self, target_key: str, method: str, prints: Prints, *, asks: bool) -> Told | None:
        """The server's number for the longest prompt that a request begins with, the whole of it included.

        Of those that end alike (`Own.asks`); an answer that goes on may begin with a person's, which is never less.
        """
        ends = (True,) if asks else (False, True)
        keys = ((target_key, method, end, entry) for end in ends for entry in reversed(prints[1:]))
        key = next((key for key in keys if key in self._prompts), None)
        if key is None:
            return None
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def text(self, target_key: str, method: str, family: Family, *, rendered: bool) -> Span:
        """A server's ratio for text, counted by its family; a stand-in counts far too much of some."""
        is_own, refused_error = family.owns_vocabulary, _REFUSED_ERROR if family.template and not rendered else 0.0
        high = 1 + max(family.error_ratio, refused_error)
        low = 1 / high if is_own else _STAND_IN_RATIO
        ratios = self._ratios.get((target_key, method), ())
        if not ratios:
            return Span(low, 1.0, high, is_confirmed=False)
        # One number moves a count no further than its interval; of two that disagree the one nearer to our own holds.
        seen = [*ratios, 1.0] if len(ratios) == 2 else list(ratios)
        usual = median(seen) if len(ratios) > 1 else min(max(ratios[0], low), high)
        least, most = min(*seen, usual), max(*seen, usual)
        slack = next(slack for numbers, slack in _SLACKS if len(ratios) < numbers)
        if is_own:
            slack = min(slack, _OWN_SLACK + 2 * (most - least if len(ratios) > 2 else max(most - 1, 1 - least)))
        # A ratio below one may be of another kind of text.
        most = most if rendered else max(1.0, most)
        return Span(least * (1 - slack), usual, most * (1 + slack), is_confirmed=True)

    def price(self, target_key: str, method: str, amounts: Amounts) -> Span:
        """What a server makes of our estimates of media, by those of about this size: some have one price for all."""
        prices = self._prices.get((target_key, _kind(method, amounts)))
        if not prices:
            return Span(0.0, 1.0, 1.0, is_confirmed=False)
        ratios, tokens = zip(*prices, strict=True)
        dearest = max(ratios)
        # Another picture may be of another kind.
        high = 1.05 * dearest if len(prices) > 2 else max(1.15 * dearest, 0.5 + 0.5 * dearest)
        low = 0.95 * min(ratios)
        if max(tokens) <= _ONE_PRICE_RATIO * min(tokens):
            # Whatever their size.
            size = amounts.media / max(1.0, amounts.images) or 1.0
            low, high = min(low, 0.95 * min(tokens) / size), max(high, 1.05 * max(tokens) / size)
        return Span(low, dearest, high, is_confirmed=True)

    def note_prompt(self, target_key: str, count: Estimate, told: Told, *, is_sure: bool) -> None:
        """A second number stands only if it is higher, or was asked for: some servers leave out what was cached."""
        key = (target_key, count.method, count.own.asks, count.fingerprint)
        before = self._prompts.get(key, Told(0, Amounts(), inf))
        is_last = not told.doubt_tokens and (is_sure or before.tokens < told.tokens)
        if is_last or told.doubt_tokens < before.doubt_tokens:
            self._prompts[key] = told

    def forget(self, target_key: str, prints: Prints = ()) -> None:
        """Forgets the numbers of what a prompt begins with, else those of a protocol, which an answer contradicts."""
        for key, told in [*self._prompts.items()]:
            if key[0] == target_key and (key[-1] in prints if prints else told.doubt_tokens):
                del self._prompts[key]

    def note(self, target_key: str, count: Estimate, tokens: int) -> None:
        """Learns what a server makes of text and media, from its number for a prompt that it has not cut."""
        # Where a protocol counts each prompt before its answer does, nothing is new: the first lesson is of all of it.
        is_first = count.is_counted and not count.rates[0].is_confirmed
        base = Told(0, Amounts()) if count.told is None or count.told.doubt_tokens or is_first else count.told
        new, tokens = count.own.amounts.since(base.amounts), tokens - base.tokens
        price = self.price(target_key, count.method, new)
        if new.media:
            # The price of media, if the text beside them is known well.
            doubt = abs(new.text) * (0.02 if count.own.rendered else count.other_likely_ratio - 1)
            media = tokens - new.text
            most = max(_MOST_RATIO * new.media, new.images * _MOST_IMAGE_TOKENS)
            if doubt <= _MOST_DOUBT * max(new.media, media) and -_MOST_DOUBT * new.media <= media <= most:
                prices = self._prices.setdefault((target_key, _kind(count.method, new)), deque(maxlen=_KEPT_PRICES))
                prices.append((max(0.0, media) / new.media, max(0.0, media) / max(1.0, new.images)))
            if not price.is_confirmed:
                return
        ratio = (tokens - new.media * price.usual) / max(1.0, new.text)
        if new.text >= _LEAST_TOKENS and _LEAST_RATIO <= ratio <= _MOST_RATIO:
            self._ratios.setdefault((target_key, count.method), deque(maxlen=_KEPT_RATIOS)).append(ratio)

    def explains(self, target_key: str, count: Estimate, tokens: int) -> bool:
        """Returns True if a number far below ours is how this server counts, by another like it of another prompt."""
        key, own_tokens = (target_key, count.method), count.own.tokens
        ratio = tokens / max(1.0, own_tokens)
        other_tokens, other_ratio = self._odd.get(key, (0.0, 0.0))
        self._odd[key] = own_tokens, ratio
        least, most = sorted((own_tokens, other_tokens))
        return abs(ratio - other_ratio) <= _SAME_RATIO * ratio and most >= _OTHER_SIZE_RATIO * least


class Protocol:
    """Holds the counts of LM Studio's protocol against the answers to the same requests.

    Both are equal or a small constant apart, which stays a doubt; else the answers' numbers count alone for an hour.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._asked: Bounded[tuple[str, int], int] = Bounded(_MAX_TARGETS)
        # By how much it was off where an answer has confirmed it.
        self._off_tokens: Bounded[str, int] = Bounded(_MAX_TARGETS)
        self._doubted: Rests[str] = Rests(_DOUBTED_S, _DOUBTED_S, clock)

    def is_believed(self, target_key: str) -> bool:
        """Returns True if its counts were those of answers, as far as both are known."""
        return self._doubted.is_over(target_key)

    def doubt_tokens(self, target_key: str, tokens: int) -> int:
        """Returns by how much a number may be off, as far as answers have confirmed others."""
        return self._off_tokens.get(target_key, ceil(_UNCONFIRMED_RATIO * tokens))

    def take(self, target_key: str, fingerprint: int, tokens: int) -> None:
        """Takes a number that is of all of a request, to be compared with its answer's."""
        self._asked[target_key, fingerprint] = tokens

    def compare(self, target_key: str, label: str, fingerprint: int, prompt_tokens: int) -> bool:
        """Compares a count with the answer to the same request; False if it contradicts. `label` is for logs."""
        asked_tokens = self._asked.pop((target_key, fingerprint), None)
        if asked_tokens is None:
            return True
        off_tokens = abs(prompt_tokens - asked_tokens)
        if off_tokens <= _MOST_CONSTANT_TOKENS + _SAME_COUNT_RATIO * asked_tokens:
            self._off_tokens[target_key] = off_tokens
            return True
        self._off_tokens.pop(target_key, None)
        if self._doubted.begin(target_key):
            said = "ask_server model=%s: LM Studio's protocol counted %d tokens, its answer %d; it rests an hour"
            logger.warning(said, label, asked_tokens, prompt_tokens)
        return False
