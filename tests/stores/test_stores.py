"""What every store does, whatever it is made of: one suite, run over all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import pytest

from litellm_compaction.core.compaction import Compaction, Segment
from litellm_compaction.engine.making import Store
from litellm_compaction.errors import StoreError
from litellm_compaction.stores import MemoryStore, open_store

TTL_S = 100.0


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class OpenStore(Protocol):
    def __call__(self, *, max_bytes: int = ...) -> Store: ...


def _memory(max_bytes: int, clock: Clock) -> Store:
    return MemoryStore(ttl_s=TTL_S, max_bytes=max_bytes, clock=clock)


STORES: dict[str, Callable[[int, Clock], Store]] = {"memory": _memory}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=STORES)
async def opened(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[OpenStore]:
    """Opens stores of one kind and ends them."""
    stores: list[Store] = []

    def make(*, max_bytes: int = 1_000_000) -> Store:
        stores.append(STORES[request.param](max_bytes, clock))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def compaction(name: str, *, covered: int = 4, text: str = "What happened.", provisional: bool = False) -> Compaction:
    segment = Segment(text=text, round=1, covered_messages=covered, covered_hash=name)
    return Compaction(
        covered_messages=covered,
        covered_hash=name,
        pinned=1,
        round=1,
        segments=(segment,),
        ledger="- src/a.py",
        rung="summary",
        provisional=provisional,
    )


async def test_what_was_put_is_found(opened: OpenStore) -> None:
    """Equal in every field, by any list of hashes that its own is in."""
    store = opened()
    kept = compaction("h4", provisional=True)
    await store.put("team", kept)
    assert await store.find("team", ["h1", "h2", "h3", "h4", "h5"]) == [kept]
    assert await store.find("team", ["h1", "h5"]) == []
    assert await store.find("team", []) == []


async def test_the_longest_comes_first(opened: OpenStore) -> None:
    """In the order of the conversation, not of writing."""
    store = opened()
    for covered in (4, 8, 2):
        await store.put("team", compaction(f"h{covered}", covered=covered))
    found = await store.find("team", [f"h{number}" for number in range(1, 10)])
    assert [each.covered_messages for each in found] == [8, 4, 2]


async def test_scopes_never_meet(opened: OpenStore) -> None:
    """P9: the same conversation of another tenant finds nothing."""
    store = opened()
    await store.put("team-a", compaction("h", text="A's secret"))
    assert await store.find("team-b", ["h"]) == []
    await store.put("team-b", compaction("h", text="B's"))
    assert [each.summary for each in await store.find("team-a", ["h"])] == ["A's secret"]


async def test_a_newer_one_takes_the_place_of_an_older(opened: OpenStore) -> None:
    """Of the same covered messages there is one record, the latest."""
    store = opened()
    await store.put("team", compaction("h", text="old"))
    await store.put("team", compaction("h", text="new"))
    assert [each.summary for each in await store.find("team", ["h"])] == ["new"]


async def test_what_nobody_uses_is_forgotten(opened: OpenStore, clock: Clock) -> None:
    """After the time to live, and not before."""
    store = opened()
    await store.put("team", compaction("h"))
    clock.now_s += TTL_S - 1
    assert len(await store.find("team", ["other"])) == 0
    clock.now_s += 2
    assert await store.find("team", ["h"]) == []
    clock.now_s -= 2
    assert await store.find("team", ["h"]) == []


async def test_what_is_used_lives_on(opened: OpenStore, clock: Clock) -> None:
    """Every find begins the time to live anew: a long conversation never loses its record."""
    store = opened()
    await store.put("team", compaction("h"))
    for _ in range(5):
        clock.now_s += TTL_S - 1
        assert len(await store.find("team", ["h"])) == 1


async def test_the_least_recently_used_goes_first(opened: OpenStore) -> None:
    """When the bytes are used up, whatever was found last stays."""
    store = opened(max_bytes=20_000)
    for name in ("a", "b", "c"):
        await store.put("team", compaction(name, text="x" * 1000))
    await store.find("team", ["a"])
    await store.put("team", compaction("d", text="x" * 1000))
    await store.put("team", compaction("e", text="x" * 1000))
    found = {name for name in "abcde" if await store.find("team", [name])}
    assert "a" in found
    assert "b" not in found
    assert {"d", "e"} <= found


async def test_the_bytes_have_a_bound(opened: OpenStore) -> None:
    """A thousand large records do not grow the store beyond it, and replacing one does not use it up."""
    store = opened(max_bytes=100_000)
    for number in range(1000):
        await store.put("team", compaction(f"h{number}", text="é" * 1000))
    found = await store.find("team", [f"h{number}" for number in range(1000)])
    assert 10 <= len(found) <= 50
    assert sum(len(each.summary.encode()) for each in found) <= 100_000
    for _ in range(1000):
        await store.put("team", compaction("h999", text="é" * 1000))
    assert len(await store.find("team", [f"h{number}" for number in range(1000)])) == len(found)


async def test_the_newest_is_kept_however_large(opened: OpenStore) -> None:
    """The request that made it is about to need it again."""
    store = opened(max_bytes=1024)
    await store.put("team", compaction("small"))
    await store.put("team", compaction("large", text="x" * 10_000))
    assert [each.covered_hash for each in await store.find("team", ["small", "large"])] == ["large"]


async def test_a_store_does_not_hand_out_what_it_can_lose(opened: OpenStore) -> None:
    """What was found stays what it was while the store changes."""
    store = opened()
    await store.put("team", compaction("h", text="old"))
    (found,) = await store.find("team", ["h"])
    await store.put("team", replace(found, ledger="changed"))
    assert found.ledger == "- src/a.py"


async def test_an_ended_memory_store_is_empty(clock: Clock) -> None:
    """Ending it gives the memory back."""
    store = _memory(1_000_000, clock)
    await store.put("team", compaction("h"))
    await store.aclose()
    assert await store.find("team", ["h"]) == []


async def test_stores_are_opened_by_url() -> None:
    """A scheme that is not known is an error that names it."""
    store = open_store("memory://", ttl_s=1, max_bytes=1024)
    assert isinstance(store, MemoryStore)
    await store.aclose()
    with pytest.raises(StoreError, match="redis://localhost"):
        open_store("redis://localhost", ttl_s=1, max_bytes=1024)
