"""Originals: kept once, encrypted, each tenant's own, forgotten in time, on every backend."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import chain, visible_text
from litellm_compaction.errors import StoreError
from litellm_compaction.stores import Covered, Originals, open_store, originals_of
from litellm_compaction.stores.rows import MemoryRows, Rows
from tests.builders import JsonDict, assistant, contents, parsed, user
from tests.stores.compactions import compaction
from tests.stores.made import RedisStore, sqlite_rows
from tests.stores.servers import any_program, running

SECRET = "sk-master"
KINDS = ("memory", "sqlite", "redis")


class Opening:
    """Opens originals, each time on the same rows."""

    def __init__(self, rows: Callable[[], Rows]) -> None:
        self.opened: list[Originals | Rows] = []
        self._rows = rows

    def rows(self) -> Rows:
        self.opened.append(self._rows())
        return self.opened[-1]  # type: ignore[return-value]

    def __call__(self, secret: str | None = SECRET, **options: float) -> Originals:
        originals = Originals(self._rows(), secret=lambda: secret, **{"ttl_s": 100, **options})
        self.opened.append(originals)
        return originals


def covered(*raw: JsonDict, scope: str = "scope", tenant: str = "tenant") -> Covered:
    messages = parsed(raw)
    return Covered(scope=scope, tenant=tenant, messages=messages, hashes=chain(messages))


def talk(number: int, word: str = "word") -> list[JsonDict]:
    return [(user, assistant)[at % 2](f"{word} {at}") for at in range(number)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ExitStack() as ending:
        yield ending.enter_context(running(any_program())).url


@pytest.fixture(params=KINDS)
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opening]:
    name = uuid.uuid4().hex
    memory = MemoryRows(ttl_s=100, max_bytes=10_000_000)

    def rows() -> Rows:
        if request.param == "memory":
            return memory
        if request.param == "sqlite":
            return sqlite_rows(tmp_path / "store.originals", ttl_s=100, max_bytes=10_000_000)
        url = f"{request.getfixturevalue('server')}?prefix={name}"
        return RedisStore(url, rests=False, limit_s=10, ttl_s=100).rows

    opening = Opening(rows)
    yield opening
    for each in opening.opened:
        await each.aclose()


async def kept(originals: Originals, *all_covered: Covered) -> None:
    for each in all_covered:
        originals.keep(each)
        await originals.settle()


async def texts(originals: Originals, tenant: str = "tenant") -> list[str]:
    found = await originals.read(tenant, await originals.names(tenant))
    return [message.text for stretch in found for message in stretch.messages]


async def test_a_stretch_has_a_bound() -> None:
    """Sixty-four messages or half a million characters: so much a fork stores again, and a reader decrypts, at most."""
    originals = Originals(MemoryRows(ttl_s=100, max_bytes=10_000_000), ttl_s=100, secret=lambda: SECRET)
    await kept(originals, covered(*talk(130)), covered(*talk(3, "x" * 200_000), tenant="large"))
    sizes = [
        [len(each.messages) for each in await originals.read(tenant, await originals.names(tenant))]
        for tenant in ("tenant", "large")
    ]
    assert sizes == [[64, 64, 2], [2, 1]]


async def test_tenants_find_their_own(opened: Opening) -> None:
    """The same conversation of two: each has its own rows, and a forged list leads to nothing."""
    originals = opened()
    await kept(
        originals, covered(*talk(2), scope="a", tenant="one"), covered(*talk(2, "other"), scope="b", tenant="two")
    )
    assert await texts(originals, "one") == ["word 0", "word 1"]
    assert await texts(originals, "two") == ["other 0", "other 1"]
    assert await originals.names("three") == []
    assert await originals.read("one", await originals.names("two")) == []


async def test_a_moved_row_is_none(opened: Opening) -> None:
    """What is encrypted is bound to its scope and its key; half a row, or another version's, is passed over, too."""
    originals, rows = opened(), opened.rows()
    await kept(originals, covered(*talk(2)))
    [row] = [row for row in await rows.scan() if row.key.startswith("o:")]
    await rows.put("else", row.key, row.body)
    foreign = [row.body, b"", b"\x01", b"\x01" + bytes(40), b"\x02" + row.body[1:]]
    for at, body in enumerate(foreign):
        await rows.put(row.scope, f"o:{at}", body)
    names = [("else", row.key[2:]), *((row.scope, str(at)) for at in range(len(foreign)))]
    assert await originals.read("tenant", names) == []
    assert [len(each.messages) for each in await originals.scan()] == [2]


async def test_deleted_is_forgotten(opened: Opening) -> None:
    """Of one scope, with its list; of all; the tenant's other scopes stay."""
    originals = opened()
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


async def test_without_a_key_nothing_is_kept(opened: Opening, caplog: pytest.LogCaptureFixture) -> None:
    """It says once which setting wants one."""
    originals = opened(None)
    await kept(originals, covered(*talk(2)), covered(*talk(4)))
    assert await originals.scopes() == set()
    assert [record.getMessage().split()[:2] for record in caplog.records] == [["originals_off", "keep_originals"]]


async def test_secrets_and_data_stay_out(opened: Opening) -> None:
    """What the record leaves out is left out of text and arguments; of an image nothing is kept."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    call = {"id": "c", "function": {"name": "login", "arguments": '{"with": "hunter2"}'}}
    conversation = covered(
        user([{"type": "text", "text": "I am hunter2"}, image]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "welcome"},
    )
    originals = opened()
    await kept(originals, replace(conversation, redact=lambda text: text.replace("hunter2", "***")))
    [stretch] = await originals.scan()
    assert [visible_text(each) for each in stretch.messages] == ["I am ***", "\nlogin(with: ***)", "welcome"]
    assert "AAAA" not in repr(stretch)
    assert stretch.messages[2].call_id == "c"


async def test_the_bound_drops_the_oldest() -> None:
    """Of the scope that has most; what is left is found."""
    originals = Originals(MemoryRows(ttl_s=100, max_bytes=40_000), ttl_s=100, secret=lambda: SECRET)
    for at in range(10):
        await kept(originals, covered(user(os.urandom(4_000).hex() + f" {at}")))
    found = [text.split()[1] for text in await texts(originals)]
    assert 2 <= len(found) < 10
    assert found == [str(at) for at in range(10 - len(found), 10)]


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


async def test_what_a_record_covers_is_put_together_again(opened: Opening) -> None:
    """From the parts in which it was kept, in order, for its tenant alone; without its beginning if that is gone."""
    originals = opened()
    said = talk(150)
    short, whole = covered(*said[:10]), covered(*said)
    await kept(originals, short, whole)
    for each in (short, whole):
        found = await originals.covered("scope", each.hashes[-1], tenant="tenant")
        assert [message.text for message in found.messages] == [message.text for message in each.messages]
        assert tuple(found.entries) == each.hashes[1:]
    assert await originals.covered("scope", whole.hashes[-1]) == found
    assert await originals.covered("scope", whole.hashes[-1], tenant="other") == ([], [])
    assert await originals.covered("other", whole.hashes[-1], tenant="tenant") == ([], [])
    assert await originals.covered("scope", "0" * 32, tenant="tenant") == ([], [])
    await opened.rows().delete(scope="scope", key=f"o:{short.hashes[-1]}")
    left = await originals.covered("scope", whole.hashes[-1], tenant="tenant")
    assert [message.text for message in left.messages] == [message.text for message in whole.messages[10:]]
