"""Threat: a store that is damaged, tampered with or fails; and text that was deleted but is still on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.recall.lookup import Lookup
from litellm_compaction.stores import Originals, open_store
from litellm_compaction.stores.rows import Row
from litellm_compaction.stores.sqlite import MemoryRows
from litellm_compaction.stores.store import decode
from tests.integration.bench import Bench
from tests.security.office import action, ask, body_of, conversation
from tests.stores.compactions import compaction
from tests.stores.conftest import change
from tests.stores.made import SqliteStore

SECRET = "Geheimwort-4711"


# Statements that write what no process of ours writes.
_TAMPERED = {
    "a text for a body": "UPDATE entry SET body = 'text'",
    "no JSON": "UPDATE entry SET body = x'7b'",
    "deep JSON": "UPDATE entry SET body = CAST(replace(hex(zeroblob(50000)), '0', '[') AS BLOB)",
    "a text for a time": "UPDATE entry SET used_s = 'soon', created_s = 'later'",
    "an endless time": "UPDATE entry SET used_s = 9e999",
    "a key that is no UTF-8": "UPDATE entry SET key = CAST(x'ff' || CAST(id AS BLOB) AS TEXT)",
    "no usage": "DELETE FROM usage",
    "no table": "DROP TABLE entry",
    "a column less": "ALTER TABLE entry RENAME COLUMN used_order TO something",
    "a trigger that fails": "CREATE TRIGGER t BEFORE INSERT ON entry BEGIN SELECT raise(FAIL, 'no'); END",
}


@pytest.mark.parametrize("name", _TAMPERED)
async def test_rows_that_somebody_else_wrote_harm_nobody(name: str, tmp_path: Path) -> None:
    """A row of the wrong types is passed over, a missing table is damage; a proxy's store goes on either way."""
    path = tmp_path / "store.sqlite3"
    filled = SqliteStore(path, ttl_s=1e6, max_bytes=10_000_000)
    for number in range(20):
        await filled.put("scope", compaction(f"{number:02}"))
    await filled.aclose()
    change(path, _TAMPERED[name])
    store = open_store(f"sqlite:///{path}", ttl_s=1e6, max_bytes=10_000_000)
    kept = compaction("new")
    await store.put("scope", kept)
    assert await store.find("scope", ["x", kept.covered_hash]) == [kept]
    for stored in await store.compactions():
        assert stored.size_bytes > 0
        assert stored.used_s > 0
    await store.events()
    await store.aclose()


# What a store of another kind may hand out, which reads its own records.
_UNREAD: dict[str, dict[str, Any]] = {
    "forms that are nothing": {"forms": None},
    "no text for a ledger": {"ledger": 5},
}


@pytest.mark.parametrize("name", _UNREAD)
@pytest.mark.parametrize("group", ["small", "foreign-hooked"])
def test_a_record_that_cannot_be_applied_is_deleted_and_done_without(office: Bench, name: str, group: str) -> None:
    """The guard opened with every turn, since the record stayed: now the turn after finds a good one."""
    office.watch(group)
    body = body_of(group, conversation(f"unread {name}", 20))
    assert action(ask(office, "sk-alice", body)) == "compacted"
    with pytest.MonkeyPatch.context() as patch:
        # As if a record could be read that fits no conversation.
        patch.setattr("litellm_compaction.stores.store.decode", lambda data: replace(_decoded(data), **_UNREAD[name]))
        told = ask(office, "sk-alice", body)
        assert (action(told), told.headers["x-litellm-compaction-round"]) == ("compacted", "1")
    assert action(ask(office, "sk-alice", body)) == "reused"
    assert office.proxy.logged("record_deleted")
    assert office.proxy.logged("failed_open") == []


def _decoded(data: bytes) -> Compaction:
    found = decode(data)
    assert found is not None
    return found


def _holds_secret(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.is_file() and SECRET.encode() in each.read_bytes()]


@pytest.mark.parametrize("way", ["replaced", "expired", "evicted", "purged"])
async def test_text_that_is_gone_is_gone_from_the_journal_too(way: str, tmp_path: Path) -> None:
    """In no file of the folder stands what was replaced, expired, evicted or purged, while the proxy runs on."""
    now_s = [1e9]
    path = tmp_path / "store.sqlite3"
    store = SqliteStore(path, ttl_s=1000, max_bytes=60_000 if way == "evicted" else 10_000_000, clock=lambda: now_s[0])
    old = replace(compaction("old"), ledger=SECRET * 400)
    await store.put("scope", old)
    assert _holds_secret(tmp_path)
    if way == "replaced":
        await store.put("scope", replace(old, ledger="nothing"))
    elif way == "expired":
        now_s[0] += 2000
        await store.put("scope", compaction("new"))
    elif way == "evicted":
        for number in range(20):
            await store.put("scope", replace(compaction(f"{number:02}"), ledger="x" * 5000))
    else:
        await store.delete()
    await store.events()
    assert _holds_secret(tmp_path) == []
    await store.aclose()


async def test_a_clock_that_jumps_loses_nothing_that_is_young_and_keeps_nothing_for_ever(tmp_path: Path) -> None:
    """Set back, a record is not older than it is; what was used in a year that has not come expires like the rest."""
    now_s, day_s = [1_800_000_000.0], 86_400.0
    store = SqliteStore(tmp_path / "store.sqlite3", ttl_s=day_s, max_bytes=10_000_000, clock=lambda: now_s[0])

    async def found(*names: str) -> list[str]:
        kept = await store.find("scope", [compaction(name).covered_hash for name in names])
        return sorted(each.covered_hash for each in kept)

    young, ahead = compaction("young"), replace(compaction("ahead"), ledger=SECRET * 400)
    await store.put("scope", young)
    now_s[0] -= 30 * day_s
    assert await found("young") == [young.covered_hash]
    now_s[0] += 365 * day_s
    await store.put("scope", ahead)
    assert await found("young", "ahead") == [ahead.covered_hash], "what is over by the clock is over"
    now_s[0] -= 335 * day_s
    await store.put("scope", compaction("back"))
    assert await found("ahead", "back") == sorted(compaction(name).covered_hash for name in ("ahead", "back"))
    now_s[0] += 2 * day_s
    await store.put("scope", compaction("later"))
    assert await found("ahead", "back") == []
    await store.events()
    assert _holds_secret(tmp_path) == []
    await store.aclose()


@pytest.mark.parametrize("scope", ["%032x", "scope"])
async def test_a_forged_list_of_originals_costs_a_search_no_more_than_a_full_one(scope: str) -> None:
    """Whoever writes to a shared Redis may list any number; the newest are believed, and each is asked for at most."""

    class Counted(MemoryRows):
        asked = 0

        async def find(self, scope: str, keys: Sequence[str]) -> list[Row]:
            self.asked += 1
            return await super().find(scope, keys)

    rows = Counted(ttl_s=1e6, max_bytes=100_000_000)
    originals = Originals(rows, secret=lambda: SECRET)
    listed = " ".join(f"{scope.replace('%032x', f'{number:032x}')}:{number:032x}" for number in range(100_000))
    await rows.put("tenant", "stretches", listed.encode())
    assert len(await originals.names("tenant")) == (4096 if scope == "scope" else 256)
    assert rows.asked == 1
    await Lookup(originals).search("tenant", "whale", limit=5)
    assert rows.asked <= 600
