"""`litellm-compaction compact`: what it says, what it writes, and what it asks a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli import main
from tests.builders import chat
from tests.cli.conftest import QWEN

# Nobody listens there.
NOWHERE = "http://127.0.0.1:9/v1"

Run = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], str]:
    """Writes a request; its path."""

    def save(document: Any) -> str:
        path = tmp_path / "conversation.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
        return str(path)

    return save


# What takes more than a second says so; on a busy machine anything may.
_PROGRESS = re.compile(r"^.+ … \d+ s\n", re.MULTILINE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command for Qwen with 8,192 tokens; what it printed, or said on stderr where it failed."""
    for name in ("LM_STUDIO_API_BASE", "LM_STUDIO_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, code: int = 0, window: int = 8192) -> str:
        assert main(["compact", "--model", QWEN, "--window", str(window), *arguments]) == code
        captured = capsys.readouterr()
        said = _PROGRESS.sub("", captured.err)
        assert bool(said) is bool(code)
        return said if code else captured.out

    return run


def test_dry_run_says_what_would_be_done(run: Run, save: Callable[[Any], str]) -> None:
    """Kept and summarized by number, tokens before and a bound for after; nobody is asked, no text is shown."""
    said = run("--dry-run", "--api-base", NOWHERE, save(chat(30, words=150)))
    assert said.startswith("60 messages, 24,")
    assert f" tokens, for {QWEN} with 8,192.\n" in said
    rows = [line.split(maxsplit=2) for line in said.splitlines() if line.endswith(("kept", "summarized"))]
    assert [(numbers, what) for numbers, _, what in rows] == [("1", "kept"), ("2–58", "summarized"), ("59–60", "kept")]
    assert " → at most " in said
    assert said.endswith("Dry run: no model was asked.\n")
    assert "Question" not in said


def test_a_small_conversation_is_left_alone(run: Run, save: Callable[[Any], str]) -> None:
    """And said to be; the new request is the old one."""
    body = {"model": "any", "messages": chat(3), "temperature": 0.5}
    assert "Nothing to do: with room for the answer" in run(save(body))
    report = json.loads(run("--json", save(body)))
    assert (report["decided"], report["request"]) == ("below_trigger", body)
    assert report["tokens_before"] == report["tokens_after"]
