"""Decides what is sent for a measured request: itself, an earlier compaction, or a new one, which is made here.

`core/plan.py` decides by numbers. They are settled with the server if they are in doubt, and the steps of a plan are
climbed until the result of one does.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from litellm_compaction.concurrency import Bounded, Flights, off_loop, off_loop_if
from litellm_compaction.core.compaction import Compaction, superseded, usable
from litellm_compaction.core.identity import Course, Listed, Relisted, relisted
from litellm_compaction.core.messages import Message
from litellm_compaction.core.plan import Make, Plan, Send, Step, plan, shortened, with_less_data
from litellm_compaction.core.prompts import strategy
from litellm_compaction.core.refusal import UNCHANGEABLE, refusal, too_long
from litellm_compaction.engine.context import (
    Action,
    CompactionNeeded,
    Decided,
    Decision,
    Effort,
    MeasuredRequest,
    PreparedRequest,
)
from litellm_compaction.engine.measure import COMPACTED_BEFORE_RATIO, hashed
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import UNDONE, Outcome

if TYPE_CHECKING:
    from litellm_compaction.engine.compactor import Compactor

_ALONE = contextlib.nullcontext()
# Lists that are remembered, the characters of one, and how many are tried of those with the last words ("go on").
_MOST_LISTS, _MOST_LIST_CHARS, _MOST_TRIES, _MOST_FIRST = 64, 1_000_000, 4, 3


class Decider:
    """Finds the cheapest way in which a request fits its window, by the rooms of `engine`."""

    def __init__(self, engine: Compactor, leases: Leases | None) -> None:
        self._engine, self._leases = engine, leases
        self._measurer, self._asker, self._maker = engine.measurer, engine.asker, engine.maker
        # With a list of the request that made it, which holds its effort once its client has left.
        self._flights: Flights[tuple[Compaction | None, list[Effort]]] = Flights()
        self.sent_before = SentBefore()
        # Tenants of whom a small conversation has been compacted at a client's wish: theirs are looked up, too.
        self._small: Bounded[str, bool] = Bounded()

    # ------------------------------------------------------------------ the decision

    async def first(self, measured: MeasuredRequest) -> Decided:
        """Decides about a request of which only the size is known yet; errors as `Compactor.guard`, and BadWish."""
        context = measured.context
        if not context.may_change and not context.portable:
            measured = await self._asker.settled(measured, is_sent=True)
            if measured.budget.own.fits(measured.count.tokens):
                return self._measurer.unchanged(measured)
            self._tell_refused(measured, measured.count.tokens)
            raise too_long(context.label, measured.count.tokens, measured.budget, UNCHANGEABLE)
        has_wish = context.is_wanted or context.pins is not None or bool(context.portable)
        if not has_wish and context.scope not in self._small and _is_small(measured):
            return self._measurer.unchanged(measured)
        measured = await hashed(measured)
        if context.is_beside or context.is_client_summary:
            return await self._with_stored(measured)
        sent, decided = await self._as_before(measured)
        await off_loop(sent.conversation.rest, partial(self.sent_before.note, sent))
        return decided

    async def _as_before(self, measured: MeasuredRequest) -> tuple[MeasuredRequest, Decided]:
        """A request as it was before its client cleared or left out some of it, if its record or an edit does."""
        before, earlier = await self.restored(measured), None
        # It may be too large, and what its client sends fit.
        with contextlib.suppress(CompactionError):
            earlier = None if before is measured else await self._with_stored(before)
            if earlier and (told := _told(earlier)) <= max(before.request.left_out, default=-1):
                # What no record tells is not shown again.
                listed = Listed(before.conversation.rest, before.request.left_out).without(told)
                before, earlier = await self._measured(before, listed), None
                if before.request.messages != measured.request.messages:
                    earlier = await self._with_stored(before)
        if isinstance(earlier, PreparedRequest) and earlier.round:
            return before, earlier
        decided = await self._with_stored(measured)
        is_other = Listed(before.conversation.rest, before.request.left_out).is_other
        does = isinstance(earlier, CompactionNeeded) and (is_other or earlier.steps[0].is_edit)
        is_still_needed = isinstance(decided, CompactionNeeded) or decided.round
        return (before, earlier) if earlier is not None and does and is_still_needed else (measured, decided)

    async def restored(self, measured: MeasuredRequest) -> MeasuredRequest:
        """A request with what its client has cleared or left out since it was sent; itself if that is nothing."""
        found = await off_loop(measured.conversation.rest, partial(self.sent_before.restored, measured))
        return measured if found is None else await self._measured(measured, found)

    async def _measured(self, measured: MeasuredRequest, listed: Listed) -> MeasuredRequest:
        messages = (*measured.request.messages[: measured.conversation.prefix], *listed.rest)
        request = replace(measured.request, messages=messages, left_out=listed.left_out)
        return await hashed(await self._measurer.measure(request, measured.context))

    async def _with_stored(self, measured: MeasuredRequest) -> Decided:
        measured, records = await self._maker.find(self.sent_before.steadied(measured))

        async def decided(stored: Sequence[Compaction]) -> Decided:
            settled = measured if stored else await self._asker.settled(measured)
            # A running answer is stopped at this line: nothing begins above it that could begin below.
            limit_tokens = int(settled.budget.rules.streaming_ratio * settled.window.tokens)
            less = await self._shorter(settled, with_less_data, limit_tokens)
            return await self.decide(less or settled, stored, cut="attached" if less else "")

        return await self._maker.without_misfits(measured, records, decided)

    async def decide(self, measured: MeasuredRequest, stored: Sequence[Compaction], *, cut: str = "") -> Decided:
        """Decides by what is `stored` under a request's hashes; `cut` says in a word why its texts are not whole."""
        allowed = stored
        while True:
            decision = await self.plan(measured, allowed)
            if isinstance(decision, Make):
                reused = await self._reused(measured, allowed)
                is_sure = reused is not None or not stored or measured.count.text.is_confirmed
                if is_sure or (settled := await self._asker.settled(measured)) is measured:
                    return reused or CompactionNeeded(measured=measured, steps=decision.steps, stored=tuple(stored))
                # No number of the server was known, and a summary's prompt could be twice as long as we count.
                measured, allowed = settled, stored
                continue
            if isinstance(decision, Send) and decision.compaction is not None:
                prepared = await self._applied(measured, decision.compaction, "reused")
                if prepared.budget.fits(prepared.count.tokens):
                    return await self._quoted(prepared, Decision("reused"))
                # Counted as it is sent it does not do: what is decided without it?
                allowed = ()
                continue
            again = await self._recounted(measured, fits=isinstance(decision, Send))
            if again is None and isinstance(decision, Send):
                return self._kept(measured, cut, is_undone=decision.is_undone)
            if again is None:
                again, cut = await self._cut(measured, cut)
            measured, allowed = again, stored

    async def _recounted(self, measured: MeasuredRequest, *, fits: bool) -> MeasuredRequest | None:
        """A request by the server's count, before it is sent as it came or refused; None if that says nothing new."""
        again = await (self._asker.settled(measured, is_sent=True) if fits else self._asker.with_floor(measured))
        return None if again is measured else again

    async def plan(self, measured: MeasuredRequest, stored: Sequence[Compaction]) -> Plan:
        budget = replace(measured.budget, is_wanted=True) if measured.context.is_wanted else measured.budget
        make = partial(plan, measured.conversation, budget, measured.options, stored)
        return await off_loop_if(measured.is_long, make)

    async def _applied(self, measured: MeasuredRequest, compaction: Compaction, action: Action) -> PreparedRequest:
        """The request after a compaction, counted by the server if our doubt would decide about it."""
        prepared = await self._measurer.applied(measured, compaction, action)
        if await self._asker.has_recounted(measured, prepared):
            return await self._measurer.applied(measured, compaction, action)
        return prepared

    async def _reused(self, measured: MeasuredRequest, known: Sequence[Compaction]) -> PreparedRequest | None:
        """An earlier compaction that still does, counted as it is sent, which the planner can only estimate."""
        found = usable(measured.conversation, known)[:1]
        if not found or found[0].state == "provisional" or measured.context.is_wanted:
            return None
        prepared = await self._applied(measured, found[0], "reused")
        does_last = not prepared.budget.triggers(prepared.count.tokens)
        return await self._quoted(prepared, Decision("reused")) if does_last else None

    async def _quoted(self, prepared: PreparedRequest, decision: Decision) -> PreparedRequest:
        return replace(await self._engine.recaller.quoted(prepared, self._measurer), decision=decision)

    def _kept(self, measured: MeasuredRequest, cut: str, *, is_undone: bool) -> PreparedRequest:
        """The request as it came, or with its texts cut; `is_undone` if the owner of its compaction has undone that."""
        is_kept = is_undone and measured.budget.own.triggers(measured.count.tokens)
        reason, prepared = cut or (UNDONE if is_kept else ""), self._measurer.unchanged(measured)
        decision = Decision("fallback" if cut else "kept", Effort(reason=reason))
        return replace(prepared, decision=decision) if reason else prepared

    async def sent(self, prepared: PreparedRequest) -> PreparedRequest:
        """Tells of a request that is sent as it was decided; a record written ahead is in effect from then on."""
        if prepared.decision is None:
            return prepared
        self._engine.reporter.decided(prepared.measured, prepared.decision, prepared=prepared)
        if prepared.applied is not None and prepared.applied.is_waiting:
            # Also if a later turn is smaller.
            await self._maker.put(prepared.measured, replace(prepared.applied, state="applied"))
        return replace(prepared, decision=None)

    # ------------------------------------------------------------------ a request that does not fit

    async def _cut(self, measured: MeasuredRequest, cut: str) -> tuple[MeasuredRequest, str]:
        """The request with less attached data, or its largest texts cut if the operator allows it; or the refusal."""
        limit_tokens, settings = measured.budget.prompt_limit_tokens, measured.context.settings
        if not measured.is_shortened and (less := await self._shorter(measured, with_less_data, limit_tokens)):
            return less, "attached"
        results, words = settings.oversized_tool_result == "excerpt", settings.oversized_user_message == "excerpt"
        may_cut = {"tool_results": results, "user_message": words}
        if cut != "excerpt" and (less := await self._shorter(measured, shortened, **may_cut)):
            return less, "excerpt"
        raise await self.refusal(measured)

    async def _shorter(
        self, measured: MeasuredRequest, shorten: Callable[..., tuple[Message, ...] | None], *given: Any, **changes: Any
    ) -> MeasuredRequest | None:
        """The request with the messages that a function of `core/plan.py` leaves of it; None if all may stay."""
        make = partial(shorten, measured.conversation, measured.budget, *given, **changes)
        messages = await off_loop_if(measured.is_long, make)
        return await self._measurer.shortened(measured, messages) if messages else None

    async def refusal(self, measured: MeasuredRequest) -> DoesNotFit:
        """The error for a request that nothing makes fit; says what takes how many tokens."""
        context, view, count = measured.context, measured.conversation, measured.count
        if not context.goes_on:
            # An answer that cannot be carried over is no refused request: the loop that carries it tells of it.
            self._tell_refused(measured, measured.budget.floor_tokens)
        tools_share = count.tools_tokens / max(1, count.tools_tokens + count.overhead_tokens)
        make = partial(refusal, context.label, view, measured.budget, round(tools_share * view.fixed_tokens))
        return await off_loop_if(measured.is_long, make)

    def _tell_refused(self, measured: MeasuredRequest, tokens: int) -> None:
        self._engine.reporter.decided(measured, Decision("refused", Effort(reason="does_not_fit")), after=tokens)

    # ------------------------------------------------------------------ the steps of a plan

    async def climbed(self, needed: CompactionNeeded, room: Reservation | None) -> PreparedRequest:
        """Returns the request after the first step whose result does, or as is decided about it by then."""

        async def finished(stored: Sequence[Compaction]) -> PreparedRequest:
            decided = needed if stored == needed.stored else await self.decide(needed.measured, stored)
            while isinstance(decided, CompactionNeeded):
                decided = await self._climbed(decided, room)
            return decided

        return await self._maker.without_misfits(needed.measured, needed.stored, finished)

    async def _climbed(self, needed: CompactionNeeded, room: Reservation | None) -> Decided:
        measured, context, effort = needed.measured, needed.measured.context, Effort()
        for at, step in enumerate(needed.steps):
            made, made_by = await self._made(needed, needed.steps[at:], room, effort)
            if made and made_by and (prepared := await self._tried(needed, step, made, made_by)) is not None:
                await self._maker.forget(measured, superseded(needed.stored))
                return prepared
            if made is not None and made_by is not effort:
                # Another request's may not be for this one, which goes on differently.
                context.attempts.has_compacted = context.attempts.has_compacted or context.now
                return await self.decide(measured, (made, *needed.stored))
            if step.draft.is_record:
                break
        does_fit = measured.budget.own.fits(measured.count.tokens)
        if (again := await self._recounted(measured, fits=does_fit)) is not None:
            return await self.decide(again, needed.stored)
        if does_fit:
            return self._measurer.unchanged(measured)
        for hardest in await self._maker.hardest(measured):
            prepared = await self._applied(measured, hardest, "compacted")
            if prepared.budget.fits(prepared.count.tokens):
                return replace(prepared, decision=Decision("fallback", Effort(reason="bare")))
        raise await self.refusal(measured)

    async def _tried(
        self, needed: CompactionNeeded, step: Step, made: Compaction, effort: Effort
    ) -> PreparedRequest | None:
        """The request after what a step has made; None if it does not fit, or an edit or a choice leaves too much."""
        measured, context, is_copied = needed.measured, needed.measured.context, made.level == "truncate"
        if is_copied and measured.is_voluntary:
            # It fits as it came, which says more than a record without a summary.
            return replace(self._measurer.unchanged(measured), decision=Decision("fallback", effort))
        prepared = await self._applied(measured, made, "compacted")
        if not is_enough(measured, step, made, prepared):
            return None
        if not step.draft.is_record:
            # A record is the last step: it is sent whatever the template says.
            sent, accepts = prepared.sent(measured.request), self._engine.windows.accepts
            if not await accepts(context.target, sent, measured.request):
                return None
            await self._maker.put(measured, made)
        if context.now:
            context.attempts.has_compacted = self._small[context.scope] = True
        outcome: Outcome = "fallback" if is_copied and not context.is_client_summary else "compacted"
        return await self._quoted(prepared, Decision(outcome, effort, step.base))

    async def _made(
        self, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None, effort: Effort
    ) -> tuple[Compaction | None, Effort | None]:
        """The compaction by the first step, None for nothing usable; and its effort if this request tells of it.

        What a model is asked for is made once, in one of all processes, for all of equal tenants, models, topics, and
        covered messages; who waits for it gives back its room.
        """
        measured, context, step = needed.measured, needed.measured.context, steps[0]
        make = partial(self._maker.make, measured, steps, effort)
        if step.question == "none":
            return await make(), effort
        covered_hash = measured.conversation.hashes[step.draft.covered_messages]
        key = (context.scope, context.target.key, context.focus, step.question, covered_hash)
        limit_s, leases, left = context.settings.summary_timeout_s, self._leases, list[Effort]()

        async def look() -> Compaction | None:
            # It may have waited, or come late.
            again, stored = await self._maker.find(measured)
            new = usable(again.conversation, (each for each in stored if each not in needed.stored))
            return new[0] if new else None

        async def waited() -> Compaction | None:
            if room is not None:
                room.pause()
            return await look()

        async def first() -> tuple[Compaction | None, list[Effort]]:
            shared = leases.one_of_all(f"compaction {key!r}", waited, limit_s=limit_s) if leases is not None else _ALONE
            async with shared as found:
                if others := found or await look():
                    return others, []
                async with room.for_summary(measured.window, measured.count.tokens) if room is not None else _ALONE:
                    return await make(), left

        if self._flights.is_under_way(key) and room is not None:
            room.pause()
        try:
            made, makers = await self._flights.join(key, first)
        except asyncio.CancelledError:
            # Its client has left: another one tells of it.
            left.append(effort)
            raise
        if makers is left:
            return made, effort
        return made, makers.pop() if makers else None


