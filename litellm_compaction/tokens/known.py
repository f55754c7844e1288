"""Remembers what servers have counted: exact prompts, and the ratios of text and images.

One odd number cannot refuse a client for good, since nothing here can say "too long": a lesson widens an interval and
moves its middle only if a second number agrees, sixteen newer ones replace it, and a refusal asks the server about the
very prompt first (`engine/asking.py`). All of it is this process's memory: one answer teaches it again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from statistics import median

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.tokens.estimate import Amounts, Estimate, Own, Prints, Span, Told

# Wildcard deployments get their model names from clients, so the number of targets needs an end.
_MAX_TARGETS, _MAX_PROMPTS = 4096, 16_384
_KEPT_RATIOS, _KEPT_PRICES = 16, 8
# Of fewer tokens a number says nothing of a ratio; no vocabulary explains one outside these bounds.
_LEAST_TOKENS = 200
LEAST_RATIO, MOST_RATIO = 0.3, 4.0
# Of each other two numbers below every bound, of prompts of so different sizes, are no accident: a cut has one size.
_SAME_RATIO, _OTHER_SIZE_RATIO = 0.03, 1.25
# Beyond what was seen: after two numbers, after seven, after more, and if all are one (`slack` of `Known.text`).
_SLACKS, _EXACT_SLACK = ((3, 0.30), (8, 0.15), (_KEPT_RATIOS + 1, 0.08)), 0.02


def fingerprints(request: Request, asker: str = "") -> Prints:
    """Entry i stands for the first i messages, to the letter, with the request's tools and extras: 0.5 ms per new MB.

    Empty if the request cannot be written as JSON. The same request of two tenants (`asker`) has no entry in common, so
    that the count and the time of one's request do not tell what the other has sent.
    """
    try:
        beside = [request.tools, request.tool_choice, *([request.extras] if request.extras else [])]
        entry = hash((asker, json.dumps(beside)))
        entries = [entry]
        for message in request.messages:
            entry = hash((entry, *_content(message)))
            entries.append(entry)
    except (RecursionError, TypeError, ValueError):
        return ()
    return tuple(entries)


def _content(message: Message) -> Sequence[str]:
    """All of a message, its text without a copy if it is plain."""
    content = message.raw.get("content")
    if not isinstance(content, str):
        return (json.dumps(message.raw),)
    if len(message.raw) == 2:
        return message.role, content
    return content, json.dumps({key: value for key, value in message.raw.items() if key != "content"})


class Known:
    """Used between two awaits only, so that it needs no lock; threads that count texts only read."""

    def __init__(self) -> None:
        self._prompts: Bounded[tuple[str, str, bool, int], Told] = Bounded(_MAX_PROMPTS)
        self._ratios: Bounded[tuple[str, str, bool], deque[float]] = Bounded(_MAX_TARGETS)
        self._odd: Bounded[tuple[str, str], tuple[float, float]] = Bounded(_MAX_TARGETS)
        self._prices: Bounded[str, deque[float]] = Bounded(_MAX_TARGETS)

    def prompt(self, target_key: str, method: str, prints: Prints, *, asks: bool) -> Told | None:
        """The server's number for the longest prompt that a request begins with, the whole of it included.

        Of those that end alike: before a tool's result some templates leave the system message out (`Own.asks`).
        """
        keys = ((target_key, method, asks, entry) for entry in reversed(prints[1:]))
        key = next((key for key in keys if key in self._prompts), None)
        if key is None:
            return None
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def text(self, target_key: str, method: str, own: Own, error_ratio: float, *, is_own: bool) -> Span:
        """What a server makes of text.

        Args:
            target_key: the deployment.
            method: of our count.
            own: our count of the text.
            error_ratio: of such a count before anything is known of the server.
            is_own: the vocabulary is the model's own; a stand-in counts far too much of some texts.
        """
        low, high = (1 / (1 + error_ratio) if is_own else 0.45), 1 + error_ratio
        ratios = self._ratios.get((target_key, method, own.asks)) or self._ratios.get((target_key, method, True))
        if not ratios:
            return Span(low, 1.0, high, is_confirmed=False)
        is_one = len(ratios) == 1
        seen = [*ratios, *([low, high] if is_one and not low <= ratios[0] <= high else [])]
        least, most = min(seen), max(seen)
        # One number moves a count no further than its interval; of two that disagree the one nearer to our own holds.
        middle = median([*ratios, 1.0] if len(ratios) % 2 == 0 else ratios)
        usual = min(max(ratios[0], low), high) if is_one else middle
        is_exact = is_own and error_ratio <= _EXACT_SLACK
        slack = next(slack for numbers, slack in _SLACKS if len(ratios) < numbers)
        if is_exact and most - least < _EXACT_SLACK:
            slack = _EXACT_SLACK
        elif is_own:
            # Near our own numbers leave little doubt.
            slack = min(slack, _EXACT_SLACK + 2 * max(most - 1, 1 - least))
        # A ratio below one may be of another kind of text.
        most = most if own.rendered else max(1.0, most)
        return Span(min(least * (1 - slack), usual), usual, max(most * (1 + slack), usual), is_confirmed=True)

    def price(self, target_key: str) -> Span:
        """What a server makes of our estimates of media."""
        prices = self._prices.get(target_key)
        if not prices:
            return Span(0.0, 1.0, 1.0, is_confirmed=False)
        dearest = max(prices)
        # Another picture may be of another kind.
        high = 1.05 * dearest if len(prices) > 2 else max(1.15 * dearest, 0.5 + 0.5 * dearest)
        return Span(0.95 * min(prices), dearest, high, is_confirmed=True)

    def note_prompt(self, target_key: str, count: Estimate, told: Told, *, is_sure: bool) -> None:
        """A second number stands only if it is higher, or was asked for: some servers leave out what was cached."""
        key = (target_key, count.method, count.own.asks, count.fingerprint)
        known = self._prompts.get(key)
        if known is not None and told.doubt_tokens >= known.doubt_tokens:
            is_better = not told.doubt_tokens and (is_sure or known.tokens < told.tokens)
        else:
            is_better = True
        if count.fingerprint and is_better:
            self._prompts[key] = told

    def forget_doubted(self, target_key: str) -> None:
        """Forgets the numbers of a protocol that an answer has contradicted."""
        for key in [key for key, told in self._prompts.items() if key[0] == target_key and told.doubt_tokens]:
            del self._prompts[key]

    def note(self, target_key: str, count: Estimate, tokens: int) -> None:
        """Learns what a server makes of text and media, from its number for a prompt that it has not cut."""
        told = count.told if count.told is not None and not count.told.doubt_tokens else None
        base = told.tokens if told is not None else 0
        new = count.own.amounts.since(told.amounts) if told is not None else count.own.amounts
        price = self.price(target_key)
        if new.media:
            self._note_price(target_key, count, new, tokens - base)
            if new.media > new.text / 3 and not price.is_confirmed:
                return
        # Before another end than the person's word some templates leave the system message out.
        ends = [True, False] if base else [count.own.asks]
        is_clear = new.optional <= 0.1 * new.text or (target_key, count.method, ends[0]) not in self._ratios
        ratio = (tokens - base - new.media * price.usual) / max(1.0, new.text)
        if new.text >= _LEAST_TOKENS and is_clear and LEAST_RATIO <= ratio <= MOST_RATIO:
            for asks in ends:
                self._ratios.setdefault((target_key, count.method, asks), deque(maxlen=_KEPT_RATIOS)).append(ratio)

    def _note_price(self, target_key: str, count: Estimate, new: Amounts, tokens: int) -> None:
        """Learns the price of media if the text beside them is known well."""
        doubt = abs(new.text) * (0.02 if count.own.rendered else count.other_likely_ratio - 1)
        ratio = (tokens - new.text) / new.media
        if doubt <= 0.2 * new.media and -0.2 <= ratio <= MOST_RATIO:
            self._prices.setdefault(target_key, deque(maxlen=_KEPT_PRICES)).append(max(0.0, ratio))

    def explains(self, target_key: str, count: Estimate, tokens: int) -> bool:
        """Returns True if a number far below ours is how this server counts, by another like it of another prompt."""
        key, own_tokens = (target_key, count.method), count.own.tokens
        ratio = tokens / max(1.0, own_tokens)
        other = self._odd.get(key)
        self._odd[key] = own_tokens, ratio
        if other is None or abs(ratio - other[1]) > _SAME_RATIO * ratio:
            return False
        return max(own_tokens, other[0]) >= _OTHER_SIZE_RATIO * min(own_tokens, other[0])
