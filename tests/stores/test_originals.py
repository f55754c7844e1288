"""Originals: kept once, encrypted, each tenant's own, forgotten in time, on every backend."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import chain, visible_text
from litellm_compaction.errors import StoreError
from litellm_compaction.stores import Covered, Originals, open_store, originals_of
from litellm_compaction.stores.sqlite import MemoryRows
from tests.builders import JsonDict, assistant, contents, parsed, user
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore
from tests.virtual_time import Clock

SECRET = "sk-master"


def covered(*raw: JsonDict, scope: str = "scope", tenant: str = "tenant") -> Covered:
    messages = parsed(raw)
    return Covered(scope=scope, tenant=tenant, messages=messages, hashes=chain(messages))


def talk(number: int, word: str = "word") -> list[JsonDict]:
    return [(user, assistant)[at % 2](f"{word} {at}") for at in range(number)]


@pytest.fixture
def rows() -> MemoryRows:
    return MemoryRows(ttl_s=100, max_bytes=10_000_000)


@pytest.fixture
def originals(rows: MemoryRows) -> Originals:
    return Originals(rows, secret=lambda: SECRET)


async def kept(originals: Originals, *all_covered: Covered) -> None:
    for each in all_covered:
        originals.keep(each)
        await originals.aclose()


async def texts(originals: Originals, tenant: str = "tenant") -> list[str]:
    found = await originals.read(tenant, await originals.names(tenant))
    return [message.text for stretch in found for message in stretch.messages]


async def test_a_stretch_has_a_bound(originals: Originals) -> None:
    """Sixty-four messages or half a million characters: so much a fork stores again, and a reader decrypts, at most."""
    long = [user("x" * 250_000), assistant("y" * 250_000)] * 2
    await kept(originals, covered(*talk(130)), covered(*long, user("z"), tenant="large"))
    sizes = [
        [len(each.messages) for each in await originals.read(tenant, await originals.names(tenant))]
        for tenant in ("tenant", "large")
    ]
    assert sizes == [[64, 64, 2], [2, 2, 1]]


async def test_tenants_find_their_own(originals: Originals) -> None:
    """The same conversation of two: each has its own rows, and a forged list leads to nothing."""
    await kept(
        originals, covered(*talk(2), scope="a", tenant="one"), covered(*talk(2, "other"), scope="b", tenant="two")
    )
    assert await texts(originals, "one") == ["word 0", "word 1"]
    assert await texts(originals, "two") == ["other 0", "other 1"]
    assert (await originals.names("three"), await originals.scopes()) == ([], {"a", "b"})
    assert await originals.read("one", await originals.names("two")) == []


@pytest.mark.parametrize(("scopes", "entries", "left"), [(256, 4096, 4096), (1, 4097, 4096), (257, 257, 256)])
async def test_of_a_long_list_the_last_count(
    originals: Originals, rows: MemoryRows, scopes: int, entries: int, left: int
) -> None:
    """Whoever has written it into a shared store: each of its scopes is asked for by itself."""
    listed = [(f"s{at % scopes}", str(at)) for at in range(entries)]
    await rows.put("tenant", "stretches", " ".join(map(":".join, listed)).encode())
    assert await originals.names("tenant") == listed[-left:]


async def test_an_answer_that_goes_on_is_kept_with_the_next_turn(originals: Originals) -> None:
    """Then it stands in one piece."""
    said = covered(*talk(3), assistant("Half an"), user("Go on."))
    *before, seam = said.messages
    await kept(originals, replace(said, messages=(*before, replace(seam, is_synthetic=True))))
    [stretch] = await originals.scan()
    assert (stretch.messages, stretch.hashes) == (said.messages[:3], tuple(said.hashes[:4]))


async def test_a_moved_row_is_none(originals: Originals, rows: MemoryRows, caplog: pytest.LogCaptureFixture) -> None:
    """What is encrypted is bound to its scope and its key."""
    await kept(originals, covered(*talk(2)))
    [row] = [row for row in await rows.scan() if row.key.startswith("o:")]
    await rows.put("else", row.key, row.body)
    await rows.put(row.scope, "o:else", row.body)
    assert await originals.read("tenant", [("else", row.key[2:]), (row.scope, "else")]) == []
    assert [len(each.messages) for each in await originals.scan()] == [2]
    assert [record.getMessage().split()[:2] for record in caplog.records] == [["originals_unreadable", "rows=2"]]


async def test_what_is_older_than_its_time_is_gone() -> None:
    """Looked up or not: of other rows a look-up is a use, from which on they live anew."""
    clock = Clock()
    store = MemoryStore(ttl_s=1e9, max_bytes=10_000_000, clock=clock)
    originals = originals_of(store, ttl_s=100, max_bytes=10_000_000, secret=lambda: SECRET)
    await kept(originals, covered(*talk(2)))
    for later_s, left in ((60.0, 2), (40.0, 2), (0.1, 0)):
        clock.now_s += later_s
        assert (len(await texts(originals)), len(await originals.scopes())) == (left, left // 2)


async def test_without_a_key_nothing_is_kept(rows: MemoryRows, caplog: pytest.LogCaptureFixture) -> None:
    """It says once which setting wants one."""
    originals = Originals(rows, secret=lambda: None)
    await kept(originals, covered(*talk(2)), covered(*talk(4)))
    assert await originals.scopes() == set()
    assert [record.getMessage().split()[:2] for record in caplog.records] == [["originals_off", "keep_originals"]]


@pytest.mark.parametrize(("error", "said"), [(StoreError("full"), "full"), (ValueError("of a word"), "ValueError")])
async def test_a_failure_is_told_once(error: Exception, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """In our words: those of others may quote what is kept."""

    class Failing(MemoryRows):
        async def put(self, scope: str, key: str, body: bytes) -> None:
            raise error

    originals = Originals(Failing(ttl_s=100, max_bytes=10_000), secret=lambda: SECRET)
    await kept(originals, covered(*talk(2)), covered(*talk(2)))
    assert [record.getMessage() for record in caplog.records] == [f"originals_failed {said}; (logged once)"]


async def test_secrets_and_data_stay_out(originals: Originals) -> None:
    """What the record leaves out is left out of text and arguments; of an image nothing is kept."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    call = {"id": "c", "function": {"name": "login", "arguments": '{"with": "hunter2"}'}}
    conversation = covered(
        user([{"type": "text", "text": "I am hunter2"}, image]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "welcome"},
    )
    await kept(originals, replace(conversation, redact=lambda text: text.replace("hunter2", "***")))
    [stretch] = await originals.scan()
    assert [visible_text(each) for each in stretch.messages] == ["I am ***", "\nlogin(with: ***)", "welcome"]
    assert "AAAA" not in repr(stretch)
    assert stretch.messages[2].call_id == "c"


