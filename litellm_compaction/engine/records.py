"""A record outside of a request: its receipt, its view beside the messages that it covers, and its end.

The proxy writes receipts into headers and usage, and shows a record to its owner; the command line shows it to an
operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.compaction import Compaction, compaction_id, covered_as_sent, mark_of
from litellm_compaction.core.messages import Message, user_message, visible_text
from litellm_compaction.events import CompactionEvent, event_from_json
from litellm_compaction.stores import Originals, Store, StoredCompaction, digest

# What became of a covered message: sent as it was, sent shorter, told by the record alone, or gone by a model's choice.
Fate: TypeAlias = Literal["verbatim", "shorter", "in the record", "gone"]


class Receipt(NamedTuple):
    """The name of a record, and a proof of its contents.

    Attributes:
        record: its id, as in events; it opens nothing without the key of its owner.
        covered: the first and the last message of the client's list that it stands for, from 1: `2-31`.
        digest: SHA-256 of its contents, as `digest` of the store makes it.
    """

    record: str
    covered: str
    digest: str


def receipt_of(scope: str, compaction: Compaction, prefix: int) -> Receipt:
    """Returns the receipt of a record; `prefix` is the number of the client's leading system messages."""
    covered = f"{prefix + 1}-{prefix + compaction.covered_messages}"
    return Receipt(compaction_id(scope, compaction.covered_hash), covered, digest(compaction))


class Pair(NamedTuple):
    """A covered message before and after.

    Attributes:
        number: from 1, without the leading system messages.
        before: its text, with its calls.
        after: the text that is sent in its place; "" for none of its own.
    """

    number: int
    role: str
    before: str
    fate: Fate
    after: str


class RecordView(NamedTuple):
    """A record with what is known of it.

    Attributes:
        events: of requests to which it was applied, the newest last.
        pairs: of the covered messages whose originals are kept.
        why_incomplete: why there are not all of them; "" if there are.
    """

    stored: StoredCompaction
    events: Sequence[CompactionEvent]
    pairs: Sequence[Pair]
    why_incomplete: str


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


async def view_of(
    stored: StoredCompaction, store: Store, originals: Originals | None, tenant: str | None = None
) -> RecordView:
    """Returns a record beside what it covers.

    Args:
        stored: a record that may be shown.
        originals: None if none are kept.
        tenant: whose it is; None for an operator's look.
    """
    compaction = stored.compaction
    kept: Sequence[Message] = ()
    if originals is not None:
        kept = await originals.covered(stored.scope, compaction.covered_hash, tenant=tenant)
    why_incomplete = _why_incomplete(len(kept), compaction.covered_messages)
    return RecordView(stored, await events_of(store, stored.id, tenant), pairs_of(compaction, kept), why_incomplete)


def pairs_of(compaction: Compaction, kept: Sequence[Message]) -> list[Pair]:
    """Returns the covered messages before and after; `kept` are the last of them, at most all."""
    covered = compaction.covered_messages
    kept = kept[max(len(kept) - covered, 0) :]
    missing = covered - len(kept)
    after = covered_as_sent([*[user_message("")] * missing, *kept], compaction)[missing:]
    pairs = []
    for number, (before, sent) in enumerate(zip(kept, after, strict=True), missing + 1):
        fate: Fate = "verbatim" if sent is before else "shorter"
        if sent is None:
            fate = "in the record" if number <= compaction.start else "gone"
        text = "" if sent is None else visible_text(sent)
        pairs.append(Pair(number, before.role, visible_text(before), fate, text))
    return pairs


def _why_incomplete(kept: int, covered: int) -> str:
    if kept >= covered:
        return ""
    if kept:
        return f"The originals of the first {covered - kept} of {covered} messages are not kept any more."
    return (
        "There is no text from before: originals are kept with `keep_originals: compacted`, encrypted with the master "
        "key, for `originals_ttl_s`."
    )


async def undo(store: Store, stored: StoredCompaction, tenant: str | None = None) -> int:
    """Forgets a record and those that go on from it; returns their number.

    A mark in its place keeps the conversation from being compacted again until more is said than in the last request
    to which one of them was applied, or it does not fit. Those that go on from it are known by the history.

    Args:
        stored: a record that the caller may undo.
        tenant: whose it is; None for an operator's command.

    Raises:
        StoreError: not all of it is forgotten.
    """
    doomed, messages = [stored], stored.compaction.covered_messages
    # It grows while it is walked.
    for record in doomed:
        for event in await _events_about(store, record.id, tenant):
            if event.compaction_id == record.id:
                messages = max(messages, event.messages)
            elif event.compaction_id not in {each.id for each in doomed}:
                later = await store.named(event.tenant, event.compaction_id)
                doomed += [] if later is None else [later]
    await store.put(stored.scope, mark_of(stored.compaction, undone_messages=messages))
    for record in doomed[1:]:
        await store.delete(scope=record.scope, covered_hash=record.compaction.covered_hash)
    return len(doomed)
