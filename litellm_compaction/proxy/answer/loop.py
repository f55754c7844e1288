"""The loop that carries an answer over the context limit: watch, stop, compact, continue; streaming and not.

Written once, over an abstract upstream (`upstream.py`); `transport.py` and `hooks.py` carry it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import httpx

from litellm_compaction.core.go_on import Partial
from litellm_compaction.core.messages import (
    ABORT_NOTICE,
    ATTEMPTS_NOTICE,
    DONE_NOTICE,
    NEARLY_FULL_NOTICE,
    START_NOTICE,
    THOUGHTS_NOTICE,
)
from litellm_compaction.engine import (
    MOST_LOOKUPS,
    TOLD_AFTER_S,
    CompactionNeeded,
    Compactor,
    ContinuationPlan,
    PreparedRequest,
    RequestContext,
    Reservation,
)
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import ContinuationOutcome, Cut
from litellm_compaction.proxy.answer.client import Asked, OneAnswer, Progress
from litellm_compaction.proxy.answer.endings import (
    GIVES_WAY,
    MAX_CUTS,
    STOPPED,
    Ended,
    Lessons,
    State,
    next_leg,
    restart_of,
)
from litellm_compaction.proxy.answer.relay import Relay
from litellm_compaction.proxy.answer.sse import Batch, Chunk, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.answer.upstream import Leg, Upstream, has_another_way
from litellm_compaction.proxy.exchange import Exchange

# Of the text that a client has of an answer, before it is cut for others.
_LEAST_CUT_CHARS = 200
# Finish reasons of an answer that its client sends back as it is, and which of these are calls.
_ENDS, _CALLS = frozenset({"stop", "length", "tool_calls", "function_call"}), frozenset({"tool_calls", "function_call"})
_STILL_TOO_LARGE = "The compacted prompt still exceeds the available context size."


class _Next(NamedTuple):
    """What the client gets behind a leg, and what makes the next one's request, if any; of that it may be told."""

    sent: list[Chunk]
    make: Callable[[], Awaitable[PreparedRequest]] | None = None
    is_announced: bool = False


