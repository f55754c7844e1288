"""Holds one answer's part of its instance's context, from its first request to its last.

If nothing is shared, a `Reservation` only says that the answer is there. Else it takes a seat (`admission.py`) for each
request that is sent, a summary's too, and gives the bound for the server. Room belongs to the answer that a server is
writing: it is given back soon after the end of that has been read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litellm_compaction.core.budget import margin_tokens
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.engine.sharing.admission import Admission, Seat
from litellm_compaction.errors import DoesNotFit, Share
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.windows import Window

# A summary's own instruction, answer and thinking beside the history that it reads: 450 + 800 + 800, rounded up.
SUMMARY_EXTRA_TOKENS = 2100
# Most answers are far shorter than their bound: no request waits longer for one without a reader.
_ABANDONED_S = 10.0
# An answer that its server has ended keeps its room for so long, in case that it goes on as another request.
_KEPT_S = 1.0
# Our request to go on, and the template's text around the answer so far.
_GOING_ON_TOKENS = 128


def server_of(context: RequestContext) -> str:
    """The name by which a request's server is known here."""
    return str(context.target.api_base)


class Reservation:
    """One answer's room in its instance's context."""

    def __init__(self, admission: Admission, context: RequestContext) -> None:
        self._admission = admission
        self._context = context
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seat: Seat | None = None
        # By its count, which stays the same object if a carrier tells the rest of it anew.
        self._taken_for: Estimate | None = None
        self._limit_tokens = self._cuts = 0
        self._is_running = self._has_begun = self._has_left = False
        self._leaving: asyncio.TimerHandle | None = None

    def __del__(self) -> None:
        # In whatever thread it is collected; its loop may have ended.
        if self._seat is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._admission.release_later, self._seat)

    def is_shared(self, window: Window) -> bool:
        """Requests to this instance have to be fitted beside each other."""
        admission = self._context.settings.admission
        return admission == "pool" or (admission == "auto" and window.parallel > 1)

    async def acquire(self, prepared: PreparedRequest, limit_tokens: int, *, is_watched: bool, answers: int = 1) -> int:
        """Waits for room for a prompt and its answer; returns the bound on the answer that the server has to be told.

        An `Overloaded` says that there was none in time, a `DoesNotFit` that too many answers are asked for.

        Args:
            limit_tokens: what the window leaves, and the client wants.
            is_watched: the answer comes in pieces, can be stopped, and can go on: such a one begins with less.
            answers: how many are asked for (`n`), each up to the bound.
        """
        self._keep()
        window, admission, context = prepared.window, self._admission, self._context
        if admission.turns and admission.make_way is not None:
            await admission.make_way(server_of(context), is_beside=context.is_beside)
        if not self.is_shared(window):
            if context.is_beside and self._seat is None and window.parallel == 1:
                # Between an answer and its restart it would take the conversation's place in the server's cache.
                await admission.after_those_present(self._pool(window), self._timeout_s)
            self._be_present(window)
            return limit_tokens
        if self._taken_for is prepared.count:
            return min(limit_tokens, self._limit_tokens)
        # LM Studio has no field that asks for several answers to one prompt (lmstudio.ai, "OpenAI compatibility").
        written = 1 if context.target.is_lmstudio else answers
        prompt_tokens, least_tokens = _prompt_tokens(prepared), self._reserve_tokens(prepared)
        most_tokens = prompt_tokens + written * limit_tokens
        if not is_watched:
            least_tokens = max(window.tokens // window.parallel - prepared.count.tokens, least_tokens)
        if written > 1:
            shortest_tokens = min(limit_tokens, prepared.budget.rules.answer_min_tokens)
            if prompt_tokens + written * shortest_tokens > window.tokens:
                raise _too_many(prompt_tokens, written, shortest_tokens, window.tokens)
            least_tokens = min(least_tokens, (window.tokens - prompt_tokens) // written)
            most_tokens = min(most_tokens, window.tokens)
        seat = self._be_present(window)
        await self._take(seat, window, prompt_tokens + written * min(limit_tokens, least_tokens), most_tokens)
        limit_tokens = max(min(limit_tokens, (seat.tokens - prompt_tokens) // written), 1)
        self._taken_for, self._limit_tokens = prepared.count, limit_tokens
        return limit_tokens

    @asynccontextmanager
    async def for_summary(
        self, window: Window, history_tokens: int, *, extra_tokens: int = SUMMARY_EXTRA_TOKENS
    ) -> AsyncGenerator[None, None]:
        """Waits for room for a summary of so much history, in place of what is held now; an `Overloaded` if in vain.

        It is held until the summary is made, which may have other readers than the client that leaves meanwhile.
        """
        self._keep()
        seat = self._be_present(window)
        if not self.is_shared(window):
            yield
            return
        # It is lent: nobody gives it back meanwhile.
        self._seat = None
        try:
            await self._take(seat, window, min(history_tokens + extra_tokens, window.tokens))
            yield
        except (asyncio.CancelledError, TimeoutError):
            # Its server writes on until it has noticed.
            self._is_running = True
            raise
        finally:
            self._seat = seat
            if self._has_left:
                self.release()
            elif not self._is_running:
                self.ended()

    def pause(self) -> None:
        """Gives back what is held while another's summary is waited for, which may need the very room."""
        if not self._is_running:
            self._give_back()

    @property
    def is_waited_for(self) -> bool:
        return self._seat is not None and self._seat.is_waited_for

    @property
    def has_company(self) -> bool:
        """Another answer runs in the context that they share, or waits for room there."""
        return self._seat is not None and self._seat.tokens > 0 and self._seat.has_company

    def is_called_back(self, prepared: PreparedRequest, generated_tokens: int, *, can_be_cut: bool) -> bool:
        """Returns True if a running answer to `prepared` has to stop for another, if it `can_be_cut`."""
        if self._seat is None:
            return False
        again_tokens = prepared.count.tokens + generated_tokens + _GOING_ON_TOKENS
        needed_tokens = again_tokens + margin_tokens(again_tokens, prepared.count.likely_ratio)
        return self._seat.must_give_way(needed_tokens + self._reserve_tokens(prepared) if can_be_cut else None)

    def stay(self) -> None:
        """Notes that an answer which was called back runs on: it could not go on later."""
        if self._seat is not None:
            self._seat.must_give_way(None)

    def started(self) -> None:
        """Notes that the server has begun, and generates for as long as it is not told to stop."""
        self._is_running = True

    async def stopped(self) -> None:
        """Waits until the server has noticed that its answer was stopped: until then it holds the room all the same."""
        if self._is_running and self._seat is not None and self._seat.tokens:
            await asyncio.sleep(self._admission.stopping_s)
        self.ended()

    def ended(self) -> None:
        """Notes that no server writes for the answer now: its next request has its room, if it comes soon."""
        self._is_running = False
        if self._leaving is None and self._seat is not None:
            self._leaving = asyncio.get_running_loop().call_later(_KEPT_S, self._give_back)

    def was_cut(self, *, is_spent: bool) -> None:
        """Notes that an answer goes on as another request; if its share `is_spent`, with the double."""
        self._cuts += is_spent
        self._taken_for = None

    def beside(self, window: Window) -> int:
        """Returns how many other answers run or wait at the same instance."""
        pool = self._admission.pools.get(self._pool(window))
        return max(pool.answers - (self._seat is not None), 0) if pool is not None else 0

    def abandon(self) -> None:
        """Gives everything back of an answer without a reader that is no stream: its server writes it to the end."""
        self._has_left = True
        self._give_back(_ABANDONED_S)

    def release(self) -> None:
        """Gives everything back, of an answer that has just been stopped when its server has noticed it."""
        self._has_left = True
        self._give_back()

    def _give_back(self, after_s: float | None = None) -> None:
        self._keep()
        seat, self._seat, self._taken_for = self._seat, None, None
        if seat is None:
            return
        if seat.tokens and (self._is_running or after_s):
            self._admission.release_later(seat, after_s=after_s)
        else:
            seat.release()

    def _keep(self) -> None:
        """Keeps the room for the request that comes."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _be_present(self, window: Window) -> Seat:
        if self._seat is None:
            self._loop = asyncio.get_running_loop()
            self._seat = self._admission.seat(self._pool(window), self._context.attempts)
        return self._seat

    @property
    def _timeout_s(self) -> float:
        return self._context.settings.constants.admission_timeout_s

    def _pool(self, window: Window) -> str:
        return f"{server_of(self._context)} {window.instance_id}"

    def _reserve_tokens(self, prepared: PreparedRequest) -> int:
        """The tokens of an answer with which it starts; double after each share that was spent, up to the window."""
        budget = prepared.budget
        reserve = max(budget.output_buffer_tokens(prepared.count.tokens), budget.rules.answer_min_tokens)
        return min(reserve << self._cuts, prepared.window.tokens)

    async def _take(self, seat: Seat, window: Window, tokens: int, most_tokens: int = 0) -> None:
        limits = {"window_tokens": window.tokens, "most_tokens": most_tokens}
        await seat.take(min(tokens, window.tokens), **limits, timeout_s=self._timeout_s, is_restart=self._has_begun)
        self._has_begun = True


def _prompt_tokens(prepared: PreparedRequest) -> int:
    """The most that the prompt can take."""
    return prepared.count.tokens + margin_tokens(prepared.count.tokens, prepared.count.likely_ratio)


def _too_many(prompt_tokens: int, written: int, shortest_tokens: int, window_tokens: int) -> DoesNotFit:
    written_tokens = written * shortest_tokens
    needed_tokens = prompt_tokens + written_tokens
    said = (
        f"This model's maximum context length is {window_tokens} tokens, which all answers of a request share. "
        f"However, you asked for {written} answers: its prompt and {shortest_tokens} tokens for each of them need "
        f"{needed_tokens} tokens (context_length_exceeded). Ask for fewer at a time."
    )
    shares = Share("its prompt", prompt_tokens), Share(f"{written} answers of {shortest_tokens}", written_tokens)
    return DoesNotFit(said, shares=shares, window_tokens=window_tokens, needed_tokens=needed_tokens)
