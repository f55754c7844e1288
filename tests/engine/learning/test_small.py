"""Tenants of whom a small conversation has been compacted."""

from __future__ import annotations

from litellm_compaction.engine.learning.small import SmallConversations
from tests.engine.bench import Clock, RecordingStore


async def test_the_store_is_asked_once_a_second_until_there_is_one() -> None:
    """And never again: by whatever process it was made."""
    store, clock = RecordingStore(), Clock(0.0)
    small = SmallConversations(store, clock)
    assert not await small.are_compacted("team")
    assert not await small.are_compacted("team")
    assert store.facts_read == 1
    await SmallConversations(store, clock).remember("team")
    assert not await small.are_compacted("team"), "known for a second"
    clock.now_s = 1.0
    assert await small.are_compacted("team")
    clock.now_s = 1e6
    assert await small.are_compacted("team")
    assert store.facts_read == 2
    assert not await small.are_compacted("others")
