"""`store`, `events` and `doctor` on a Redis that machines share, as an operator uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.doctor import doctor
from litellm_compaction.stores import open_existing
from tests.cli.conftest import config
from tests.cli.test_stores import SECRET, fill
from tests.stores.servers import Server, any_program, free_port, running


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a password, and what two tenants have stored."""
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    with running(any_program()) as server:
        fill(open_existing(server.url, ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET))
        server.tell("CONFIG", "SET", "requirepass", "hunter2")
        yield server


def with_password(server: Server) -> str:
    return server.url.replace("127", ":hunter2@127", 1)


@pytest.fixture
def findings(
    write: Callable[[Any], Path], environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> Callable[[str], dict[str, str]]:
    """What doctor finds about a store: message by level."""

    def look(store: str) -> dict[str, str]:
        doctor(config=write(config(settings={"store": store})), as_json=True, environ=environ)
        said = capsys.readouterr().out
        assert "hunter2" not in said
        places = ("store", "callback_settings.litellm_compaction")
        return {each["level"]: each["message"] for each in json.loads(said)["findings"] if each["place"] in places}

    return look


def test_doctor_says_what_is_wrong_with_a_shared_store(
    server: Server, findings: Callable[[str], dict[str, str]]
) -> None:
    """Nothing where it works; gone, a replica, an eviction that takes settings; never the password."""
    assert findings(with_password(server)) == {}
    assert "AuthenticationError" in findings(server.url)["problem"]
    assert "cannot be reached" in findings(f"redis://:hunter2@127.0.0.1:{free_port()}")["problem"]
    said = b"AUTH hunter2\r\n"
    for line in ("CONFIG SET maxmemory-policy allkeys-lru", f"REPLICAOF 127.0.0.1 {free_port()}"):
        tell_with_password(server, said + f"{line}\r\n".encode())
    found = findings(with_password(server))
    assert "allkeys-lru may evict changed settings" in found["note"]
    assert "read-only replica" in found["problem"]


def tell_with_password(server: Server, lines: bytes) -> None:
    """Sends inline commands on one connection."""

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(lines)
        assert await reader.readline() == b"+OK\r\n"
        assert await reader.readline() == b"+OK\r\n"
        writer.close()
        await writer.wait_closed()

    asyncio.run(send())