async def test_no_word_is_on_the_disk(tmp_path: Path) -> None:
    """Neither in the file nor in its journal; they are a part of the store's file, with a bound of their own."""
    store = open_store(f"sqlite:///{tmp_path / 'store.sqlite3'}", ttl_s=100, max_bytes=1_000_000)
    originals = originals_of(store, ttl_s=100, max_bytes=50_000, secret=lambda: SECRET)
    await kept(originals, covered(*talk(30, "rhinoceros"), tenant="nobody"))
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert (b"scope" in data, b"rhinoceros" in data) == (True, False)
    await store.put("scope", compaction("h"))
    for at in range(10):
        await kept(originals, covered(user(os.urandom(8_000).hex() + f" {at}"), scope="large"))
    assert 2 <= len(await originals.scan()) <= 7
    assert await originals.delete() >= 2
    assert (len(await store.compactions()), await store.delete()) == (1, 1)
    await store.aclose()


@given(st.lists(contents(), min_size=1, max_size=12), st.data())
def test_any_text_comes_back(said: list[object], data: st.DataObject) -> None:
    """Half surrogate pairs and control characters, too, in whatever steps they are covered."""
    conversation = covered(*({"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(said)))
    steps = sorted({*data.draw(st.lists(st.integers(1, len(said)), max_size=3)), len(said)})

    async def run() -> list[str]:
        originals = Originals(MemoryRows(ttl_s=100, max_bytes=10**8), secret=lambda: SECRET)
        parts = [
            replace(conversation, messages=conversation.messages[:end], hashes=conversation.hashes[: end + 1])
            for end in steps
        ]
        await kept(originals, *parts)
        return await texts(originals)

    assert asyncio.run(run()) == [message.text for message in conversation.messages]


async def test_what_a_record_covers_is_put_together_again(originals: Originals, rows: MemoryRows) -> None:
    """From the parts in which it was kept, in order, for its tenant alone; without its beginning if that is gone."""
    said = talk(150)
    short, whole = covered(*said[:10]), covered(*said)
    await kept(originals, short, whole)
    for each in (short, whole):
        found = await originals.covered("scope", each.hashes[-1], tenant="tenant")
        assert [message.text for message in found] == [message.text for message in each.messages]
    assert await originals.covered("scope", whole.hashes[-1]) == found
    assert await originals.covered("scope", whole.hashes[-1], tenant="other") == []
    assert await originals.covered("other", whole.hashes[-1], tenant="tenant") == []
    assert await originals.covered("scope", "0" * 32, tenant="tenant") == []
    await rows.delete(scope="scope", key=f"o:{short.hashes[-1]}")
    left = await originals.covered("scope", whole.hashes[-1], tenant="tenant")
    assert [message.text for message in left] == [message.text for message in whole.messages[10:]]


async def test_of_very_many_parts_the_last_are_read(originals: Originals) -> None:
    """An operator waits for sixty-four look-ups at most."""
    whole = covered(*talk(65))
    for end in range(1, 66):
        await kept(originals, replace(whole, messages=whole.messages[:end], hashes=whole.hashes[: end + 1]))
    assert await originals.covered("scope", whole.hashes[-1]) == list(whole.messages[1:])


async def test_deleted_is_forgotten(originals: Originals) -> None:
    """Of one scope, with its list; of all; the tenant's other scopes stay."""
    await kept(originals, covered(*talk(2), scope="a"), covered(*talk(2, "other"), scope="b"))
    assert await originals.scopes() == {"a", "b"}
    assert await originals.delete(scope="a") == 1
    assert await texts(originals) == ["other 0", "other 1"]
    assert await originals.delete() == 1
    assert await texts(originals) == []
    assert (await originals.scopes(), await originals.names("tenant")) == (set(), [])
