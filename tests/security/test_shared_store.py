"""Threat: somebody else who writes to the Redis that a proxy's workers share."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from litellm_compaction.config import settings_from
from litellm_compaction.errors import StoreError
from litellm_compaction.master_key import Seal
from litellm_compaction.proxy.live_settings import KEY, LiveSettings, Overlay, overlay_from_json
from litellm_compaction.redis_address import parse
from litellm_compaction.stores import MemoryStore
from litellm_compaction.stores.redis import VALUE_MAX_BYTES, RedisStore
from litellm_compaction.stores.redis_board import RedisBoard
from litellm_compaction.stores.redis_connection import RedisConnection
from tests.stores.compactions import compaction
from tests.stores.servers import any_program, running

SECRET = "sk-of-all-workers"
_FAR = 9_999_999_999_999
# What stands in a topic besides what workers write there.
_FORGED_NOTES: dict[str, bytes] = {
    "digits that are none (ended coordination)": f"{_FAR}x {{}}".encode(),
    "for ever": f"{_FAR} {{}}".encode(),
    "no time": b"{}",
    "nothing": b"",
    "a time alone": str(_FAR).encode(),
    "a time below nothing": b"-5 {}",
    "a time that is no number": b"1e99 {}",
    "another's digits": "٣٣٣ {}".encode(),
    "a million bytes": f"{_FAR} ".encode() + b"x" * 1_000_000,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(any_program()) as server:
        yield server.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(RedisConnection(parse(url), limit_s=60.0), ttl_s=100.0)
    await store.connection.command("FLUSHDB", "SYNC")
    yield store
    await store.aclose()


def _board(store: RedisStore, secret: str | None = SECRET) -> RedisBoard:
    return RedisBoard(store.connection, Seal(lambda: secret, b"notes"))


async def _seen(board: RedisBoard, name: str = "me", topic: str = "pool") -> list[bytes]:
    return await board.update(topic, name, lambda others: (b"mine", list(others)), lease_s=10)


@pytest.mark.parametrize("name", _FORGED_NOTES)
async def test_a_note_that_nobody_here_has_written_counts_as_none(name: str, store: RedisStore) -> None:
    """With or without a key; it does not stay, and whoever looks goes on."""
    for secret in (SECRET, None):
        await store.connection.command("HSET", "compaction:{pool}:board", "evil", _FORGED_NOTES[name])
        assert await _seen(_board(store, secret)) == []
        assert await _seen(_board(store, secret), "you") == [b"mine"]
        assert await store.connection.command("HEXISTS", "compaction:{pool}:board", "evil") == 0
        await store.connection.command("DEL", "compaction:{pool}:board")


async def test_forged_notes_of_a_shared_context_count_as_none(
    store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One that lasts as long as a true one, one of another proxy, and true ones under other names and topics."""
    one, two, stranger = _board(store), _board(store), _board(store, "sk-of-another-proxy")
    key = "compaction:{pool}:board"
    assert await _seen(one, "one") == []
    assert await _seen(two, "two") == [b"mine"]
    true = await store.connection.command("HGET", key, "one")
    until_ms = true.partition(b" ")[0]
    with caplog.at_level(logging.WARNING):
        for name, note in (("evil", until_ms + b' {"held":1}'), ("moved", true)):
            await store.connection.command("HSET", key, name, note)
        await store.connection.command("HSET", "compaction:{other}:board", "one", true)
        assert await _seen(one, "one") == [b"mine"]
        assert await _seen(two, "two", "other") == []
        assert await _seen(stranger, "stranger") == []
    # Each worker says it once.
    assert [line.split()[0] for line in caplog.messages] == ["notes_ignored"] * 3


def _forged(**changes: object) -> str:
    rows = {key: {"value": value, "when_s": 1, "role": "proxy_admin"} for key, value in changes.items()}
    return json.dumps({"version": 1, "changes": rows})


_CONFIGURED = settings_from({"mode": "guard"})
_TRUE = Overlay().changed(_CONFIGURED, {"mode": "observe"}, when_s=1.0, role="proxy_admin")
# What somebody else writes into the settings: the guard off, and everybody's conversations to another model.
_FORGED_SETTINGS: dict[str, str] = {
    "guard off": _forged(mode="off"),
    "another model": _forged(pruning_model="other-model"),
    "an empty signature": json.dumps({**json.loads(_forged(mode="off")), "mac": ""}),
    "a signature of zeros": json.dumps({**json.loads(_forged(mode="off")), "mac": "0" * 32}),
    "a signature that is no text": json.dumps({**json.loads(_forged(mode="off")), "mac": [1]}),
    "a signature in other letters": json.dumps({**json.loads(_forged(mode="off")), "mac": "é" * 32}),
    "a true signature of other settings": "",
}


@pytest.mark.parametrize("name", _FORGED_SETTINGS)
async def test_forged_settings_are_ignored_with_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """config.yaml holds; what a worker with the same key has saved is in force, of one with another key it is not."""
    store = MemoryStore(ttl_s=1e6, max_bytes=1_000_000)

    def live(secret: str | None) -> LiveSettings:
        return LiveSettings(_CONFIGURED, store, secret=lambda: secret)

    await live(SECRET).write(_TRUE)
    signed = str(await store.get_setting(KEY))
    assert (await live(SECRET).current()).mode == "observe"
    assert (await live("sk-of-another-proxy").current()).mode == "guard"
    # Where LiteLLM asks for no key, everybody may do all.
    assert (await live(None).current()).mode == "observe"
    moved = json.dumps({**json.loads(_forged(mode="off")), "mac": json.loads(signed)["mac"]})
    await store.put_setting(KEY, _FORGED_SETTINGS[name] or moved)
    caplog.clear()
    worker = live(SECRET)
    assert await worker.current() == _CONFIGURED
    assert "signed" in worker.known.ignored
    assert "settings_ignored" in caplog.text
    # Saving again replaces it.
    await worker.write(_TRUE)
    assert (await live(SECRET).current()).mode == "observe"
    assert overlay_from_json(await store.get_setting(KEY)) == _TRUE


async def test_what_is_larger_than_anything_written_here_is_not_read(store: RedisStore) -> None:
    """Settings of 20 MB cost each worker 85 MB a second; a record, a fact, a plot or a note likewise."""
    command = store.connection.command
    huge = b"x" * (VALUE_MAX_BYTES + 1)
    await command("HSET", "compaction:{settings}", "settings", b"x" * 65_537)
    with pytest.raises(StoreError, match="65,537 bytes of settings"):
        await store.get_setting("settings")
    await store.put("team", compaction("h"))
    await store.put_fact("team", "key", "1")
    for kind, name in (("c", "h"), ("f", "key"), ("c", "only-listed")):
        await command("HSET", f"compaction:{{team}}:{kind}:{name}", "body", huge, "used_s", "9e9", "created_s", "9e9")
    assert await store.compactions() == []
    assert await store.find("team", ["h"]) == []
    assert await store.get_fact("team", "key") is None
    assert await command("EXISTS", "compaction:{team}:c:h", "compaction:{team}:f:key") == 0
    await command("HSET", "compaction:{team}:f:key", "body", huge, "used_s", "9e9", "created_s", "9e9")
    assert await store.merge_fact("team", "key", "2", lambda kept, new: kept + new) == "2"
    await command("HSET", "compaction:{plots}:bodies", "evil", huge)
    await command("ZADD", "compaction:{plots}:times", "9e9", "evil")
    assert await store.plots() == []
