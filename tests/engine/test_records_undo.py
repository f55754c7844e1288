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
