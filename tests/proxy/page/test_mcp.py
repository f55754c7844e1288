"""The route by which a key's MCP client looks up what its conversations lost."""

from __future__ import annotations

import json

import httpx
import httpx2
import pytest
from fastapi import FastAPI
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.routing import Route

from litellm_compaction.proxy.page.mcp import MCP_PATH, McpRoute
from litellm_compaction.recall import NOT_KEPT, Lookup
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.proxy.page.test_records import Broken, _visitor
from tests.recall.test_lookup import BIRD, FISH
from tests.stores.made import MemoryStore
from tests.stores.test_originals import SECRET, covered, kept

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


async def _application(rows: MemoryRows | None = None) -> FastAPI:
    originals = Originals(rows or MemoryRows(ttl_s=100, max_bytes=1_000_000), ttl_s=100, secret=lambda: SECRET)
    if rows is None:
        one, two = covered(*FISH, scope="a", tenant="one"), covered(*BIRD, scope="b", tenant="two")
        await kept(originals, one, two)
    app, store = FastAPI(), MemoryStore(ttl_s=100, max_bytes=1_000_000)
    app.router.routes.append(Route(MCP_PATH, McpRoute(Lookup(originals), store, _visitor)))
    return app


async def _client(rows: MemoryRows | None = None) -> httpx.AsyncClient:
    app = await _application(rows)
    accept = {"Accept": "application/json, text/event-stream"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy", headers=accept)


async def _asked(client: httpx.AsyncClient, key: str, tool: str, **given: object) -> tuple[str, bool]:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": given}}
    answer = await client.post(MCP_PATH, json=call, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    result = answer.json()["result"]
    return result["content"][0]["text"], result["isError"]


async def test_each_key_asks_a_server_of_its_own() -> None:
    """None sees what another key's has found; an administrator, who sees all numbers, sees no text of others."""
    async with await _client() as client:
        found, _ = await _asked(client, "one", "search_history", query="whale shark")
        handle = found.split("handle ")[1].split()[0]
        assert (await _asked(client, "one", "get_message", handle=handle))[1] is False
        for other in ("two", "admin"):
            assert await _asked(client, other, "get_message", handle=handle) == (NOT_KEPT, True)
            assert "Rhincodon" not in (await _asked(client, other, "search_history", query="whale shark"))[0]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_sdks_own_client_is_served(mode: str) -> None:
    """By both of its protocols."""
    http = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(await _application()), headers={"Authorization": "Bearer one"}
    )
    async with http, Client(streamable_http_client(f"http://proxy{MCP_PATH}", http_client=http), mode=mode) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["search_history", "get_message", "describe_compactions"]
        [content] = (await client.call_tool("search_history", {"query": "whale shark"})).content
        assert "Rhincodon" in content.text


_CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


@pytest.mark.parametrize(
    ("method", "key", "body", "status"),
    [
        ("GET", "three", b"{walrus", 401),
        ("POST", "three", b"{walrus", 401),
        ("GET", "one", b"", 405),
        ("DELETE", "one", b"", 405),
        ("PUT", "one", b"", 405),
        ("POST", "one", b'{"walrus', 400),
        ("POST", "one", b'["walrus"]', 400),
        ("POST", "one", b'{"jsonrpc": "2.0", "id": 1, "method": 7, "params": "walrus"}', 400),
        ("POST", "one", json.dumps({**_CALL, "params": {"name": ["walrus"]}}).encode(), 200),
        ("POST", "one", json.dumps({**_CALL, "params": {"name": "x", "arguments": "walrus"}}).encode(), 200),
        ("POST", "one", b" " * 1_000_001, 413),
    ],
)
async def test_what_is_no_call_is_refused(
    method: str, key: str, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong key, other methods, half a message, other shapes: in a word, without an echo in the log."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with await _client() as client:
        answer = await client.request(method, MCP_PATH, content=body, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "walrus" not in answer.text
    assert status != 200 or answer.json()["error"]["code"] == -32602
    assert "walrus" not in caplog.text


async def test_what_fails_is_told_without_words(caplog: pytest.LogCaptureFixture) -> None:
    """Neither query nor text is in answer or log."""
    async with await _client(Broken(ttl_s=100, max_bytes=1000)) as client:
        answer = await _asked(client, "one", "search_history", query="rhinoceros")
    assert answer == ("this has failed; the proxy's log says where", True)
    assert "rhinoceros" not in caplog.text
    assert "with the words" not in caplog.text
