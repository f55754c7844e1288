"""The window as a budget: when to compact, how deep, how much an answer may take, and what fills it.

All numbers are tokens. A prompt is always an estimate; `likely_ratio` says how far the truth may lie above it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from litellm_compaction.core.prompts import STRATEGIES, Strategy

MARGIN_MIN_TOKENS, MARGIN_MIN_RATIO = 64, 0.02
# A compaction's room above the floor, and what of it is worth a change.
ROOM_ABOVE_FLOOR_RATIO, MIN_GAIN_RATIO = 0.15, 0.10
# An answer that is stopped after fewer tokens was not worth reading its prompt; a high floor leaves it a third.
_LEAST_START_TOKENS, _ANSWER_DIVISOR = 64, 3
# Of the window, for an answer, and for a summary that a client makes itself.
_BUFFER_CAP_RATIO = _SUMMARY_ROOM_RATIO = 0.10
# About 60 % of the window by default: a record that is written ahead then has two or three turns to be ready.
_IN_SIGHT_RATIO = 0.80
# A reserve counts for no more of a window: the rest has to hold a conversation. config.py refuses more.
RESERVE_MAX_RATIO = 0.75


def margin_tokens(prompt_tokens: int, likely_ratio: float) -> int:
    """Tokens kept free because a count is an estimate: max(64, 2 %), wider if the count is less certain."""
    return max(MARGIN_MIN_TOKENS, math.ceil(prompt_tokens * max(MARGIN_MIN_RATIO, round(likely_ratio - 1, 9))))


def gained_tokens(now_tokens: int) -> int:
    """The most to which a change from `now_tokens` has to lead to be worth it."""
    return int(now_tokens * (1 - MIN_GAIN_RATIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """The operator's wishes about a compaction's depth."""

    keep_recent_messages: int  # At the end, if they fit.
    summary_max_tokens: int
    keep_images: int = 0  # The newest, those of the kept messages among them.
    # The server reads all of a prompt again after any change of it, so changes are to be rare, and edits take all.
    rereads: bool = False
    edits: bool = True  # An edit may do alone.
    strategy: Strategy = STRATEGIES["summary"]
    # A record takes no spare room, and one that is wanted leaves the recent messages as they are.
    writes_whole_records: bool = False
    covers_all: bool = False  # A record stands for all that may go: the server's cache ends with its question.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that shape a budget; ratios are shares of the window (0–1)."""

    pre_request_ratio: float
    streaming_ratio: float
    target_ratio: float
    output_buffer_ratio: float
    output_buffer_min_tokens: int
    answer_min_tokens: int
    threshold_tokens: int = 0  # Above 0 it decides alone, else the reserve, else the ratio with the output buffer.
    reserve_tokens: int = 0
    keeps_what_fits: bool = False  # No more goes than has to, for an answer of a tenth of the window.


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The room of one request in one window; a number that follows from the rules is worked out once."""

    rules: Rules
    window_tokens: int
    # Gives the tokens of system, tools and protected messages, which no compaction can shrink; not asked for a prompt
    # that is sent as it came.
    floor: Callable[[], int]
    likely_ratio: float  # The true prompt is at most so many times the estimate of one that is made of this one.
    fixed_tokens: int = 0  # System messages and tools, which no threshold counts; part of the floor.
    own_likely_ratio: float | None = None  # Of the request as it came, if the server has counted its beginning.
    is_wanted: bool = False  # The client wants a compaction whatever the fill: it goes deep even if little is used.

    @cached_property
    def floor_tokens(self) -> int:
        return self.floor()

    @cached_property
    def own(self) -> Budget:
        """The budget of the request as it came; this one is for anything made of it."""
        return self if self.own_likely_ratio is None else replace(self, likely_ratio=self.own_likely_ratio)

    def with_trigger(self, prompt_tokens: int) -> Budget:
        """Returns the same with a trigger at so many tokens of a whole prompt, if that is below its own; 0 for none."""
        threshold_tokens = max(prompt_tokens - self.fixed_tokens, 1)
        is_lower = 0 < prompt_tokens < self.trigger_tokens
        return replace(self, rules=replace(self.rules, threshold_tokens=threshold_tokens)) if is_lower else self

    @property
    def outside_tokens(self) -> int:
        """Tokens of the prompt that are not the conversation's: system and tools, if a threshold decides."""
        return self.fixed_tokens if self.rules.threshold_tokens else 0

    @cached_property
    def usable_tokens(self) -> int:
        """The conversation's room: the window without its reserve, or the room whose trigger is `threshold_tokens`."""
        if self.rules.threshold_tokens:
            return min(math.ceil(self.rules.threshold_tokens / self.rules.pre_request_ratio), self.window_tokens)
        return self.window_tokens - min(self.rules.reserve_tokens, int(RESERVE_MAX_RATIO * self.window_tokens))

    @cached_property
    def trigger_tokens(self) -> int:
        """The largest prompt that does not have to be compacted."""
        rules, window = self.rules, range(self.window_tokens + 1)
        if rules.keeps_what_fits:
            return self._limit_tokens(math.ceil(_SUMMARY_ROOM_RATIO * self.window_tokens))
        if rules.threshold_tokens:
            return min(self.fixed_tokens + rules.threshold_tokens, self.prompt_limit_tokens)
        line_tokens = int(rules.pre_request_ratio * self.usable_tokens)
        if not rules.reserve_tokens:
            # With the room for its answer.
            line_tokens = bisect_right(window, line_tokens, key=lambda each: each + self.output_buffer_tokens(each)) - 1
        return min(max(line_tokens, 0), self.prompt_limit_tokens)

    @cached_property
    def prompt_limit_tokens(self) -> int:
        """The largest estimate with which prompt + margin + least answer stay inside the window (promise P1)."""
        return self._limit_tokens(0)

    def _limit_tokens(self, answer_tokens: int) -> int:
        room = self.window_tokens - max(answer_tokens, self.rules.answer_min_tokens)
        by_ratio = math.floor(room / max(1 + MARGIN_MIN_RATIO, self.likely_ratio))
        return max(min(by_ratio, room - MARGIN_MIN_TOKENS), 0)

    def fits(self, prompt_tokens: int) -> bool:
        """Returns True if the prompt may be sent at all."""
        return prompt_tokens <= self.prompt_limit_tokens

    def triggers(self, prompt_tokens: int) -> bool:
        """Returns True if the prompt has to be compacted before it is sent: by the rules, and if it does not fit."""
        return prompt_tokens > self.trigger_tokens

    def nears_trigger(self, prompt_tokens: int) -> bool:
        """Returns True if the conversation's next compaction is in sight."""
        return prompt_tokens > _IN_SIGHT_RATIO * self.trigger_tokens

    def needed_window_tokens(self, prompt_tokens: int) -> int:
        """The context length with which a prompt of this size would fit, rounded up to 256."""
        needed = prompt_tokens + margin_tokens(prompt_tokens, self.likely_ratio) + self.rules.answer_min_tokens
        return math.ceil(needed / 256) * 256

    def output_buffer_tokens(self, prompt_tokens: int) -> int:
        """The room set aside for the answer: max(ratio of the rest, min(minimum, 10 % of the window))."""
        least = min(self.rules.output_buffer_min_tokens, int(_BUFFER_CAP_RATIO * self.window_tokens))
        return max(int(self.rules.output_buffer_ratio * (self.window_tokens - prompt_tokens)), least)

    def max_output_tokens(self, prompt_tokens: int, asked_tokens: int | None) -> int:
        """The upstream `max_tokens`: the window's rest, and no more than asked; None or negative is "unlimited"."""
        free = max(self.window_tokens - prompt_tokens - margin_tokens(prompt_tokens, self.likely_ratio), 1)
        return free if asked_tokens is None or asked_tokens < 0 else min(asked_tokens, free)

    @property
    def _stop_tokens(self) -> int:
        """The line at which a running answer is stopped."""
        return int(self.rules.streaming_ratio * self.window_tokens)

    @property
    def _span_tokens(self) -> int:
        """From the floor to that line; 0 if an answer has to run to the window's end."""
        span_tokens = self._stop_tokens - self.floor_tokens
        return span_tokens if span_tokens >= _LEAST_START_TOKENS else 0

    def restart_room_tokens(self, used_tokens: int) -> int:
        """The room after a restart at `used_tokens` (prompt and answer) that lets it begin (promise P5)."""
        return max(self.output_buffer_tokens(used_tokens), self.window_tokens - self._stop_tokens + _LEAST_START_TOKENS)

    @cached_property
    def early_start_tokens(self) -> int:
        """The largest prompt after which the output buffer fits before the streaming limit."""
        buffer_tokens = max(self.output_buffer_tokens(self._stop_tokens), _LEAST_START_TOKENS)
        return min(self._stop_tokens - buffer_tokens, self.prompt_limit_tokens)

    @cached_property
    def latest_start_tokens(self) -> int:
        """The largest prompt after which an answer is not stopped at once; more is compacted if that leads below it."""
        least_tokens = max(self._span_tokens // _ANSWER_DIVISOR, _LEAST_START_TOKENS)
        latest_tokens = max(self._stop_tokens - least_tokens, self.early_start_tokens)
        return min(latest_tokens if self._span_tokens else self.window_tokens, self.prompt_limit_tokens)

    @property
    def waiting_tokens(self) -> int:
        """Up to where a compacted prompt may outgrow the trigger, since above a high floor one turn takes all the room.

        -1 for nowhere; also if everything triggers: then the server has shown that too much was let through.
        """
        is_pressed = self.rules.pre_request_ratio <= self.rules.target_ratio
        is_narrow = self.trigger_tokens - self.floor_tokens < 2 * int(ROOM_ABOVE_FLOOR_RATIO * self.usable_tokens)
        return self.latest_start_tokens if is_narrow and not (is_pressed or self.is_wanted) else -1

    def target_tokens(self, prompt_tokens: int, depth_ratio: float = 1.0) -> int:
        """The size to which a prompt is compacted: min(target_ratio of the conversation's room, half of the prompt).

        That is at least the floor and a record's room, half of the rest at most, and never so much that the answer
        would be stopped at once. If the client wants it, no more than a third of the compactable part stays.
        """
        room = int(ROOM_ABOVE_FLOOR_RATIO * self.usable_tokens)
        room = min(room, self._span_tokens // 2 or room)
        room = min(room, max(prompt_tokens - self.floor_tokens, 0) // 3) if self.is_wanted else room
        inside_tokens = max(prompt_tokens - self.outside_tokens, 0)
        deep = min(int(depth_ratio * self.rules.target_ratio * self.usable_tokens), inside_tokens // 2)
        return min(max(self.outside_tokens + deep, self.floor_tokens + room), self.latest_start_tokens)
