"""What a server's replies say: how it counts, how large its window is, and whether it has cut a prompt.

Called by the compactor for every reply, and by the prober for those that it asks for.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from litellm_compaction.engine.case import Case, Guarded
from litellm_compaction.engine.lessons import Lessons
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.errors import CompactionError, Overflow
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows

_FULL_WINDOW_RATIO = 0.98
# A prompt that fills more of the window than this may have been cut to it.
_INSIDE_RATIO = 0.9


class Replies:
    """Takes note of replies.

    Args:
        windows: are asked for anew where a reply contradicts them.
        counter: knows what is suspicious.
        lessons: keep what is true.
        reporter: tells of what was cut.
    """

    def __init__(self, *, windows: Windows, counter: TokenCounter, lessons: Lessons, reporter: Reporter) -> None:
        self._windows = windows
        self._counter = counter
        self._lessons = lessons
        self._reporter = reporter
        self._asking: set[asyncio.Task[None]] = set()

    def learn(self, case: Case, guarded: Guarded, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Compares a reply's usage with our count: trains the counter, or raises the truncation alarm.

        Args:
            case: of the request.
            guarded: what was sent.
            prompt_tokens: as the server reported them for exactly that.
            completion_tokens: likewise; 0 for an empty answer.
        """
        if completion_tokens > 0:
            self._windows.served(case.target, prompt_tokens)
        reason = truncation(guarded, prompt_tokens, completion_tokens, self._counter)
        if not reason:
            # A reply that was itself truncated never gets here: it would teach the counter a wrong ratio.
            self._lessons.learn(case.target.key, case.label, guarded.count, prompt_tokens)
            return
        is_inside = prompt_tokens < _INSIDE_RATIO * guarded.window.tokens
        is_low = reason == "prompt_far_below_count"
        if is_low and is_inside and self._lessons.explains(case.target.key, guarded.count, prompt_tokens):
            return
        self._windows.invalidate(case.target)
        if case.target.is_listed:
            task = asyncio.create_task(self._alarm_if_cut(case, guarded, prompt_tokens, completion_tokens, reason))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            return
        self._reporter.alarmed(case, guarded, prompt_tokens, reason)

    async def aclose(self) -> None:
        """Ends what still asks for windows."""
        tasks = list(self._asking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _alarm_if_cut(
        self, case: Case, guarded: Guarded, prompt_tokens: int, completion_tokens: int, reason: str
    ) -> None:
        """Raises the alarm where the window, read again, is too small for what was sent.

        A prompt that fits by our count, which is the higher one, cannot have been cut: its server counts otherwise, as
        one does whose template leaves tools out. One that is above the window we knew fits where the model has been
        loaded with a larger one since.
        """
        try:
            window = await self._windows.resolve(case.target, fresh=True)
        except CompactionError:
            window = None
        is_fit = window is not None and guarded.count.tokens <= window.tokens
        if window is None or not is_fit or _is_full(window.tokens, prompt_tokens, completion_tokens):
            self._reporter.alarmed(case, guarded, prompt_tokens, reason)

    def learn_overflow(self, case: Case, guarded: Guarded | None, overflow: Overflow) -> None:
        """Takes note of an overflow error: what we knew of the window is out of date, and what the error names is true.

        Args:
            case: of the request.
            guarded: what was sent; None when that is not certain.
            overflow: what the error says.
        """
        self._windows.invalidate(case.target)
        if overflow.window_tokens is not None:
            self._windows.learn(case.target, overflow.window_tokens)
        if overflow.prompt_tokens is not None and guarded is not None:
            # In the middle of an answer the number has what was generated in it, which makes no anchor.
            count = replace(guarded.count, fingerprint=0, anchor=None)
            self._lessons.learn(case.target.key, case.label, count, overflow.prompt_tokens)


def truncation(guarded: Guarded, prompt_tokens: int, completion_tokens: int, counter: TokenCounter) -> str:
    """One word for what a reply's usage says about a prompt that the server did not see whole; "" for nothing.

    Args:
        guarded: what was sent.
        prompt_tokens: as the server reported them for exactly that.
        completion_tokens: likewise; 0 for an empty answer.
        counter: knows which deviation a tokenizer cannot explain.
    """
    if full := _is_full(guarded.window.tokens, prompt_tokens, completion_tokens):
        return full
    return "prompt_far_below_count" if counter.is_suspicious(guarded.count, prompt_tokens) else ""


def _is_full(window_tokens: int, prompt_tokens: int, completion_tokens: int) -> str:
    """One word for a prompt that a window cannot have held with its answer; "" where it can."""
    if prompt_tokens > window_tokens:
        return "prompt_above_window"
    is_empty = completion_tokens == 0
    return "empty_at_full_window" if is_empty and prompt_tokens >= _FULL_WINDOW_RATIO * window_tokens else ""
