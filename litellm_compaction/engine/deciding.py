"""Decides what is sent for a measured request: itself, an earlier compaction, or a new one, which has to be made first.

`core/plan.py` decides by numbers; here they are settled with the server if they are in doubt, and the decision is
carried out as far as no model has to write for it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from typing_extensions import assert_never

from litellm_compaction.concurrency import Bounded, off_loop_if
from litellm_compaction.core.compaction import Compaction, usable
from litellm_compaction.core.identity import edited
from litellm_compaction.core.messages import Message
from litellm_compaction.core.plan import Make, Plan, Refuse, Send, plan
from litellm_compaction.core.refusal import refusal, shortened, unchangeable, with_less_data
from litellm_compaction.core.stretches import is_text_result
from litellm_compaction.core.view import View
from litellm_compaction.engine.context import CompactionNeeded, Decided, MeasuredRequest, PreparedRequest
from litellm_compaction.engine.measure import hashed, is_small
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import UNDONE

if TYPE_CHECKING:
    from litellm_compaction.engine.compactor import Compactor

_MOST_SCOPES = 4096
# What a client's clearing has to leave free, of what is sent.
_ROOM_RATIO = 1.25
# Of all results together, each with its own weight beside its text.
_MOST_CHARS, _CHARS_OF_AN_ENTRY = 32_000_000, 200
# Of one conversation.
_MOST_MESSAGES = 1000


class Decider:
    """Finds the cheapest way in which a request fits its window."""

    def __init__(self, compactor: Compactor) -> None:
        self._compactor = compactor
        self._sent = SentBefore()
        # Tenants of whom a small conversation has been compacted at a client's wish: theirs are looked up, too.
        self.small: Bounded[str, bool] = Bounded(_MOST_SCOPES)

    async def first(self, measured: MeasuredRequest) -> Decided:
        """Decides about a request of which only the size is known yet.

        Raises:
            DoesNotFit: the protected messages alone are too large.
            BadWish: a pin names nothing.
        """
        context = measured.context
        has_wish = context.is_wanted or context.pins is not None or bool(context.portable)
        if not context.may_change and not context.portable:
            measured = await self._compactor.asker.settled(measured)
            if not measured.budget.own.fits(measured.count.tokens):
                self._compactor.reporter.decided(
                    measured, "refused", after=measured.count.tokens, reason="does_not_fit"
                )
                raise unchangeable(context.label, measured.count.tokens, measured.budget)
            return self._compactor.measurer.unchanged(measured)
        if is_small(measured) and not has_wish and context.scope not in self.small:
            return self._compactor.measurer.unchanged(measured)
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

        Or if that leaves so little room that each turn until the next compaction would be read anew, and an edit, for
        which no model is asked, leaves more.
        """
        request, edits = replace(measured.request, messages=restored), False
        before = await hashed(await self._compactor.measurer.measure(request, measured.context))
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
        measured, found = await self._compactor.builder.find(measured)
        measured = await self._compactor.pins.applied(measured)

        async def decided(stored: Sequence[Compaction]) -> Decided:
            settled = measured if stored else await self._compactor.asker.settled(measured)
            # A running answer is stopped at this line: nothing begins above it that could begin below.
            limit_tokens = int(settled.budget.rules.streaming_ratio * settled.window.tokens)
            less = await self._with_less_data(settled, limit_tokens)
            return await self.decide(less or settled, stored, cut="attached" if less else "")

        return await self._compactor.builder.without_misfits(measured, found, decided)

    async def decide(self, measured: MeasuredRequest, stored: Sequence[Compaction], *, cut: str = "") -> Decided:
        """Decides about a request with its hashes, by what is `stored` under them; errors as `first`.

        `cut` says in a word why its texts are not whole, for events.
        """
        known = stored
        while True:
            again: MeasuredRequest | None
            decision = await self.plan(measured, known)
            match decision:
                case Send(compaction=compaction, is_undone=is_undone):
                    if compaction is not None:
                        prepared = await self.applied(measured, compaction, "reused")
                        if prepared.budget.fits(prepared.count.tokens):
                            return await self._reusing(prepared, compaction)
                        # Counted as it is sent it does not do: what is decided without it?
                        known = ()
                        continue
                    again = await self._compactor.asker.fitted(measured)
                    if again is None:
                        return self._kept(measured, cut, is_undone=is_undone)
                    measured, known = again, stored
                case Make(steps=steps):
                    reused = await self._reused(measured, known)
                    return reused or CompactionNeeded(measured=measured, steps=steps, stored=tuple(stored))
                case Refuse():
                    again = await self._compactor.asker.with_floor(measured)
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

    async def applied(
        self, measured: MeasuredRequest, compaction: Compaction, action: Literal["reused", "compacted"]
    ) -> PreparedRequest:
        """The request after a compaction, counted by the server if our doubt would decide about it."""
        prepared = await self._compactor.measurer.applied(measured, compaction, action)
        if await self._compactor.asker.has_recounted(measured, prepared):
            return await self._compactor.measurer.applied(measured, compaction, action)
        return prepared

    async def _reused(self, measured: MeasuredRequest, stored: Sequence[Compaction]) -> PreparedRequest | None:
        """An earlier compaction that still does, counted as it is sent; None if a new one is due or wanted.

        The planner's number is an estimate; the server may have counted all of it but the newest messages.
        """
        if measured.context.is_wanted:
            return None
        found = await off_loop_if(bool(stored) and measured.is_long, lambda: usable(measured.conversation, stored))
        if found and found[0].state != "provisional":
            prepared = await self.applied(measured, found[0], "reused")
            if not prepared.budget.triggers(prepared.count.tokens):
                return await self._reusing(prepared, found[0])
        return None

    async def _reusing(self, prepared: PreparedRequest, compaction: Compaction) -> PreparedRequest:
        """A reuse; a record written ahead is in effect once it is sent, also if a later turn is smaller."""
        prepared, measured = await self._compactor.quoter.added(prepared), prepared.measured

        async def tell() -> None:
            self._compactor.reporter.decided(measured, "reused", prepared=prepared, compaction=compaction)
            if compaction.is_waiting:
                await self._compactor.builder.put(measured, replace(compaction, state="applied"))

        return replace(prepared, compaction=compaction, tell=tell)

    def _kept(self, measured: MeasuredRequest, cut: str, *, is_undone: bool) -> PreparedRequest:
        """The request as it came, or with its texts cut; `is_undone` if the owner of its compaction has undone that."""
        prepared = self._compactor.measurer.unchanged(measured)

        async def tell() -> None:
            if cut:
                self._compactor.reporter.decided(measured, "fallback", prepared=prepared, reason=cut)
            elif is_undone and measured.budget.own.triggers(measured.count.tokens):
                self._compactor.reporter.decided(measured, "kept", prepared=prepared, reason=UNDONE)

        return replace(prepared, tell=tell)

    async def _cut(self, measured: MeasuredRequest, cut: str) -> tuple[MeasuredRequest, str]:
        """The request with less attached data, or its largest texts cut to excerpts if the operator allows it.

        Else it raises the refusal.
        """
        if not measured.is_shortened:
            less = await self._with_less_data(measured, measured.budget.prompt_limit_tokens)
            if less is not None:
                return less, "attached"
        settings = measured.context.settings
        excerpts = partial(
            shortened,
            measured.conversation,
            measured.budget,
            tool_results=settings.oversized_tool_result == "excerpt",
            user_message=settings.oversized_user_message == "excerpt",
        )
        if cut == "excerpt" or not (messages := await off_loop_if(measured.is_long, excerpts)):
            raise await self.refusal(measured)
        return await self._compactor.measurer.shortened(measured, messages), "excerpt"

    async def _with_less_data(self, measured: MeasuredRequest, limit_tokens: int) -> MeasuredRequest | None:
        """The request with less of the data attached to unanswered messages; None if all may stay."""
        make = partial(with_less_data, measured.conversation, measured.budget, limit_tokens)
        messages = await off_loop_if(measured.is_long, make)
        return None if messages is None else await self._compactor.measurer.shortened(measured, messages)

    async def refusal(self, measured: MeasuredRequest) -> DoesNotFit:
        """The error for a request that nothing makes fit; says what takes how many tokens."""
        if not measured.context.goes_on:
            # An answer that cannot be carried over is no refused request: the loop that carries it tells of it.
            self._compactor.reporter.decided(
                measured, "refused", after=measured.budget.floor_tokens, reason="does_not_fit"
            )
        count, fixed_tokens = measured.count, measured.conversation.fixed_tokens
        tools_share = count.tools_tokens / max(1, count.tools_tokens + count.overhead_tokens)
        tools_tokens = round(tools_share * fixed_tokens)
        make = partial(refusal, measured.context.label, measured.conversation, measured.budget, tools_tokens)
        return await off_loop_if(measured.is_long, make)


