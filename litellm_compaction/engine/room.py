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
from litellm_compaction.models.counter import Count
from litellm_compaction.models.window import Window

# A summary's own instruction, answer and thinking beside the history that it reads: 450 + 800 + 800, rounded up.
SUMMARY_EXTRA_TOKENS = 2100
# A running answer asks for more room before it needs it, in steps.
_STEP_TOKENS = 512
# One that gets no more stops before the end of what it holds: the server generates on until it hears of it. Four
# answers of 1,000 tokens/s were 300 tokens each ahead of a busy proxy, and overflowed (2026-11-22).
_AHEAD_TOKENS = 256
_AHEAD_SHARE = 0.25
# Of the room with which an answer goes on that was stopped for others; with so many even 256 tokens are a whole window.
_MAX_DOUBLINGS = 12


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
        # By its count, which stays the same object where a carrier tells the rest of it anew.
        self._taken_for: Count | None = None
        self._limit_tokens = 0
        self._cuts = 0
        self._is_lent = False
        self._has_left = False
        self._present_in = ""

    def is_shared(self, window: Window) -> bool:
        """Whether requests to this instance have to be fitted beside each other."""
        return shares_context(self._case.settings.admission, window.parallel)

    async def take(self, guarded: Guarded, limit_tokens: int, *, can_grow: bool) -> int:
        """Waits for room for a prompt and the beginning, or all, of its answer; gives the bound on the answer's tokens.

        Once for each that is sent. An answer that grows while it is watched may have all that the window leaves. One
        that nobody can watch holds all of it from the start, which it may where it is alone; else a fair share.

        Args:
            guarded: what is sent.
            limit_tokens: what the window leaves, and the client wants.
            can_grow: whether the answer is watched.

        Raises:
            Overloaded: there was no room in time.
        """
        window = guarded.window
        if not self.is_shared(window):
            if not self._present_in:
                self._present_in = self._pool(window)
                self._admission.come(self._present_in)
            return limit_tokens
        if self._taken_for is guarded.count:
            return min(limit_tokens, self._limit_tokens)
        prompt_tokens, answer_tokens = _prompt_tokens(guarded), self._reserve_tokens(guarded)
        if not can_grow:
            share = window.tokens // max(window.parallel, 1) - guarded.count.tokens
            answer_tokens = max(share, answer_tokens)
        seat = await self._hold(window, prompt_tokens + min(limit_tokens, answer_tokens))
        if not can_grow:
            if seat.is_alone:
                seat.grow(prompt_tokens + limit_tokens)
            limit_tokens = max(min(limit_tokens, seat.tokens - prompt_tokens), 1)
        self._taken_for, self._limit_tokens = guarded.count, limit_tokens
        return limit_tokens

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

    def covers(self, guarded: Guarded, generated_tokens: int, *, can_be_cut: bool = True) -> bool:
        """Whether a running answer may go on: it holds enough, or gets more without waiting.

        Args:
            guarded: what was sent.
            generated_tokens: of its answer so far.
            can_be_cut: whether it could go on later where it stops now. What can't, such as a tool call, goes before
                answers that can: those then hear that they have to stop.
        """
        if self._seat is None:
            return True
        self._seat.yields = can_be_cut
        needed = _prompt_tokens(guarded) + generated_tokens + margin_tokens(generated_tokens, guarded.count.error_ratio)
        if self._seat.must_give_way:
            return False
        if needed + _STEP_TOKENS // 2 <= self._seat.tokens:
            return True
        wanted = min(needed + _STEP_TOKENS, guarded.window.tokens)
        if self._seat.grow(wanted, goes_first=not can_be_cut):
            return True
        answer_tokens = self._seat.tokens - _prompt_tokens(guarded)
        if answer_tokens >= self._limit_tokens:
            # The server's own limit ends it within what is held.
            return True
        ahead_tokens = min(_AHEAD_TOKENS, int(_AHEAD_SHARE * max(answer_tokens, 0))) if can_be_cut else 0
        return needed + ahead_tokens <= self._seat.tokens

    def was_cut(self) -> None:
        """Notes that an answer stopped for others: its next part begins with the double, so that it comes to an end."""
        self._cuts += 1
        self._taken_for = None

    def beside(self, window: Window) -> int:
        """How many other answers of this process run or wait at the same instance."""
        pool = self._pool(window)
        running = max(self._admission.present(pool), self._admission.seated(pool))
        return max(running - 1, 0)

    def leave(self) -> None:
        """Gives everything back."""
        if self._present_in:
            self._admission.go(self._present_in)
            self._present_in = ""
        self._has_left = True
        if self._seat is not None and not self._is_lent:
            self._count_seat(-1)
            self._seat.leave()
            self._seat = None

    def _pool(self, window: Window) -> str:
        return f"{self._case.target.api_base} {window.instance_id}"

    def _reserve_tokens(self, guarded: Guarded) -> int:
        """With how much of an answer it begins; after each cut with the double, up to all of the window."""
        budget = guarded.budget
        reserve = max(budget.output_buffer_tokens(guarded.count.tokens), budget.rules.answer_min_tokens)
        return min(reserve << min(self._cuts, _MAX_DOUBLINGS), guarded.window.tokens)

    async def _hold(self, window: Window, tokens: int) -> Seat:
        timeout_s = self._case.settings.admission_timeout_s
        tokens = max(min(tokens, window.tokens), 1)
        if self._seat is None:
            self._seat = await self._admission.enter(
                self._pool(window), window_tokens=window.tokens, tokens=tokens, timeout_s=timeout_s
            )
        else:
            self._count_seat(-1)
            await self._seat.exchange(tokens, timeout_s=timeout_s)
        self._count_seat(1)
        return self._seat

    def _count_seat(self, change: int) -> None:
        """Says to the request's other phases that it holds a place, which one that rests is not."""
        if self._seat is not None and self._seat.tokens > 0:
            self._case.attempts.seats += change


def _prompt_tokens(guarded: Guarded) -> int:
    """The most that the prompt can take."""
    return guarded.count.tokens + margin_tokens(guarded.count.tokens, guarded.count.error_ratio)
