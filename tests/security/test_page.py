"""Threat: the page, the terminal and the log as ways in, or as places where strangers' text acts (issue 12)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Request

from litellm_compaction.cli import main
from litellm_compaction.config import settings_from
from litellm_compaction.events import HarmlessRecords, harmless
from litellm_compaction.places import make_private
from litellm_compaction.proxy.callback import CompactionHandler
from litellm_compaction.proxy.page import routes
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.data import Surroundings
from tests.security.hooks import Router
from tests.stores.made import MemoryStore

# LiteLLM's own, while its proxy is imported.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

# What terminals and editors obey, as a model's name may have it.
_COMMANDS = {
    "colour": "\x1b[31mqwen",
    "title": "\x1b]0;owned\x07",
    "8-bit escape": "\x9b31mqwen",
    "new line": "qwen\n2026-01-01 ERROR forged",
    "carriage return": "qwen\rforged",
    "backspace": "qwen\x08\x08",
    "right to left": "qwen\u202enewq",
    "isolate": "qwen\u2066x",
    "unseen": "qwen\u200b",
    "line separator": "qwen\u2028x",
}


@pytest.mark.parametrize("name", _COMMANDS.values(), ids=_COMMANDS)
def test_names_do_not_command_a_terminal_or_forge_a_log_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are spelled out; ordinary names in any script stay as they are."""
    assert harmless(name).isprintable()
    assert harmless("qwen-3 ü 模型 🙂") == "qwen-3 ü 模型 🙂"
    logger = logging.getLogger("harmless")
    logger.addFilter(HarmlessRecords())
    logger.warning("compacted model=%s tokens=%d", name, 7)
    assert caplog.messages[-1].isprintable()
    assert caplog.messages[-1].endswith("tokens=7")


_REQUEST = json.dumps({"messages": [{"role": "\x1b[31mu\x9bser", "content": "hi"}]})
_CONFIG = {
    "model_list": [
        {"model_name": "NAME", "litellm_params": {"model": "lm_studio/NAME", "api_base": "http://127.0.0.1:9/v1"}}
    ],
    "litellm_settings": {"callbacks": ["NAME"]},
}
_LINES = {
    "doctor": ["doctor", "--config", "CONFIG"],
    "doctor, JSON": ["doctor", "--json", "--config", "CONFIG"],
    "doctor without a file": ["doctor", "--config", "NAME"],
    "count": ["count", "--model", "NAME", "--api-base", "http://127.0.0.1:9", "REQUEST"],
    "count, JSON": ["count", "--json", "--model", "NAME", "--api-base", "http://127.0.0.1:9", "REQUEST"],
    "count without a file": ["count", "--model", "NAME", "NAME"],
    "compact": ["compact", "--dry-run", "--model", "NAME", "--window", "4096", "REQUEST"],
    "compact with a server": [
        "compact",
        "--model",
        "NAME",
        "--window",
        "1024",
        "--api-base",
        "http://127.0.0.1:9",
        "LONG",
    ],
    "up": ["up", "--config", "NAME"],
}


