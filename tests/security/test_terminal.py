"""Threat: the terminal and the log as places where strangers' text acts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from litellm_compaction.cli import main
from litellm_compaction.events import HarmlessRecords, harmless

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
