"""Tells of records: decisions to observers, in numbers alone, receipts to clients, and a view to their owner.

And a record's end, if its owner undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.compaction import Compaction, as_sent, compaction_id, mark_of
from litellm_compaction.core.messages import Message, clients_length, user_message, visible_text
from litellm_compaction.engine.context import Decision, Effort, MeasuredRequest, PreparedRequest, RequestContext
from litellm_compaction.events import (
    USED_AHEAD,
    USED_EARLY,
    CompactionEvent,
    Event,
    Observer,
    TruncationAlarm,
    event_from_json,
)
from litellm_compaction.stores import Originals, Store, StoredCompaction, digest

# ------------------------------------------------------------------ decisions


class Reporter:
    """Tells observers of decisions, never of mere plans; the wall clock is for the history."""

    def __init__(
        self, observers: Sequence[Observer], *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._observers, self._clock, self._wall_clock = tuple(observers), clock, wall_clock

    def decided(
        self,
        measured: MeasuredRequest,
        decision: Decision,
        *,
        prepared: PreparedRequest | None = None,
        made: Compaction | None = None,
        after: int = 0,
    ) -> None:
        """Tells of what is sent, `prepared`, of reuse once; else of a prompt of `after` tokens, or a record `made`."""
        context, effort, base = measured.context, decision.effort or Effort(), decision.base
        compaction, reason = made, effort.reason or ("overflow" if context.refusal else "")
        if prepared is not None and prepared.applied is not None:
            compaction = measured.keyed(prepared.applied)
            if decision.outcome == "reused" and context.attempts.told_hash == compaction.covered_hash:
                return
            context.attempts.told_hash = compaction.covered_hash
            if compaction.is_waiting:
                reason = USED_AHEAD if measured.budget.own.triggers(measured.count.tokens) else USED_EARLY
        event = CompactionEvent(
            outcome=decision.outcome,
            phase=measured.phase,
            model=context.label,
            window_tokens=measured.window.tokens,
            window_source=measured.window.source,
            tokens_before=measured.tokens_before,
            tokens_after=prepared.count.tokens if prepared else after,
            strategy=context.settings.strategy,
            pruning_model=effort.pruning_model,
            summary_calls=effort.calls,
            duration_ms=1000 * (self._clock() - measured.started_s),
            reason=reason,
            summary_ms=1000 * effort.seconds,
            continues_id=compaction_id(context.scope, base.covered_hash) if base else "",
            tenant=context.tenant,
            refusal=context.refusal,
            messages=clients_length(measured.conversation.rest),
            excerpts=prepared.excerpts if prepared else 0,
            excerpt_tokens=prepared.excerpt_tokens if prepared else 0,
        )
        if compaction is not None:
            name, covered = compaction_id(context.scope, compaction.covered_hash), compaction.covered_messages
            event = replace(event, covered_messages=covered, round=compaction.round, rung=compaction.level)
            event = replace(event, compaction_id=name)
        self.tell(event)

    def alarmed(self, context: RequestContext, prepared: PreparedRequest, prompt_tokens: int, reason: str) -> None:
        """Tells that the server did not see a whole prompt, by the usage that it reported."""
        self.tell(
            TruncationAlarm(
                model=context.label,
                window_tokens=prepared.window.tokens,
                expected_tokens=prepared.count.tokens,
                reported_tokens=prompt_tokens,
                reason=reason,
                tenant=context.tenant,
            )
        )

    def tell(self, event: Event) -> None:
        event = replace(event, when_s=self._wall_clock())
        for observer in self._observers:
            observer(event)


# ------------------------------------------------------------------ receipts and views

_NOT_KEPT = (
    "There is no text from before: originals are kept with `keep_originals: compacted`, encrypted with the master "
    "key, for `originals_ttl_s`."
)
# What became of a covered message: sent as it was, sent shorter, told by the record alone, or gone by a model's choice.
Fate: TypeAlias = Literal["verbatim", "shorter", "in the record", "gone"]


class Receipt(NamedTuple):
    """The name of a record, as in events, which opens nothing without its owner's key; and proof of its contents."""

    record: str
    covered: str  # The first and last message of the client's list that it stands for, from 1: `2-31`; `0` for none.
    digest: str  # SHA-256, as the store makes it.


