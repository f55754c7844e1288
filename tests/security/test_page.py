"""Threat: the page, the terminal and the log as ways in, or as places where strangers' text acts (issue 12)."""

from __future__ import annotations

import base64
import json
import logging
import os
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from litellm_compaction.cli import main
from litellm_compaction.config import LIVE
from litellm_compaction.events import HarmlessRecords, harmless
from litellm_compaction.places import make_private
from tests.integration.bench import Bench
from tests.integration.page_forms import PAGE, hidden, look, send

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


_FORM = {"content-type": "application/x-www-form-urlencoded"}
_OFF = b"do=save&mode=off"
# (method, path below the page, headers, body, status): what an administrator's browser may be made to send.
_ODD: dict[str, tuple[str, str, dict[str, str], bytes, int]] = {
    "a body of 70 kB": ("POST", "", _FORM, b"do=save&mode=" + b"x" * 70_000, 415),
    "200 fields": ("POST", "", _FORM, b"&".join(b"a%d=1" % number for number in range(200)), 415),
    "JSON": ("POST", "", {"content-type": "application/json"}, b'{"do": "save", "mode": "off"}', 415),
    "plain text, which other sites may send": ("POST", "", {"content-type": "text/plain"}, _OFF, 415),
    "no type": ("POST", "", {}, _OFF, 415),
    "no UTF-8": ("POST", "", _FORM, b"do=save&mode=\xff\xfe", 415),
    "another site": ("POST", "", {**_FORM, "origin": "https://evil.example"}, _OFF, 403),
    "no origin at all": ("POST", "", {**_FORM, "origin": "null"}, _OFF, 403),
    "the same site": ("POST", "", {**_FORM, "sec-fetch-site": "same-site"}, _OFF, 403),
    "another method": ("PUT", "", _FORM, _OFF, 405),
    "deleting": ("DELETE", "", {}, b"", 405),
    "a message of the address": ("GET", "?done=<script>alert(1)</script>&next=https://evil.example", {}, b"", 200),
}


@pytest.mark.parametrize("odd", _ODD)
def test_an_administrators_browser_cannot_be_used(office: Bench, odd: str) -> None:
    """Nothing is saved by what is no form of the page's own; nothing of the address is shown, or followed."""
    method, path, headers, body, status = _ODD[odd]
    known = {"authorization": f"Basic {base64.b64encode(b'x:sk-admin').decode()}"}
    answer = office.proxy.client.request(method, f"{PAGE}{path}", headers={**known, **headers}, content=body)
    assert answer.status_code == status
    assert "evil" not in answer.text + answer.headers.get("location", "")
    assert "alert(1)" not in answer.text
    assert not [name for name in answer.headers if name.startswith("access-control") and "evil" in answer.headers[name]]
    assert "changed here to" not in look(office.proxy, "sk-admin").text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(["save", "reset", "", "other"]),
    st.dictionaries(
        st.sampled_from([*LIVE, "reset", "x"]),
        st.sampled_from(["guard", "off", "0.5", "nan", "1e999", "-1", "*", "", "on", "\0", "<b>"])
        | st.text(max_size=9),
        max_size=6,
    ),
    st.binary(max_size=30),
)
def test_any_form_is_saved_or_refused_by_name(office: Bench, do: str, fields: dict[str, str], noise: bytes) -> None:
    """The page never fails, whatever an administrator's browser sends."""
    shown = hidden(look(office.proxy, "sk-admin").text, "revision")
    body = urlencode({"do": do, "revision": shown, **fields}, errors="replace").encode()
    headers = {**_FORM, "authorization": "Bearer sk-admin"}
    answer = office.proxy.client.post(PAGE, content=body + (b"&" + noise if noise else b""), headers=headers)
    send(office.proxy, {"do": "reset", "reset": "*"}, "sk-admin")
    assert answer.status_code in (200, 303, 409, 415, 422)


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
