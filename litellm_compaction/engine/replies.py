"""Learns from servers' replies: how they count, how large their windows are, and if one cut a prompt."""

from __future__ import annotations

import asyncio
import logging

from litellm_compaction.concurrency import Bounded, Tasks, ended
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.engine.records import Reporter
from litellm_compaction.errors import CompactionError, Overflow
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.windows import Target, Windows

logger = logging.getLogger("litellm_compaction")

# For events.
_FAR_BELOW = "prompt_far_below_count"
_FULL_WINDOW_RATIO = 0.98
# A prompt that fills more of the window than this may have been cut to it.
_INSIDE_RATIO = 0.9
# A known family that is so far off is worth a warning, of a prompt that is long enough to tell.
_WARN_RATIO, _LEAST_TOLD_TOKENS = 0.05, 200
# A process that ends waits so long for a question to LM Studio that the last answer has left.
_FAREWELL_S = 1.0
# Wildcard deployments get their model names from clients, so the number of targets needs an end.
_MAX_TARGETS = 4096


class ReplyReader:
    def __init__(self, *, windows: Windows, counter: TokenCounter, reporter: Reporter) -> None:
        self._windows = windows
        self._counter = counter
        self._reporter = reporter
        self._asking = Tasks()
        self._warned: Bounded[str, bool] = Bounded(_MAX_TARGETS)

    def learn(
        self, context: RequestContext, prepared: PreparedRequest, *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Compares a reply's usage with our count: trains the counter, or raises the truncation alarm.

        The tokens are those that the server reported for exactly what was sent; 0 of an empty answer.
        """
        reason = _is_full(prepared.window.tokens, prompt_tokens, completion_tokens)
        if not reason and self._counter.is_suspicious(prepared.count, prompt_tokens):
            reason = _FAR_BELOW
        if not reason and not is_whole(prepared.count, prepared.window.tokens, prompt_tokens):
            # A prompt that may have been cut teaches nothing.
            return
        is_low = reason == _FAR_BELOW and prompt_tokens < _INSIDE_RATIO * prepared.window.tokens
        if is_low and self._counter.learn(context.target.key, prepared.count, prompt_tokens):
            # That is how it counts: another of its numbers says so, too.
            return
        if reason:
            self._windows.invalidate(context.target)
        if context.target.is_listed and (reason or self._counter.may_be_cut(prepared.count, prompt_tokens)):
            self._asking.begin(self._learn_if_whole(context, prepared, prompt_tokens, completion_tokens, reason))
        elif reason:
            self._reporter.alarmed(context, prepared, prompt_tokens, reason)
        else:
            self._learned(context, prepared.count, prompt_tokens)

    async def aclose(self) -> None:
        """Gives questions for windows a moment, so that an alarm is raised; then ends them."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=_FAREWELL_S)
        await ended(self._asking)

    def learn_overflow(self, context: RequestContext, prepared: PreparedRequest | None, overflow: Overflow) -> None:
        """Takes note of an overflow error: the window we knew is out of date, and what the error names is true.

        `prepared` is what was sent; None when that is not certain.
        """
        self._windows.invalidate(context.target)
        if overflow.window_tokens is not None:
            self._windows.learn(context.target, overflow.window_tokens)
        if overflow.prompt_tokens is not None and prepared is not None:
            # In the middle of an answer the number has what was generated in it, which is no prompt's.
            self._counter.learn_ratio(context.target.key, prepared.count, overflow.prompt_tokens)

    def _learned(self, context: RequestContext, count: Estimate, prompt_tokens: int) -> None:
        """Has the counter learn, and warns once of a known family that does not fit."""
        key, expected = context.target.key, max(1.0, count.own.tokens)
        is_learned = self._counter.learn(key, count, prompt_tokens, label=context.label)
        is_off = count.own.exact and expected > _LEAST_TOLD_TOKENS and abs(prompt_tokens / expected - 1) > _WARN_RATIO
        if (is_off or not is_learned) and prompt_tokens > 0 and key not in self._warned:
            self._warned[key] = True
            logger.warning(
                "count_deviation model=%s expected=%d reported=%d tokens ratio=%.2f; counts follow the server from now "
                "on where they can: its chat template may not be the family's",
                context.label,
                expected,
                prompt_tokens,
                prompt_tokens / expected,
            )

    async def _learn_if_whole(
        self,
        context: RequestContext,
        prepared: PreparedRequest,
        prompt_tokens: int,
        completion_tokens: int,
        reason: str,
    ) -> None:
        """Learns a number far below ours if the window, read again, still holds what was sent; else raises the alarm.

        A prompt that fits by our count, which is the higher one, cannot have been cut: its server counts otherwise, as
        one does whose template leaves tools out. A model that was loaded anew with a smaller window cuts the prompt,
        and answers as if nothing had happened; with a larger one it may fit though it is above the window we knew.
        """
        window_tokens = await window_tokens_now(self._windows, context.target)
        if prepared.count.tokens > window_tokens or _is_full(window_tokens, prompt_tokens, completion_tokens):
            self._reporter.alarmed(context, prepared, prompt_tokens, reason or _FAR_BELOW)
        elif is_whole(prepared.count, window_tokens, prompt_tokens):
            self._counter.take_over(context.target.key, prepared.count, prompt_tokens)


async def window_tokens_now(windows: Windows, target: Target, *, fresh: bool = True) -> int:
    """Of a target's window, read again if `fresh`; 0 if nobody knows it any more."""
    try:
        return (await windows.resolve(target, fresh=fresh)).tokens
    except CompactionError:
        return 0


def surely_fits(count: Estimate, window_tokens: int) -> bool:
    """Returns True if a prompt is shorter than its window even by the upper end of its count."""
    return count.high + MARGIN_MIN_TOKENS <= window_tokens


def is_whole(count: Estimate, window_tokens: int, prompt_tokens: int) -> bool:
    """Returns True if a server's number is certainly of all the prompt: one that may have been cut teaches nothing."""
    return surely_fits(count, window_tokens) and prompt_tokens < _FULL_WINDOW_RATIO * window_tokens


def _is_full(window_tokens: int, prompt_tokens: int, completion_tokens: int) -> str:
    """Returns one word for a prompt that a window cannot have held with its answer; "" if it can."""
    if prompt_tokens > window_tokens:
        return "prompt_above_window"
    is_empty = completion_tokens == 0
    return "empty_at_full_window" if is_empty and prompt_tokens >= _FULL_WINDOW_RATIO * window_tokens else ""
