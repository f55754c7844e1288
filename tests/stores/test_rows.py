"""Rows in memory: they are gone at the end, and those of a scope that has most give way first."""

from __future__ import annotations

from litellm_compaction.stores.rows import OVERHEAD_BYTES, MemoryRows
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore


async def test_an_ended_memory_store_is_empty() -> None:
    """Ending it gives the memory back."""
    store = MemoryStore(ttl_s=100.0, max_bytes=1_000_000)
    await store.put("team", compaction("h"))
    await store.aclose()
    assert await store.find("team", ["h"]) == []


async def test_the_scope_that_has_most_gives_way() -> None:
    """Its row that was used longest ago; what others have stays, however old it is."""
    rows = MemoryRows(ttl_s=100.0, max_bytes=3 * (OVERHEAD_BYTES + 100))
    for scope, key in (("small", "a"), ("large", "b"), ("large", "c")):
        await rows.put(scope, key, b"x" * 99)
    await rows.find("large", ["b"])
    await rows.put("large", "d", b"x" * 99)
    assert {(row.scope, row.key) for row in await rows.scan()} == {("small", "a"), ("large", "b"), ("large", "d")}
