"""The loop that carries an answer over the context limit: watch, stop, compact, continue; streaming and not.

Written once, over an abstract upstream (`upstream.py`); `transport.py` and, for the hooks, `callback.py` carry it.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import httpx

from litellm_compaction.core.go_on import Partial, Way
from litellm_compaction.core.messages import ABORT_NOTICE, ATTEMPTS_NOTICE, NEARLY_FULL_NOTICE, THOUGHTS_NOTICE
from litellm_compaction.engine import (
    MOST_LOOKUPS,
    TOLD_AFTER_S,
    CompactionNeeded,
    Compactor,
    ContinuationPlan,
    Outcome,
    PreparedRequest,
    RequestContext,
    Reservation,
)
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import ContinuationEvent, ContinuationOutcome, Cut
from litellm_compaction.proxy.answer.client import Asked, Cost, OneAnswer
from litellm_compaction.proxy.answer.legs import GIVES_WAY, MAX_CUTS, RESTARTS, UNNAMED, Leg, State, Step, next_leg
from litellm_compaction.proxy.answer.relay import Ending, Relay
from litellm_compaction.proxy.answer.sse import Batches, Chunk, UpstreamError
from litellm_compaction.proxy.answer.upstream import Upstream
from litellm_compaction.proxy.exchange import Exchange
from litellm_compaction.proxy.refusals import log_failure

# Of the text that a client has of an answer, before it is cut for others.
_LEAST_CUT_CHARS = 200
# An overflow without a number at less than this share of the window is not of this answer alone.
_FAR_BELOW_RATIO = 0.5
# Finish reasons of an answer that its client sends back as it is, and which of these are calls.
_ENDS, _CALLS = frozenset({"stop", "length", "tool_calls", "function_call"}), frozenset({"tool_calls", "function_call"})
_STILL_TOO_LARGE = "The compacted prompt still exceeds the available context size."


@dataclass(slots=True, eq=False)
class Answer:
    """One client's answer, over as many upstream requests as it takes; `decided` before it began, in its `room`."""

    compactor: Compactor
    context: RequestContext
    upstream: Upstream
    asked: Asked
    decided: PreparedRequest | CompactionNeeded
    exchange: Exchange
    room: Reservation
    _one: OneAnswer = field(init=False)
    _state: State = field(init=False)
    _cost: Cost = field(default_factory=Cost)
    _relay: Relay = field(init=False)  # Of the last leg.
    _next: PreparedRequest | None = field(init=False)  # The request of the next one, if any.

    def __post_init__(self) -> None:
        self._one = OneAnswer(self.asked)
        self._state = State(ways=self.upstream.ways, restarts_left=self.context.settings.max_restarts)

    async def batches(self) -> Batches:
        """The chunks of all upstream answers, and what stands between them; the room is given back behind the last.

        An `UpstreamError` tells a failure that is no overflow, a `CompactionError` that nothing fits and none was sent.
        """
        one, state = self._one, self._state
        try:
            if chunks := self._begun():
                yield chunks
            self._next = prepared = await self.compactor.finish(self.decided, self.room)
            # A compaction that was announced may have been made by an alike request meanwhile.
            if isinstance(self.decided, CompactionNeeded) and prepared.action != "none" and (chunks := one.done()):
                yield chunks
            while self._next is not None:
                async with aclosing(self._leg(self._next)) as batches:
                    async for batch in batches:
                        yield batch
                self._next = None
                if chunks := await self._behind(self._relay):
                    yield chunks
                if state.plan is not None and (chunks := await self._continued(self._relay, state.plan)):
                    yield chunks
        except CompactionError:
            # Behind a leg of which the client has some it ends regularly; its request gets the error otherwise.
            if not one.is_delivered:
                raise
            yield self._closing(self._relay)
        except (asyncio.CancelledError, httpx.ReadTimeout):
            if self.asked.is_whole:
                # Its server may write to the end although nobody reads it.
                self.room.abandon()
            raise
        finally:
            self.room.release()
        self._tell_background()

    @property
    def is_one_leg(self) -> bool:
        """A single upstream answer is all of it, and the window has not ended it."""
        return not self._state.is_joined and self._state.outcome == "completed"

    def _begun(self) -> list[Chunk]:
        """Tells the client of a compaction that is still needed, or of one that an earlier hook made."""
        if isinstance(self.decided, CompactionNeeded):
            return [] if self.asked.is_whole else self._one.starts() or [self._one.opening()]
        return [*self._one.starts(), *self._one.done()] if self.decided.action == "compacted" else []

    async def _leg(self, prepared: PreparedRequest) -> Batches:
        """One upstream answer as soon as there is room for it, which becomes the last leg."""
        seating = asyncio.ensure_future(self._seated(prepared))
        try:
            if self._one.is_silent and not self.asked.is_whole:
                await asyncio.wait({seating}, timeout=TOLD_AFTER_S)
                if not seating.done():
                    # Its client learns that an answer comes; from then on a heartbeat says so.
                    self.exchange.may_pause = True
                    yield [self._one.opening()]
            leg = await seating
        finally:
            seating.cancel()
        self.exchange.sent(leg.prepared)
        relay = self._relay = Relay(leg, self._one)
        failure: UpstreamError | None = None
        try:
            # Closed here and not by the garbage collector: the server generates for as long as it is open.
            async with aclosing(self._stream(relay)) as batches:
                async for batch in batches:
                    yield batch
        except UpstreamError as error:
            failure = error
        if relay.end is None and (held := self._one.dressed(relay.closed(failure))):
            yield held
        if (relay.is_stopped or relay.end in GIVES_WAY) and relay.finish_reason is None:
            # We ended it: its server holds the room until it has noticed.
            await self.room.stopped()
        else:
            self.room.ended()

    async def _seated(self, prepared: PreparedRequest) -> Leg:
        """The request as it is sent, as soon as there is room for it; made anew if the window has shrunk meanwhile."""
        while True:
            leg = self._bounded(prepared)
            tokens = await self.room.acquire(prepared, leg.max_tokens, is_watched=True)
            if not await self.compactor.has_shrunk(self.context, prepared):
                if tokens == leg.max_tokens:
                    return leg
                return replace(leg, max_tokens=tokens, is_share=True, is_doubted=False)
            request, compactor, ways = self.asked.request, self.compactor, self._state.ways
            if prepared.continuation.way is None:
                prepared = await compactor.guard(request, self.context, self.room)
            else:
                plan = await compactor.go_on(request, self._partial(), self.context, ways=ways)
                prepared = await compactor.continued(plan, self.room)

    def _bounded(self, prepared: PreparedRequest) -> Leg:
        """The next leg with what the window and the client leave it, or less if it can go on behind that."""
        asked, constants, given_tokens = self.asked, self.context.settings.constants, self._cost.given_tokens
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
        has_begun = bool(self._one.sent_text.strip()) or prepared.continuation.closing is not None
        return Leg(
            prepared=prepared,
            max_tokens=tokens,
            asked_tokens=left_tokens,
            thoughts_tokens=thoughts_tokens,
            goes_on=has_begun and prepared.continuation.way is not None,
            is_doubted=tokens < most_tokens and not asked.is_json,
        )

    async def _stream(self, relay: Relay) -> Batches:
        """Gives the client a leg as it comes, until the stream ends, or is stopped because that gains room."""
        self.room.started()
        self._one.waits_since_s = asyncio.get_running_loop().time()
        async with self.upstream.open(relay.leg) as stream:
            async for batch in stream:
                relay.has_company = self.room.has_company
                sent: list[Chunk] = []
                for chunk in batch:
                    is_first = self._one.is_silent
                    sent += self._taken(chunk, relay)
                    if relay.end is None and not is_first:
                        continue
                    if sent:
                        # They do not wait for the rest.
                        yield sent
                        sent = []
                    if relay.is_stopped and not await self._can_go_on(relay):
                        relay.go_on_to_the_end()
                    if relay.end is not None:
                        return
                if sent:
                    yield sent

    def _taken(self, chunk: Chunk, relay: Relay) -> list[Chunk]:
        """Gives the client a chunk of the server's; the leg ends if others wait for its room."""
        deltas, is_delivered = relay.take(chunk), self._one.is_delivered
        is_at_a_seam = self._one.is_settled or not is_delivered
        if relay.has_company and is_at_a_seam and self._is_called_back(relay):
            relay.stop()
            if relay.end == "called_back" and not is_delivered:
                # Before the client has a word of it: it is asked for again, without a seam.
                return []
        may_call = relay.calls or self.asked.request.tools
        if relay.would_hold_calls if may_call else relay.is_near_the_end:
            self.exchange.may_pause = True
        sent = self._one.written(chunk, deltas)
        # Of a call that is held for long its client learns that an answer comes; until then a failure has its status.
        is_held = relay.calls and self._one.is_silent and not (sent or self.asked.is_whole)
        is_told = is_held and asyncio.get_running_loop().time() - self._one.waits_since_s >= TOLD_AFTER_S
        return [self._one.opening()] if is_told else sent

    def _is_called_back(self, relay: Relay) -> bool:
        """The answer has to stop since others wait for its room; a document, a call or a mere beginning is not cut."""
        one = self._one
        if self.asked.is_whole or not self.room.is_waited_for:
            return False
        is_telling = not one.text or len(one.sent_text) >= _LEAST_CUT_CHARS
        is_cuttable = not one.is_delivered or (is_telling and not self.asked.is_json)
        can_be_cut = is_cuttable and not relay.calls and self._state.cuts < MAX_CUTS - 1
        return self.room.is_called_back(relay.leg.prepared, relay.generated.tokens, can_be_cut=can_be_cut)

    def _step(self, relay: Relay) -> Step:
        """Decides what follows a leg, or one that is about to be stopped."""
        if relay.end == "done" and not relay.calls:
            return "deliver"
        asked_tokens = self.asked.output_tokens
        is_used_up = asked_tokens is not None and self._cost.given_tokens + 1 >= asked_tokens
        return next_leg(relay, self._state, is_used_up=is_used_up, is_thoughts=self._partial().is_thoughts)

    async def _can_go_on(self, relay: Relay) -> bool:
        """An answer that is about to be stopped can go on, or ends better so; it runs to its end otherwise."""
        step = self._step(relay)
        if step not in RESTARTS:
            # Of thoughts that go on although they were closed.
            return step != "close" or (relay.end == "overthought" and self._state.is_closing)
        self._state.plan = await self._planned(relay, step)
        if self._state.plan is None and step == "resumed":
            self.room.stay()
        return self._state.plan is not None

    async def _behind(self, relay: Relay) -> list[Chunk]:
        """Gives the client the end of a leg, or what it is told before the next one, found or planned."""
        step, one, state = self._step(relay), self._one, self._state
        if step != "other_way":
            self._note(relay)
            step = self._step(relay)
        if relay.recalls and state.may_look_up:
            await self._look_up(relay)
        if step in RESTARTS or step == "close":
            return await self._going_on(relay, step)
        state.plan = None
        match step:
            case "fail":
                raise relay.ending.error or UpstreamError(_STILL_TOO_LARGE)
            case "deliver":
                return self._ended(relay)
            case "used_up":
                return [*one.dressed(relay.surrendered()), *self._ended(relay, "length")]
            case "calls":
                return self._with_calls(relay)
            case "other_way":
                self._next = await self._by_another_way(relay)
                return []
        pressed = self.context.pressed(relay.ending.refusal) if step == "harder" else self.context
        state.has_retried = state.has_retried or step == "harder"
        self._next = await self.compactor.guard(self.asked.request, pressed, self.room)
        if step == "anew":
            self._cost.lost_tokens = self._cost.completion_tokens
            one.begin_anew()
        return one.part() if step == "look_up" else []

    async def _going_on(self, relay: Relay, step: Step) -> list[Chunk]:
        """Plans the next leg behind one that was cut, and tells of the compaction that it needs; or ends the answer."""
        state = self._state
        self.exchange.may_pause = True
        state.is_joined = state.is_joined or self._one.is_delivered
        plan = state.plan = state.plan or (await self._planned(relay, step) if step in RESTARTS else None)
        if plan is None:
            return self._closing(relay)
        is_new = isinstance(plan.prepared, CompactionNeeded)
        # Others needed the room, or nobody doubts it now: nothing is compacted, and the client need not know.
        state.is_resumed = relay.end in GIVES_WAY and not is_new
        chunks: list[Chunk] = []
        if plan.partial.closes and not state.is_resumed:
            state.is_closing = True
            chunks = self._one.dressed(self._one.close_thoughts())
        return [*chunks, *self._one.starts()] if is_new else chunks

    async def _continued(self, relay: Relay, plan: ContinuationPlan) -> list[Chunk]:
        """Makes the request of a continuation; tells of a compaction that was made for it."""
        state = self._state
        state.plan = None
        self._next = prepared = await self.compactor.continued(plan, self.room)
        if state.is_resumed:
            return []
        self._cost.restarts += 1
        state.restarts_left -= 1
        state.has_gained = prepared.count.tokens < relay.used_tokens - relay.lost_tokens or plan.partial.closes
        self._tell("restarted", prepared, relay)
        is_made = isinstance(plan.prepared, CompactionNeeded) and prepared.action != "none"
        return self._one.done() if is_made else []

    async def _planned(self, relay: Relay, step: Step) -> ContinuationPlan | None:
        """The plan by which the answer is stopped and goes on; None if no stop gains enough room (P5)."""
        so_far, context, room_tokens = self._partial(), self.context.relaxed(), 0
        if step != "resumed":
            so_far = replace(so_far, closes=so_far.is_thoughts)
        if step in ("compacted", "pressed"):
            context = self.context.pressed(relay.ending.refusal) if step == "pressed" else self.context
            room_tokens = self._room_tokens(relay)
        ways = self._state.ways
        try:
            plan = await self.compactor.go_on(self.asked.request, so_far, context, room_tokens=room_tokens, ways=ways)
        except CompactionError:
            return None
        # Behind a bound made for doubt it goes on as it is, or ends, once the compactions are used up.
        is_new = isinstance(plan.prepared, CompactionNeeded)
        return None if is_new and relay.leg.is_doubted and self._state.is_last else plan

    def _room_tokens(self, relay: Relay) -> int:
        """The least room for the rest: an output buffer more than there was, and that of a call that was cut."""
        prepared = relay.leg.prepared
        budget, window_tokens = prepared.budget, prepared.window.tokens
        # By our count, as that of the call is.
        used_tokens = window_tokens if relay.end == "overflow" else prepared.count.tokens + relay.generated.tokens
        room_tokens = budget.restart_room_tokens(used_tokens)
        if relay.is_full:
            room_tokens = budget.output_buffer_tokens(used_tokens) + max(window_tokens - used_tokens, 0)
        return room_tokens + relay.cut_call_tokens

    async def _by_another_way(self, relay: Relay) -> PreparedRequest:
        prepared, state = relay.leg.prepared, self._state
        plan, way = prepared.continuation.plan, prepared.continuation.way
        if prepared.continuation.closing or plan is None or way is None:
            # The words alone.
            return replace(prepared, continuation=replace(prepared.continuation, closing={}))
        state.ways -= {way}
        if relay.ending.error is not None and not relay.ending.error.may_pass:
            state.refused = (*state.refused, way)
        return await self.compactor.continued(plan, self.room, ways=state.ways)

    async def _look_up(self, relay: Relay) -> None:
        """Answers the calls of our own tool, for this answer or, beside calls of the client's, for the next one."""
        calls, left = relay.recalls, MOST_LOOKUPS - self._cost.lookups
        # A model that calls for more is told so once.
        self._state.is_joined, self._state.may_look_up = True, len(calls) <= left
        self._cost.lookups += min(len(calls), left)
        await self.compactor.recaller.look_up(relay.leg.prepared, self._one.sent_text, calls, left)

    def _partial(self) -> Partial:
        so_far = Partial(text=self._one.sent_text, reasoning=self._one.reasoning, is_json=self.asked.is_json)
        return replace(so_far, closes=True) if self._state.is_closing and so_far.is_thoughts else so_far

    def _note(self, relay: Relay) -> None:
        """Counts a leg, and learns from it."""
        cost, state = self._cost, self._state
        cost.completion_tokens += relay.tokens.completion_tokens
        cost.lost_tokens += relay.lost_tokens
        if not state.is_resumed:
            cost.prompt_tokens.append(relay.tokens.prompt_tokens)
        cost.usages.append(relay.usage_fields)
        is_others = self._is_overflow_of_all(relay)
        try:
            self._learn(relay)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            log_failure("learn", error)
        if is_others:
            relay.ending = Ending("spent")
        if relay.end in GIVES_WAY:
            state.cuts += 1
            # Told of doubt once for each answer: a server that tells no number would end it there again and again.
            state.was_doubted = state.was_doubted or relay.leg.is_doubted
            self.room.was_cut(is_spent=relay.end == "spent" and not relay.leg.is_doubted)

    def _is_overflow_of_all(self, relay: Relay) -> bool:
        """A context that several answers fill was full, and not this answer's window; notes that.

        Servers end all of them then, with words that name no number. Far below the window that proves a shared context.
        """
        if relay.ending.overflow != UNNAMED or relay.looks_full() or self._state.cuts >= MAX_CUTS // 2:
            return False
        window = relay.leg.prepared.window
        others, is_shared = self.room.beside(window), self.room.is_shared(window)
        is_far_below = self._one.is_delivered and sum(relay.tokens) < _FAR_BELOW_RATIO * window.tokens
        is_of_all = others > 0 or (is_far_below and not is_shared)
        if is_of_all and not is_shared:
            self.compactor.learn_shared(self.context, max(others + 1, window.slots))
        return is_of_all

    def _learn(self, relay: Relay) -> None:
        """Notes what a leg shows of the window, of our count, and of the ways in which its server goes on."""
        context, prepared, replies = self.context, relay.leg.prepared, self.compactor.replies
        if relay.end == "overflow":
            replies.learn_overflow(context, prepared, relay.ending.overflow or UNNAMED)
        if relay.usage_fields:
            replies.learn(context, prepared, **relay.tokens._asdict())
        outcomes: dict[Way, Outcome] = {}
        if relay.has_begun:
            # A server that refuses every way says nothing about ways.
            outcomes = dict.fromkeys(self._state.refused, "refused")
            self._state.refused = ()
        if prepared.continuation.way in ("raw", "prefill") and (outcome := relay.outcome()) is not None:
            outcomes[prepared.continuation.way] = outcome
        for way, outcome in outcomes.items():
            self.compactor.known_ways.learn(context.target, context.label, way, outcome)

    def _tell(self, outcome: ContinuationOutcome, prepared: PreparedRequest, relay: Relay) -> None:
        event = ContinuationEvent(
            outcome=outcome,
            model=self.context.label,
            window_tokens=prepared.window.tokens,
            attempt=self._cost.restarts,
            attempts=self.context.settings.max_restarts,
            tokens_before=relay.used_tokens,
            tokens_after=prepared.count.tokens if outcome == "restarted" else relay.used_tokens,
            lost_tokens=min(relay.lost_tokens, relay.used_tokens),
            tenant=self.context.tenant,
        )
        self.compactor.reporter.tell(event)

    def _closing(self, relay: Relay) -> list[Chunk]:
        """No way out: everything that is held, the notice, a regular end; or the calls that are whole."""
        if relay.calls.whole:
            return self._with_calls(relay)
        chunks = self._one.dressed(relay.surrendered())
        window_tokens, is_stuck = relay.leg.prepared.window.tokens, relay.calls.has_begun
        is_exceeded = relay.end == "overflow" or relay.used_tokens >= window_tokens
        outcome: Cut = "aborted"
        text = ABORT_NOTICE if is_exceeded else NEARLY_FULL_NOTICE
        if self._partial().is_thoughts and not is_stuck:
            outcome, text = "unanswered", THOUGHTS_NOTICE
            chunks += self._one.dressed(self._one.close_thoughts())
        elif self._state.restarts_left <= 0 and not is_stuck:
            outcome, text = "attempts", ATTEMPTS_NOTICE
        self._state.outcome = outcome
        self._tell(outcome, relay.leg.prepared, relay)
        chunks += self._one.ends(text.format(used=relay.used_tokens, window=window_tokens))
        return [*chunks, *self._ended(relay, "length")]

    def _with_calls(self, relay: Relay) -> list[Chunk]:
        """Of several calls the last was cut, perhaps: the client executes the whole ones, and the model asks again."""
        self._state.is_joined = True
        return [*self._one.dressed(relay.surrendered("whole")), *self._ended(relay, "tool_calls")]

    def _ended(self, relay: Relay, reason: str | None = None) -> list[Chunk]:
        """The answer's last chunks, and its costs."""
        reason = reason or relay.finish_reason or ("tool_calls" if relay.calls.of("clients") else "stop")
        if reason in _CALLS and relay.recalls and not relay.calls.of("clients"):
            # It calls for more than it may look up.
            reason = "stop"
        was_cut = bool(self._cost.restarts or self._state.cuts)
        if reason == "stop" and was_cut and self._one.is_cut_document():
            reason = "length"
        receipt = {} if self.asked.is_whole else self.exchange.late_receipt
        if details := self._cost.details(self._state.outcome, receipt):
            self.exchange.details = details
        return self._one.ending(reason, self._cost.usage(details) if self.asked.wants_usage else None)

    def _tell_background(self) -> None:
        """Lets the answer's conversation be compacted ahead, unless a restart has done that already."""
        relay = self._relay
        if self.is_one_leg and relay.finish_reason in _ENDS:
            prepared, used_tokens = relay.leg.prepared, sum(relay.tokens)
            if self.context.is_beside or prepared.budget.nears_trigger(used_tokens):
                answer, told = self._one.whole_text, self.compactor.background.answered
                answer = "" if relay.finish_reason in _CALLS else answer
                told(self.asked.request, self.context, prepared, answer=answer, used_tokens=used_tokens)
