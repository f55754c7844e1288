"""Threat: the page, the terminal and the log as ways in, or as places where strangers' text acts (issue 12)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from litellm_compaction.cli import main
from litellm_compaction.config import LIVE
from litellm_compaction.events import HarmlessRecords, harmless
from tests.integration.bench import Bench
from tests.integration.page_forms import PAGE, look, reset

# What terminals and editors obey, as a model's name may have it.
_COMMANDS = {
    "colour": "\x1b[31mqwen",
    "new line": "qwen\n2026-01-01 ERROR forged",
    "carriage return": "qwen\rforged",
    "backspace": "qwen\x08\x08",
    "right to left": "qwen\u202enewq",
    "unseen": "qwen\u200b",
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
    "doctor without a file": ["doctor", "--config", "NAME"],
    "count": ["count", "--model", "NAME", "REQUEST"],
    "count without a file": ["count", "--model", "x", "--tokenizer", "NAME", "NAME"],
    "connect": ["connect", "NAME"],
    "up": ["up", "--config", "NAME"],
}


@pytest.mark.parametrize("line", _LINES)
@pytest.mark.parametrize("name", ["\x1b[31m\x9bq\u202ew\x08\r"])
def test_no_command_writes_what_commands_a_terminal(
    line: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of models and files, and what servers and errors say: on both outputs of every command."""
    files = {"REQUEST": _REQUEST, "CONFIG": json.dumps(_CONFIG)}
    for file, text in files.items():
        (tmp_path / file).write_text(text.replace("NAME", json.dumps(name)[1:-1]))
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))
    main([str(tmp_path / part) if part in files else part.replace("NAME", name) for part in _LINES[line]])
    written = "".join(capfd.readouterr())
    assert written
    assert [char for char in written if not char.isprintable() and char != "\n"] == []


_OFF = b'{"values": {"mode": "off"}}'
_KEYED = {"authorization": "Bearer sk-admin"}
_SENT_BY_A_BROWSER = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
# (method, path below the page, headers, body, status): what somebody sends, or makes an administrator's browser send.
_ODD: dict[str, tuple[str, str, dict[str, str], bytes, int]] = {
    "another site's form": ("POST", "/settings", _SENT_BY_A_BROWSER, _OFF, 401),
    "a browser's password": ("POST", "/settings", {"authorization": "Basic eDpzay1hZG1pbg=="}, _OFF, 401),
    "a key as a password": ("POST", "/settings", {"authorization": "Basic sk-admin"}, _OFF, 401),
    "a cookie": ("POST", "/settings", {"cookie": "token=sk-admin; key=sk-admin"}, _OFF, 401),
    "a key in the address": ("GET", "/events?key=sk-admin&api_key=sk-admin", {}, b"", 401),
    "a body of 70 kB": ("POST", "/settings", _KEYED, b'{"values": {"mode": "' + b"x" * 70_000 + b'"}}', 413),
    "a form": ("POST", "/settings", _KEYED, b"do=save&mode=off", 400),
    "deep JSON": ("POST", "/settings", _KEYED, b"[" * 60_000, 400),
    "another shape": ("POST", "/settings", _KEYED, b'{"values": ["mode"]}', 400),
    "no UTF-8": ("POST", "/settings", _KEYED, b'{"values": {"mode": "\xff\xfe"}}', 400),
    "another method": ("PUT", "/settings", _KEYED, _OFF, 405),
    "deleting": ("DELETE", "", _KEYED, b"", 405),
    "a form for the page": ("POST", "", _KEYED, b"do=save&mode=off", 405),
    "a message of the address": ("GET", "?done=<script>alert(1)</script>&next=https://evil.example", {}, b"", 200),
}


@pytest.mark.parametrize("odd", _ODD)
def test_an_administrators_browser_cannot_be_used(office: Bench, odd: str) -> None:
    """Nothing is saved without the key in the page's own header; nothing of the address is shown, or followed."""
    method, path, headers, body, status = _ODD[odd]
    answer = office.proxy.client.request(method, f"{PAGE}{path}", headers=headers, content=body)
    assert answer.status_code == status
    assert "evil" not in answer.text + answer.headers.get("location", "")
    assert "alert(1)" not in answer.text
    assert not [name for name in answer.headers if name.startswith("access-control") and "evil" in answer.headers[name]]
    assert not any(row["is_changed"] for row in look(office.proxy, key="sk-admin").json()["settings"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from([*LIVE, "store", "x"]),
        st.sampled_from(
            ["guard", "off", "0.5", "nan", "1e999", "-1", "*", "", "on", "\0", "<b>", "\ud800", 0.5, None, []]
        )
        | st.text(max_size=9),
        max_size=6,
    ),
    st.binary(max_size=30),
)
def test_any_values_are_saved_or_refused_by_name(office: Bench, values: dict[str, Any], noise: bytes) -> None:
    """The page never fails, whatever an administrator's key sends."""
    body = json.dumps({"values": values}).encode() + noise
    answer = office.proxy.client.post(f"{PAGE}/settings", content=body, headers=_KEYED)
    reset(office.proxy, "sk-admin")
    assert answer.status_code in (200, 400, 422)
    if answer.status_code == 422:
        assert answer.json()["error"]["problems"].keys() <= {*LIVE, *values}
