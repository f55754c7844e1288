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
    return Originals(rows, ttl_s=100, secret=lambda: SECRET)


async def kept(originals: Originals, *all_covered: Covered) -> None:
    for each in all_covered:
        originals.keep(each)
        await originals.aclose()


async def texts(originals: Originals, tenant: str = "tenant") -> list[str]:
    found = await originals.read(tenant, await originals.names(tenant))
    return [message.text for stretch in found for message in stretch.messages]


async def test_a_stretch_has_a_bound(originals: Originals) -> None:
    """Sixty-four messages or half a million characters: so much a fork stores again, and a reader decrypts, at most."""
    await kept(originals, covered(*talk(130)), covered(*talk(3, "x" * 200_000), tenant="large"))
    sizes = [
        [len(each.messages) for each in await originals.read(tenant, await originals.names(tenant))]
        for tenant in ("tenant", "large")
    ]
    assert sizes == [[64, 64, 2], [2, 1]]


async def test_tenants_find_their_own(originals: Originals) -> None:
    """The same conversation of two: each has its own rows, and a forged list leads to nothing."""
    await kept(
        originals, covered(*talk(2), scope="a", tenant="one"), covered(*talk(2, "other"), scope="b", tenant="two")
    )
    assert await texts(originals, "one") == ["word 0", "word 1"]
    assert await texts(originals, "two") == ["other 0", "other 1"]
    assert await originals.names("three") == []
    assert await originals.read("one", await originals.names("two")) == []


async def test_a_moved_row_is_none(originals: Originals, rows: MemoryRows) -> None:
    """What is encrypted is bound to its scope and its key; half a row, or another version's, is passed over, too."""
    await kept(originals, covered(*talk(2)))
    [row] = [row for row in await rows.scan() if row.key.startswith("o:")]
    await rows.put("else", row.key, row.body)
    foreign = [row.body, b"", b"\x01", b"\x01" + bytes(40), b"\x02" + row.body[1:]]
    for at, body in enumerate(foreign):
        await rows.put(row.scope, f"o:{at}", body)
    names = [("else", row.key[2:]), *((row.scope, str(at)) for at in range(len(foreign)))]
    assert await originals.read("tenant", names) == []
    assert [len(each.messages) for each in await originals.scan()] == [2]


async def test_deleted_is_forgotten(originals: Originals) -> None:
    """Of one scope, with its list; of all; the tenant's other scopes stay."""
    await kept(originals, covered(*talk(2), scope="a"), covered(*talk(2, "other"), scope="b"))
    assert await originals.scopes() == {"a", "b"}
    assert await originals.delete(scope="a") == 1
    assert await texts(originals) == ["other 0", "other 1"]
    assert await originals.delete() == 1
    assert await texts(originals) == []
    assert (await originals.scopes(), await originals.names("tenant")) == (set(), [])


async def test_what_is_older_than_its_time_is_not_read() -> None:
    """Whether or not it is still there."""
    rows = MemoryRows(ttl_s=1e9, max_bytes=10_000_000, clock=lambda: 1000.0)
    now, later = (
        Originals(rows, ttl_s=100, secret=lambda: SECRET, clock=lambda at=at: at)  # type: ignore[misc]
        for at in (1100.0, 1100.1)
    )
    await kept(now, covered(*talk(2)))
    assert (len(await texts(now)), await texts(later)) == (2, [])


async def test_without_a_key_nothing_is_kept(rows: MemoryRows, caplog: pytest.LogCaptureFixture) -> None:
    """It says once which setting wants one."""
    originals = Originals(rows, ttl_s=100, secret=lambda: None)
    await kept(originals, covered(*talk(2)), covered(*talk(4)))
    assert await originals.scopes() == set()
    assert [record.getMessage().split()[:2] for record in caplog.records] == [["originals_off", "keep_originals"]]


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
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    store, look = (open_store(url, ttl_s=100, max_bytes=1_000_000, is_proxy=each) for each in (True, False))
    originals, again = (
        originals_of(each, ttl_s=100, max_bytes=50_000, secret=lambda: SECRET) for each in (store, look)
    )
    with pytest.raises(StoreError, match="there is no store"):
        await again.scan()
    await kept(originals, covered(*talk(30, "rhinoceros"), tenant="nobody"))
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"scope" in data
    assert b"rhinoceros" not in data
    assert len(await again.scan()) == 1
    await store.put("scope", compaction("h"))
    for at in range(10):
        await kept(originals, covered(user(os.urandom(8_000).hex() + f" {at}"), scope="large"))
    assert 2 <= len(await again.scan()) <= 7
    assert (len(await store.compactions()), len(await look.compactions())) == (1, 1)
    assert await originals.delete() >= 2
    assert (len(await store.compactions()), await store.delete()) == (1, 1)
    for each in (again, originals, store, look):
        await each.aclose()


@given(st.lists(contents(), min_size=1, max_size=12), st.data())
def test_any_text_comes_back(said: list[object], data: st.DataObject) -> None:
    """Half surrogate pairs and control characters, too, in whatever steps they are covered."""
    conversation = covered(*({"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(said)))
    steps = sorted({*data.draw(st.lists(st.integers(1, len(said)), max_size=3)), len(said)})

    async def run() -> list[str]:
        originals = Originals(MemoryRows(ttl_s=100, max_bytes=10**8), ttl_s=100, secret=lambda: SECRET)
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
