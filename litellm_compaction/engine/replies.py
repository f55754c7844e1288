"""Learns from servers' replies: how they count, how large windows are, if one cut a prompt, how one goes on.

What a server has shown is kept in memory: after a restart its next answers show it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias, get_args

from litellm_compaction.concurrency import Bounded, Rests, Tasks, ended
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.core.go_on import Way
from litellm_compaction.core.messages import JsonValue
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.engine.records import Reporter
from litellm_compaction.errors import CompactionError, Overflow
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Source, Target, Windows, server_of

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

# What a continuation teaches: it began with something new, or with what the server was shown; the answer began anew;
# the server does not take such a request. One over which it fails teaches nothing.
Outcome: TypeAlias = Literal["went_on", "began_anew", "refused"]
ALL_WAYS: tuple[Way, ...] = get_args(Way)
# For people.
_WAYS_IN_WORDS: Mapping[Way, str] = {
    "raw": "the model goes on inside its answer, by a prompt that is rendered here",
    "prefill": "the answer's end is the last message, which the server goes on with",
    "turn": "the model is asked to go on in the user's place",
}
# A server that was updated may do what it did not do before.
_REST_S = 24 * 3600.0


class ReplyReader:
    def __init__(self, *, windows: Windows, counter: TokenCounter, reporter: Reporter) -> None:
        self._windows, self._counter, self._reporter = windows, counter, reporter
        self._asking = Tasks()
        self._warned: Bounded[str, bool] = Bounded(_MAX_TARGETS)

    def learn(
        self, context: RequestContext, prepared: PreparedRequest, *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Compares a reply's usage with our count: trains the counter, or raises the truncation alarm.

        The tokens are those that the server reported for exactly what was sent; 0 of an empty answer.
        """
        count, target, window_tokens = prepared.count, context.target, prepared.window.tokens
        reason = _is_full(window_tokens, prompt_tokens, completion_tokens)
        if not reason and self._counter.is_suspicious(count, prompt_tokens):
            reason = _FAR_BELOW
            is_inside = prompt_tokens < _INSIDE_RATIO * window_tokens
            if is_inside and self._counter.learn(target.key, count, prompt_tokens):
                # That is how it counts: another of its numbers says so, too.
                return
        elif not reason and not is_whole(count, window_tokens, prompt_tokens):
            # A prompt that may have been cut teaches nothing.
            return
        if reason:
            self._windows.invalidate(target)
        if target.is_listed and (reason or self._counter.may_be_cut(count, prompt_tokens)):
            self._asking.begin(self._learn_if_whole(context, prepared, prompt_tokens, completion_tokens, reason))
        elif reason:
            self._reporter.alarmed(context, prepared, prompt_tokens, reason)
        else:
            self._learned(context, count, prompt_tokens)

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
        is_learned, ratio = (
            self._counter.learn(key, count, prompt_tokens, label=context.label),
            prompt_tokens / expected,
        )
        is_off = count.own.exact and expected > _LEAST_TOLD_TOKENS and abs(ratio - 1) > _WARN_RATIO
        if (is_off or not is_learned) and prompt_tokens > 0 and key not in self._warned:
            self._warned[key] = True
            said = "count_deviation model=%s expected=%d reported=%d tokens ratio=%.2f; counts follow the server"
            logger.warning(said, context.label, expected, prompt_tokens, ratio)

    async def _learn_if_whole(
        self, context: RequestContext, prepared: PreparedRequest, tokens: int, completion_tokens: int, reason: str
    ) -> None:
        """Learns a number far below ours if the window, read again, still holds what was sent; else raises the alarm.

        A prompt that fits by our count, which is the higher one, cannot have been cut: its server counts otherwise, as
        one does whose template leaves tools out. A model that was loaded anew with a smaller window cuts the prompt,
        and answers as if nothing had happened; with a larger one it may fit though it is above the window we knew.
        """
        window_tokens = await window_tokens_now(self._windows, context.target)
        if prepared.count.tokens > window_tokens or _is_full(window_tokens, tokens, completion_tokens):
            self._reporter.alarmed(context, prepared, tokens, reason or _FAR_BELOW)
        elif is_whole(prepared.count, window_tokens, tokens):
            self._counter.take_over(context.target.key, prepared.count, tokens)


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


class KnownWays:
    """Knows by which ways each server goes on with an answer: by its kind, and by how it has done so far."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._gone_on: Bounded[tuple[str, str, Way], bool] = Bounded(_MAX_TARGETS)
        self._failed: Rests[tuple[str, str, Way]] = Rests(_REST_S, _REST_S, wall_clock)

    def ways(self, target: Target, source: Source) -> tuple[Way, ...]:
        """Returns the ways that are worth a try, best first; the last one always is. `source` tells the window's size.

        LM Studio goes on with a last message of the assistant (lmstudio-bug-tracker 2041) and puts no template around
        the prompt of a text completion (its documentation, "Completions"); so does llama.cpp, and vLLM if it is told to
        (`continue_final_message`).
        """
        server = server_of(source)
        goes_on = _is_lmstudio(target, source) or (server is not None and server.continues)
        own = (way for way in ALL_WAYS[:-1] if goes_on and self._failed.is_over(_key(target, way)))
        return (*own, ALL_WAYS[-1])

    def has_gone_on(self, target: Target, way: Way) -> bool:
        return self._gone_on.get(_key(target, way), False)

    def in_words(self, target: Target, source: Source, possible: Collection[Way]) -> str:
        """The best way of those that are `possible`, for people; "" for none."""
        best = next((way for way in self.ways(target, source) if way in possible), None)
        shown = ", as it has done" if best is not None and self.has_gone_on(target, best) else ""
        return "" if best is None else f"{best}: {_WAYS_IN_WORDS[best]}{shown}"

    def learn(self, target: Target, label: str, way: Way, outcome: Outcome) -> None:
        """Takes note of a continuation's outcome; `label` is for logs.

        A single repeat that the model meant does not outweigh what went well.
        """
        key, had_gone_on = _key(target, way), self.has_gone_on(target, way)
        self._gone_on[key] = outcome == "went_on"
        if outcome == "went_on":
            self._failed.end(key)
        elif (outcome == "refused" or not had_gone_on) and self._failed.begin(key):
            logger.warning("going_on model=%s way=%s outcome=%s; the next way is used", label, way, outcome)


def without_thoughts(target: Target, source: Source, family: str) -> Mapping[str, JsonValue]:
    """Returns the fields of a request's body that have a server think no more; empty if none is known.

    LM Studio takes `reasoning_effort: none` on chats since 0.4.17 (its bug tracker 2057, by the vendor); gpt-oss knows
    no other efforts than low, medium and high.
    """
    if _is_lmstudio(target, source):
        return {"reasoning_effort": "low" if family == "gpt-oss" else "none"}
    server = server_of(source)
    return server.no_thoughts if server is not None else {}


def _is_lmstudio(target: Target, source: Source) -> bool:
    return target.is_lmstudio or source in ("api/v1", "api/v0")


def _key(target: Target, way: Way) -> tuple[str, str, Way]:
    """The same for all deployments that lead to one model of one server."""
    return server_root(target.api_base) if target.api_base else target.key, target.model, way
