"""Looking up what is kept: a tenant's own, what came meanwhile, and nothing that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from litellm_compaction.recall import Lookup, found_fields, indexed, message_fields, told
from litellm_compaction.recall.lookup import Stretch
from litellm_compaction.stores import Covered, Originals
from litellm_compaction.stores.sqlite import MemoryRows
from tests.recall.test_index import assistant, user
from tests.stores.test_originals import SECRET, covered, kept


class Counting(Originals):
    """Originals in memory; how many stretches were read."""

    def __init__(self) -> None:
        self.kept = MemoryRows(ttl_s=100, max_bytes=10_000_000)
        self.reads = 0
        super().__init__(self.kept, secret=lambda: SECRET)

    async def read(self, tenant: str, names: Sequence[tuple[str, str]]) -> list[Stretch]:
        self.reads += len(names)
        return await super().read(tenant, names)


FISH = [user("Which fish is the largest?"), assistant("The whale shark, Rhincodon typus.")]
BIRD = [user("Which bird is the fastest?"), assistant("The peregrine falcon.")]


async def said(lookup: Lookup, query: str, tenant: str = "tenant") -> list[str]:
    found = await lookup.search(tenant, query, limit=5)
    return [piece.text for hit in found.hits for piece in hit.pieces]


async def test_what_came_meanwhile_is_found_and_read_once() -> None:
    """The index grows; a hit reads only what it is from and what stands beside it."""
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, covered(*FISH))
    assert "whale shark" in " ".join(await said(lookup, "largest fish"))
    await kept(originals, covered(*FISH, *BIRD))
    assert "falcon" in " ".join(await said(lookup, "fastest bird"))
    before = originals.reads
    assert await said(lookup, "falcon") != []
    assert originals.reads - before <= 2


async def test_a_search_that_is_cancelled_while_it_indexes_harms_none_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, covered(*FISH))

    async def cancelled(run: Callable[..., Any], *given: Any) -> Any:
        done = run(*given)
        if run is indexed:
            raise asyncio.CancelledError
        return done

    with monkeypatch.context() as patched:
        patched.setattr("asyncio.to_thread", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await said(lookup, "largest fish")
    assert await said(lookup, "largest fish")


async def test_tenants_find_nothing_of_each_other() -> None:
    """Not by words, not by handle; and a foreign handle reads as much as a forged one: nothing."""
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, covered(*FISH, scope="a", tenant="one"), covered(*BIRD, scope="b", tenant="two"))
    [hit, *_] = (await lookup.search("one", "whale shark", limit=5)).hits
    handle = hit.original.handle
    assert await lookup.find("one", handle) != ()
    assert await said(lookup, "whale shark", "two") == []
    before = originals.reads
    assert await lookup.find("two", handle) == await lookup.find("two", "0" * 12) == ()
    assert originals.reads == before


async def test_eight_tenants_that_asked_last_are_not_read_anew() -> None:
    """Whoever asks again reads only what a hit is from; of nine, the one that asked longest ago reads all."""
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, *(covered(*FISH, scope=name, tenant=name) for name in "abcdefghi"))
    reads = []
    for tenant in "abcdefghaiab":
        originals.reads = 0
        assert await said(lookup, "whale shark", tenant) != []
        reads.append(originals.reads)
    assert reads == [2] * 8 + [1, 2, 1, 2]


async def test_the_same_conversation_of_two_stays_apart() -> None:
    """One's handles are the other's by chance of the same words; one's deletion leaves the other's."""
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, covered(*FISH, scope="a", tenant="one"), covered(*FISH, scope="b", tenant="two"))
    assert await said(lookup, "whale shark", "one") == await said(lookup, "whale shark", "two") != []
    await originals.delete(scope="a")
    assert await said(lookup, "whale shark", "one") == []
    assert await said(lookup, "whale shark", "two") != []


async def test_what_is_gone_is_not_shown() -> None:
    """A row that was evicted takes its words with it, also those that stand beside another one's hit."""
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, covered(*FISH), covered(*FISH, *BIRD))
    [first, _] = await originals.names("tenant")
    found = await lookup.search("tenant", "fastest bird", limit=5)
    assert "whale shark" in repr(found)
    [hit, *_] = (await lookup.search("tenant", "Rhincodon", limit=1)).hits
    await originals.kept.delete(scope=first[0], key=f"o:{first[1]}")
    assert [piece.text for hit in found.hits for piece in hit.pieces][-2:] == await said(lookup, "fastest bird")
    assert await lookup.find("tenant", hit.original.handle) == ()
    assert await said(lookup, "falcon") != []


async def test_as_json_and_as_text() -> None:
    """Both have role, turn and handle; without a hit the words that were searched, and that no more is kept."""
    originals = Counting()
    lookup = Lookup(originals)
    await kept(originals, covered(*FISH))
    found = await lookup.search("tenant", "whale", limit=1)
    fields = found_fields(found)
    assert fields["words"] == ["whale"]
    [hit] = fields["hits"]  # type: ignore[misc]
    assert {"role": "assistant", "turn": 1, "share": 0.455}.items() <= hit.items()  # type: ignore[union-attr]
    handle = found.hits[0].original.handle
    assert f"handle {handle}" in told(found)
    parts = await lookup.find("tenant", handle)
    assert message_fields(parts) == {
        "handle": handle,
        "turn": 1,
        "parts": [{"role": "assistant", "call": "", "text": FISH[1]["content"]}],
    }
    nothing = await lookup.search("tenant", "zebra", limit=1)
    said = "Nothing was found in the earlier conversation, as far as it is kept, for: zebra"
    assert (told(nothing), found_fields(nothing)["note"]) == (said, said)
    for query in ("x" * 400, 'AND OR NOT " * ( )', "/(/", "\x00", "\ud800"):
        assert len(told(await lookup.search("tenant", query, limit=5))) < 10_000


def test_stretches_stand_behind_those_that_they_go_on_from() -> None:
    """However they come in between those of other conversations."""

    def part(whole: Covered, first: int, end: int) -> Stretch:
        messages, hashes = tuple(whole.messages[first:end]), tuple(whole.hashes[first : end + 1])
        return Stretch(scope="scope", tenant="tenant", messages=messages, hashes=hashes, kept_s=0.0)

    fish, bird = covered(*FISH, *BIRD), covered(*BIRD)
    index = indexed([part(fish, 0, 2), part(bird, 0, 2), part(fish, 2, 4)])
    assert [each.text for each in index.originals][3:5] == [FISH[1]["content"], BIRD[0]["content"]]


async def test_more_text_than_an_index_may_hold_leaves_the_newer_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a worker is bounded, however much one tenant says; what is said last is found."""
    monkeypatch.setattr("litellm_compaction.recall.lookup._MOST_CHARS", 400)
    originals = Counting()
    lookup = Lookup(originals)
    said_so_far = []
    for number in range(12):
        said_so_far += [
            user(f"Remember city {number}."),
            assistant(f"Noted: city{number} lies on river{number}. {'x' * 40}"),
        ]
        await kept(originals, covered(*said_so_far))
        for newest in range(max(number - 1, 0), number + 1):
            assert f"river{newest}" in " ".join(await said(lookup, f"city{newest}"))
        assert sum(len(each.text) for each in lookup._tenants["tenant"].index.originals) <= 400
    assert "river0." not in " ".join(await said(lookup, "river0"))
