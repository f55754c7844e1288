"""The route by which a key's MCP client looks up what its conversations lost."""

from __future__ import annotations

import json
import sys

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.routing import Route

from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.mcp import MCP_PATH, McpRoute
from litellm_compaction.recall import Lookup
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import MemoryRows
from tests.recall.test_lookup import BIRD, FISH
from tests.stores.made import MemoryStore
from tests.stores.test_originals import SECRET, covered, kept

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

KEYS = {"Bearer one": "one", "Bearer two": "two"}
ACCEPT = {"Accept": "application/json, text/event-stream"}


async def _visitor(request: Request) -> Visitor | None:
    tenant = KEYS.get(request.headers.get("authorization", ""))
    # Whoever sees all numbers sees no text of others.
    return None if tenant is None else Visitor(role="proxy_admin", tenant=tenant, auth=None)


async def _client(rows: MemoryRows | None = None) -> httpx.AsyncClient:
    originals = Originals(rows or MemoryRows(ttl_s=100, max_bytes=1_000_000), ttl_s=100, secret=lambda: SECRET)
    if rows is None:
        one, two = covered(*FISH, scope="a", tenant="one"), covered(*BIRD, scope="b", tenant="two")
        await kept(originals, one, two)
    app, store = FastAPI(), MemoryStore(ttl_s=100, max_bytes=1_000_000)
    app.router.routes.append(Route(MCP_PATH, McpRoute(Lookup(originals), store, _visitor)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy", headers=ACCEPT)


async def _asked(client: httpx.AsyncClient, key: str, tool: str, **given: object) -> tuple[str, bool]:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": given}}
    answer = await client.post(MCP_PATH, json=call, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    result = answer.json()["result"]
    return result["content"][0]["text"], result["isError"]


async def test_each_key_asks_a_server_of_its_own() -> None:
    """Requests need no session, and none sees what another key's has found."""
    async with await _client() as client:
        found, _ = await _asked(client, "one", "search_history", query="whale shark")
        assert "Rhincodon typus" in found
        handle = found.split("handle ")[1].split()[0]
        assert await _asked(client, "two", "get_message", handle=handle) == ("not found", True)
        nothing = "Nothing was found in the earlier conversation for: Rhincodon, typus"
        assert await _asked(client, "two", "search_history", query="Rhincodon typus") == (nothing, False)
        assert (await _asked(client, "one", "get_message", handle=handle))[1] is False


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_there_are_no_sessions(method: str) -> None:
    """So there is nothing to listen to and nothing to end: MCP asks for a 405."""
    async with await _client() as client:
        answer = await client.request(method, MCP_PATH, headers={"Authorization": "Bearer one"})
        assert answer.status_code == 405


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_a_key_there_is_nothing(method: str) -> None:
    """As for the page, whatever is sent."""
    async with await _client() as client:
        answer = await client.request(method, MCP_PATH, content=b"{walrus", headers={"Authorization": "Bearer three"})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "walrus" not in answer.text


async def test_an_older_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy goes on without it."""
    monkeypatch.delitem(sys.modules, "litellm_compaction.proxy.mcp_server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    async with await _client() as client:
        answer = await client.post(MCP_PATH, json={}, headers={"Authorization": "Bearer one"})
        assert answer.status_code == 501
        assert "LiteLLM 1.103" in answer.json()["error"]["message"]


class _Broken(MemoryRows):
    async def find(self, scope: str, keys: object) -> list[object]:  # type: ignore[override]
        raise RuntimeError("with the words of a conversation")


async def test_what_fails_is_told_without_words(caplog: pytest.LogCaptureFixture) -> None:
    """Neither query nor text is in answer or log."""
    async with await _client(_Broken(ttl_s=100, max_bytes=1000)) as client:
        answer = await _asked(client, "one", "search_history", query="rhinoceros")
    assert answer == ("this has failed; the proxy's log says where", True)
    assert "rhinoceros" not in json.dumps(answer) + caplog.text
    assert "with the words" not in caplog.text
