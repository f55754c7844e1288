"""Decides what is sent for a measured request: itself, an earlier compaction, or a new one, which is made here.

`core/plan.py` decides by numbers. They are settled with the server if they are in doubt, and the steps of a plan are
climbed until the result of one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from litellm_compaction.concurrency import Bounded, Flights, off_loop_if
from litellm_compaction.core.compaction import Compaction, is_undone, usable
from litellm_compaction.core.identity import edited
from litellm_compaction.core.messages import Message
from litellm_compaction.core.plan import Make, Plan, Send, Step, plan
from litellm_compaction.core.prompts import strategy
from litellm_compaction.core.refusal import refusal, shortened, unchangeable, with_less_data
from litellm_compaction.core.stretches import is_text_result
from litellm_compaction.core.view import View
from litellm_compaction.engine.context import CompactionNeeded, Decided, Effort, MeasuredRequest, PreparedRequest
from litellm_compaction.engine.measure import COMPACTED_BEFORE_RATIO, hashed
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import UNDONE

if TYPE_CHECKING:
    from litellm_compaction.engine.compactor import Compactor

_ALONE = contextlib.nullcontext()
_MOST_SCOPES = 4096
# What a client's clearing has to leave free, of what is sent.
_ROOM_RATIO = 1.25
# Results that are remembered, of all conversations; and of how many characters at most: of 32 million in all.
_MOST_RESULTS, _MOST_CHARS = 1024, 32_000


class Decider:
    """Finds the cheapest way in which a request fits its window, by the rooms of `engine`."""

    def __init__(self, engine: Compactor, leases: Leases | None) -> None:
        self._engine, self._leases = engine, leases
        self._flights: Flights[Compaction | None] = Flights()
        self._sent = SentBefore()
        # Tenants of whom a small conversation has been compacted at a client's wish: theirs are looked up, too.
        self._small: Bounded[str, bool] = Bounded(_MOST_SCOPES)

    # ------------------------------------------------------------------ the decision

    async def first(self, measured: MeasuredRequest) -> Decided:
        """Decides about a request of which only the size is known yet; errors as `Compactor.guard`, and BadWish."""
        context, unchanged = measured.context, self._engine.measurer.unchanged
        if not context.may_change and not context.portable:
            measured = await self._engine.asker.settled(measured, is_sent=True)
            if measured.budget.own.fits(measured.count.tokens):
                return unchanged(measured)
            self._tell_refused(measured, measured.count.tokens)
            raise unchangeable(context.label, measured.count.tokens, measured.budget)
        has_wish = context.is_wanted or context.pins is not None or bool(context.portable)
        if not has_wish and context.scope not in self._small and _is_small(measured):
            return unchanged(measured)
        measured = await hashed(measured)
        if context.is_beside or context.is_client_summary:
            return await self._with_stored(measured)
        sent, decided = await self._as_before(measured)
        self._sent.note(context.scope, sent.conversation)
        return decided

    async def _as_before(self, measured: MeasuredRequest) -> tuple[MeasuredRequest, Decided]:
        """A request as it was before its client cleared some of it, if its compaction does once more; else as it is.

        Or if so little room is left that each turn until the next compaction would be read anew, and an edit does.
        """
        before, edit = measured, None
        restored = self._sent.restored(measured.context.scope, measured.conversation)
        if restored is not None:
            request = replace(measured.request, messages=restored)
            before = await hashed(await self._engine.measurer.measure(request, measured.context))
            # Cleared it may well fit.
            with contextlib.suppress(CompactionError):
                earlier = await self._with_stored(before)
                if isinstance(earlier, CompactionNeeded):
                    edit = earlier if earlier.steps[0].is_edit else None
                elif earlier.round:
                    return before, earlier
        decided = await self._with_stored(measured)
        is_full = isinstance(decided, CompactionNeeded) or (
            decided.round > 0 and decided.budget.triggers(int(_ROOM_RATIO * decided.count.tokens))
        )
        return (before, edit) if edit is not None and is_full else (measured, decided)

    async def _with_stored(self, measured: MeasuredRequest) -> Decided:
        measured, found = await self._engine.maker.find(measured)

        async def decided(stored: Sequence[Compaction]) -> Decided:
            settled = measured if stored else await self._engine.asker.settled(measured)
            # A running answer is stopped at this line: nothing begins above it that could begin below.
            limit_tokens = int(settled.budget.rules.streaming_ratio * settled.window.tokens)
            less = await self._shorter(settled, with_less_data, limit_tokens)
            return await self.decide(less or settled, stored, cut="attached" if less else "")

        return await self._engine.maker.without_misfits(measured, found, decided)

    async def decide(self, measured: MeasuredRequest, stored: Sequence[Compaction], *, cut: str = "") -> Decided:
        """Decides by what is `stored` under a request's hashes; `cut` says in a word why its texts are not whole."""
        known = stored
        while True:
            decision = await self.plan(measured, known)
            if isinstance(decision, Make):
                needed = CompactionNeeded(measured=measured, steps=decision.steps, stored=tuple(stored))
                return await self._reused(measured, known) or needed
            if isinstance(decision, Send) and decision.compaction is not None:
                prepared = await self._applied(measured, decision.compaction, "reused")
                if prepared.budget.fits(prepared.count.tokens):
                    return await self._quoted(prepared)
                # Counted as it is sent it does not do: what is decided without it?
                known = ()
                continue
            again = await self._recounted(measured, fits=isinstance(decision, Send))
            if again is None and isinstance(decision, Send):
                return self._kept(measured, cut, is_undone=decision.is_undone)
            if again is None:
                again, cut = await self._cut(measured, cut)
            measured, known = again, stored

    async def _recounted(self, measured: MeasuredRequest, *, fits: bool) -> MeasuredRequest | None:
        """A request by the server's count, before it is sent as it came or refused; None if that says nothing new."""
        asker = self._engine.asker
        again = await (asker.settled(measured, is_sent=True) if fits else asker.with_floor(measured))
        return None if again is measured else again

    async def plan(self, measured: MeasuredRequest, stored: Sequence[Compaction]) -> Plan:
        budget = replace(measured.budget, is_wanted=True) if measured.context.is_wanted else measured.budget
        return await off_loop_if(
            measured.is_long, lambda: plan(measured.conversation, budget, measured.options, stored)
        )

    async def _applied(
        self, measured: MeasuredRequest, compaction: Compaction, action: Literal["reused", "compacted"]
    ) -> PreparedRequest:
        """The request after a compaction, counted by the server if our doubt would decide about it."""
        prepared = await self._engine.measurer.applied(measured, compaction, action)
        if await self._engine.asker.has_recounted(measured, prepared):
            return await self._engine.measurer.applied(measured, compaction, action)
        return prepared

    async def _reused(self, measured: MeasuredRequest, stored: Sequence[Compaction]) -> PreparedRequest | None:
        """An earlier compaction that still does, counted as it is sent, which the planner can only estimate."""
        if not stored or measured.context.is_wanted:
            return None
        found = await off_loop_if(measured.is_long, lambda: usable(measured.conversation, stored))
        if found and found[0].state != "provisional":
            prepared = await self._applied(measured, found[0], "reused")
            if not prepared.budget.triggers(prepared.count.tokens):
                return await self._quoted(prepared)
        return None

    async def _quoted(self, prepared: PreparedRequest) -> PreparedRequest:
        quoted = await self._engine.recaller.quoted(prepared, self._engine.measurer)
        return replace(quoted, outcome="reused")

    def _kept(self, measured: MeasuredRequest, cut: str, *, is_undone: bool) -> PreparedRequest:
        """The request as it came, or with its texts cut; `is_undone` if the owner of its compaction has undone that."""
        prepared = self._engine.measurer.unchanged(measured)
        if cut:
            return replace(prepared, outcome="fallback", reason=cut)
        is_told = is_undone and measured.budget.own.triggers(measured.count.tokens)
        return replace(prepared, outcome="kept", reason=UNDONE) if is_told else prepared

    async def sent(self, prepared: PreparedRequest) -> PreparedRequest:
        """Tells of a request that is sent as it was decided; a record written ahead is in effect from then on."""
        if prepared.outcome is None:
            return prepared
        measured, compaction, effort = prepared.measured, prepared.applied, Effort(reason=prepared.reason)
        self._engine.reporter.decided(measured, prepared.outcome, prepared=prepared, effort=effort)
        if compaction is not None and compaction.is_waiting:
            # Also if a later turn is smaller.
            await self._engine.maker.put(measured, replace(compaction, state="applied"))
        return replace(prepared, outcome=None)

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
        """The request with the messages that a function of `core/refusal.py` leaves of it; None if all may stay."""
        make = partial(shorten, measured.conversation, measured.budget, *given, **changes)
        messages = await off_loop_if(measured.is_long, make)
        return await self._engine.measurer.shortened(measured, messages) if messages else None

    async def refusal(self, measured: MeasuredRequest) -> DoesNotFit:
        """The error for a request that nothing makes fit; says what takes how many tokens."""
        if not measured.context.goes_on:
            # An answer that cannot be carried over is no refused request: the loop that carries it tells of it.
            self._tell_refused(measured, measured.budget.floor_tokens)
        count, fixed_tokens = measured.count, measured.conversation.fixed_tokens
        tools_share = count.tools_tokens / max(1, count.tools_tokens + count.overhead_tokens)
        tools_tokens = round(tools_share * fixed_tokens)
        make = partial(refusal, measured.context.label, measured.conversation, measured.budget, tools_tokens)
        return await off_loop_if(measured.is_long, make)

    def _tell_refused(self, measured: MeasuredRequest, tokens: int) -> None:
        self._engine.reporter.decided(measured, "refused", after=tokens, effort=Effort(reason="does_not_fit"))

    # ------------------------------------------------------------------ the steps of a plan

    async def climbed(self, needed: CompactionNeeded, room: Reservation | None) -> PreparedRequest:
        """Returns the request after the first step whose result does, or as is decided about it by then."""

        async def finished(stored: Sequence[Compaction]) -> PreparedRequest:
            decided = needed if stored == needed.stored else await self.decide(needed.measured, stored)
            while isinstance(decided, CompactionNeeded):
                decided = await self._climbed(decided, room)
            return decided

        return await self._engine.maker.without_misfits(needed.measured, needed.stored, finished)

    async def _climbed(self, needed: CompactionNeeded, room: Reservation | None) -> Decided:
        measured, context, effort = needed.measured, needed.measured.context, Effort()
        for at, step in enumerate(needed.steps):
            made, is_ours = await self._made(needed, needed.steps[at:], room, effort)
            if made is not None and not is_ours:
                # Another request's may not be for this one, which goes on differently.
                context.attempts.has_compacted = context.attempts.has_compacted or context.now
                return await self.decide(measured, (made, *needed.stored))
            if made is not None and (prepared := await self._tried(needed, step, made, effort)) is not None:
                return prepared
            if step.is_record:
                break
        does_fit = measured.budget.own.fits(measured.count.tokens)
        if (again := await self._recounted(measured, fits=does_fit)) is not None:
            return await self.decide(again, needed.stored)
        if does_fit:
            return self._engine.measurer.unchanged(measured)
        for hardest in await self._engine.maker.hardest(measured):
            prepared = await self._applied(measured, hardest, "compacted")
            if prepared.budget.fits(prepared.count.tokens):
                return replace(prepared, outcome="fallback", reason="bare")
        raise await self.refusal(measured)

    async def _tried(
        self, needed: CompactionNeeded, step: Step, made: Compaction, effort: Effort
    ) -> PreparedRequest | None:
        """The request after what a step has made; None if it does not fit, or an edit or a choice leaves too much."""
        measured, context, reporter = needed.measured, needed.measured.context, self._engine.reporter
        if made.level == "truncate" and measured.is_voluntary:
            # It fits as it came, which says more than a record without a summary.
            prepared = self._engine.measurer.unchanged(measured)
            reporter.decided(measured, "fallback", prepared=prepared, effort=effort)
            return prepared
        prepared = await self._applied(measured, made, "compacted")
        if not is_enough(measured, step, made, prepared):
            return None
        if not step.is_record:
            # A record is the last step: it is sent whatever the template says.
            if not await self._engine.windows.accepts(
                context.target, prepared.sent(measured.request), measured.request
            ):
                return None
            await self._engine.maker.put(measured, made)
        if context.now:
            context.attempts.has_compacted = self._small[context.scope] = True
        elif is_undone(measured.conversation, needed.stored):
            # It would not have fitted otherwise.
            effort.reason = effort.reason or UNDONE
        prepared = replace(await self._quoted(prepared), outcome=None)
        is_fallback = made.level == "truncate" and not context.is_client_summary
        reporter.decided(
            measured,
            "fallback" if is_fallback else "compacted",
            prepared=prepared,
            effort=effort,
            base=step.base,
            known=next(iter(usable(measured.conversation, needed.stored)), None),
        )
        return prepared

    async def _made(
        self, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None, effort: Effort
    ) -> tuple[Compaction | None, bool]:
        """The compaction by the first step, None for nothing usable; and True if it was made for this very request.

        What a model is asked for is made once, in one of all processes, for all of equal tenants, models, topics, and
        covered messages; who waits for it gives back its room.
        """
        measured, context, step, is_ours = needed.measured, needed.measured.context, steps[0], False
        make = partial(self._engine.maker.make, measured, steps, effort)
        if step.question == "none":
            return await make(), True
        covered_hash = measured.conversation.hashes[step.draft.covered_messages]
        key = (context.scope, context.target.key, context.focus, step.question, covered_hash)
        topic, limit_s = f"compaction {key!r}", context.settings.summary_timeout_s

        async def look() -> Compaction | None:
            # It may have waited, or come late.
            again, stored = await self._engine.maker.find(measured)
            new = usable(again.conversation, (each for each in stored if each not in needed.stored))
            return new[0] if new else None

        async def waited() -> Compaction | None:
            if room is not None:
                room.pause()
            return await look()

        async def first() -> Compaction | None:
            nonlocal is_ours
            shared = self._leases.one_of_all(topic, waited, limit_s=limit_s) if self._leases is not None else _ALONE
            async with shared as found:
                if found := found or await look():
                    return found
                is_ours = True
                async with room.for_summary(measured.window, measured.count.tokens) if room is not None else _ALONE:
                    return await make()

        if self._flights.is_under_way(key) and room is not None:
            room.pause()
        made = await self._flights.join(key, first)
        return made, is_ours


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
    must_not_trigger = step.is_edit or strategy(compaction.level).chooses
    return is_as_planned or not (must_not_trigger and budget.triggers(tokens))


