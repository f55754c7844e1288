"""The SDK's own MCP client asks a real proxy over HTTP, each key for its own conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.integration.page_forms import ANNA, BERT
from tests.processes.test_recall import Running, running, told

__all__ = ["running"]


PATH = "/compaction/mcp"
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


@asynccontextmanager
async def client_of(running: Running, key: str, mode: str = "auto") -> AsyncIterator[Client]:
    url, headers = running.proxy.base_url + PATH, {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def asked(client: Client, tool: str, **given: object) -> tuple[str, bool]:
    answer = await client.call_tool(tool, given)
    [content] = answer.content
    assert content.type == "text"
    return content.text, answer.is_error


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_each_key_finds_its_own(running: Running, mode: str) -> None:
    """By search, handle and list, with clients of the SDK's both protocols; no log has a word of it."""
    async with client_of(running, ANNA, mode) as anna, client_of(running, BERT, mode) as bert:
        assert (await asked(anna, "search_history", query="walrus"))[1], "nothing is kept yet"
        running.compact(told("anna's work", "The walrus is called Archibald."))
        running.compact(told("bert's work", "The walrus is called Bartholomew."), BERT)
        [hit, *_] = running.found("walrus")
        [foreign, *_] = running.found("walrus", BERT)
        names = [tool.name for tool in (await anna.list_tools()).tools]
        assert names == ["search_history", "get_message", "describe_compactions"]
        found, _ = await asked(anna, "search_history", query="walrus")
        assert found.startswith("Found in the earlier conversation")
        assert "Archibald" in found
        assert "Bartholomew" not in found
        assert "Archibald" in (await asked(anna, "get_message", handle=hit["handle"]))[0]
        nothing = "Nothing was found in the earlier conversation for: Archibald"
        assert await asked(bert, "search_history", query="Archibald") == (nothing, False)
        for handle in (hit["handle"], "0123456789ab", "", "x" * 5000):
            assert await asked(bert, "get_message", handle=handle) == ("not found", True)
        for client, opening in ((anna, hit), (bert, foreign)):
            [row] = json.loads((await asked(client, "describe_compactions"))[0])["compactions"]
            assert row["tokens_before"] > row["tokens_after"] > 0
            assert row["messages"] > 2
            assert (await asked(client, "get_message", handle=row["first_handle"]))[1] is False
            assert opening["handle"] not in ("", row["last_handle"])
        assert "at most 400 are searched" in (await asked(anna, "search_history", query="walrus " * 14_000))[0]
    running.proxy.expect_logged(f"POST {PATH}")
    assert not running.proxy.logged("walrus|Archibald|Bartholomew|failed_open|Traceback")


def test_what_is_no_call_is_refused(running: Running) -> None:
    """A wrong key, none, other methods, half a message: in a word, without an echo in the log."""

    def send(content: bytes = b"", key: str = ANNA, method: str = "POST") -> httpx.Response:
        headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return running.proxy.client.request(method, PATH, content=content, headers=headers)

    body = json.dumps({**CALL, "params": {"name": "search_history", "arguments": {"query": "walrus"}}}).encode()
    for key in ("sk-wrong", ""):
        refused = send(body, key)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert "walrus" not in refused.text
    assert {send(method=method).status_code for method in ("GET", "DELETE", "PUT")} == {405}
    for bad in (b'{"walrus', b'["walrus"]', b'{"jsonrpc": "2.0", "id": 1, "method": 7, "params": "walrus"}'):
        assert send(bad).status_code == 400
    named = {"name": "walrus", "arguments": {"handle": "walrus"}}
    assert send(json.dumps({**CALL, "params": named}).encode()).json()["result"]["isError"] is True
    for params in ({"name": ["walrus"]}, {"name": "get_message", "arguments": "walrus"}):
        assert send(json.dumps({**CALL, "params": params}).encode()).json()["error"]["code"] == -32602
    assert send(b" " * 1_000_001).status_code == 413
    assert send(body).json()["result"]["isError"] is True, "nothing is kept"
    assert not running.proxy.logged("walrus|Traceback")
