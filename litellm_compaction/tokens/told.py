"""How far the counts of LM Studio's protocol are believed: each is held against the answer to the same request.

Both are equal or a constant apart, which is learned; else the answers' numbers count for an hour. Images are not
in them and cost what such images have cost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from litellm_compaction.concurrency import Bounded, Rests
from litellm_compaction.tokens.count import Count
from litellm_compaction.tokens.media import MediaPrices

logger = logging.getLogger("litellm_compaction")

# `countTokens` may add the token that begins a prompt, or a chat the beginning of the answer: no more than this.
_MOST_CONSTANT_TOKENS = 32
# A larger share of a prompt is no constant yet: a count that is 13 % too low looks like one in a short prompt.
_MOST_CONSTANT_RATIO = 0.02
# Two numbers for one prompt that are no further apart are the same.
_SAME_TOKENS, _SAME_RATIO = 2, 0.005
_MOST_PRICE_DOUBT = 0.01
# A count is taken to be no more than so many times too low before an answer confirms it.
_UNCONFIRMED_RATIO = 1.2
_DOUBTED_S = 3600.0
_MAX_TARGETS, _MAX_TOLD = 4096, 1024


class _Told(NamedTuple):
    tokens: int
    beside_tokens: int
    label: str


class ToldCounts:
    """The counts of LM Studio's protocol, by deployment and fingerprint of the request."""

    def __init__(self, prices_of: Callable[[str], MediaPrices], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._prices_of = prices_of
        self._told: Bounded[tuple[str, int], _Told] = Bounded(_MAX_TOLD)
        self._constants: Bounded[str, int] = Bounded(_MAX_TARGETS)
        self._doubted: Rests[str] = Rests(_DOUBTED_S, _DOUBTED_S, clock)

    def is_believed(self, target_key: str) -> bool:
        """Returns True if its counts were those of answers, as far as both are known."""
        return self._doubted.is_over(target_key)

    def take(self, target_key: str, label: str, count: Count, tokens: int, beside_tokens: int = 0) -> int | None:
        """The number that an answer will have; it is compared later.

        Args:
            target_key: the deployment.
            label: its name in logs.
            count: ours.
            tokens: the protocol's.
            beside_tokens: of reasoning and extras, which it leaves out.

        Returns:
            None if it has images whose price is not known well enough.
        """
        if count.fingerprint:
            self._told[target_key, count.fingerprint] = _Told(tokens, beside_tokens, label)
        tokens += self._constants.get(target_key, 0) + beside_tokens
        least, most = self._prices_of(target_key).between(count.media_tokens, count.images)
        return tokens + ceil(most) if most - least <= _MOST_PRICE_DOUBT * tokens else None

    def is_unconfirmed(self, target_key: str, count: Count) -> bool:
        """Returns True for a prompt that the protocol has counted, of a model whose answers have confirmed no count."""
        return (target_key, count.fingerprint) in self._told and target_key not in self._constants

    def doubt_tokens(self, target_key: str, count: Count) -> int:
        """Tokens that the protocol may have left out of a count, until an answer confirms it (promise P1).

        0 if it counts no less than we do; no more than a count that is a sixth too low leaves out.
        """
        if not self.is_unconfirmed(target_key, count):
            return 0
        return max(0, ceil(min(count.raw_tokens, _UNCONFIRMED_RATIO * count.tokens)) - count.tokens)

    def compare(self, target_key: str, count: Count, prompt_tokens: int) -> None:
        """Compares a count with the answer to the same request, and learns the price of its images."""
        told = self._told.pop((target_key, count.fingerprint), None)
        if told is None:
            return
        more, known = prompt_tokens - told.tokens, self._constants.get(target_key)
        same_tokens = max(_SAME_TOKENS, _SAME_RATIO * told.tokens)
        if count.images:
            # Reasoning in older turns may not be in the number.
            if told.beside_tokens <= same_tokens:
                prices = self._prices_of(target_key)
                prices.note(count.media_tokens, more - (known or 0), 0.0, images=count.images)
        elif told.beside_tokens:
            # A template shows it or leaves it out. Anything between is no reason for doubt.
            if known is None and min(abs(more), abs(more - told.beside_tokens)) <= same_tokens:
                self._constants[target_key] = 0
        elif known is None and abs(more) <= _MOST_CONSTANT_TOKENS:
            if abs(more) <= max(_SAME_TOKENS, _MOST_CONSTANT_RATIO * told.tokens):
                self._constants[target_key] = more
        elif abs(more - (known or 0)) > same_tokens:
            self._constants.pop(target_key, None)
            if self._doubted.begin(target_key):
                logger.warning(
                    "ask_server model=%s: LM Studio's protocol counted %d tokens and its answer %d for one prompt; for "
                    "an hour the answers' numbers count alone (logged once)",
                    told.label,
                    told.tokens,
                    prompt_tokens,
                )
