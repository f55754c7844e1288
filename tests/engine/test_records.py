"""Records outside of a request: receipts, and the messages before and after."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.messages import visible_text
from litellm_compaction.engine.records import events_of, pairs_of
from litellm_compaction.events import CompactionEvent, event_to_json
from tests.builders import parsed
from tests.stores.compactions import compactions
from tests.stores.made import MemoryStore
from tests.stores.test_originals import talk

EVENT: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
EVENT |= {"outcome": "compacted", "tokens_before": 7000, "tokens_after": 900}


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