def receipt_of(scope: str, compaction: Compaction, prefix: int, left_out: int = 0) -> Receipt:
    """Returns the receipt of a record, for a client with `prefix` system messages that leaves out `left_out` others."""
    own = compaction.covered_messages - left_out
    covered = f"{prefix + 1}-{prefix + own}" if own else "0"
    return Receipt(compaction_id(scope, compaction.covered_hash), covered, digest(compaction))


class Pair(NamedTuple):
    """A covered message by its number, from 1 without the leading system ones, before and after; "" for nothing."""

    number: int
    role: str
    before: str
    fate: Fate
    after: str


class RecordView(NamedTuple):
    """A record, the events of requests to which it was applied, oldest first, and its messages that are kept."""

    stored: StoredCompaction
    events: Sequence[CompactionEvent]
    pairs: Sequence[Pair]

    @property
    def why_incomplete(self) -> str:
        """Why not all covered messages are shown; "" if they are."""
        covered = self.stored.compaction.covered_messages
        missing = covered - len(self.pairs)
        if self.pairs and missing:
            return f"The originals of the first {missing} of {covered} messages are not kept any more."
        return _NOT_KEPT if missing else ""


async def view_of(
    stored: StoredCompaction, store: Store, originals: Originals | None, tenant: str | None = None
) -> RecordView:
    """Returns a record that `tenant` may see beside what it covers; None for an operator's look."""
    kept: Sequence[Message] = ()
    if originals is not None:
        kept = await originals.covered(stored.scope, stored.compaction.covered_hash, tenant=tenant)
    return RecordView(stored, await events_of(store, stored.id, tenant), pairs_of(stored.compaction, kept))


def pairs_of(compaction: Compaction, originals: Sequence[Message]) -> list[Pair]:
    """Returns the covered messages before and after; `kept` are the last of them, at most all."""
    missing = compaction.covered_messages - len(originals)
    after = as_sent([*[user_message("")] * missing, *originals], compaction)[missing:]
    pairs = []
    for number, (before, sent) in enumerate(zip(originals, after, strict=True), missing + 1):
        fate: Fate = "verbatim" if sent is before else "shorter"
        if sent is None:
            fate = "in the record" if number <= compaction.start else "gone"
        text = "" if sent is None else visible_text(sent)
        pairs.append(Pair(number, before.role, visible_text(before), fate, text))
    return pairs


async def events_of(log: Store, record: str, tenant: str | None = None) -> list[CompactionEvent]:
    """Returns the events of a record, oldest first: of one tenant, or of any with None."""
    return [event for event in await _events_about(log, record, tenant) if event.compaction_id == record]


async def _events_about(log: Store, record: str, tenant: str | None) -> list[CompactionEvent]:
    """Events of a record, and of those that were made to go on from it."""
    # The log looks for the characters alone.
    events = [event_from_json(row.text) for row in await log.events(containing=record)]
    return [
        event
        for event in events
        if isinstance(event, CompactionEvent)
        and record in (event.compaction_id, event.continues_id)
        and tenant in (None, event.tenant)
    ]


async def undo(store: Store, stored: StoredCompaction, tenant: str | None = None) -> int:
    """Forgets a record that `tenant`, None for an operator, may undo, and those that go on from it; their number.

    A mark in its place keeps the conversation from being compacted again until more is said than in the last request
    to which one of them was applied, or it does not fit. A StoreError says that not all of it is forgotten.
    """
    chain, doomed, messages = [stored.id], [stored], stored.compaction.covered_messages
    # It grows while it is walked; a link of it may have been deleted.
    for record in chain:
        for event in await _events_about(store, record, tenant):
            if event.compaction_id == record:
                messages = max(messages, event.messages)
            elif event.compaction_id not in chain:
                chain.append(event.compaction_id)
                later = await store.named(event.tenant, event.compaction_id)
                doomed += [] if later is None else [later]
    await store.put(stored.scope, mark_of(stored.compaction, undone_messages=messages))
    for each in doomed[1:]:
        await store.delete(scope=each.scope, covered_hash=each.compaction.covered_hash)
    return len(doomed)
