"""Remembers what servers have counted: exact prompts, the ratios of text and images, and if a protocol is right.

One odd number cannot refuse a client for good, since nothing here can say "too long": a lesson widens an interval and
moves its middle only if a second number agrees, sixteen newer ones replace it, and a refusal asks the server about the
very prompt first (`engine/asking.py`). All of it is this process's memory: one answer teaches it again.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from litellm_compaction.concurrency import Bounded, Rests
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.tokens.estimate import Estimate, Own, Prints, Span, Told

logger = logging.getLogger("litellm_compaction")

# Wildcard deployments get their model names from clients, so the number of targets needs an end.
_MAX_TARGETS, _MAX_PROMPTS, _MAX_ASKED = 4096, 16_384, 1024
_KEPT_RATIOS, _KEPT_PRICES = 16, 8
# Of fewer tokens a number says nothing of a ratio; no vocabulary explains one outside these bounds.
_LEAST_TOKENS = 200
LEAST_RATIO, MOST_RATIO = 0.3, 4.0
# Of each other two numbers below every bound, of prompts of so different sizes, are no accident: a cut has one size.
_SAME_RATIO, _OTHER_SIZE_RATIO = 0.03, 1.25
# Beyond what was seen: after two numbers, after seven, after more, and if all are one (`slack` of `Known.text`).
_SLACKS, _EXACT_SLACK = ((3, 0.30), (8, 0.15), (_KEPT_RATIOS + 1, 0.08)), 0.02
# A protocol may leave out the token that begins a prompt, or the beginning of the answer; no answer has shown it yet.
_MOST_CONSTANT_TOKENS, _SAME_COUNT_RATIO, UNCONFIRMED_RATIO = 32, 0.02, 0.2
_DOUBTED_S = 3600.0


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


class _Prompt(NamedTuple):
    told: Told
    is_sure: bool


class Known:
    """Used between two awaits only, so that it needs no lock; threads that count texts only read."""

    def __init__(self) -> None:
        self._prompts: Bounded[tuple[str, str, bool, int], _Prompt] = Bounded(_MAX_PROMPTS)
        self._ratios: Bounded[tuple[str, str, bool], deque[float]] = Bounded(_MAX_TARGETS)
        self._odd: Bounded[tuple[str, str], tuple[float, float]] = Bounded(_MAX_TARGETS)
        self._prices: Bounded[str, deque[float]] = Bounded(_MAX_TARGETS)
        self._fronts: Bounded[tuple[str, str, bool, int], Told] = Bounded(_MAX_TARGETS)

    def prompt(self, target_key: str, method: str, prints: Prints, *, asks: bool) -> Told | None:
        """The server's number for the longest prompt that a request begins with, the whole of it included.

        Of those that end alike: before a tool's result some templates leave the system message out (`Own.asks`).
        """
        for entry in reversed(prints[1:]):
            found = self._prompts.get((target_key, method, asks, entry))
            if found is not None:
                self._prompts.move_to_end((target_key, method, asks, entry))
                return found.told
        return self._fronts.get((target_key, method, asks, prints[0])) if prints else None

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

    def note_prompt(self, target_key: str, count: Estimate, tokens: int, *, is_sure: bool, doubt: float = 0.0) -> None:
        """A second number stands only if it is higher, or was asked for: some servers leave out what was cached."""
        if not count.fingerprint:
            return
        key = (target_key, count.method, count.own.asks, count.fingerprint)
        known = self._prompts.get(key)
        if known is None or is_sure or (not doubt and (known.told.doubt_tokens or known.told.tokens < tokens)):
            self._prompts[key] = _Prompt(Told(tokens, count.own.amounts, doubt * tokens), is_sure)

    def forget_doubted(self, target_key: str) -> None:
        """Forgets the numbers of a protocol that an answer has contradicted."""
        for key in [key for key, each in self._prompts.items() if key[0] == target_key and each.told.doubt_tokens]:
            del self._prompts[key]

    def note(self, target_key: str, count: Estimate, tokens: int) -> None:
        """Learns what a server makes of text and media, from its number for a prompt that it has not cut."""
        told = count.told
        base = told.tokens if told is not None and not told.doubt_tokens else 0
        new = count.own.amounts.since(told.amounts) if told is not None and base else count.own.amounts
        self._note_front(target_key, count, tokens)
        price = self.price(target_key)
        got_text = tokens - base - new.media * price.usual
        if new.media:
            self._note_price(target_key, count, new.media, tokens - base - new.text, new)
            if new.media > new.text / 3 and not price.is_confirmed:
                return
        # Before another end than the person's word some templates leave the system message out.
        ends = [True, False] if base else [count.own.asks]
        is_clear = new.optional <= 0.1 * new.text or not self._ratios.get((target_key, count.method, ends[0]))
        if new.text >= _LEAST_TOKENS and is_clear and LEAST_RATIO <= got_text / new.text <= MOST_RATIO:
            for asks in ends:
                ratios = self._ratios.setdefault((target_key, count.method, asks), deque(maxlen=_KEPT_RATIOS))
                ratios.append(got_text / new.text)

    def _note_front(self, target_key: str, count: Estimate, tokens: int) -> None:
        """Learns what tools and all else around the messages take, if the messages are known better than that.

        It is below 0 if the template leaves out a system message.
        """
        own, front = count.own, count.own.front
        rest = own.amounts.text - front.text
        doubt_tokens = max(1.0, rest * (count.text.high - count.text.low) / 2)
        if not own.tools_tokens or own.images or not count.prints or not count.text.is_confirmed:
            return
        key = (target_key, count.method, own.asks, count.prints[0])
        known = self._fronts.get(key)
        if doubt_tokens < (known.doubt_tokens if known else front.text / 2):
            self._fronts[key] = Told(round(tokens - rest * count.text.usual), front, doubt_tokens)

    def _note_price(self, target_key: str, count: Estimate, media: float, got: float, new: object) -> None:
        """Learns the price of media if the text beside them is known well."""
        text = count.own.amounts.since(count.told.amounts).text if count.told else count.own.amounts.text
        doubt = abs(text) * (0.02 if count.own.rendered else count.other_likely_ratio - 1)
        ratio = got / media
        if doubt <= 0.2 * media and -0.2 <= ratio <= MOST_RATIO:
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


class Protocol:
    """Holds the counts of LM Studio's protocol against the answers to the same requests.

    Both are equal or a small constant apart, which is learned; else the answers' numbers count alone for an hour.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._asked: Bounded[tuple[str, int], tuple[int, float]] = Bounded(_MAX_ASKED)
        self._constants: Bounded[str, int] = Bounded(_MAX_TARGETS)
        self._doubted: Rests[str] = Rests(_DOUBTED_S, _DOUBTED_S, clock)

    def is_believed(self, target_key: str) -> bool:
        """Returns True if its counts were those of answers, as far as both are known."""
        return self._doubted.is_over(target_key)

    def is_confirmed(self, target_key: str) -> bool:
        """Returns True if an answer has shown that it counts as its server does."""
        return target_key in self._constants

    def take(self, target_key: str, count: Estimate, tokens: int, beside_tokens: float) -> int:
        """The number that an answer will have, which is compared later; `beside_tokens` the protocol leaves out."""
        if count.fingerprint:
            self._asked[target_key, count.fingerprint] = tokens, beside_tokens
        return tokens + self._constants.get(target_key, 0) + round(beside_tokens)

    def compare(self, target_key: str, label: str, fingerprint: int, prompt_tokens: int) -> None:
        """Compares a count with the answer to the same request; `label` is for logs."""
        asked = self._asked.pop((target_key, fingerprint), None)
        if asked is None:
            return
        tokens, beside_tokens = asked
        more, constant = prompt_tokens - tokens, self._constants.get(target_key, 0)
        same_tokens = _MOST_CONSTANT_TOKENS + _SAME_COUNT_RATIO * tokens
        if min(abs(more - constant), abs(more - beside_tokens - constant)) <= same_tokens:
            if not beside_tokens:
                self._constants[target_key] = more if abs(more) <= _MOST_CONSTANT_TOKENS else 0
            return
        if beside_tokens:
            # Images and reasoning cost what they cost.
            return
        self._constants.pop(target_key, None)
        if self._doubted.begin(target_key):
            logger.warning(
                "ask_server model=%s: LM Studio's protocol counted %d tokens and its answer %d for one prompt; for an "
                "hour the answers' numbers count alone (logged once)",
                label,
                tokens,
                prompt_tokens,
            )