def _is_small(measured: MeasuredRequest) -> bool:
    """Nothing has to be looked up: it is too short ever to have been compacted."""
    budget, tokens = measured.budget, measured.count.tokens
    # The rest of an answer may need most of the window.
    may_need_all = bool(budget.outside_tokens) or measured.context.goes_on
    if may_need_all and not budget.own.fits(tokens):
        return False
    return tokens - budget.outside_tokens < COMPACTED_BEFORE_RATIO * budget.usable_tokens


def is_enough(measured: MeasuredRequest, step: Step, compaction: Compaction, prepared: PreparedRequest) -> bool:
    """Returns True if a new compaction does, counted as it is sent; else the next step's turn has come (promise P5).

    It was to be made by `step`, and may have been made by a later one.
    """
    tokens, budget = prepared.count.tokens, prepared.budget
    if not budget.fits(tokens) or tokens >= measured.count.tokens:
        return False
    is_as_planned = step.is_edit and tokens <= step.predicted_tokens
    must_not_trigger = step.is_edit or strategy(compaction.level).writer
    return is_as_planned or not (must_not_trigger and budget.triggers(tokens))


def _told(decided: Decided) -> int:
    """The messages for which a record stands by now."""
    if isinstance(decided, PreparedRequest):
        return decided.compaction.start if decided.compaction else 0
    return max((each.start for each in decided.stored), default=0)