@pytest.mark.parametrize("line", _LINES)
@pytest.mark.parametrize("name", ["\x1b[31mqwen", "\x9b31mqwen\u202e", "qwen\x08\r"])
def test_no_command_writes_what_commands_a_terminal(
    line: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of models and files, and what servers and errors say: on both outputs of every command."""
    long = [{"role": "user" if number % 2 == 0 else "assistant", "content": f"{name} " * 99} for number in range(9)]
    files = {"REQUEST": _REQUEST, "LONG": json.dumps({"messages": long}), "CONFIG": json.dumps(_CONFIG)}
    for file, text in files.items():
        (tmp_path / file).write_text(text.replace("NAME", json.dumps(name)[1:-1]))
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))
    main([str(tmp_path / part) if part in files else part.replace("NAME", name) for part in _LINES[line]])
    written = "".join(capfd.readouterr())
    assert written
    assert [char for char in written if not char.isprintable() and char != "\n"] == []


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PATCH"])
async def test_the_page_itself_allows_no_other_origin(method: str) -> None:
    """A preflight finds no route of ours; what answers it on a proxy is LiteLLM's own CORS."""
    served = routes._Page(SimpleNamespace(store=MemoryStore(ttl_s=60, max_bytes=1 << 20)))  # type: ignore[arg-type]
    app = FastAPI()
    app.add_api_route("/", served.answer, methods=["GET", "POST"])
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.example") as client:
        answer = await client.request(method, "/", headers=asked)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


_FORM = {"content-type": "application/x-www-form-urlencoded"}
# (method, path, headers, body, status): what an administrator's browser may be made to send.
_ODD: dict[str, tuple[str, str, dict[str, str], bytes, int]] = {
    "a body of 70 kB": ("POST", "/", _FORM, b"do=save&mode=" + b"x" * 70_000, 415),
    "200 fields": ("POST", "/", _FORM, b"&".join(b"a%d=1" % number for number in range(200)), 415),
    "JSON": ("POST", "/", {"content-type": "application/json"}, b'{"do": "save", "mode": "off"}', 415),
    "plain text, which other sites may send": ("POST", "/", {"content-type": "text/plain"}, b"do=save&mode=off", 415),
    "no type": ("POST", "/", {}, b"do=save&mode=off", 415),
    "no UTF-8": ("POST", "/", _FORM, b"do=save&mode=\xff\xfe", 415),
    "another site": ("POST", "/", {**_FORM, "origin": "https://evil.example"}, b"do=save&mode=off", 403),
    "no origin at all": ("POST", "/", {**_FORM, "origin": "null"}, b"do=save&mode=off", 403),
    "the same site": ("POST", "/", {**_FORM, "sec-fetch-site": "same-site"}, b"do=save&mode=off", 403),
    "a password of no origin": (
        "POST",
        "/",
        {**_FORM, "authorization": "Basic eDp5"},
        b"do=save&mode=off",
        403,
    ),
    "another method": ("PUT", "/", _FORM, b"do=save&mode=off", 405),
    "deleting": ("DELETE", "/", {}, b"", 405),
    "a path": ("GET", "/../etc/passwd", {}, b"", 404),
    "a path in disguise": ("GET", "/%2e%2e%2fetc%2fpasswd", {}, b"", 404),
    "a message of the address": ("GET", "/?done=<script>alert(1)</script>&next=https://evil.example", {}, b"", 200),
}


@pytest.mark.parametrize("odd", _ODD)
async def test_an_administrators_browser_cannot_be_used(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Nothing is saved by what is no form of the page's own; nothing of the address is shown, or followed."""

    async def administrator(request: Request) -> Visitor | None:
        return Visitor(role="proxy_admin", tenant="t", auth=None)

    monkeypatch.setattr(routes, "visitor_of", administrator)
    written: list[object] = []

    async def write(around: object, form: object, *_: object) -> str:
        written.append(form)
        return "same"

    monkeypatch.setattr(routes, "write", write)
    handler = CompactionHandler(settings_from({"store": "memory://"}))
    assert handler._live is not None
    assert handler._turns is not None
    around = Surroundings(
        live=handler._live,
        guards=handler._gate.guards,
        compactor=handler._compactor,
        store=handler._store,
        turns=handler._turns,
        router=Router,
    )
    served = routes._Page(around)
    app = FastAPI()
    app.add_api_route("/", served.answer, methods=["GET", "POST"])
    method, path, headers, body, status = _ODD[odd]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.example") as client:
        answer = await client.request(method, path, headers=headers, content=body)
        assert answer.status_code == status
        assert written == []
        assert "evil" not in answer.text + answer.headers.get("location", "")
        assert "alert(1)" not in answer.text
        # What the page's own form sends arrives: the others were refused for what they are.
        assert (await client.post("/", headers=_FORM, content=b"do=save&mode=off")).status_code == 303
    assert written[-1] == {"do": "save", "mode": "off"}
    await handler._compactor.aclose()


@pytest.mark.skipif(os.name != "posix", reason="rights are POSIX's")
def test_closing_a_file_does_not_follow_a_link(tmp_path: Path) -> None:
    """What somebody has put in its place leads to a file that is not ours to change."""
    target, link, own = tmp_path / "target", tmp_path / "store-wal", tmp_path / "own"
    for path in (target, own):
        path.write_text("x")
        path.chmod(0o644)
    link.symlink_to(target)
    with pytest.raises(OSError, match="link"):
        make_private(link)
    make_private(own)
    assert (target.stat().st_mode & 0o777, own.stat().st_mode & 0o777) == (0o644, 0o600)
