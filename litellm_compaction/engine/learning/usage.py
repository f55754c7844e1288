"""Learns from servers' replies: how they count and answer, how large their windows are, and if one cut a prompt.

The counter learns at once; the store is read and written in the background only, and a store that fails costs nothing
but the memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from litellm_compaction.concurrency import Bounded, Tasks, ended
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.errors import CompactionError, Overflow
from litellm_compaction.stores import FACTS_SCOPE, Facts
from litellm_compaction.tokens.count import most_tokens
from litellm_compaction.tokens.counter import Count, TokenCounter, joined
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

_FACT_KEY = "calibration:"
_WRITE_EVERY_S = 10.0
# What other workers learned meanwhile, of a deployment that is asked for: a read of a millisecond, in the background.
_READ_EVERY_S = 60.0
_STORE_TIMEOUT_S = 10.0
# Wildcard deployments get their model names from clients, so the number of targets needs an end.
_MAX_TARGETS = 4096
_FULL_WINDOW_RATIO = 0.98
# A prompt that fills more of the window than this may have been cut to it.
_INSIDE_RATIO = 0.9
# A process that ends waits so long for a question to LM Studio that the last answer has left.
_FAREWELL_S = 1.0


@dataclass(slots=True)
class _Kept:
    """The knowledge of a deployment's fact; times of the monotonic clock.

    Attributes:
        change_key: of what is kept in the store.
        seen: hash of the text that was last seen there.
    """

    change_key: tuple[object, ...] = ()
    seen: int = 0
    read_s: float | None = None
    written_s: float | None = None
    is_busy: bool = False
    is_warned: bool = False


class UsageFeedback:
    """Lets the counter learn, warns once if a known family does not fit, and keeps what was learned.

    The lessons of several processes are added up in the store, and each takes over those of the others, when
    it writes and once a minute while the deployment is asked for. A deployment's fact is written every `write_every_s`
    at most, and only when it changed noticeably.
    """

    def __init__(
        self,
        *,
        counter: TokenCounter,
        store: Facts,
        clock: Callable[[], float] = time.monotonic,
        write_every_s: float = _WRITE_EVERY_S,
    ) -> None:
        self._counter = counter
        self._store = store
        self._clock = clock
        self._write_every_s = write_every_s
        self._kept: Bounded[str, _Kept] = Bounded(_MAX_TARGETS)
        self._tasks = Tasks()
        self._has_warned = False

    def recall(self, target_key: str) -> None:
        """Begins to read the lessons of an earlier run or another process about a deployment that is asked for."""
        kept = self._of(target_key)
        if not kept.is_busy and (kept.read_s is None or self._clock() >= kept.read_s + _READ_EVERY_S):
            kept.read_s = self._clock()
            self._start(kept, self._read(target_key, kept))

    def learn(self, target_key: str, label: str, count: Count, prompt_tokens: int) -> None:
        """Takes over the server's number for a prompt that we count as `count`; `label` is for logs."""
        kept = self._of(target_key)
        deviation = self._counter.learn(target_key, count, prompt_tokens)
        if deviation is not None and not kept.is_warned:
            kept.is_warned = True
            logger.warning(
                "count_deviation model=%s expected=%d reported=%d tokens ratio=%.2f; counts follow the server from now "
                "on where they can: its chat template may not be the family's",
                label,
                deviation.expected,
                deviation.actual,
                deviation.ratio,
            )
        self.keep(target_key)

    def explains(self, target_key: str, count: Count, prompt_tokens: int) -> bool:
        """Returns True if a number far below ours is how the server counts, by others like it."""
        self._of(target_key)
        explained = self._counter.explains(target_key, count, prompt_tokens)
        if explained:
            self.keep(target_key)
        return explained

    def keep(self, target_key: str) -> None:
        """Writes a deployment's lessons soon, if they have changed noticeably."""
        kept = self._of(target_key)
        if not kept.is_busy and self._counter.change_key(target_key) != kept.change_key:
            self._start(kept, self._write(target_key, kept))

    async def aclose(self) -> None:
        """Writes lessons that have not been written yet; call before the store is closed."""
        await ended(self._tasks)
        for target_key, kept in self._kept.items():
            if kept.change_key != self._counter.change_key(target_key):
                await self._put(target_key, kept)

    def _of(self, target_key: str) -> _Kept:
        found = self._kept.get(target_key)
        if found is None:
            found = self._kept[target_key] = _Kept(change_key=self._counter.change_key(target_key))
        return found

    async def _read(self, target_key: str, kept: _Kept) -> None:
        try:
            text = await asyncio.wait_for(self._store.get_fact(FACTS_SCOPE, _FACT_KEY + target_key), _STORE_TIMEOUT_S)
            if text is not None:
                self._take_over(target_key, kept, text)
        except Exception as error:  # noqa: BLE001 - nothing that is only remembered may harm a request (P8)
            self._warn(error)
        finally:
            kept.is_busy = False
        self.keep(target_key)

    async def _write(self, target_key: str, kept: _Kept) -> None:
        try:
            if kept.written_s is not None:
                await asyncio.sleep(max(0.0, kept.written_s + self._write_every_s - self._clock()))
            await self._put(target_key, kept)
        finally:
            kept.is_busy = False
        self.keep(target_key)

    async def _put(self, target_key: str, kept: _Kept) -> None:
        kept.written_s = self._clock()
        change_key = self._counter.change_key(target_key)
        text = self._counter.as_json(target_key)
        try:
            merge = self._store.merge_fact(FACTS_SCOPE, _FACT_KEY + target_key, text, joined)
            both = await asyncio.wait_for(merge, _STORE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - as when reading
            self._warn(error)
            both = text
        # After a failure too: the next noticeable change is the next attempt.
        kept.change_key = change_key
        if both == text:
            kept.seen = hash(text)
        else:
            self._take_over(target_key, kept, both)

    def _take_over(self, target_key: str, kept: _Kept, text: str) -> None:
        """Learns the others' lessons, which need not be written again."""
        if hash(text) == kept.seen:
            return
        kept.seen = hash(text)
        before = self._counter.change_key(target_key)
        self._counter.take_over(target_key, text)
        if before == kept.change_key:
            kept.change_key = self._counter.change_key(target_key)

    def _start(self, kept: _Kept, measured: Coroutine[None, None, None]) -> None:
        kept.is_busy = True
        try:
            self._tasks.begin(measured)
        except RuntimeError:
            # Outside an event loop nothing waits for a store.
            measured.close()
            kept.is_busy = False

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "calibration_not_kept %s: %s; counts learn anew after a restart", type(error).__name__, error
            )