class Answer:
    """One client's answer, over as many upstream requests as it takes; `prepared` before it began, in its `room`.

    Seven of its attributes are what it was given, and the others what becomes of it.
    """

    def __init__(
        self,
        compactor: Compactor,
        context: RequestContext,
        upstream: Upstream,
        asked: Asked,
        prepared: PreparedRequest | CompactionNeeded,
        exchange: Exchange,
        *,
        room: Reservation,
    ) -> None:
        self._compactor = compactor
        self._context = context
        self._upstream = upstream
        self._asked = asked
        self._prepared = prepared
        self._exchange = exchange
        self._room = room
        self._lessons = Lessons(compactor, context, room)
        self._progress = Progress()
        self._state = State(ways=upstream.ways, restarts_left=context.settings.max_restarts)
        self._relay: Relay | None = None
        # Of the leg that was stopped last.
        self._plan: ContinuationPlan | None = None
        notices = asked.notices.at_the_end_only if asked.is_json or asked.is_whole else asked.notices
        self._one = OneAnswer(self._progress, notices)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """The chunks of all upstream answers, and what stands between them; the room is given back behind the last.

        An `UpstreamError` tells a failure that is no overflow, a `CompactionError` that nothing fits and none was sent.
        """
        try:
            following = self._begun()
            while True:
                if following.sent:
                    yield following.sent
                if following.make is None:
                    break
                prepared = await following.make()
                # A compaction that was announced may have been made by an alike request meanwhile.
                is_made = following.is_announced and prepared.action != "none"
                if is_made and (notice := self._one.notice(f"{DONE_NOTICE}\n\n")):
                    yield notice
                async with aclosing(self._leg(prepared)) as batches:
                    async for batch in batches:
                        yield batch
                assert self._relay is not None  # noqa: S101 - it has just been read
                following = await self._following(self._relay)
        except CompactionError:
            # Behind a leg of which the client has some it ends regularly; its request gets the error otherwise.
            if self._relay is None or not self._progress.delivered:
                raise
            yield self._closing(self._relay)
        except (asyncio.CancelledError, httpx.ReadTimeout):
            if self._asked.is_whole:
                # Its server may write to the end although nobody reads it.
                self._room.abandon()
            raise
        finally:
            self._room.release()
        self._tell_background()

    @property
    def is_waited_for(self) -> bool:
        return self._room.is_waited_for

    def _begun(self) -> _Next:
        """What a client is told before the first leg, and the compaction that is still needed."""
        decided = self._prepared
        is_needed = isinstance(decided, CompactionNeeded)
        told: list[Chunk] = []
        if is_needed and not self._asked.is_whole:
            told = self._one.notice(f"{START_NOTICE}\n\n") or [self._one.opening()]
        elif isinstance(decided, PreparedRequest) and decided.action == "compacted":
            told = self._one.notice(f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n")
        return _Next(told, partial(self._compactor.finish, decided, self._room), is_announced=is_needed)

    async def _leg(self, prepared: PreparedRequest) -> AsyncGenerator[Batch, None]:
        """One upstream answer as soon as there is room for it, which becomes the last leg."""
        seating = asyncio.ensure_future(self._seated(prepared))
        try:
            if self._one.is_silent and not self._asked.is_whole:
                await asyncio.wait({seating}, timeout=TOLD_AFTER_S)
                if not seating.done():
                    # Its client learns that an answer comes; from then on a heartbeat says so.
                    self._exchange.may_pause = True
                    yield [self._one.opening()]
            leg = await seating
        finally:
            seating.cancel()
        self._exchange.sent(self._context, leg.prepared)
        relay = Relay(leg, self._progress, self._asked, streaming_ratio=self._context.settings.streaming_ratio)
        dropped: UpstreamDropped | None = None
        try:
            # Closed here and not by the garbage collector: the server generates for as long as it is open.
            async with aclosing(self._stream(relay)) as batches:
                async for batch in batches:
                    yield batch
        except UpstreamDropped as error:
            dropped = error
        except UpstreamError as error:
            relay.fail(error)
        if relay.end is None and (flushed := self._one.dressed(relay.closed(dropped))):
            yield flushed
        if relay.is_left_running:
            # Its server holds the room until it has noticed.
            await self._room.stopped()
        else:
            self._room.ended()
        self._relay = relay

    async def _seated(self, prepared: PreparedRequest) -> Leg:
        """The request as it is sent, as soon as there is room for it; made anew if the window has shrunk meanwhile."""
        while True:
            leg = self._bounded(prepared)
            tokens = await self._room.acquire(prepared, leg.max_tokens, is_watched=True)
            if not await self._compactor.has_shrunk(self._context, prepared):
                if tokens == leg.max_tokens:
                    return leg
                return replace(leg, max_tokens=tokens, is_share=True, is_doubted=False)
            if prepared.continuation.way is None:
                prepared = await self._guarded()
            else:
                prepared = await self._compactor.continue_answer(
                    self._asked.request, self._partial(), self._context, self._room, ways=self._state.ways
                )

    def _bounded(self, prepared: PreparedRequest) -> Leg:
        """The next leg with what the window and the client leave it, or less if it can go on behind that."""
        asked, constants, given_tokens = self._asked, self._context.settings.constants, self._progress.given_tokens
        left_tokens = None if asked.output_tokens is None else max(asked.output_tokens - given_tokens, 1)
        most_tokens = prepared.max_output_tokens(left_tokens, is_certain=True)
        tokens = prepared.max_output_tokens(left_tokens, is_certain=self._state.was_doubted)
        # Those of a whole answer are not seen before its end.
        thoughts_tokens = math.inf
        if prepared.continuation.closing is not None and not asked.is_whole:
            # The model is to think no more.
            thoughts_tokens = max(constants.reasoning_answer_min_tokens, prepared.max_output_tokens(None) // 2)
        elif constants.reasoning_budget_ratio and not asked.is_whole:
            own_tokens = constants.reasoning_budget_ratio * prepared.window.tokens
            budget_tokens = own_tokens if asked.thoughts_tokens is None else asked.thoughts_tokens
            thoughts_tokens = max(budget_tokens - given_tokens, 1)
        has_begun = bool(self._progress.sent_text.strip()) or prepared.continuation.closing is not None
        return Leg(
            prepared=prepared,
            max_tokens=tokens,
            asked_tokens=left_tokens,
            thoughts_tokens=thoughts_tokens,
            goes_on=has_begun and prepared.continuation.way is not None,
            is_doubted=tokens < most_tokens and not asked.is_json,
        )

    async def _stream(self, relay: Relay) -> AsyncGenerator[Batch, None]:
        """What the client gets of a leg as it comes, until the stream ends, or is stopped because that gains room."""
        self._room.started()
        async with self._upstream.open(relay.leg) as stream:
            async for batch in stream:
                relay.has_company = self._room.has_company
                sent: list[Chunk] = []
                for chunk in batch:
                    sent += self._taken(chunk, relay)
                    if relay.end is None:
                        continue
                    if sent:
                        # They do not wait for the rest.
                        yield sent
                        sent = []
                    if relay.end in STOPPED and not await self._can_go_on(relay):
                        relay.go_on_to_the_end()
                    if relay.end is not None:
                        return
                if sent:
                    yield sent

    def _taken(self, chunk: Chunk, relay: Relay) -> list[Chunk]:
        """What the client gets for a chunk of the server's; the leg ends if others wait for its room."""
        deltas, is_delivered = relay.take(chunk), self._progress.delivered
        is_at_a_seam = not (is_delivered and relay.is_inside_a_word)
        if relay.has_company and is_at_a_seam and self._is_called_back(relay):
            relay.stop()
            if relay.end == "called_back" and not is_delivered:
                # Before the client has a word of it: it is asked for again, without a seam.
                return []
        if relay.is_near_the_end:
            self._exchange.may_pause = True
        return self._one.written(chunk, deltas)

    def _is_called_back(self, relay: Relay) -> bool:
        """The answer has to stop since others wait for its room; a document, a call or a mere beginning is not cut."""
        if self._asked.is_whole or not self._room.is_waited_for:
            return False
        is_telling = not self._progress.text or len(self._progress.sent_text) >= _LEAST_CUT_CHARS
        is_cuttable = not self._progress.delivered or (is_telling and not self._asked.is_json)
        can_be_cut = is_cuttable and not relay.calls and self._state.cuts < MAX_CUTS - 1
        return self._room.is_called_back(relay.prepared, relay.generated.tokens, can_be_cut=can_be_cut)

    async def _can_go_on(self, relay: Relay) -> bool:
        """An answer that is about to be stopped can go on; it runs to its end otherwise."""
        is_anew = relay.end in GIVES_WAY and not self._progress.delivered
        if is_anew or (relay.end == "overthought" and self._state.is_closing):
            return True
        self._plan = await self._planned(relay)
        if self._plan is None and relay.end in GIVES_WAY:
            self._room.stay()
        return self._plan is not None

    def _ended(self, relay: Relay) -> Ended:
        """The end of a leg as the next step depends on it, or of one that is about to be stopped."""
        asked_tokens = self._asked.output_tokens
        return Ended(
            end=relay.end,
            is_way_refused=relay.end == "failed" and has_another_way(relay.prepared) and not relay.has_begun,
            is_delivered=self._progress.delivered,
            has_whole_calls=relay.calls.has_begun and bool(relay.calls.held),
            only_recalls=bool(relay.recalls) and not relay.calls.clients,
            is_used_up=asked_tokens is not None and self._progress.given_tokens + 1 >= asked_tokens,
            is_stuck=relay.calls.has_begun,
            is_thoughts=self._partial().is_thoughts,
            is_full=relay.is_full,
        )

    async def _following(self, relay: Relay) -> _Next:
        """What follows a leg: the answer's end, or the request for the next one."""
        if not self._ended(relay).is_way_refused:
            self._note(relay)
        step = next_leg(self._ended(relay), self._state)
        if relay.recalls and self._state.may_look_up:
            await self._look_up(relay)
        if step == "fail":
            raise relay.error or UpstreamError(_STILL_TOO_LARGE)
        if step == "deliver":
            return _Next(self._ending(relay))
        if step == "used_up":
            return _Next([*self._one.dressed(relay.surrendered()), *self._ending(relay, "length")])
        if step == "calls":
            # Of several calls the last was cut: the client executes the whole ones, and the model asks again.
            return _Next([*self._one.dressed(relay.surrendered("whole")), *self._ending(relay, "tool_calls")])
        if step == "other_way":
            return _Next([], partial(self._by_another_way, relay))
        if step == "harder":
            self._state.has_retried = True
            return _Next([], partial(self._guarded, self._context.pressed(relay.refusal)))
        if step == "anew":
            self._progress.begin_anew()
            self._state.is_resumed = True
            return _Next([], self._guarded)
        if step == "look_up":
            parting = self._progress.part()
            return _Next(self._one.dressed([{"content": parting}] if parting else []), self._guarded)
        return await self._going_on(relay)

    async def _going_on(self, relay: Relay) -> _Next:
        """Plans the next leg behind one that was cut, and tells of the compaction that it needs; or ends the answer."""
        self._exchange.may_pause = True
        state = self._state
        state.is_joined = state.is_joined or self._progress.delivered
        plan, self._plan = self._plan or await self._planned(relay), None
        if plan is None:
            return _Next(self._closing(relay))
        is_new = isinstance(plan.prepared, CompactionNeeded)
        state.is_resumed = relay.end in GIVES_WAY and not is_new
        if state.is_resumed:
            # Others needed the room, or nobody doubts it now: nothing is compacted, and the client need not know.
            return _Next([], partial(self._compactor.continued, plan, self._room))
        sent: list[Chunk] = []
        if plan.partial.closes:
            state.is_closing = True
            sent = self._one.dressed(relay.closed_thoughts())
        if is_new:
            sent += self._one.notice(f"\n\n{START_NOTICE}\n\n")
        return _Next(sent, partial(self._restarted, relay, plan), is_announced=is_new)

    async def _planned(self, relay: Relay) -> ContinuationPlan | None:
        """The plan by which the answer is stopped and goes on; None if no stop gains enough room (P5)."""
        restart = restart_of(self._ended(relay), self._state)
        if restart is None:
            return None
        so_far, context, room_tokens = self._partial(), self._context.relaxed(), 0
        if restart != "resumed":
            so_far = replace(so_far, closes=so_far.is_thoughts)
        if restart in ("compacted", "pressed"):
            context = self._context.pressed(relay.refusal) if restart == "pressed" else self._context
            room_tokens = self._room_tokens(relay)
        try:
            plan = await self._compactor.go_on(
                self._asked.request, so_far, context, room_tokens=room_tokens, ways=self._state.ways
            )
        except CompactionError:
            return None
        # Behind a bound made for doubt it goes on as it is, or ends, once the compactions are used up.
        is_new = isinstance(plan.prepared, CompactionNeeded)
        return None if is_new and relay.leg.is_doubted and self._state.is_last else plan

    def _room_tokens(self, relay: Relay) -> int:
        """The least room for the rest: an output buffer more than there was, and that of a call that was cut."""
        window_tokens, budget = relay.prepared.window.tokens, relay.prepared.budget
        used_tokens = window_tokens if relay.end == "overflow" else relay.used_tokens
        if relay.is_full:
            room_tokens = budget.output_buffer_tokens(used_tokens) + max(window_tokens - used_tokens, 0)
        else:
            room_tokens = budget.restart_room_tokens(used_tokens)
        return room_tokens + relay.cut_call_tokens

    async def _restarted(self, relay: Relay, plan: ContinuationPlan) -> PreparedRequest:
        """The request behind a stop at the window's end, or at that of a budget."""
        again = await self._compactor.continued(plan, self._room)
        self._progress.restarts += 1
        self._state.restarts_left -= 1
        left_tokens = min(relay.filled_tokens, relay.prepared.window.tokens) - relay.lost_tokens
        self._state.has_gained = again.count.tokens < left_tokens or plan.partial.closes
        self._tell("restarted", again, relay)
        return again

    async def _by_another_way(self, relay: Relay) -> PreparedRequest:
        prepared, error, state = relay.prepared, relay.error, self._state
        plan, way = prepared.continuation.plan, prepared.continuation.way
        if prepared.continuation.closing or plan is None or way is None:
            # The words alone.
            return replace(prepared, continuation=replace(prepared.continuation, closing={}))
        state.ways -= {way}
        if error is not None and not error.may_pass:
            state.refused = (*state.refused, way)
        return await self._compactor.continued(plan, self._room, ways=state.ways)

    async def _guarded(self, context: RequestContext | None = None) -> PreparedRequest:
        """The client's request as it is to be sent now."""
        return await self._compactor.guard(self._asked.request, context or self._context, self._room)

    async def _look_up(self, relay: Relay) -> None:
        """Answers the calls of our own tool, for this answer or, beside calls of the client's, for the next one."""
        calls, left = relay.recalls, MOST_LOOKUPS - self._progress.lookups
        # A model that calls for more is told so once.
        self._state.is_joined, self._state.may_look_up = True, len(calls) <= left
        self._progress.lookups += min(len(calls), left)
        await self._compactor.recaller.look_up(relay.prepared, self._progress.sent_text, calls, left)

    def _partial(self) -> Partial:
        so_far = Partial(text=self._progress.sent_text, reasoning=self._progress.reasoning, is_json=self._asked.is_json)
        return replace(so_far, closes=True) if self._state.is_closing and so_far.is_thoughts else so_far

    def _note(self, relay: Relay) -> None:
        """Counts a leg, and learns from it."""
        progress, state = self._progress, self._state
        progress.completion_tokens += relay.completion_tokens()
        progress.lost_tokens += relay.lost_tokens
        is_others = self._lessons.is_overflow_of_all(relay, state, is_delivered=progress.delivered)
        self._lessons.learn(relay, state)
        if not state.is_resumed:
            progress.prompt_tokens.append(relay.usage.prompt_tokens if relay.usage else relay.prepared.count.tokens)
        progress.usages.append(relay.usage_fields)
        if is_others:
            relay.end = "spent"
        if relay.end in GIVES_WAY:
            state.cuts += 1
            # Told of doubt once for each answer: a server that tells no number would end it there again and again.
            state.was_doubted = state.was_doubted or relay.leg.is_doubted
            self._room.was_cut(is_spent=relay.end == "spent" and not relay.leg.is_doubted)

    def _tell(self, outcome: ContinuationOutcome, prepared: PreparedRequest, relay: Relay) -> None:
        used_tokens = min(relay.filled_tokens, prepared.window.tokens)
        self._compactor.reporter.continued(
            self._context,
            prepared,
            outcome=outcome,
            attempt=self._progress.restarts,
            used_tokens=used_tokens,
            lost_tokens=min(relay.lost_tokens, used_tokens),
        )

    def _closing(self, relay: Relay) -> list[Chunk]:
        """No way out: everything that is held, the notice, a regular end."""
        chunks = self._one.dressed(relay.surrendered())
        window_tokens = relay.prepared.window.tokens
        used_tokens = min(relay.filled_tokens, window_tokens)
        outcome: Cut = "aborted"
        if self._partial().is_thoughts and not relay.calls.has_begun:
            outcome, text = "unanswered", THOUGHTS_NOTICE
            chunks += self._one.dressed(relay.closed_thoughts())
        elif self._state.restarts_left <= 0 and not relay.calls.has_begun:
            outcome, text = "attempts", ATTEMPTS_NOTICE
        else:
            is_exceeded = relay.end == "overflow" or used_tokens >= window_tokens
            text = ABORT_NOTICE if is_exceeded else NEARLY_FULL_NOTICE
        self._state.outcome = outcome
        self._tell(outcome, relay.prepared, relay)
        notice = self._one.closing_notice("\n\n" + text.format(used=used_tokens, window=window_tokens))
        return [*chunks, *notice, *self._ending(relay, "length")]

    def _ending(self, relay: Relay, reason: str | None = None) -> list[Chunk]:
        reason = reason or relay.finish_reason or ("tool_calls" if relay.calls.clients else "stop")
        if reason in _CALLS and relay.recalls and not relay.calls.clients:
            # It calls for more than it may look up.
            reason = "stop"
        was_cut = bool(self._progress.restarts or self._state.cuts)
        if reason == "stop" and self._asked.is_json and was_cut and not self._progress.is_json:
            reason = "length"
        receipt = {} if self._asked.is_whole else self._exchange.late_receipt
        if details := self._progress.details(self._state.outcome, receipt):
            self._exchange.ended(details)
        return self._one.ending(reason, self._progress.usage(details) if self._asked.wants_usage else None)

    def _tell_background(self) -> None:
        """Lets the answer's conversation be compacted ahead, unless a restart has done that already."""
        relay = self._relay
        if relay is None or not self.is_one_leg or relay.finish_reason not in _ENDS:
            return
        self._compactor.background.answered(
            self._asked.request,
            self._context,
            relay.prepared,
            answer="" if relay.finish_reason in _CALLS else self._progress.whole_text,
            used_tokens=relay.filled_tokens,
        )

    @property
    def is_joined(self) -> bool:
        return self._state.is_joined

    @property
    def is_one_leg(self) -> bool:
        """A single upstream answer is all of it, and the window has not ended it."""
        return not self._state.is_joined and self._state.outcome == "completed"
