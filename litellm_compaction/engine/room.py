"""One answer's share of a context that several requests fill together.

LM Studio 0.4 and newer shares the loaded context among its parallel slots, and one overflow ends all of them. Called
by the loop that carries an answer; where nothing is shared, or the operator does not want it, it does nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

from litellm_compaction.core.budget import margin_tokens
from litellm_compaction.engine.admission import Admission, Seat
from litellm_compaction.engine.case import Case, Guarded
from litellm_compaction.models.window import Window

# A summary's own instruction, answer and thinking beside the history that it reads: 450 + 800 + 800, rounded up.
SUMMARY_EXTRA_TOKENS = 2100
# A running answer asks for more room before it needs it, in steps.
_STEP_TOKENS = 512


def shares_context(admission: Literal["auto", "pool", "off"], parallel: int) -> bool:
    """Whether requests to one instance are fitted beside each other.

    Args:
        admission: the operator's wish.
        parallel: how many requests the server says that it serves at once.
    """
    return admission == "pool" or (admission == "auto" and parallel > 1)


class Room:
    """What one answer holds of its instance's context.

    Args:
        admission: who decides for all answers of this process.
        case: of the request.
    """

    def __init__(self, admission: Admission, case: Case) -> None:
        self._admission = admission
        self._case = case
        self._seat: Seat | None = None
        self._taken_for: Guarded | None = None
        self._is_lent = False
        self._has_left = False

    def is_shared(self, window: Window) -> bool:
        """Whether requests to this instance have to be fitted beside each other."""
        return shares_context(self._case.settings.admission, window.parallel)

    def output_limit(self, guarded: Guarded, limit_tokens: int, *, can_grow: bool) -> int:
        """The bound on an answer's tokens: all that is left, or a fair share for an answer that nobody can watch.

        Args:
            guarded: what is sent.
            limit_tokens: what the window leaves.
            can_grow: whether the answer is watched, and may take more room while it runs.
        """
        window = guarded.window
        if can_grow or not self.is_shared(window):
            return limit_tokens
        share = window.tokens // max(window.parallel, 1) - guarded.count.tokens
        return min(limit_tokens, max(share, _reserve_tokens(guarded)))

    async def take(self, guarded: Guarded, limit_tokens: int, *, can_grow: bool) -> None:
        """Waits for room for a prompt and the beginning, or all, of its answer; once for each that is sent.

        Raises:
            Overloaded: there was none in time.
        """
        if self.is_shared(guarded.window) and self._taken_for is not guarded:
            answer = min(limit_tokens, _reserve_tokens(guarded)) if can_grow else limit_tokens
            await self._hold(guarded.window, _prompt_tokens(guarded) + answer)
            self._taken_for = guarded

    @asynccontextmanager
    async def for_summary(self, window: Window, history_tokens: int) -> AsyncGenerator[None, None]:
        """Room for a summary of so much history, in place of what is held now; waits for it.

        A summary may have more readers than the answer whose room this is: whoever leaves meanwhile leaves when it is
        made.

        Raises:
            Overloaded: there was none in time.
        """
        if not self.is_shared(window):
            yield
            return
        self._is_lent = True
        try:
            await self._hold(window, min(history_tokens + SUMMARY_EXTRA_TOKENS, window.tokens))
            yield
        finally:
            self._is_lent = False
            if self._has_left:
                self.leave()

    def rest(self) -> None:
        """Gives back what is held until the next answer, which then stands before those that have not begun.

        For an answer that waits for somebody else's summary: that may need the very room.
        """
        if self._seat is not None:
            self._count_seat(-1)
            self._seat.shrink(0)
            self._taken_for = None

    async def take_for_question(self, window: Window, prompt_tokens: int) -> None:
        """Waits for room for a prompt that is only counted.

        Raises:
            Overloaded: there was none in time.
        """
        if self.is_shared(window):
            await self._hold(window, prompt_tokens)

    def covers(self, guarded: Guarded, generated_tokens: int) -> bool:
        """Whether a running answer may go on: it holds enough, or gets more without waiting."""
        if self._seat is None:
            return True
        needed = _prompt_tokens(guarded) + generated_tokens + margin_tokens(generated_tokens, guarded.count.error_ratio)
        if needed + _STEP_TOKENS // 2 <= self._seat.tokens:
            return True
        return self._seat.grow(min(needed + _STEP_TOKENS, guarded.window.tokens)) or needed <= self._seat.tokens

    def leave(self) -> None:
        """Gives everything back."""
        self._has_left = True
        if self._seat is not None and not self._is_lent:
            self._count_seat(-1)
            self._seat.leave()
            self._seat = None

    async def _hold(self, window: Window, tokens: int) -> None:
        timeout_s = self._case.settings.admission_timeout_s
        tokens = max(min(tokens, window.tokens), 1)
        if self._seat is None:
            pool = f"{self._case.target.api_base} {window.instance_id}"
            self._seat = await self._admission.enter(
                pool, window_tokens=window.tokens, tokens=tokens, timeout_s=timeout_s
            )
        else:
            self._count_seat(-1)
            await self._seat.exchange(tokens, timeout_s=timeout_s)
        self._count_seat(1)

    def _count_seat(self, change: int) -> None:
        """Says to the request's other phases that it holds a place, which one that rests is not."""
        if self._seat is not None and self._seat.tokens > 0:
            self._case.attempts.seats += change


def _prompt_tokens(guarded: Guarded) -> int:
    """The most that the prompt can take."""
    return guarded.count.tokens + margin_tokens(guarded.count.tokens, guarded.count.error_ratio)


def _reserve_tokens(guarded: Guarded) -> int:
    budget = guarded.budget
    return max(budget.output_buffer_tokens(guarded.count.tokens), budget.rules.answer_min_tokens)