class ReplyReader:
    def __init__(self, *, windows: Windows, counter: TokenCounter, feedback: UsageFeedback, reporter: Reporter) -> None:
        self._windows = windows
        self._counter = counter
        self._feedback = feedback
        self._reporter = reporter
        self._asking = Tasks()

    def learn(
        self, context: RequestContext, prepared: PreparedRequest, *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Compares a reply's usage with our count: trains the counter, or raises the truncation alarm.

        The tokens are those that the server reported for exactly what was sent; 0 of an empty answer.
        """
        if completion_tokens > 0:
            self._windows.served(context.target, prompt_tokens)
        reason = truncation(prepared, prompt_tokens, completion_tokens, self._counter)
        if not reason and not is_whole(prepared.count, prepared.window.tokens, prompt_tokens):
            return
        if not reason:
            # A reply that was itself truncated is not learned: it would teach the counter a wrong ratio.
            if context.target.is_listed and self._counter.may_be_cut(prepared.count, prompt_tokens):
                self._asking.begin(self._learn_if_whole(context, prepared, prompt_tokens, completion_tokens))
            else:
                self._feedback.learn(context.target.key, context.label, prepared.count, prompt_tokens)
            return
        is_inside = prompt_tokens < _INSIDE_RATIO * prepared.window.tokens
        is_low = reason == "prompt_far_below_count"
        if is_low and is_inside and self._feedback.explains(context.target.key, prepared.count, prompt_tokens):
            return
        self._windows.invalidate(context.target)
        if context.target.is_listed:
            self._asking.begin(self._alarm_if_cut(context, prepared, prompt_tokens, completion_tokens, reason))
            return
        self._reporter.alarmed(context, prepared, prompt_tokens, reason)

    async def aclose(self) -> None:
        """Gives questions for windows a moment, so that the last answer's lesson is kept; then ends it."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=_FAREWELL_S)
        await ended(self._asking)

    async def _learn_if_whole(
        self, context: RequestContext, prepared: PreparedRequest, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Learns a number far below a doubtful count if the window, read again, still holds what was sent.

        A model that has been loaded anew with a smaller one cuts the prompt, and answers as if nothing had happened.
        """
        reason = "prompt_far_below_count"
        if not await self._alarm_if_cut(context, prepared, prompt_tokens, completion_tokens, reason):
            self._feedback.learn(context.target.key, context.label, prepared.count, prompt_tokens)

    async def _alarm_if_cut(
        self,
        context: RequestContext,
        prepared: PreparedRequest,
        prompt_tokens: int,
        completion_tokens: int,
        reason: str,
    ) -> bool:
        """Returns True, and raises the alarm, if the window, read again, is too small for what was sent.

        A prompt that fits by our count, which is the higher one, cannot have been cut: its server counts otherwise, as
        one does whose template leaves tools out. One above the window we knew fits if the model has been loaded with a
        larger one since.
        """
        try:
            window = await self._windows.resolve(context.target, fresh=True)
        except CompactionError:
            window = None
        is_fit = window is not None and prepared.count.tokens <= window.tokens
        is_cut = window is None or not is_fit or bool(_is_full(window.tokens, prompt_tokens, completion_tokens))
        if is_cut:
            self._reporter.alarmed(context, prepared, prompt_tokens, reason)
        return is_cut

    def learn_overflow(self, context: RequestContext, prepared: PreparedRequest | None, overflow: Overflow) -> None:
        """Takes note of an overflow error: the window we knew is out of date, and what the error names is true.

        `prepared` is what was sent; None when that is not certain.
        """
        self._windows.invalidate(context.target)
        if overflow.window_tokens is not None:
            self._windows.learn(context.target, overflow.window_tokens)
        if overflow.prompt_tokens is not None and prepared is not None:
            # In the middle of an answer the number has what was generated in it, which makes no anchor.
            count = replace(prepared.count, prints=(), anchor=None)
            self._feedback.learn(context.target.key, context.label, count, overflow.prompt_tokens)


def surely_fits(count: Count, window_tokens: int) -> bool:
    """Returns True if a prompt is shorter than its window even by the upper end of its count."""
    return most_tokens(count) + MARGIN_MIN_TOKENS <= window_tokens


def is_whole(count: Count, window_tokens: int, prompt_tokens: int) -> bool:
    """Returns True if a server's number is certainly of all the prompt: one that may have been cut teaches nothing."""
    return surely_fits(count, window_tokens) and prompt_tokens < _FULL_WINDOW_RATIO * window_tokens


def truncation(prepared: PreparedRequest, prompt_tokens: int, completion_tokens: int, counter: TokenCounter) -> str:
    """Returns one word for what a reply's usage says of a prompt that the server did not see whole, else ""."""
    if full := _is_full(prepared.window.tokens, prompt_tokens, completion_tokens):
        return full
    return "prompt_far_below_count" if counter.is_suspicious(prepared.count, prompt_tokens) else ""


def _is_full(window_tokens: int, prompt_tokens: int, completion_tokens: int) -> str:
    """Returns one word for a prompt that a window cannot have held with its answer; "" if it can."""
    if prompt_tokens > window_tokens:
        return "prompt_above_window"
    is_empty = completion_tokens == 0
    return "empty_at_full_window" if is_empty and prompt_tokens >= _FULL_WINDOW_RATIO * window_tokens else ""
