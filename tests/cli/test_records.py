"""`records ID` as an operator uses it: numbers first, text only if it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from litellm_compaction.cli import main
from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.stores import digest, open_originals, open_store
from tests.stores.compactions import compaction
from tests.stores.test_originals import covered, kept, talk

SECRET = "sk-of-the-environment"
COVERED = covered(*talk(5, "walrus"), scope="scope", tenant="one")
KNOWN = replace(compaction(COVERED.hashes[-1], covered=5, text="The \x1b[31msummary."), window_tokens=1000)
RECORD = compaction_id("scope", COVERED.hashes[-1])
Run = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one record, beside its originals."""
    found = tmp_path / "store.sqlite3"

    async def fill() -> None:
        store = open_store(f"sqlite:///{found}", ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
        await store.put("scope", KNOWN)
        url = f"sqlite:///{found}"
        originals = open_originals(url, store, ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
        assert originals is not None
        await kept(originals, COVERED)
        await originals.aclose()
        await store.aclose()

    asyncio.run(fill())
    return found


@pytest.fixture
def run(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))

    def run(*arguments: str, code: int = 0) -> str:
        assert main([*arguments, "--store", f"sqlite:///{path}"]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


def test_show_tells_numbers_alone(run: Run) -> None:
    """By the beginning of an id, as other commands take it."""
    shown = run("records", RECORD[:6])
    assert RECORD in shown
    assert digest(KNOWN) in shown
    assert "5 messages" in shown
    assert "walrus" not in shown
    assert "summary." not in shown


def test_show_has_text_if_it_is_asked_for(run: Run) -> None:
    """The record, and each message with what became of it; nothing commands the terminal."""
    shown = run("records", "--text", RECORD)
    assert "summary." in shown
    assert "\x1b" not in shown
    assert "[2] assistant: verbatim\n    walrus 1\n[3] user: in the record\n    walrus 2\n" in shown


def test_undo_forgets_one(run: Run) -> None:
    """It is listed no more, and cannot be shown."""
    assert run("records", "--undo", RECORD[:6]) == "1 records forgotten.\n"
    assert "No records yet." in run("records")
    assert "no records have an id" in run("records", RECORD, code=1)
    assert "name the record" in run("records", "--undo", code=1)
