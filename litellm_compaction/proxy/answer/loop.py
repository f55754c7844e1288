"""The loop that carries an answer over the context limit: watch, stop, compact, continue; streaming and not.

Written once, over an abstract upstream (`protocol.py`); `transport.py` and `hooks.py` carry it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import httpx

from litellm_compaction.core.continuation.request import Partial, Way
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
    Outcome,
    PreparedRequest,
    RequestContext,
    Reservation,
)
from litellm_compaction.errors import CompactionError, Overflow
from litellm_compaction.events import ContinuationOutcome
from litellm_compaction.proxy.answer.endings import MAX_CUTS, Ended, Judged, State, next_leg, restart_of, taught
from litellm_compaction.proxy.answer.one_answer import OneAnswer, Progress
from litellm_compaction.proxy.answer.protocol import (
    Asked,
    Batch,
    Chunk,
    LegRequest,
    Listener,
    Upstream,
    UpstreamDropped,
    UpstreamError,
    continuation_of,
)
from litellm_compaction.proxy.answer.relay import LegBound, Relay
from litellm_compaction.proxy.answer.thoughts import Thoughts
from litellm_compaction.proxy.answer.unread import closed_if_unread
from litellm_compaction.proxy.refusals import log_failure

# Of the text that a client has of an answer, before it is cut for others.
_LEAST_CUT_CHARS = 200
# Ways in which a server goes on itself, and which some refuse.
_OWN_WAYS: tuple[Way, ...] = ("raw", "prefill")
# Finish reasons of an answer that its client sends back as it is, and which of these are calls.
_ENDS, _CALLS = frozenset({"stop", "length", "tool_calls", "function_call"}), frozenset({"tool_calls", "function_call"})
# An overflow without a number at less than this share of the window is not of this answer alone.
_FAR_BELOW_RATIO = 0.5
_STILL_TOO_LARGE = "The compacted prompt still exceeds the available context size."


@dataclass(frozen=True, slots=True)
class _Leg:
    """One upstream answer: what was sent, and the reader of its stream, with its end and facts."""

    prepared: PreparedRequest
    relay: Relay


class _Next(NamedTuple):
    """What follows a leg.

    Attributes:
        sent: to the client, at once.
        make: makes the request of the next leg; None if the answer has ended.
        is_announced: it needs a compaction, which the client was told of.
        goes_on: the answer was cut; if nothing can be made it ends regularly, even if its client has nothing of it.
    """

    sent: list[Chunk]
    make: Callable[[], Awaitable[PreparedRequest]] | None = None
    is_announced: bool = False
    goes_on: bool = False


class Answer:
    """One client's answer, over as many upstream requests as it takes.

    Eight of its attributes are what it was given, and the other five what becomes of it: `_state` and `_progress`, the
    last leg with the plan behind it, and the client's side.

    Args:
        prepared: from the engine, before the answer began.
        room: its place beside other answers.
    """

    def __init__(
        self,
        compactor: Compactor,
        context: RequestContext,
        upstream: Upstream,
        asked: Asked,
        prepared: PreparedRequest | CompactionNeeded,
        listener: Listener,
        *,
        room: Reservation,
    ) -> None:
        self._compactor = compactor
        self._context = context
        self._upstream = upstream
        self._asked = asked
        self._prepared = prepared
        self._listener = listener
        self._room = room
        self._progress = Progress()
        self._thoughts = Thoughts(context, asked, self._progress, upstream)
        self._state = State(
            ways=upstream.ways,
            restarts_left=context.settings.max_restarts,
            stops_at_line=asked.is_whole and not asked.is_json,
        )
        # The last one.
        self._leg: _Leg | None = None
        # With the state that it was asked for.
        self._plan: tuple[object, ContinuationPlan] | None = None
        self._one = OneAnswer(self._progress, asked.notices.at_the_end_only if asked.is_json else asked.notices)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """The answer's chunks as they come: one id, one role, one finish_reason, the usage last if it was asked for.

        Raises:
            UpstreamError: before the first chunk; or the server failed in a way that is not an overflow.
            CompactionError: it cannot be made to fit, and nothing has been sent.
        """
        async with aclosing(closed_if_unread(self._legs())) as batches:
            async for batch in batches:
                yield batch
        self._tell_background()

    async def _legs(self) -> AsyncGenerator[Batch, None]:
        """The upstream answers, each with what stands between it and the next; the room is given back behind them."""
        following = self._begun()
        try:
            while True:
                if following.sent:
                    yield following.sent
                if following.make is None:
                    return
                prepared = await following.make()
                following = following._replace(goes_on=False)
                # A compaction that was announced may have been made by an alike request meanwhile.
                is_made = following.is_announced and prepared.action != "none"
                if is_made and (notice := self._one.notice(f"{DONE_NOTICE}\n\n")):
                    yield [notice]
                async with aclosing(self._sent(prepared)) as batches:
                    async for batch in batches:
                        yield batch
                assert self._leg is not None  # noqa: S101 - it has just been read
                following = await self._following(self._leg)
        except CompactionError:
            # Behind a leg of which the client has some it ends regularly; its request gets the error otherwise.
            if self._leg is None or not (self._progress.delivered or following.goes_on):
                raise
            yield self._closing(self._leg)
        except (asyncio.CancelledError, httpx.ReadTimeout):
            if self._asked.is_whole:
                # Its server may write to the end although nobody reads it.
                self._room.abandon()
            raise
        finally:
            self._room.release()

    def _begun(self) -> _Next:
        """What a client is told before the first leg, and the compaction that is still needed."""
        decided = self._prepared
        if isinstance(decided, PreparedRequest):
            is_made = decided.action == "compacted"
            notice = self._one.notice(f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n") if is_made else None
        else:
            is_told = not self._asked.is_whole
            notice = (self._one.notice(f"{START_NOTICE}\n\n") or self._one.opening()) if is_told else None
        make = partial(self._compactor.finish, decided, self._room)
        return _Next([notice] if notice else [], make, is_announced=isinstance(decided, CompactionNeeded))

    async def _sent(self, prepared: PreparedRequest) -> AsyncGenerator[Batch, None]:
        """One upstream answer as soon as there is room for it, which becomes the last leg."""
        seating = asyncio.ensure_future(self._seated(prepared))
        try:
            if self._one.is_silent and not self._asked.is_whole:
                await asyncio.wait({seating}, timeout=TOLD_AFTER_S)
                if not seating.done():
                    # Its client learns that an answer comes; from then on a heartbeat says so. If it has left
                    # meanwhile, the room that it gets is soon another's.
                    self._listener.may_pause = True
                    seating.add_done_callback(self._not_begun)
                    yield [self._one.opening()]
                    seating.remove_done_callback(self._not_begun)
            prepared = await seating
        finally:
            seating.cancel()
        self._listener.sent(self._context, prepared)
        relay = Relay(
            self._progress,
            prepared,
            self._asked,
            await self._acquired(prepared),
            streaming_ratio=self._context.settings.streaming_ratio,
            most_thoughts_tokens=self._thoughts.most_tokens(prepared),
        )
        leg = _Leg(prepared, relay)
        try:
            # Closed here and not by the garbage collector: the server generates for as long as it is open.
            async with aclosing(self._stream(leg)) as batches:
                async for batch in batches:
                    yield batch
        except UpstreamDropped as error:
            if flushed := self._dressed(relay.drop(error)):
                yield flushed
        except UpstreamError as error:
            relay.fail(error)
        if relay.is_left_running:
            # Its server holds the room until it has noticed.
            await self._room.stopped()
        else:
            self._room.ended()
        self._leg = leg

    async def _following(self, leg: _Leg) -> _Next:
        """What follows a leg: the answer's end, or the request for the next one."""
        prepared, relay = leg.prepared, leg.relay
        if not self._ended(leg).is_way_refused:
            self._note(leg)
        step = next_leg(self._ended(leg), self._state)
        if relay.recalls and self._state.may_look_up:
            await self._look_up(leg)
        if step == "fail":
            raise relay.error or UpstreamError(_STILL_TOO_LARGE)
        if step == "deliver":
            return _Next(self._ending(relay))
        if step == "used_up":
            return _Next([*self._dressed(relay.surrendered()), *self._ending(relay, "length")])
        if step == "calls":
            # Of several calls the last was cut: the client executes the whole ones, and the model asks again.
            return _Next([*self._dressed(relay.whole_calls()), *self._ending(relay, "tool_calls")])
        if step == "other_way":
            return _Next([], partial(self._by_another_way, leg))
        if step == "harder":
            self._becomes(has_retried=True)
            return _Next([], partial(self._guarded, self._context.pressed(relay.refusal)))
        if step == "anew":
            self._begin_anew()
            # By the number that the server has told.
            return _Next([], self._guarded if relay.bound.is_doubted else partial(self._compactor.finish, prepared))
        if step == "look_up":
            parting = self._progress.part()
            return _Next(self._dressed([{"content": parting}] if parting else []), self._guarded)
        return await self._going_on(leg)

    async def _going_on(self, leg: _Leg) -> _Next:
        """Plans the next leg behind one that was cut, and tells of the compaction that it needs; or ends the answer."""
        relay = leg.relay
        self._listener.may_pause = True
        self._becomes(is_joined=self._state.is_joined or self._progress.delivered)
        plan = await self._planned(leg)
        if plan is None and relay.bound.is_at_line and relay.end == "limit":
            # No compaction helps: it goes on to the end of the window as it is.
            self._becomes(stops_at_line=False)
            relay.spend()
            plan = await self._planned(leg)
        if plan is None:
            return _Next(self._closing(leg))
        self._plan = None
        is_new = isinstance(plan.prepared, CompactionNeeded)
        self._becomes(is_resumed=relay.gives_way and not is_new)
        if self._state.is_resumed:
            # Others needed the room, or nobody doubts it now: nothing is compacted, and the client need not know.
            return _Next([], partial(self._compactor.continuing.continued, plan, self._room), goes_on=True)
        sent: list[Chunk] = []
        if plan.partial.closes:
            self._becomes(is_closing=True)
            sent = self._dressed(relay.closed_thoughts())
        if is_new and (notice := self._one.notice(f"\n\n{START_NOTICE}\n\n")):
            sent.append(notice)
        return _Next(sent, partial(self._restarted, leg, plan), is_announced=is_new, goes_on=True)

    async def _restarted(self, leg: _Leg, plan: ContinuationPlan) -> PreparedRequest:
        """The request behind a stop at the window's end, or at that of a budget."""
        again = await self._compactor.continuing.continued(plan, self._room)
        self._progress.restarts += 1
        left_tokens = min(leg.relay.filled_tokens, leg.prepared.window.tokens) - leg.relay.lost_tokens
        has_gained = again.count.tokens < left_tokens or plan.partial.closes
        self._becomes(restarts_left=self._state.restarts_left - 1, has_gained=has_gained)
        self._tell("restarted", again, leg.relay)
        return again

    async def _guarded(self, context: RequestContext | None = None) -> PreparedRequest:
        """The client's request as it is to be sent now."""
        return await self._compactor.guard(self._asked.request, context or self._context, self._room)

    def _becomes(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    def _dressed(self, deltas: Iterable[Chunk]) -> list[Chunk]:
        return [self._one.dressed(delta) for delta in deltas]

    async def _look_up(self, leg: _Leg) -> None:
        """Answers the calls of our own tool, for this answer or, beside calls of the client's, for the next one."""
        calls, left = leg.relay.recalls, MOST_LOOKUPS - self._progress.lookups
        # A model that calls for more is told so once.
        self._becomes(is_joined=True, may_look_up=len(calls) <= left)
        self._progress.lookups += min(len(calls), left)
        if (recaller := self._compactor.recaller) is not None:
            await recaller.look_up(self._context, leg.prepared, self._progress.sent_text, calls, left)

    def _tell_background(self) -> None:
        """Lets the answer's conversation be compacted ahead, unless a restart has done that already."""
        if self._leg is None or not self.is_one_leg:
            return
        relay = self._leg.relay
        if relay.finish_reason in _ENDS:
            is_call = relay.finish_reason in _CALLS
            self._compactor.background.answered(
                self._asked.request,
                self._context,
                self._leg.prepared,
                answer="" if is_call else self._progress.whole_text,
                used_tokens=relay.filled_tokens,
            )

    async def _seated(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request as it is sent, as soon as there is room for it; made anew if the window has shrunk meanwhile."""
        while True:
            await self._acquired(prepared)
            if not await self._compactor.has_shrunk(self._context, prepared):
                return prepared
            if prepared.way is None:
                prepared = await self._guarded()
            else:
                prepared = await self._compactor.continuing.continue_answer(
                    self._asked.request, self._partial(), self._context, self._room, ways=self._state.ways
                )

    async def _acquired(self, prepared: PreparedRequest) -> LegBound:
        """The bound on a leg, with room for as much; at once if the room is held already."""
        bound = self._bound(prepared)
        tokens = await self._room.acquire(prepared, bound.tokens, is_watched=True)
        is_share = tokens < bound.tokens
        return replace(bound, tokens=tokens, is_share=is_share, is_doubted=bound.is_doubted and not is_share)

    def _not_begun(self, seating: asyncio.Task[PreparedRequest]) -> None:
        if not seating.cancelled() and seating.exception() is None:
            self._room.ended()

    def _begin_anew(self) -> None:
        """Forgets an answer that was cut for others before the client had any of it."""
        self._progress.lost_tokens = self._progress.completion_tokens
        self._progress.text.clear()
        self._progress.reasoning = ""
        self._becomes(is_resumed=True)

    async def _by_another_way(self, leg: _Leg) -> PreparedRequest:
        prepared, error = leg.prepared, leg.relay.error
        if prepared.closing or prepared.way is None:
            # The words alone.
            return replace(prepared, closing={})
        ways, refused = self._state.ways - {prepared.way}, self._state.refused
        if error is not None and not error.may_pass:
            refused = (*refused, prepared.way)
        self._becomes(ways=ways, refused=refused)
        return await self._compactor.continuing.by_another_way(
            prepared, self._asked.request, self._partial(), self._context, self._room, ways=ways
        )

    def _learn_way(self, leg: _Leg) -> None:
        """Notes the way in which the server has gone on, and the ways that it has refused.

        Refused ones count only after another one has worked: a server that refuses every way says nothing about ways.
        """
        outcomes: dict[Way, Outcome] = {}
        if leg.relay.has_begun:
            outcomes = dict.fromkeys(self._state.refused, "refused")
            self._becomes(refused=())
        way = leg.prepared.way
        if way in _OWN_WAYS and (outcome := leg.relay.outcome()) is not None:
            outcomes[way] = outcome
        for way, outcome in outcomes.items():
            self._compactor.known_ways.learn(self._context.target, self._context.label, way, outcome)

    async def _stream(self, leg: _Leg) -> AsyncGenerator[Batch, None]:
        """What the client gets of a leg as it comes, until the stream ends, or is stopped because that gains room."""
        prepared, relay = leg.prepared, leg.relay
        self._room.started()
        has_begun = bool(self._progress.sent_text.strip()) or prepared.closing is not None
        request = LegRequest(
            messages=prepared.messages,
            tools=prepared.tools,
            max_tokens=relay.bound.tokens,
            continuation=continuation_of(prepared) if has_begun else None,
            can_end_thoughts=self._thoughts.can_end(prepared),
        )
        async with self._upstream.open(request, self._room.ended) as stream:
            async for batch in stream:
                relay.has_company = self._room.has_company
                sent: list[Chunk] = []
                for chunk in batch:
                    sent += self._taken(chunk, leg)
                    if relay.end is None:
                        continue
                    if sent:
                        # They do not wait for the rest.
                        yield sent
                        sent = []
                    if relay.end == "overthought":
                        await self._thoughts.end(prepared, relay)
                    if relay.is_stopped_by_us and not await self._can_go_on(leg):
                        relay.go_on_to_the_end()
                    if relay.end is not None:
                        return
                if sent:
                    yield sent
        if flushed := self._dressed(relay.flush()):
            yield flushed
        relay.finish()

    def _taken(self, chunk: Chunk, leg: _Leg) -> list[Chunk]:
        """What the client gets for a chunk of the server's; the leg ends if others wait for its room."""
        relay = leg.relay
        self._one.adopt(chunk)
        deltas = relay.take(chunk)
        if relay.has_company and not self._progress.delivered and self._is_called_back(leg):
            # Before the client has a word of it: it is asked for again, without a seam.
            relay.stop()
            if relay.end == "called_back":
                return []
        if self._one.goes_on_as_it_came(chunk, deltas):
            sent = [chunk]
        else:
            sent = [*self._dressed(deltas), *self._one.beside(relay.beside)]
        if relay.is_near_the_end():
            self._listener.may_pause = True
        if relay.has_company and not relay.is_inside_a_word and self._is_called_back(leg):
            relay.stop()
        return sent

    def _is_called_back(self, leg: _Leg) -> bool:
        """Returns True if the answer has to stop since others wait for its room; a document or a call is not cut.

        Nor is an answer of which the client has too little to tell it from a server's repetition.
        """
        if self._asked.is_whole or not self._room.is_waited_for:
            return False
        has_begun = self._progress.delivered
        is_telling = not self._progress.text or len(self._progress.sent_text) >= _LEAST_CUT_CHARS
        is_cuttable = not has_begun or (is_telling and not self._asked.is_json)
        can_be_cut = is_cuttable and leg.relay.can_be_cut and self._state.callbacks < MAX_CUTS
        return self._room.is_called_back(leg.prepared, leg.relay.generated_tokens, can_be_cut=can_be_cut)

    async def _can_go_on(self, leg: _Leg) -> bool:
        """Returns True if an answer that is about to be stopped can go on; it runs to its end otherwise."""
        relay = leg.relay
        if (relay.gives_way and not self._progress.delivered) or (
            relay.end == "overthought" and self._state.is_closing
        ):
            return True
        if await self._planned(leg) is not None:
            return True
        if relay.gives_way:
            self._room.stay()
        return False

    def _ended(self, leg: _Leg) -> Ended:
        """The end of a leg as the next step depends on it, or of one that is about to be stopped."""
        asked, relay, continuation = self._asked.output_tokens, leg.relay, continuation_of(leg.prepared)
        has_another_way = continuation is not None and continuation.has_another_way
        return Ended(
            end=relay.end,
            is_way_refused=relay.end == "failed" and has_another_way and not relay.has_begun,
            is_delivered=self._progress.delivered,
            has_whole_calls=relay.has_whole_calls,
            only_recalls=relay.only_recalls,
            is_used_up=asked is not None and self._progress.given_tokens + 1 >= asked,
            is_stuck=relay.is_stuck,
            is_thoughts=self._partial().is_thoughts,
            is_full=relay.is_full,
        )

    async def _planned(self, leg: _Leg) -> ContinuationPlan | None:
        """The one plan by which the answer is stopped and goes on; None if no stop gains enough room (P5)."""
        prepared, relay = leg.prepared, leg.relay
        restart = restart_of(self._ended(leg), self._state)
        if restart is None:
            return None
        so_far, context, room_tokens = self._partial(), self._context.relaxed(), 0
        if restart != "resumed":
            so_far = replace(so_far, closes=so_far.is_thoughts)
        if restart in ("compacted", "pressed"):
            context = self._context.pressed(relay.refusal) if restart == "pressed" else self._context
            room_tokens = self._room_tokens(prepared, relay)
        asked = (so_far, context, self._state.ways)
        if self._plan is None or self._plan[0] != asked:
            try:
                plan = await self._compactor.continuing.plan(
                    self._asked.request, so_far, context, room_tokens=room_tokens, ways=self._state.ways
                )
            except CompactionError:
                return None
            self._plan = asked, plan
        plan = self._plan[1]
        if relay.bound.is_doubted and self._state.is_last and isinstance(plan.prepared, CompactionNeeded):
            # Behind a bound made for doubt it goes on as it is, or ends: the compactions are used up.
            return None
        return plan

    def _room_tokens(self, prepared: PreparedRequest, relay: Relay) -> int:
        """The least room that the rest of the answer must have.

        After a restart at least an output buffer is free, and that much more than there was before. A call that was cut
        has to be written again: with no more room than the last time it would be cut again.
        """
        used_tokens = prepared.window.tokens if relay.end == "overflow" else relay.used_tokens()
        if relay.is_full:
            free_tokens = max(prepared.window.tokens - used_tokens, 0)
            room_tokens = prepared.budget.output_buffer_tokens(used_tokens) + free_tokens
        else:
            room_tokens = prepared.budget.restart_room_tokens(used_tokens)
        return room_tokens + relay.cut_call_tokens

    def _note(self, leg: _Leg) -> None:
        """Counts a leg, and learns from it."""
        prepared, relay, state = leg.prepared, leg.relay, self._state
        self._progress.completion_tokens += relay.completion_tokens()
        self._progress.lost_tokens += relay.lost_tokens
        is_others = self._is_overflow_of_all(leg)
        try:
            self._learn(leg, is_others=is_others)
            self._learn_way(leg)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            # The client has its answer; a lesson that is lost must not take it away again.
            log_failure("learn", error)
        if not state.is_resumed:
            self._progress.prompt_tokens.append(relay.usage.prompt_tokens if relay.usage else prepared.count.tokens)
        self._progress.usages.append(relay.usage_fields)
        if is_others:
            relay.spend()
        if relay.gives_way:
            is_spent, is_doubted = relay.end == "spent", relay.bound.is_doubted
            # Told of doubt once for each answer: a server that tells no number would end it there again and again.
            self._becomes(
                cuts=state.cuts + is_spent,
                callbacks=state.callbacks + (not is_spent),
                was_doubted=state.was_doubted or is_doubted,
            )
            self._room.was_cut(is_spent=is_spent and not is_doubted)

    def _partial(self) -> Partial:
        so_far = Partial(text=self._progress.sent_text, reasoning=self._progress.reasoning, is_json=self._asked.is_json)
        return replace(so_far, closes=True) if self._state.is_closing and so_far.is_thoughts else so_far

    def _output_tokens_left(self) -> int | None:
        if self._asked.output_tokens is None:
            return None
        return max(self._asked.output_tokens - self._progress.given_tokens, 1)

    def _bound(self, prepared: PreparedRequest) -> LegBound:
        """The bound on the next leg: what the window and the client leave, or less if it can go on behind that.

        A whole answer is not seen before its end. So it ends at the line where a stream is stopped, or at the window's
        end if that line is near.
        """
        left_tokens, count = self._output_tokens_left(), prepared.count.tokens
        most_tokens = prepared.max_output_tokens(left_tokens, is_certain=True)
        tokens = prepared.max_output_tokens(left_tokens, is_certain=self._state.was_doubted)
        line_tokens = int(self._context.settings.streaming_ratio * prepared.window.tokens) - count
        if (
            not self._state.stops_at_line
            or self._state.is_last
            or not prepared.budget.output_buffer_tokens(count) <= line_tokens < tokens
        ):
            return LegBound(tokens, left_tokens, is_doubted=tokens < most_tokens and not self._asked.is_json)
        return LegBound(line_tokens, left_tokens, is_at_line=True)

    def _is_overflow_of_all(self, leg: _Leg) -> bool:
        """Returns True if a context that several answers fill was full, and not this answer's window; notes that.

        LM Studio and llama.cpp then end all of them, with words that name no number. Far below the window that proves a
        shared context even if the server lists none (four answers of 150 tokens over 4,096).
        """
        prepared, relay = leg.prepared, leg.relay
        if relay.end != "overflow" or self._state.cuts >= MAX_CUTS:
            return False
        found = relay.judged
        if found is None or not found.teaches or found.overflow != Overflow(None, None) or relay.looks_nearly_full():
            return False
        others = self._room.beside(prepared.window)
        if self._room.is_shared(prepared.window):
            return others > 0
        if others == 0 and (
            not self._progress.delivered or relay.filled_tokens >= _FAR_BELOW_RATIO * prepared.window.tokens
        ):
            return False
        self._compactor.learn_shared(self._context, max(others + 1, prepared.window.slots))
        return True

    def _learn(self, leg: _Leg, *, is_others: bool) -> None:
        prepared, relay = leg.prepared, leg.relay
        if relay.end == "overflow":
            overflow, teaches = relay.judged or Judged(Overflow(None, None), teaches=True)
            if teaches:
                is_shared = is_others or self._room.is_shared(prepared.window)
                overflow = taught(overflow, prepared, is_shared=is_shared)
            self._compactor.replies.learn_overflow(self._context, prepared, overflow)
        if relay.usage is not None:
            self._compactor.replies.learn(
                self._context,
                prepared,
                prompt_tokens=relay.usage.prompt_tokens,
                completion_tokens=relay.usage.completion_tokens,
            )

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

    def _closing(self, leg: _Leg) -> list[Chunk]:
        """No way out: everything that is held, the notice, a regular end."""
        prepared, relay = leg.prepared, leg.relay
        chunks = self._dressed(relay.surrendered())
        used_tokens, window_tokens = min(relay.filled_tokens, prepared.window.tokens), prepared.window.tokens
        if self._partial().is_thoughts and not relay.is_stuck:
            outcome: Literal["unanswered", "attempts", "aborted"] = "unanswered"
            chunks += self._dressed(relay.closed_thoughts())
            text = THOUGHTS_NOTICE.format(used=used_tokens, window=window_tokens)
        elif self._state.restarts_left <= 0 and not relay.is_stuck:
            outcome = "attempts"
            text = ATTEMPTS_NOTICE
        else:
            outcome = "aborted"
            is_exceeded = relay.end == "overflow" or used_tokens >= window_tokens
            text = (ABORT_NOTICE if is_exceeded else NEARLY_FULL_NOTICE).format(used=used_tokens, window=window_tokens)
        self._becomes(outcome=outcome)
        self._tell(outcome, prepared, relay)
        notice = self._one.closing_notice(f"\n\n{text}")
        return [*chunks, *([notice] if notice else []), *self._ending(relay, reason="length")]

    def _ending(self, relay: Relay, reason: str | None = None) -> list[Chunk]:
        reason = reason or relay.finish_reason or ("tool_calls" if relay.has_calls else "stop")
        if reason in _CALLS and relay.only_recalls:
            # It calls for more than it may look up.
            reason = "stop"
        if (
            reason == "stop"
            and self._asked.is_json
            and (self._progress.restarts or self._state.cuts)
            and not self._progress.is_json
        ):
            reason = "length"
        if details := self._progress.details(self._state.outcome, self._late_receipt):
            self._listener.ended(details)
        fields = relay.ending_fields if reason == relay.finish_reason else {}
        usage = self._progress.usage(self._state.outcome, self._late_receipt)
        return self._one.ending(reason, usage if self._asked.wants_usage else None, fields)

    @property
    def _late_receipt(self) -> Mapping[str, str]:
        return {} if self._asked.is_whole else self._listener.late_receipt

    @property
    def is_joined(self) -> bool:
        """Returns True if it is made of more than one upstream answer."""
        return self._state.is_joined

    @property
    def is_one_leg(self) -> bool:
        """Returns True if a single upstream answer is all of it, and the window has not ended it."""
        return not self._state.is_joined and self._state.outcome == "completed"