class SentBefore:
    """The newest lists of conversations that were sent, by the tenants' scope and their last words.

    In this process only. What a client leaves out is put back the second time that this is at the same place, for a
    person may have deleted it.
    """

    def __init__(self) -> None:
        # With where their client has left some out or written some anew; None for those of two persons.
        self._lists: Bounded[tuple[str, str], Relisted | None] = Bounded(_MOST_LISTS)
        self._newest = Listed(())
        self._courses: Bounded[tuple[str, int], Course] = Bounded(4 * _MOST_LISTS)  # By first messages, and the newest.

    def steadied(self, measured: MeasuredRequest, *, is_answered: bool = False) -> MeasuredRequest:
        """Remembers a list, or one with its answer, which a client may cut; the request knows what may change next."""
        view, scope = measured.conversation, measured.context.scope
        # A tenth of their size as texts.
        entries = array("q", map(hash, view.words_hashes[: len(view.words_hashes) - is_answered]))
        key = (scope, entries[:3][-1])
        course = self._courses.get(key, Course()).then(entries)
        # A tenant's client does so in its next conversation, too.
        newest = course if course.changed else self._courses.get((scope, 0), course)
        if not (measured.context.goes_on or measured.context.is_beside):
            self._courses[key], self._courses[scope, 0] = course, newest
        changed = max(newest.changed, default=0)
        unsteady = None if is_answered and len(course.changed) < 2 else changed and changed + 2 * is_answered
        return replace(measured, conversation=replace(view, unsteady=unsteady))

    def restored(self, measured: MeasuredRequest) -> Listed | None:
        """Returns a request's list with what its client has left out, cleared or cut as it was."""
        context, own = measured.context, Listed(measured.conversation.rest)
        # In another thread than other requests'.
        self._newest, (now, before) = own, self._relisted(context.scope, own)
        if now is None or not now.is_as(before):
            return None
        # A wish, a record that the client keeps, and the library's caller count the client's own messages.
        counts_its_own = context.is_wanted or context.portable or context.writes_whole_records
        is_same = now.listed.rest == own.rest
        return None if is_same or (counts_its_own and now.listed.is_other) else now.listed

    def note(self, measured: MeasuredRequest) -> None:
        """Remembers a conversation that is sent."""
        scope, view, own = measured.context.scope, measured.conversation, self._newest
        # The marks of a long list take some ms, and are there already if nothing was put back.
        own = own if own.rest is view.rest else Listed(view.rest, measured.request.left_out)
        if not own.spoken or sum(len(str(each.raw)) for each in view.rest) > _MOST_LIST_CHARS:
            return
        (now, before), key = self._relisted(scope, own), (scope, own.marks[own.spoken[-1]])
        now, same = now or Relisted(own), self._lists.get(key, before)
        again = same and relisted(same, own, len(own.spoken))
        is_anothers = same is None or (again.renewed if again else same.listed.marks == own.marks)
        # A window of last messages goes on behind a few first ones, if not in each request; a person deletes elsewhere.
        is_windows = own.left_out or (before.cut or 0) <= _MOST_FIRST
        cut = before.cut if now.cut is None and is_windows else now.cut
        self._lists[key] = None if is_anothers else Relisted(own, cut, now.renewed or before.renewed, now.notes)

    def _relisted(self, scope: str, own: Listed) -> tuple[Relisted | None, Relisted]:
        """As `relisted`, and by which list that its client has sent before; by none an empty one."""
        ends = (
            (end, old)
            for end in range(len(own.spoken), len(own.spoken) // 2, -1)
            if (old := self._lists.get((scope, own.marks[own.spoken[end - 1]]))) is not None
        )
        for end, old in islice(ends, _MOST_TRIES):
            if (now := relisted(old, own, end)) is not None:
                return now, old
        return None, Relisted(own)