class SentBefore:
    """The newest results that were sent, by the tenants' scope and all words up to them, in this process only.

    What a client changes behind a record changes the prompt from there on, and its server reads all of that again: with
    one result cleared a turn more than half of each prompt. So a result in whose place a note or a piece has come is
    sent as it was until that is too much; then all that the client has cleared goes at once. If conversations of equal
    words had different data there, either may be another person's (promise P9): None.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[str, str], Message | None] = OrderedDict()
        self._chars = 0

    def restored(self, scope: str, conversation: View) -> tuple[Message, ...] | None:
        """Returns the messages with results as they were that the client has cleared or cut; None if there are none."""
        other = self._other(scope, conversation)
        does = edited([(conversation.rest[at], was) for at, was in other.items()])
        restored = {
            conversation.prefix + at: was for (at, was), is_edit in zip(other.items(), does, strict=True) if is_edit
        }
        return tuple(restored.get(at, each) for at, each in enumerate(conversation.messages)) if restored else None

    def note(self, scope: str, conversation: View) -> None:
        """Remembers the results of a conversation that is sent."""
        other = self._other(scope, conversation)
        pairs = [(conversation.rest[at], was) for at, was in other.items()]
        either = zip(other, edited(pairs), edited([(was, now) for now, was in pairs]), strict=True)
        strangers = {at for at, *is_edit in either if not any(is_edit)}
        for at in _newest(conversation):
            message = conversation.rest[at]
            if (message.role == "tool" or is_text_result(message)) and not message.other_parts:
                key = (scope, conversation.words_hashes[at + 1])
                is_strange = at in strangers or self._sent.get(key, message) is None
                self._forget(key)
                self._sent[key] = None if is_strange else message
                self._chars += _weight(self._sent[key])
        while self._chars > _MOST_CHARS:
            self._forget(next(iter(self._sent)))

    def _other(self, scope: str, conversation: View) -> dict[int, Message]:
        """The results, by position, that were something else when these words were sent before."""
        sent = ((at, self._sent.get((scope, conversation.words_hashes[at + 1]))) for at in _newest(conversation))
        return {at: was for at, was in sent if was is not None and was.raw != conversation.rest[at].raw}

    def _forget(self, key: tuple[str, str]) -> None:
        if key in self._sent:
            self._chars -= _weight(self._sent.pop(key))


def _newest(conversation: View) -> range:
    """The positions of the messages that are looked at: older ones are covered."""
    return range(max(len(conversation.rest) - _MOST_MESSAGES, 0), len(conversation.rest))


def _weight(message: Message | None) -> int:
    return _CHARS_OF_AN_ENTRY + (0 if message is None else len(message.text))
