"""Records outside of a request: the messages before and after, events, and their end.

A conversation whose record its owner has undone is sent as it is while it fits, until more is said.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.messages import visible_text
from litellm_compaction.engine.records import events_of, pairs_of, receipt_of, undo
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.stores import StoredCompaction
from tests.builders import JsonDict, assistant, parsed, size, system, user
from tests.engine.bench import Bench, sent
from tests.stores.compactions import compactions
from tests.stores.made import MemoryStore
from tests.stores.test_originals import talk

WINDOW = 8192
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


def said(tokens: int) -> list[JsonDict]:
    """A conversation of about so many tokens that ends with the person's words."""
    messages = [system(), user("Begin.")]
    while tokens_of(messages) < tokens:
        messages += [assistant(f"answer {len(messages)} " * 40), user(f"question {len(messages)} " * 10)]
    return messages


def tokens_of(messages: list[JsonDict]) -> int:
    return sum(size(message) for message in parsed(messages))


class Owned:
    """A compactor whose history is in its store, for conversations of one tenant."""

    def __init__(self) -> None:
        self.bench = Bench()

    async def guard(self, raw: list[JsonDict], window: int = WINDOW, **context: Any) -> CompactionEvent | None:
        """The event of a request, None for none."""
        told = len(self.bench.events)
        sent(raw, await self.bench.guard(raw, window, tenant="anna", **context))
        for event in self.bench.events[told:]:
            await self.bench.store.add_event(9e9, event_to_json(event))
        return self.bench.last if len(self.bench.events) > told else None

    async def records(self) -> list[StoredCompaction]:
        return sorted(await self.bench.store.compactions(), key=lambda stored: stored.compaction.round)

    async def undo(self, stored: StoredCompaction) -> int:
        return await undo(self.bench.store, stored, "anna")


async def test_the_same_request_is_sent_as_it_is() -> None:
    """Once it is undone, however often it is asked; the event says why. With more said it is compacted again."""
    owned, raw = Owned(), said(6700)
    await owned.guard(raw)
    [record] = await owned.records()
    assert await owned.undo(record) == 1
    for _ in range(2):
        event = await owned.guard(raw)
        assert event is not None
        assert (event.outcome, event.reason) == ("kept", "undone")
        assert event.tokens_after == event.tokens_before
    assert await owned.records() == []
    event = await owned.guard([*raw, assistant("Understood."), user("Go on.")])
    assert event is not None
    assert (event.outcome, event.reason) == ("compacted", "")


@pytest.mark.parametrize(("undone", "forgotten"), [(0, 2), (2, 1)])
async def test_those_that_go_on_from_it_go_with_it(undone: int, forgotten: int) -> None:
    """The first record's end is the last one's, though one between them was deleted; that one's is not the first's."""
    owned, raw = Owned(), said(6700)
    while len(await owned.records()) < 3:
        await owned.guard(raw)
        raw = [*raw, assistant("word " * 100), user("Go on.")]
    first, between, last = await owned.records()
    await owned.bench.store.delete(scope=between.scope, covered_hash=between.compaction.covered_hash)
    assert await owned.undo([first, between, last][undone]) == forgotten
    assert await owned.records() == [first, last][: 2 - forgotten]


def test_a_client_that_sends_no_covered_message_any_more_reads_that() -> None:
    made = Compaction(covered_messages=4, covered_hash="0" * 32, start=4, level="summary")
    assert [receipt_of("", made, 1, left_out).covered for left_out in (0, 3, 4)] == ["2-5", "2-2", "0"]
