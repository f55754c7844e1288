"""The loop that carries an answer over the context limit: watch, stop, compact, continue; streaming and not.

Written once, over an abstract upstream (`protocol.py`); `transport.py` and `hooks.py` carry it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

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
from litellm_compaction.events import AnswerOutcome, ContinuationOutcome
from litellm_compaction.proxy.answer.endings import Ended, Step, next_step, taught
from litellm_compaction.proxy.answer.one_answer import OneAnswer, Progress
from litellm_compaction.proxy.answer.protocol import (
    Asked,
    Batch,
    Chunk,
    Listener,
    Upstream,
    UpstreamDropped,
    UpstreamError,
    continuation_of,
)
from litellm_compaction.proxy.answer.relay import Relay
from litellm_compaction.proxy.answer.thoughts import Thoughts
from litellm_compaction.proxy.answer.unread import closed_if_unread
from litellm_compaction.proxy.refusals import log_failure

# After so many stops for others, each with the double room after it, something is wrong: a compaction has to help.
_MAX_CUTS = 12
# Of the text that a client has of an answer, before it is cut for others.
_LEAST_CUT_CHARS = 200
# Ways in which a server goes on itself, and which some refuse.
_OWN_WAYS: tuple[Way, ...] = ("raw", "prefill")
# Finish reasons of an answer that its client sends back as it is, and which of these are calls.
_ENDS, _CALLS = frozenset({"stop", "length", "tool_calls", "function_call"}), frozenset({"tool_calls", "function_call"})
# An overflow without a number at less than this share of the window is not of this answer alone.
_FAR_BELOW_RATIO = 0.5
_STILL_TOO_LARGE = "The compacted prompt still exceeds the available context size."


class _Bound(NamedTuple):
    """The most that a leg may have; less than the window leaves if our count is doubted, or at the streaming line."""

    tokens: int
    is_doubted: bool = False
    is_at_line: bool = False


class Answer:
    """One client's answer, over as many upstream requests as it takes.

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
        # A whole answer is not seen before its end: it stops at the line if it can go on behind it.
        self._stops_at_line = asked.is_whole and not asked.is_json
        # Once it has ended at a bound that was made for doubt, it is told only of bounds without.
        self._was_doubted = False
        self._has_retried = False
        self._may_look_up = True
        self._cuts = 0
        self._callbacks = 0
        self._is_resumed = False
        self._is_closing = False
        self._has_gained = True
        # Made of more than one upstream answer.
        self.is_joined = False
        self._outcome: AnswerOutcome = "completed"
        self._progress = Progress()
        self._thoughts = Thoughts(context, asked, self._progress, upstream)
        self._ways = upstream.ways
        self._refused: list[Way] = []
        # The last leg, and the request for the next one.
        self._last: tuple[PreparedRequest, Relay] | None = None
        self._next: PreparedRequest | None = None
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
        try:
            async with aclosing(self._begun()) as batches:
                async for batch in batches:
                    yield batch
            while self._next is not None:
                async with aclosing(self._leg(self._next)) as batches:
                    async for batch in batches:
                        yield batch
        except (asyncio.CancelledError, httpx.ReadTimeout):
            if self._asked.is_whole:
                # Its server may write to the end although nobody reads it.
                self._room.abandon()
            raise
        finally:
            self._room.release()

    async def _begun(self) -> AsyncGenerator[Batch, None]:
        """What a client is told before the first leg; a compaction that is still needed is made."""
        decided = self._prepared
        if isinstance(decided, PreparedRequest):
            self._next = decided
            if decided.action == "compacted" and (notice := self._one.notice(f"{START_NOTICE}\n\n{DONE_NOTICE}\n\n")):
                yield [notice]
            return
        if not self._asked.is_whole:
            yield [self._one.notice(f"{START_NOTICE}\n\n") or self._one.opening()]
        self._next = await self._compactor.finish(decided, self._room)
        # A compaction that was announced may have been made by an alike request meanwhile.
        if self._next.action != "none" and (notice := self._one.notice(f"{DONE_NOTICE}\n\n")):
            yield [notice]

    async def _leg(self, prepared: PreparedRequest) -> AsyncGenerator[Batch, None]:
        """One upstream answer as soon as there is room for it; behind it `_next` is the next request, if any."""
        self._next = None
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
        except CompactionError as error:
            yield self._closing_for(error)
            return
        finally:
            seating.cancel()
        self._listener.sent(self._context, prepared)
        relay = Relay(
            self._progress,
            prepared,
            self._asked,
            streaming_ratio=self._context.settings.streaming_ratio,
            most_thoughts_tokens=self._thoughts.most_tokens(prepared),
        )
        async with aclosing(self._part(prepared, relay)) as batches:
            async for batch in batches:
                yield batch
        if relay.is_left_running:
            # Its server holds the room until it has noticed.
            await self._room.stopped()
        else:
            self._room.ended()
        async with aclosing(self._after(prepared, relay)) as batches:
            async for batch in batches:
                yield batch

    async def _after(self, prepared: PreparedRequest, relay: Relay) -> AsyncGenerator[Batch, None]:
        """The step after a leg: the answer's end, or the request for the next one."""
        step = await self._step(prepared, relay)
        self._last = prepared, relay
        if relay.recalls and self._may_look_up:
            await self._look_up(prepared, relay)
        if step == "fail":
            raise relay.error or UpstreamError(_STILL_TOO_LARGE)
        if step == "deliver":
            yield self._ending(relay)
        elif step == "used_up":
            yield [*(self._one.dressed(delta) for delta in relay.surrendered()), *self._ending(relay, "length")]
        elif step == "calls":
            yield self._calling(relay)
        elif step == "other_way":
            self._next = await self._by_another_way(prepared, relay.error)
        elif step == "harder":
            self._next = await self._harder(relay)
        elif step == "anew":
            self._begin_anew()
            # By the number that the server has told.
            self._next = await self._guarded() if relay.is_doubted else prepared
        elif step == "look_up":
            if parting := self._progress.part():
                yield [self._one.dressed({"content": parting})]
            try:
                self._next = await self._guarded()
            except CompactionError as error:
                yield self._closing_for(error)
        else:
            async with aclosing(self._going_on(prepared, relay)) as batches:
                async for batch in batches:
                    yield batch

    async def _step(self, prepared: PreparedRequest, relay: Relay) -> Step:
        """Judges a leg's end, and learns from it."""
        has_another = prepared.way in _OWN_WAYS or bool(prepared.closing)
        is_way_refused = relay.end == "failed" and has_another and not relay.has_begun
        if not is_way_refused:
            self._note(prepared, relay)
            await self._learn_way(prepared, relay)
        return next_step(
            Ended(
                end=relay.end,
                is_way_refused=is_way_refused,
                is_delivered=self._progress.delivered,
                gives_way=relay.gives_way,
                has_whole_calls=relay.has_whole_calls,
                only_recalls=relay.only_recalls and self._may_look_up,
                is_used_up=self._is_used_up,
            )
        )

    async def _going_on(self, prepared: PreparedRequest, relay: Relay) -> AsyncGenerator[Batch, None]:
        """Plans the next leg behind one that was cut, and tells of the compaction that it needs; or ends the answer."""
        self._listener.may_pause = True
        self.is_joined = self.is_joined or self._progress.delivered
        plan = await self._planned(prepared, relay)
        if plan is None and relay.is_at_line and relay.end == "limit":
            # No compaction helps: it goes on to the end of the window as it is.
            self._stops_at_line, relay.end = False, "spent"
            plan = await self._planned(prepared, relay)
        if plan is None:
            yield self._closing(prepared, relay)
            return
        self._plan = None
        is_new = isinstance(plan.prepared, CompactionNeeded)
        self._is_resumed = relay.gives_way and not is_new
        if self._is_resumed:
            # Others needed the room, or nobody doubts it now: nothing is compacted, and the client need not know.
            self._next = await self._compactor.continuing.continued(plan, self._room)
            return
        if plan.partial.closes:
            self._is_closing = True
            if closed := [self._one.dressed(delta) for delta in relay.closed_thoughts()]:
                yield closed
        if is_new and (notice := self._one.notice(f"\n\n{START_NOTICE}\n\n")):
            yield [notice]
        try:
            self._next = again = await self._compactor.continuing.continued(plan, self._room)
        except CompactionError:
            yield self._closing(prepared, relay)
            return
        self._progress.restarts += 1
        left_tokens = min(relay.filled_tokens, prepared.window.tokens) - relay.lost_tokens
        self._has_gained = again.count.tokens < left_tokens or plan.partial.closes
        self._tell("restarted", again, relay)
        if is_new and again.action != "none" and (notice := self._one.notice(f"{DONE_NOTICE}\n\n")):
            yield [notice]

    async def _guarded(self) -> PreparedRequest:
        """The client's request as it is to be sent now."""
        return await self._compactor.guard(self._asked.request, self._context, self._room)

    async def _look_up(self, prepared: PreparedRequest, relay: Relay) -> None:
        """Answers the calls of our own tool, for this answer or, beside calls of the client's, for the next one."""
        self.is_joined = True
        calls, left = relay.recalls, MOST_LOOKUPS - self._progress.lookups
        # A model that calls for more is told so once.
        self._may_look_up = len(calls) <= left
        self._progress.lookups += min(len(calls), left)
        if (recaller := self._compactor.recaller) is not None:
            await recaller.look_up(self._context, prepared, self._progress.sent_text, calls, left)

    def _tell_background(self) -> None:
        """Lets the answer's conversation be compacted ahead, unless a restart has done that already."""
        if self._last is None or not self.is_one_leg:
            return
        prepared, relay = self._last
        if relay.finish_reason in _ENDS:
            is_call = relay.finish_reason in _CALLS
            self._compactor.background.answered(
                self._asked.request,
                self._context,
                prepared,
                answer="" if is_call else self._progress.whole_text,
                used_tokens=relay.filled_tokens,
            )

    async def _seated(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request as it is sent, as soon as there is room for it; made anew if the window has shrunk meanwhile."""
        while True:
            await self._room.acquire(prepared, self._bound(prepared).tokens, is_watched=True)
            if not await self._compactor.has_shrunk(self._context, prepared):
                return prepared
            if prepared.way is None:
                prepared = await self._guarded()
            else:
                prepared = await self._compactor.continuing.continue_answer(
                    self._asked.request, self._partial(), self._context, self._room, ways=self._ways
                )

    def _not_begun(self, seating: asyncio.Task[PreparedRequest]) -> None:
        if not seating.cancelled() and seating.exception() is None:
            self._room.ended()

    async def _part(self, prepared: PreparedRequest, relay: Relay) -> AsyncGenerator[Batch, None]:
        try:
            # Closed here and not by the garbage collector: the server generates for as long as it is open.
            async with aclosing(self._stream(prepared, relay)) as batches:
                async for batch in batches:
                    yield batch
        except UpstreamDropped as error:
            # Behind its last word only the connection's own end was missing.
            if relay.finish_reason is not None and (flushed := [self._one.dressed(delta) for delta in relay.flush()]):
                yield flushed
            relay.finish()
            if relay.finish_reason is None and relay.end in ("done", "failed"):
                relay.end, relay.error = "failed", error
        except UpstreamError as error:
            if not relay.has_overflowed(error):
                relay.end, relay.error = "failed", error

    def _begin_anew(self) -> None:
        """Forgets an answer that was cut for others before the client had any of it."""
        self._progress.lost_tokens = self._progress.completion_tokens
        self._progress.text.clear()
        self._progress.reasoning = ""
        self._is_resumed = True

    async def _by_another_way(self, prepared: PreparedRequest, error: UpstreamError | None) -> PreparedRequest:
        if prepared.closing or prepared.way is None:
            # The words alone.
            return replace(prepared, closing={})
        self._ways -= {prepared.way}
        if error is not None and not error.may_pass:
            self._refused.append(prepared.way)
        return await self._compactor.continuing.by_another_way(
            prepared, self._asked.request, self._partial(), self._context, self._room, ways=self._ways
        )

    async def _learn_way(self, prepared: PreparedRequest, relay: Relay) -> None:
        """Notes the way in which the server has gone on, and the ways that it has refused.

        Refused ones count only after another one has worked: a server that refuses every way says nothing about ways.
        """
        outcomes: dict[Way, Outcome] = {}
        if relay.has_begun:
            outcomes = dict.fromkeys(self._refused, "refused")
            self._refused.clear()
        if prepared.way in _OWN_WAYS and (outcome := relay.outcome()) is not None:
            outcomes[prepared.way] = outcome
        try:
            for way, outcome in outcomes.items():
                self._compactor.known_ways.learn(self._context.target, self._context.label, way, outcome)
        except Exception as error:  # noqa: BLE001 - as `_learn`
            log_failure("learn", error)

    async def _harder(self, relay: Relay) -> PreparedRequest:
        """The request after an overflow that the client has not seen: compacted harder, once."""
        if self._has_retried:
            raise relay.error or UpstreamError(_STILL_TOO_LARGE)
        self._has_retried = True
        return await self._compactor.guard(self._asked.request, self._context.pressed(relay.refusal), self._room)

    async def _stream(self, prepared: PreparedRequest, relay: Relay) -> AsyncGenerator[Batch, None]:
        bound = self._bound(prepared)
        limit = await self._room.acquire(prepared, bound.tokens, is_watched=True)
        self._room.started()
        is_share = limit < bound.tokens
        is_doubted = bound.is_doubted and not is_share
        relay.opened(limit, self._output_tokens_left(), is_share=is_share, is_doubted=is_doubted)
        relay.is_at_line = bound.is_at_line
        has_begun = bool(self._progress.sent_text.strip()) or prepared.closing is not None
        continuation = continuation_of(prepared) if has_begun else None
        opened = self._upstream.open(
            prepared.messages,
            limit,
            continuation=continuation,
            tools=prepared.tools,
            can_end_thoughts=self._thoughts.can_end(prepared),
            on_end=self._room.ended,
        )
        async with opened as stream:
            async for batch in stream:
                relay.has_company = self._room.has_company
                sent: list[Chunk] = []
                for chunk in batch:
                    self._one.adopt(chunk)
                    deltas = relay.take(chunk)
                    if relay.has_company and not self._progress.delivered and self._is_called_back(prepared, relay):
                        # Before the client has a word of it: it is asked for again, without a seam.
                        relay.stop()
                        if relay.end == "called_back":
                            return
                    if self._one.goes_on_as_it_came(chunk, deltas):
                        sent.append(chunk)
                    else:
                        sent += map(self._one.dressed, deltas)
                        sent += self._one.beside(relay.beside)
                    if relay.is_near_the_end():
                        self._listener.may_pause = True
                    if relay.has_company and not relay.is_inside_a_word and self._is_called_back(prepared, relay):
                        relay.stop()
                    if relay.end is None:
                        continue
                    if sent:
                        # They do not wait for the rest.
                        yield sent
                        sent = []
                    if relay.end == "overthought":
                        await self._thoughts.end(prepared, relay)
                    if relay.is_stopped_by_us and not await self._can_go_on(prepared, relay):
                        relay.go_on_to_the_end()
                    if relay.end is not None:
                        return
                if sent:
                    yield sent
        if flushed := [self._one.dressed(delta) for delta in relay.flush()]:
            yield flushed
        relay.finish()

    def _is_called_back(self, prepared: PreparedRequest, relay: Relay) -> bool:
        """Returns True if the answer has to stop since others wait for its room; a document or a call is not cut.

        Nor is an answer of which the client has too little to tell it from a server's repetition.
        """
        if self._asked.is_whole or not self._room.is_waited_for:
            return False
        has_begun = self._progress.delivered
        is_telling = not self._progress.text or len(self._progress.sent_text) >= _LEAST_CUT_CHARS
        is_cuttable = not has_begun or (is_telling and not self._asked.is_json)
        can_be_cut = is_cuttable and relay.can_be_cut and self._callbacks < _MAX_CUTS
        return self._room.is_called_back(prepared, relay.generated_tokens, can_be_cut=can_be_cut)

    async def _can_go_on(self, prepared: PreparedRequest, relay: Relay) -> bool:
        """Returns True if an answer that is about to be stopped can go on; it runs to its end otherwise."""
        if (relay.gives_way and not self._progress.delivered) or (relay.end == "overthought" and self._is_closing):
            return True
        if await self._planned(prepared, relay) is not None:
            return True
        if relay.gives_way:
            self._room.stay()
        return False

    async def _planned(self, prepared: PreparedRequest, relay: Relay) -> ContinuationPlan | None:
        """The one plan by which the answer is stopped and goes on; None if no stop gains enough room (P5)."""
        if relay.is_stuck:
            return None
        partial = self._partial()
        if relay.gives_way and self._cuts < _MAX_CUTS:
            context, room_tokens = self._context.relaxed(), 0
        else:
            is_thought_out = self._is_closing and partial.is_thoughts
            if self._is_last or is_thought_out:
                return None
            # More room for thoughts is no answer: they are closed, once.
            partial = replace(partial, closes=partial.is_thoughts)
            room_tokens = self._room_tokens(prepared, relay)
            context = self._context.pressed(relay.refusal) if relay.is_full else self._context
            if relay.end == "overthought":
                # Its budget has ended it, and not the window.
                room_tokens, context = 0, self._context.relaxed()
        asked = (partial, context, self._ways)
        if self._plan is None or self._plan[0] != asked:
            try:
                plan = await self._compactor.continuing.plan(
                    self._asked.request, partial, context, room_tokens=room_tokens, ways=self._ways
                )
            except CompactionError:
                return None
            self._plan = asked, plan
        plan = self._plan[1]
        if relay.is_doubted and self._is_last and isinstance(plan.prepared, CompactionNeeded):
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

    def _note(self, prepared: PreparedRequest, relay: Relay) -> None:
        self._progress.completion_tokens += relay.completion_tokens()
        self._progress.lost_tokens += relay.lost_tokens
        is_others = self._is_overflow_of_all(prepared, relay)
        try:
            self._learn(prepared, relay, is_others=is_others)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            # The client has its answer; a lesson that is lost must not take it away again.
            log_failure("learn", error)
        if not self._is_resumed:
            self._progress.prompt_tokens.append(relay.usage.prompt_tokens if relay.usage else prepared.count.tokens)
        self._progress.usages.append(relay.usage_fields)
        if is_others:
            relay.end = "spent"
        if relay.gives_way:
            self._cuts += relay.end == "spent"
            self._callbacks += relay.end == "called_back"
            self._room.was_cut(is_spent=relay.end == "spent" and not relay.is_doubted)
            # Once for each answer: a server that tells no number would end it there again and again.
            self._was_doubted = self._was_doubted or relay.is_doubted

    def _partial(self) -> Partial:
        partial = Partial(
            text=self._progress.sent_text, reasoning=self._progress.reasoning, is_json=self._asked.is_json
        )
        return replace(partial, closes=True) if self._is_closing and partial.is_thoughts else partial

    def _output_tokens_left(self) -> int | None:
        if self._asked.output_tokens is None:
            return None
        return max(self._asked.output_tokens - self._progress.given_tokens, 1)

    def _bound(self, prepared: PreparedRequest) -> _Bound:
        """The bound on the next leg: what the window and the client leave, or less if it can go on behind that.

        A whole answer is not seen before its end. So it ends at the line where a stream is stopped, or at the window's
        end if that line is near.
        """
        left_tokens, count = self._output_tokens_left(), prepared.count.tokens
        most_tokens = prepared.max_output_tokens(left_tokens, is_certain=True)
        tokens = prepared.max_output_tokens(left_tokens, is_certain=self._was_doubted)
        line_tokens = int(self._context.settings.streaming_ratio * prepared.window.tokens) - count
        if (
            not self._stops_at_line
            or self._is_last
            or not prepared.budget.output_buffer_tokens(count) <= line_tokens < tokens
        ):
            return _Bound(tokens, is_doubted=tokens < most_tokens and not self._asked.is_json)
        return _Bound(line_tokens, is_at_line=True)

    @property
    def _is_last(self) -> bool:
        """Returns True if no compaction may carry the answer on any more."""
        return self._progress.restarts >= self._context.settings.max_restarts or not self._has_gained

    @property
    def _is_used_up(self) -> bool:
        """Returns True if the client has got as many tokens as it asked for."""
        asked = self._asked.output_tokens
        return asked is not None and self._progress.given_tokens + 1 >= asked

    def _is_overflow_of_all(self, prepared: PreparedRequest, relay: Relay) -> bool:
        """Returns True if a context that several answers fill was full, and not this answer's window; notes that.

        LM Studio and llama.cpp then end all of them, with words that name no number. Far below the window that proves a
        shared context even if the server lists none (four answers of 150 tokens over 4,096).
        """
        if relay.end != "overflow" or self._cuts >= _MAX_CUTS:
            return False
        overflow = relay.overflow
        is_numbered = overflow is not None and (overflow.window_tokens or overflow.prompt_tokens)
        if overflow is None or relay.is_crash or is_numbered or relay.looks_nearly_full():
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

    def _learn(self, prepared: PreparedRequest, relay: Relay, *, is_others: bool) -> None:
        if relay.end == "overflow":
            overflow = relay.overflow or Overflow(None, None)
            if not relay.is_crash:
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

    def _calling(self, relay: Relay) -> list[Chunk]:
        """Of several calls the last was cut: the client executes the whole ones, and the model asks again."""
        return [*(self._one.dressed(delta) for delta in relay.whole_calls()), *self._ending(relay, "tool_calls")]

    def _closing_for(self, error: CompactionError) -> list[Chunk]:
        """The same behind the last leg, if the client has some of it; its request gets the error otherwise."""
        if self._last is None or not self._progress.delivered:
            raise error
        return self._closing(*self._last)

    def _closing(self, prepared: PreparedRequest, relay: Relay) -> list[Chunk]:
        """No way out: everything that is held, the notice, a regular end."""
        chunks = [self._one.dressed(delta) for delta in relay.surrendered()]
        used_tokens, window_tokens = min(relay.filled_tokens, prepared.window.tokens), prepared.window.tokens
        if self._partial().is_thoughts and not relay.is_stuck:
            self._outcome = "unanswered"
            chunks += [self._one.dressed(delta) for delta in relay.closed_thoughts()]
            text = THOUGHTS_NOTICE.format(used=used_tokens, window=window_tokens)
        elif self._progress.restarts >= self._context.settings.max_restarts and not relay.is_stuck:
            self._outcome = "attempts"
            text = ATTEMPTS_NOTICE
        else:
            self._outcome = "aborted"
            is_exceeded = relay.end == "overflow" or used_tokens >= window_tokens
            text = (ABORT_NOTICE if is_exceeded else NEARLY_FULL_NOTICE).format(used=used_tokens, window=window_tokens)
        self._tell(self._outcome, prepared, relay)
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
            and (self._progress.restarts or self._cuts)
            and not self._progress.is_json
        ):
            reason = "length"
        if details := self._progress.details(self._outcome, self._late_receipt):
            self._listener.ended(details)
        fields = relay.ending_fields if reason == relay.finish_reason else {}
        usage = self._progress.usage(self._outcome, self._late_receipt)
        return self._one.ending(reason, usage if self._asked.wants_usage else None, fields)

    @property
    def _late_receipt(self) -> Mapping[str, str]:
        return {} if self._asked.is_whole else self._listener.late_receipt

    @property
    def is_one_leg(self) -> bool:
        """Returns True if a single upstream answer is all of it, and the window has not ended it."""
        return not self.is_joined and self._outcome == "completed"
