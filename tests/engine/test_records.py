"""Records outside of a request: receipts, and the messages before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, Shown, apply, compaction_id
from litellm_compaction.core.messages import visible_text
from litellm_compaction.engine.records import events_of, pairs_of, receipt_of, view_of
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.stores import StoredCompaction
from tests.builders import assistant, parsed, user
from tests.stores.compactions import compaction, compactions
from tests.stores.made import MemoryStore
from tests.stores.test_originals import talk

EVENT: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
EVENT |= {"outcome": "compacted", "tokens_before": 7000, "tokens_after": 900}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}


def test_a_receipt_counts_as_the_client_does() -> None:
    """From 1, with its leading system messages; the id is the one of events, and says nothing of the conversation."""
    known = compaction("a" * 32, covered=30)
    receipt = receipt_of("scope", known, prefix=1)
    assert receipt.covered == "2-31"
    assert receipt.record == compaction_id("scope", "a" * 32)
    assert "a" * 8 not in receipt.record + receipt.digest
    assert receipt_of("other", known, prefix=0).record != receipt.record


def test_messages_stand_beside_what_became_of_them() -> None:
    """Verbatim, in the record, as a line, cut, and gone: the forms in which the model gets them."""
    said = parsed(
        [
            user("Do it."),
            assistant("Well."),
            CALLED,
            {"role": "tool", "tool_call_id": "c", "content": "long\n" * 99},
            assistant("y" * 500),
            assistant("Gone."),
        ]
    )
    shown = (Shown(3, "stub"), Shown(4, 20), Shown(5, "gone"))
    known = replace(compaction("h", covered=6), pinned=(0,), edited_from=2, shown=shown)
    pairs = pairs_of(known, said)
    assert [pair.fate for pair in pairs] == ["verbatim", "in the record", "verbatim", "shorter", "shorter", "gone"]
    assert [(pair.number, pair.role) for pair in pairs[:2]] == [(1, "user"), (2, "assistant")]
    assert [pair.before for pair in pairs] == [visible_text(message) for message in said]
    assert (pairs[1].after, pairs[5].after) == ("", "")
    assert len(pairs[3].after) < 200 < len(pairs[3].before)
    assert pairs[4].after.replace("y", "") == "\n[…]\n"


@given(compactions(), st.integers(0, 50))
def test_a_view_shows_what_is_sent(known: Compaction, kept: int) -> None:
    """Whatever a store holds: one pair for each original, and in their place the texts that the model gets."""
    said = parsed(talk(known.covered_messages))
    pairs = pairs_of(known, said[len(said) - min(kept, len(said)) :])
    assert [pair.number for pair in pairs] == [*range(len(said) - len(pairs) + 1, len(said) + 1)]
    assert [pair.before for pair in pairs] == [visible_text(message) for message in said[len(said) - len(pairs) :]]
    sent = "\n".join(visible_text(message) for message in apply(said, known))
    for pair in pairs:
        assert (pair.after == "") or pair.after in sent


async def test_events_are_the_record_s_own() -> None:
    """Of its tenant; an event that names it as the earlier one is another record's."""
    store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
    for tenant, record, before in (("anna", "a" * 16, ""), ("bert", "a" * 16, ""), ("anna", "b" * 16, "a" * 16)):
        event = CompactionEvent(**EVENT, tenant=tenant, compaction_id=record, continues_id=before)
        await store.add_event(event.when_s + 9e9, event_to_json(event))
    assert [event.tenant for event in await events_of(store, "a" * 16, "anna")] == ["anna"]
    assert [event.tenant for event in await events_of(store, "a" * 16)] == ["anna", "bert"]


@pytest.mark.parametrize("tenant", [None, "anna"])
async def test_without_originals_there_is_no_before(tenant: str | None) -> None:
    """And a line says why."""
    store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
    view = await view_of(StoredCompaction("scope", compaction("h"), 0.0, 0.0, 1), store, None, tenant)
    assert (view.pairs, view.events) == ([], [])
    assert "keep_originals: compacted" in view.why_incomplete
