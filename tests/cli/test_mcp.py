"""`litellm-compaction mcp`: the SDK's own client asks a child over its pipes; odd lines; a proxy that is away."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from litellm_compaction.cli import main
from litellm_compaction.cli.mcp import served

Ask = Callable[..., list[dict[str, Any]]]
HIT = {"hits": [{"handle": "abc", "pieces": [{"role": "user", "text": "The fish 🐟 is here."}]}], "words": ["fish"]}


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """What is said to lines, by a proxy that knows a hit and one message."""

    def proxy(request: httpx.Request) -> httpx.Response:
        if request.headers["authorization"] != "Bearer sk-anna":
            return httpx.Response(401, json={"error": {"message": "a key of this proxy is needed", "code": 401}})
        if request.url.path == "/base/compaction/recall":
            if json.loads(request.content) == {"query": "fish"}:
                return httpx.Response(200, json=HIT)
            return httpx.Response(404, json={"error": {"message": "not found", "code": 404}})
        raise httpx.ConnectError("refused")

    def asked(*lines: object, key: str = "sk-anna") -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}"}
        transport = httpx.MockTransport(proxy)
        with httpx.Client(base_url="http://proxy/base/", transport=transport, headers=headers) as http:
            assert served([line if isinstance(line, str) else json.dumps(line) for line in lines], http) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return asked


def call(tool: str, **given: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": tool, "arguments": given}}


def test_a_client_is_greeted_in_its_version(ask: Ask) -> None:
    """The newest that is known for any other; a notification is not answered."""
    for wanted, given in (("2025-06-18", "2025-06-18"), ("1999-01-01", "2025-11-25")):
        hello = {"id": 1, "method": "initialize", "params": {"protocolVersion": wanted}}
        [answer] = ask(hello, {"method": "notifications/initialized"})
        assert answer["result"]["protocolVersion"] == given
    [tools, pong] = ask({"id": "a", "method": "tools/list"}, {"id": 0, "method": "ping"})
    assert [tool["name"] for tool in tools["result"]["tools"]] == ["search_history", "get_message"]
    assert pong == {"jsonrpc": "2.0", "id": 0, "result": {}}


@pytest.mark.parametrize(
    ("tool", "given", "key", "said", "is_error"),
    [
        ("search_history", {"query": "fish"}, "sk-anna", "The fish", False),
        ("search_history", {"query": "fish"}, "sk-wrong", "a key of this proxy is needed", True),
        ("get_message", {"handle": "../settings"}, "sk-anna", "not found", True),
        ("forget_all", {}, "sk-anna", "not found", True),
    ],
)
def test_a_tool_says_what_the_proxy_says(ask: Ask, tool: str, given: Any, key: str, said: str, is_error: bool) -> None:
    """As text for a model; what fails is an answer, too."""
    [answer] = ask(call(tool, **given), key=key)
    result = answer["result"]
    assert said in repr(result["content"])
    assert (answer["id"], result["isError"]) == (7, is_error)


@pytest.mark.parametrize(
    "line", ["{", "5", '{"id": 1}', '{"id": 1, "method": "initialize"}', '{"id": 1, "method": []}']
)
def test_a_malformed_line_is_an_error_and_the_next_is_answered(ask: Ask, line: str) -> None:
    """And the next line is answered."""
    [refused, pong] = ask(line, {"id": 2, "method": "ping"})
    assert refused["error"]["code"] == -32600
    assert pong["id"] == 2
    [unknown] = ask({"id": 3, "method": "server/discover"})
    assert unknown["error"]["code"] == -32601


def test_lines_are_utf_8_in_any_locale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON is, whatever the terminal's is; what is none is an error."""
    lines = io.BytesIO(b'{"id": "\xc3\xbc", "method": "ping"}\n\xff\n')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, encoding="ascii"))
    monkeypatch.setenv("LITELLM_KEY", "sk")
    assert main(["mcp"]) == 0
    pong, refused = map(json.loads, capsys.readouterr().out.splitlines())
    assert (pong["id"], refused["error"]["code"]) == ("ü", -32600)


@pytest.mark.parametrize(("url", "key"), [("http://host:port", "sk"), ("http://127.0.0.1:4000", "")])
def test_a_bad_address_or_a_missing_key_ends_it_at_once(
    url: str, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """No address, or no key."""
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path))
    monkeypatch.delenv("LITELLM_MASTER_KEY", raising=False)
    monkeypatch.setenv("LITELLM_KEY", key)
    assert main(["mcp", "--url", url]) == 2
    assert ("not the address" if key else "LITELLM_KEY is not set") in capsys.readouterr().err
