"""Holds the counts of LM Studio's protocol against the answers to the same requests.

Both are equal or a small constant apart, which stays a doubt; else the answers' numbers count alone for an hour.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import ceil

from litellm_compaction.concurrency import Bounded, Rests

logger = logging.getLogger("litellm_compaction")

_MAX_ASKED, _MAX_TARGETS = 1024, 4096
# It may leave out the token that begins a prompt, or the beginning of the answer.
_MOST_CONSTANT_TOKENS, _SAME_COUNT_RATIO = 32, 0.02
# No answer has shown yet that it is right.
_UNCONFIRMED_RATIO = 0.2
_DOUBTED_S = 3600.0


class Protocol:
    """One for all deployments; used between two awaits only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._asked: Bounded[tuple[str, int], int] = Bounded(_MAX_ASKED)
        # By how much it was off where an answer has confirmed it.
        self._off_tokens: Bounded[str, int] = Bounded(_MAX_TARGETS)
        self._doubted: Rests[str] = Rests(_DOUBTED_S, _DOUBTED_S, clock)

    def is_believed(self, target_key: str) -> bool:
        """Returns True if its counts were those of answers, as far as both are known."""
        return self._doubted.is_over(target_key)

    def take(self, target_key: str, fingerprint: int, tokens: int, *, is_whole: bool) -> int:
        """Returns by how much a number may be off, which is compared later if it `is_whole`.

        The protocol counts neither images nor reasoning.
        """
        if is_whole:
            self._asked[target_key, fingerprint] = tokens
        return self.doubt_tokens(target_key, tokens)

    def doubt_tokens(self, target_key: str, tokens: int) -> int:
        """Returns by how much a number may be off, as far as answers have confirmed others."""
        return self._off_tokens.get(target_key, ceil(_UNCONFIRMED_RATIO * tokens))

    def compare(self, target_key: str, label: str, fingerprint: int, prompt_tokens: int) -> bool:
        """Compares a count with the answer to the same request; False if it contradicts. `label` is for logs."""
        asked = self._asked.pop((target_key, fingerprint), None)
        if asked is None:
            return True
        off_tokens = abs(prompt_tokens - asked)
        if off_tokens <= _MOST_CONSTANT_TOKENS + _SAME_COUNT_RATIO * asked:
            self._off_tokens[target_key] = off_tokens
            return True
        self._off_tokens.pop(target_key, None)
        if self._doubted.begin(target_key):
            logger.warning(
                "ask_server model=%s: LM Studio's protocol counted %d tokens and its answer %d for one prompt; for an "
                "hour the answers' numbers count alone (logged once)",
                label,
                asked,
                prompt_tokens,
            )
        return False
