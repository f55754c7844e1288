"""A record that its owner has undone: the same conversation is sent as it is while it fits, until more is said."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.engine.records import undo
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.stores import StoredCompaction
from tests.builders import JsonDict, assistant, parsed, size, system, user
from tests.engine.bench import Bench, sent

WINDOW = 8192


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
        self._written = 0

    async def guard(self, raw: list[JsonDict], window: int = WINDOW, **context: Any) -> CompactionEvent | None:
        """The event of a request, None for none."""
        told = len(self.bench.events)
        sent(raw, await self.bench.guard(raw, window, tenant="anna", **context))
        for event in self.bench.events[told:]:
            await self.bench.store.add_event(9e9, event_to_json(event))
        return self.bench.last if len(self.bench.events) > told else None

    async def records(self) -> list[StoredCompaction]:
        return sorted(await self.bench.store.compactions(), key=lambda stored: stored.compaction.round)

    async def undo(self, stored: StoredCompaction, focus: str = "") -> int:
        return await undo(self.bench.store, stored, "anna", focus=focus)


@pytest.fixture
def owned() -> Owned:
    return Owned()


async def test_the_same_request_is_sent_as_it_is(owned: Owned) -> None:
    """Once it is undone, however often it is asked; the event says why. With more said it is compacted again."""
    raw = said(6700)
    assert (await owned.guard(raw)) is not None
    [record] = await owned.records()
    assert await owned.undo(record) == 1
    assert await owned.records() == []
    for _ in range(2):
        event = await owned.guard(raw)
        assert event is not None
        assert (event.outcome, event.reason) == ("kept", "undone")
        assert event.tokens_after == event.tokens_before
    assert await owned.records() == []
    event = await owned.guard([*raw, assistant("Understood."), user("Go on.")])
    assert event is not None
    assert (event.outcome, event.reason) == ("compacted", "")


async def test_what_does_not_fit_is_compacted_all_the_same(owned: Owned) -> None:
    """Never cut: and the event says that it was undone."""
    raw = said(12_000)
    await owned.guard(raw)
    [record] = await owned.records()
    await owned.undo(record)
    event = await owned.guard(raw)
    assert event is not None
    assert (event.outcome, event.reason) == ("compacted", "undone")
    again = await owned.guard(raw)
    assert again is not None
    assert again.outcome == "reused"


async def test_turns_that_found_the_record_count(owned: Owned) -> None:
    """Undone after a later turn, that turn is sent as it is."""
    raw = said(6700)
    await owned.guard(raw)
    later = [*raw, assistant("Understood."), user("Go on.")]
    event = await owned.guard(later)
    assert event is not None
    assert event.outcome == "reused"
    [record] = await owned.records()
    await owned.undo(record)
    event = await owned.guard(later)
    assert event is not None
    assert event.outcome == "kept"


async def _rounds(owned: Owned) -> list[JsonDict]:
    """A conversation that was compacted twice, and would still fit a window a little larger."""
    raw = said(6700)
    await owned.guard(raw)
    while len(await owned.records()) < 2:
        raw = [*raw, assistant("word " * 100), user("Go on.")]
        await owned.guard(raw)
    return raw


async def test_those_that_go_on_from_it_go_with_it(owned: Owned) -> None:
    """The first record's end is the second one's; the second one's is not the first one's."""
    await _rounds(owned)
    first, second = await owned.records()
    assert await owned.undo(first) == 2
    assert await owned.records() == []
    again = Owned()
    await _rounds(again)
    first, second = await again.records()
    assert await again.undo(second) == 1
    assert await again.records() == [first]


async def test_an_earlier_record_does_not_come_back_while_all_fits(owned: Owned) -> None:
    """Whoever undoes the newest wants the conversation itself."""
    raw = await _rounds(owned)
    _, second = await owned.records()
    await owned.undo(second)
    event = await owned.guard(raw, int(tokens_of(raw) * 1.15))
    assert event is not None
    assert event.outcome == "kept"


async def test_a_wish_to_compact_now_comes_first(owned: Owned) -> None:
    """It is newer than what was undone."""
    raw = said(6700)
    await owned.guard(raw)
    [record] = await owned.records()
    await owned.undo(record)
    event = await owned.guard(raw, now=True)
    assert event is not None
    assert (event.outcome, event.reason) == ("compacted", "")


async def test_other_conversations_and_tenants_are_compacted_as_ever(owned: Owned) -> None:
    """A mark is of one beginning in one scope."""
    raw = said(6700)
    await owned.guard(raw)
    [record] = await owned.records()
    await owned.undo(record)
    other = await owned.guard([raw[0], user("Another beginning."), *raw[2:]])
    foreign = await owned.guard(raw, scope="others")
    assert other is not None
    assert foreign is not None
    assert (other.outcome, foreign.outcome) == ("compacted", "compacted")


async def test_a_record_is_made_anew_with_a_focus(owned: Owned) -> None:
    """By the next request, once: the model that writes it is told the topic, and later turns find it."""
    raw = said(6700)
    await owned.guard(raw)
    [record] = await owned.records()
    await owned.undo(record, "the port of the database")
    assert await owned.records() == []
    asked = len(owned.bench.ask.prompts)
    later = [*raw, assistant("Understood."), user("Go on.")]
    event = await owned.guard(later)
    assert event is not None
    assert event.outcome == "compacted"
    assert ["the port of the database" in prompt for prompt in owned.bench.ask.prompts[asked:]] == [True]
    event = await owned.guard([*later, assistant("Understood."), user("Go on.")])
    assert event is not None
    assert event.outcome == "reused"
    assert len(owned.bench.ask.prompts) == asked + 1


async def test_the_second_of_two_rounds_is_made_anew_once(owned: Owned) -> None:
    """It goes on from the first, as it did."""
    raw = await _rounds(owned)
    first, second = await owned.records()
    await owned.undo(second, "the port of the database")
    asked = len(owned.bench.ask.prompts)
    event = await owned.guard(raw)
    assert event is not None
    assert (event.outcome, event.round, event.continues_id) == ("compacted", 2, first.id)
    assert "the port of the database" in owned.bench.ask.prompts[-1]
    event = await owned.guard(raw)
    assert event is not None
    assert event.outcome == "reused"
    assert len(owned.bench.ask.prompts) == asked + 1