class SentBefore:
    """The newest results that were sent, by the tenants' scope and all words up to them, in this process only.

    What a client changes behind a record its server reads again from there on: with one result cleared a turn more than
    half of each prompt. So a result in whose place a note or a piece has come is sent as it was until that is too much.
    If conversations of equal words had different data there, either may be another person's (promise P9): None.
    """

    def __init__(self) -> None:
        self._sent: Bounded[tuple[str, str], Message | None] = Bounded(_MOST_RESULTS)

    def restored(self, scope: str, conversation: View) -> tuple[Message, ...] | None:
        """Returns the messages with results as they were that the client has cleared or cut; None if there are none."""
        shown = {at: was for at, was in self._changed(scope, conversation).items() if was is not None}
        head, rest = conversation.messages[: conversation.prefix], conversation.rest
        return (*head, *(shown.get(at, each) for at, each in enumerate(rest))) if shown else None

    def note(self, scope: str, conversation: View) -> None:
        """Remembers the results of a conversation that is sent."""
        changed = self._changed(scope, conversation)
        for at, key in self._results(scope, conversation):
            now = conversation.rest[at]
            self._sent[key] = None if None in (changed.get(at, now), self._sent.get(key, now)) else now

    def _changed(self, scope: str, conversation: View) -> dict[int, Message | None]:
        """The results, by position, that were something else when these words were sent; None for a stranger's."""
        rest = conversation.rest
        sent = [(at, self._sent.get(key)) for at, key in self._results(scope, conversation)]
        other = {at: was for at, was in sent if was is not None and was.raw != rest[at].raw}
        does = edited([(rest[at], was) for at, was in other.items()])
        return {at: was if is_edit else None for (at, was), is_edit in zip(other.items(), does, strict=True)}

    @staticmethod
    def _results(scope: str, conversation: View) -> list[tuple[int, tuple[str, str]]]:
        """The newest results, by position, with their keys; older ones are covered."""
        results = [
            (at, (scope, conversation.words_hashes[at + 1]))
            for at, message in enumerate(conversation.rest)
            if (message.role == "tool" or is_text_result(message))
            and not message.other_parts
            and len(message.text) <= _MOST_CHARS
        ]
        return results[-_MOST_RESULTS:]
