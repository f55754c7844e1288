"""Decides what is sent for a measured request: itself, an earlier compaction, or a new one, which is made here.

`core/plan.py` decides by numbers. They are settled with the server if they are in doubt, and the steps of a plan are
climbed until the result of one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import assert_never

from litellm_compaction.concurrency import Bounded, Flights, off_loop_if
from litellm_compaction.core.compaction import Compaction, is_undone, usable
from litellm_compaction.core.identity import edited
from litellm_compaction.core.messages import Message
from litellm_compaction.core.plan import Make, Plan, Refuse, Send, Step, plan
from litellm_compaction.core.refusal import refusal, shortened, unchangeable, with_less_data
from litellm_compaction.core.stretches import is_text_result
from litellm_compaction.core.view import View
from litellm_compaction.engine.context import CompactionNeeded, Decided, Effort, MeasuredRequest, PreparedRequest
from litellm_compaction.engine.measure import hashed, is_enough, is_small
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import UNDONE

if TYPE_CHECKING:
    from litellm_compaction.engine.compactor import Compactor

_MOST_SCOPES = 4096
# What a client's clearing has to leave free, of what is sent.
_ROOM_RATIO = 1.25
# Results that are remembered, of all conversations; and of how many characters at most: of 32 million in all.
_MOST_RESULTS, _MOST_CHARS = 1024, 32_000


class Decider:
    """Finds the cheapest way in which a request fits its window, by the rooms of `engine`."""

    def __init__(self, engine: Compactor, leases: Leases | None) -> None:
        self._engine = engine
        self._leases = leases
        self._flights: Flights[Compaction | None] = Flights()
        self._sent = SentBefore()
        # Tenants of whom a small conversation has been compacted at a client's wish: theirs are looked up, too.
        self._small: Bounded[str, bool] = Bounded(_MOST_SCOPES)

    # ------------------------------------------------------------------ the decision

    async def first(self, measured: MeasuredRequest) -> Decided:
        """Decides about a request of which only the size is known yet; errors as `Compactor.guard`, and BadWish."""
        context, unchanged = measured.context, self._engine.measurer.unchanged
        if not context.may_change and not context.portable:
            measured = await self._engine.asker.settled(measured)
            if measured.budget.own.fits(measured.count.tokens):
                return unchanged(measured)
            self._tell_refused(measured, measured.count.tokens)
            raise unchangeable(context.label, measured.count.tokens, measured.budget)
        has_wish = context.is_wanted or context.pins is not None or bool(context.portable)
        if is_small(measured) and not has_wish and context.scope not in self._small:
            return unchanged(measured)
        measured = await hashed(measured)
        if context.is_beside or context.is_client_summary:
            return await self._with_stored(measured)
        restored = self._sent.restored(context.scope, measured.conversation)
        if restored is None:
            sent, prepared = measured, await self._with_stored(measured)
        else:
            sent, prepared = await self._restored(measured, restored)
        self._sent.note(context.scope, sent.conversation)
        return prepared

    async def _restored(
        self, measured: MeasuredRequest, restored: tuple[Message, ...]
    ) -> tuple[MeasuredRequest, Decided]:
        """A request as it was before its client cleared some of it, if its compaction does once more; else as it is.

        Or if so little room is left that each turn until the next compaction would be read anew, and an edit does.
        """
        request, edits = replace(measured.request, messages=restored), False
        before = await hashed(await self._engine.measurer.measure(request, measured.context))
        # Cleared it may well fit.
        with contextlib.suppress(CompactionError):
            earlier = await self._with_stored(before)
            if isinstance(earlier, PreparedRequest) and earlier.round:
                return before, earlier
            edits = isinstance(earlier, CompactionNeeded) and earlier.steps[0].is_edit
        prepared = await self._with_stored(measured)
        is_full = isinstance(prepared, CompactionNeeded) or (
            prepared.round > 0 and prepared.budget.triggers(int(_ROOM_RATIO * prepared.count.tokens))
        )
        return (before, earlier) if edits and is_full else (measured, prepared)

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
            again: MeasuredRequest | None
            decision = await self.plan(measured, known)
            match decision:
                case Send(compaction=compaction, is_undone=is_undone):
                    if compaction is not None:
                        prepared = await self._applied(measured, compaction, "reused")
                        if prepared.budget.fits(prepared.count.tokens):
                            return await self._reusing(prepared)
                        # Counted as it is sent it does not do: what is decided without it?
                        known = ()
                        continue
                    again = await self._engine.asker.settled(measured, is_sent=True)
                    if again is measured:
                        return self._kept(measured, cut, is_undone=is_undone)
                    measured, known = again, stored
                case Make(steps=steps):
                    reused = await self._reused(measured, known)
                    return reused or CompactionNeeded(measured=measured, steps=steps, stored=tuple(stored))
                case Refuse():
                    again = await self._engine.asker.with_floor(measured)
                    if again is None:
                        again, cut = await self._cut(measured, cut)
                    measured, known = again, stored
                case _:
                    assert_never(decision)

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
                return await self._reusing(prepared)
        return None

    async def _reusing(self, prepared: PreparedRequest) -> PreparedRequest:
        return replace(await self._quoted(prepared), outcome="reused")

    async def _quoted(self, prepared: PreparedRequest) -> PreparedRequest:
        return await self._engine.recaller.quoted(prepared, self._engine.measurer)

    def _kept(self, measured: MeasuredRequest, cut: str, *, is_undone: bool) -> PreparedRequest:
        """The request as it came, or with its texts cut; `is_undone` if the owner of its compaction has undone that."""
        prepared = self._engine.measurer.unchanged(measured)
        if cut:
            return replace(prepared, outcome="fallback", reason=cut)
        is_told = is_undone and measured.budget.own.triggers(measured.count.tokens)
        return replace(prepared, outcome="kept", reason=UNDONE) if is_told else prepared

    async def sent(self, prepared: PreparedRequest) -> PreparedRequest:
        """Tells of a request that is sent as it was decided; a record written ahead is in effect from then on."""
        measured, compaction = prepared.measured, prepared.applied
        if prepared.outcome is not None:
            effort = Effort(reason=prepared.reason)
            self._engine.reporter.decided(measured, prepared.outcome, prepared=prepared, effort=effort)
        if prepared.outcome is not None and compaction is not None and compaction.is_waiting:
            # Also if a later turn is smaller.
            await self._engine.maker.put(measured, replace(compaction, state="applied"))
        return replace(prepared, outcome=None)

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
        reporter = self._engine.reporter
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
        asker = self._engine.asker
        again = await (asker.settled(measured, is_sent=True) if does_fit else asker.with_floor(measured))
        if again is not None and again is not measured:
            return await self.decide(again, needed.stored)
        if does_fit:
            return self._engine.measurer.unchanged(measured)
        for hardest in await self._engine.maker.hardest(measured):
            prepared = await self._applied(measured, hardest, "compacted")
            if prepared.budget.fits(prepared.count.tokens):
                reporter.decided(measured, "fallback", prepared=prepared, effort=Effort(reason="bare"))
                return prepared
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
        prepared = await self._quoted(prepared)
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

        What a model is asked for is made once for all of equal tenants, models, topics, and covered messages.
        """
        measured, context, step, is_ours = needed.measured, needed.measured.context, steps[0], False
        if step.question == "none":
            return await self._engine.maker.make(measured, steps, effort), True

        async def make() -> Compaction | None:
            nonlocal is_ours
            is_ours = True
            if room is None:
                return await self._engine.maker.make(measured, steps, effort)
            async with room.for_summary(measured.window, measured.count.tokens):
                return await self._engine.maker.make(measured, steps, effort)

        covered_hash = measured.conversation.hashes[step.draft.covered_messages]
        key = (context.scope, context.target.key, context.focus, step.question, covered_hash)
        limit_s, wait = context.settings.summary_timeout_s, room.pause if room is not None else lambda: None
        made = await self._once(key, partial(self._made_meanwhile, needed), make, wait, limit_s)
        return made, is_ours

    async def _once(
        self,
        key: Hashable,
        look: Callable[[], Awaitable[Compaction | None]],
        make: Callable[[], Coroutine[Any, Any, Compaction | None]],
        wait: Callable[[], None],
        limit_s: float,
    ) -> Compaction | None:
        """What `make` gives, in one of all processes that need it; all others `wait` for it, and `look` for it."""

        async def looked() -> Compaction | None:
            wait()
            return await look()

        async def first() -> Compaction | None:
            if self._leases is None:
                return await look() or await make()
            async with self._leases.one_of_all(f"compaction {key!r}", looked, limit_s=limit_s) as found:
                return found or await look() or await make()

        if self._flights.is_under_way(key):
            wait()
        return await self._flights.join(key, first)

    async def _made_meanwhile(self, needed: CompactionNeeded) -> Compaction | None:
        """A compaction that another request has stored since this one was planned; it may have waited, or come late."""
        _, stored = await self._engine.maker.find(needed.measured)
        if all(each in needed.stored for each in stored):
            return None
        decision = await self.plan(needed.measured, stored)
        made = decision.compaction if isinstance(decision, Send) else None
        return made if made not in needed.stored else None


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
        other, rest = self._other(scope, conversation), conversation.rest
        does = edited([(rest[at], was) for at, was in other.items()])
        shown = {at: was for (at, was), is_edit in zip(other.items(), does, strict=True) if is_edit}
        head = conversation.messages[: conversation.prefix]
        return (*head, *(shown.get(at, each) for at, each in enumerate(rest))) if shown else None

    def note(self, scope: str, conversation: View) -> None:
        """Remembers the results of a conversation that is sent."""
        other, rest = self._other(scope, conversation), conversation.rest
        pairs = [(rest[at], was) for at, was in other.items()]
        either = zip(other, edited(pairs), edited([(was, now) for now, was in pairs]), strict=True)
        strangers = {at for at, was_cut, is_whole in either if not (was_cut or is_whole)}
        for at, key in self._results(scope, conversation):
            is_strange = at in strangers or self._sent.get(key, rest[at]) is None
            self._sent[key] = None if is_strange else rest[at]

    def _other(self, scope: str, conversation: View) -> dict[int, Message]:
        """The results, by position, that were something else when these words were sent before."""
        sent = ((at, self._sent.get(key)) for at, key in self._results(scope, conversation))
        return {at: was for at, was in sent if was is not None and was.raw != conversation.rest[at].raw}

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
