"""`litellm-compaction mcp` as the SDK's own client starts it, and as it refuses to start."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

from litellm_compaction.events import event_to_json
from litellm_compaction.stores import open_originals
from tests.cli.test_stores_recall import SECRET, Run, path, run
from tests.integration.harness import environment
from tests.proxy.test_mcp_server import compacted
from tests.recall.test_lookup import BIRD, FISH
from tests.stores.made import MemoryStore, SqliteStore
from tests.stores.test_originals import covered, kept, talk

__all__ = ["path", "run"]


def started(path: Path, *arguments: str, errors: TextIO = sys.stderr) -> Client:
    command = ["-m", "litellm_compaction.cli", "mcp", "--store", f"sqlite:///{path}", *arguments]
    given = environment(LITELLM_MASTER_KEY=SECRET, LITELLM_COMPACTION_HOME=str(path.parent))
    return Client(stdio_client(StdioServerParameters(command=sys.executable, args=command, env=given), errors))


async def asked(client: Client, tool: str, **given: object) -> tuple[str, bool]:
    answer = await client.call_tool(tool, given)
    [content] = answer.content
    assert content.type == "text"
    return content.text, answer.is_error


async def listed(client: Client) -> list[str]:
    text, _ = await asked(client, "describe_compactions")
    return [row.get("first_handle") for row in json.loads(text)["compactions"]]


@pytest.mark.slow
async def test_an_operator_looks_everything_up(path: Path, tmp_path: Path) -> None:
    """Of all tenants, also what was kept meanwhile; stderr stays empty."""
    with (tmp_path / "errors").open("w+") as errors:
        async with started(path, errors=errors) as client:
            assert len((await client.list_tools()).tools) == 3
            assert "typus" in (await asked(client, "search_history", query="fish"))[0]
            found, _ = await asked(client, "search_history", query="falcon")
            handle = found.split("handle ")[1].split()[0]
            assert "falcon" in (await asked(client, "get_message", handle=handle))[0]
            assert await asked(client, "get_message", handle="0" * 12) == ("not found", True)
            assert (await asked(client, "search_history", query=""))[1]
            assert (await asked(client, "search_history", query="walrus " * 15_000))[1] is False
            await _tell(path)
            openings = {covered(*said).hashes[1][:12] for said in (FISH, BIRD)}
            assert openings <= set(await listed(client))
            await _keep_more(path)
            assert "walrus 3" in (await asked(client, "search_history", query="walrus 3"))[0]
        errors.seek(0)
        assert errors.read() == ""


async def _tell(path: Path) -> None:
    store = SqliteStore(path, ttl_s=1000, max_bytes=1_000_000)
    for scope, said in (("scope-a", FISH), ("scope-b", BIRD)):
        await store.add_event(time.time(), event_to_json(compacted(scope, "tenant", covered(*said))))
    await store.aclose()


async def _keep_more(path: Path) -> None:
    store = MemoryStore(ttl_s=1000, max_bytes=1_000_000)
    originals = open_originals(f"sqlite:///{path}", store, ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
    assert originals is not None
    await kept(originals, covered(*talk(4, "walrus"), scope="scope-c", tenant="three"))
    await originals.aclose()


def test_without_originals_it_does_not_start(run: Run, tmp_path: Path) -> None:
    """It says how to have them, and makes no file."""
    other = tmp_path / "other.sqlite3"
    said = run("mcp", "--store", f"sqlite:///{other}", code=1, store=False)
    assert "keep_originals: compacted" in said
    assert list(tmp_path.glob("other*")) == []


def test_a_scope_that_is_not_clear_is_named(run: Run) -> None:
    """Before anything is served."""
    assert "2 scopes begin with 'scope-'" in run("mcp", "--scope", "scope-", code=1)
