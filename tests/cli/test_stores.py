"""`events`, `records`, `recall` and `purge` as an operator uses them, on a file that a proxy has written."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from litellm_compaction.cli import main
from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.events import CompactionEvent, TruncationAlarm, event_to_json
from litellm_compaction.stores import open_store, originals_of
from tests.cli.conftest import config
from tests.recall.test_lookup import BIRD
from tests.stores.compactions import compaction
from tests.stores.test_originals import covered, kept, talk

SECRET = "sk-of-the-environment"
TOLD = CompactionEvent(
    outcome="compacted",
    phase="pre_request",
    model="lm_studio/qwen",
    window_tokens=8192,
    window_source="api/v1",
    tokens_before=10_600,
    tokens_after=1986,
    excerpts=3,
    excerpt_tokens=1412,
    compaction_id="aaaa",
    continues_id="bbbb",
)
ALARM = TruncationAlarm(
    model="qwen", window_tokens=4096, expected_tokens=9000, reported_tokens=4096, reason="prompt_far_below_count"
)
EVENTS = (event_to_json(TOLD), event_to_json(ALARM), '{"event": "from the future"}')
WALRUS = covered(*talk(5, "walrus"), scope="scope-a", tenant="one")
KNOWN = replace(compaction(WALRUS.hashes[-1], covered=5, text="The \x1b[31msummary."), window_tokens=1000)
RECORD = compaction_id("scope-a", WALRUS.hashes[-1])
Run = Callable[..., str]


async def _fill(url: str, *, originals: bool) -> None:
    store = open_store(url, ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
    await store.put("scope-a", KNOWN)
    await store.put("scope-b", compaction("h2", covered=7))
    await store.put_fact("scope-a", "ratio", "1.1")
    now_s = time.time()
    for number, text in enumerate(EVENTS):
        await store.add_event(now_s + number, text)
    if originals:
        beside = originals_of(store, ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
        assert beside is not None
        await kept(beside, WALRUS, covered(*BIRD, scope="scope-b", tenant="two"))
        await beside.aclose()
    await store.aclose()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with the records and originals of two tenants, a fact, and three events of today."""
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))
    found = tmp_path / "store.sqlite3"
    asyncio.run(_fill(f"sqlite:///{found}", originals=True))
    return found


@pytest.fixture
def run(path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on the store; what it printed, or its error."""

    def run(*arguments: str, code: int = 0, store: bool = True) -> str:
        assert main([*arguments, *(["--store", f"sqlite:///{path}"] if store else [])]) == code
        captured = capsys.readouterr()
        return captured.err if code and captured.err else captured.out

    return run


def scopes(run: Run) -> set[str]:
    """Those that `records` shows."""
    return {row.split()[1] for row in run("records").splitlines()[1:-1]}


def test_a_record_tells_numbers_and_text_only_if_it_is_asked_for(run: Run) -> None:
    """By the beginning of an id; nothing commands the terminal."""
    assert scopes(run) == {"scope-a", "scope-b"}
    shown = run("records", RECORD[:6])
    assert (RECORD in shown, "5 messages" in shown) == (True, True)
    assert (shown.count("walrus"), shown.count("summary.")) == (0, 0)
    shown = run("records", "--text", RECORD)
    assert ("summary." in shown, "\x1b" in shown) == (True, False)
    assert "[2] assistant: verbatim\n    walrus 1\n[3] user: in the record\n    walrus 2\n" in shown


def test_undo_forgets_one(run: Run) -> None:
    """It is listed no more, and cannot be shown; which one has to be said."""
    assert "name the record" in run("records", "--undo", code=1)
    assert run("records", "--undo", RECORD[:6]) == "1 records forgotten.\n"
    assert scopes(run) == {"scope-b"}
    assert "no records have an id" in run("records", RECORD, code=1)


@pytest.mark.parametrize(
    ("arguments", "left", "events"),
    [
        (["--scope", "scope-a"], {"scope-b"}, 3),
        (["--older-than", "0.05"], {"scope-a", "scope-b"}, 3),
        (["--older-than", "1 h"], {"scope-a", "scope-b"}, 3),
        (["--older-than", "0m"], set(), 2),
        (["--scope", "scope-b", "--older-than", "1"], {"scope-a", "scope-b"}, 3),
        (["--all"], set(), 0),
    ],
)
def test_purge_deletes_what_is_named(run: Run, path: Path, arguments: list[str], left: set[str], events: int) -> None:
    """And no more, with the originals; the file holds the text no longer."""
    gone = 2 - len(left)
    said = run("purge", *arguments, "--yes").splitlines()
    assert said[0] == f"This deletes {gone} of 2 records, and the originals that they cover."
    assert said[-1] == f"{gone} records and {gone} parts of originals deleted."
    assert ("facts and events" in said[1]) == ("--scope" not in arguments)
    assert scopes(run) == left
    if left == {"scope-b"}:
        assert "walrus 1" not in run("recall", "walrus")
        assert "falcon" in run("recall", "falcon")
    elif not left:
        assert "no originals" in run("recall", "falcon", code=1)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM line").fetchone() == (events,)
    connection.close()


@pytest.mark.parametrize("arguments", [[], ["--all", "--scope", "a"], ["--all", "--older-than", "1"]])
def test_purge_wants_to_know_what(run: Run, arguments: list[str]) -> None:
    """Nothing by default, and no contradiction."""
    assert "name what to delete" in run("purge", "--yes", *arguments, code=1)
    assert len(scopes(run)) == 2


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("Yes", 0, 0), ("", 1, 2), ("n", 1, 2)])
def test_purge_asks(run: Run, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int) -> None:
    """It says how many first; only a yes deletes, and nobody's silence."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert "add --yes" in run("purge", "--all", code=1)
    terminal = io.StringIO(f"{answer}\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert run("purge", "--all", code=code).startswith("This deletes 2 of 2 records")
    assert len(scopes(run)) == left


@pytest.mark.parametrize("key", ["sk-of-another-proxy", ""])
def test_with_another_key_records_are_counted_and_deleted(run: Run, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Or with none: it says what to do in place of an empty list, and a purge needs no key."""
    monkeypatch.setenv("LITELLM_MASTER_KEY", key)
    for said in (run("records"), run("records", RECORD, code=1), run("records", RECORD, "--undo", code=1)):
        assert "2 records cannot be read" in said
        assert "Set LITELLM_MASTER_KEY to the proxy's" in said
        assert "No records yet" not in said
    assert "1 records and 1 parts of originals deleted." in run("purge", "--scope", "scope-a", "--yes")
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    assert scopes(run) == {"scope-b"}


def test_recall_searches_one_scope_or_all(run: Run) -> None:
    """A scope by its beginning; nothing of another one is shown; JSON for programs."""
    assert "falcon" in run("recall", "--scope", "scope-b", "falcon")
    assert run("recall", "--scope", "scope-a", "falcon").endswith("for: falcon\n")
    assert "2 scopes begin with 'scope-'" in run("recall", "--scope", "scope-", "falcon", code=1)
    assert "falcon" in str(json.loads(run("recall", "--json", "falcon"))["hits"])


@pytest.mark.parametrize("written", ["sk-else", "os.environ/ELSE", None])
def test_the_key_is_the_configs_then_the_environments(
    run: Run, path: Path, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, written: str | None
) -> None:
    """Another one reads nothing and is told so; no key is made."""
    general = {"master_key": written} if written else {}
    named = str(write(config(settings={"store": f"sqlite:///{path}"}, general_settings=general)))
    if written is None:
        assert "falcon" in run("recall", "--config", named, "falcon", store=False)
        monkeypatch.delenv("LITELLM_MASTER_KEY")
    assert "no originals here that can be read" in run("recall", "--config", named, "falcon", code=1, store=False)
    monkeypatch.setenv("ELSE", SECRET)
    if written == "os.environ/ELSE":
        assert "falcon" in run("recall", "--config", named, "falcon", store=False)
    assert not (path.parent / "home").exists()


def test_without_originals_it_says_how_to_have_them(run: Run, tmp_path: Path) -> None:
    """A proxy's that keeps none."""
    url = f"sqlite:///{tmp_path / 'other.sqlite3'}"
    asyncio.run(_fill(url, originals=False))
    assert "keep_originals: compacted" in run("recall", "fish", "--store", url, code=1, store=False)


def test_events_are_lines_for_people_and_json_for_programs(run: Run, path: Path) -> None:
    """Oldest first, as the log has them, with the record's id; another version's are told as such."""
    compacted, alarm, future = run("events").splitlines()
    assert "  aaaa              compacted model=lm_studio/qwen phase=pre_request 10600/8192 tokens" in compacted
    assert compacted.endswith("excerpts=3 excerpt_tokens=1412")
    assert "truncation_alarm model=qwen " in alarm
    assert future.endswith("(written by another version)")
    first, second, third = map(json.loads, run("events", "--json").splitlines())
    assert (first["number"], first["event"], first["tokens_before"]) == (1, "compaction", 10_600)
    assert second["event"] == "truncation_alarm"
    assert third == {"number": 3, "event": "from the future"} == json.loads(run("events", "--json", "--last", "1"))
    store = open_store(f"sqlite:///{path}", ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET)
    asyncio.run(store.add_event(time.time() + 9, "another program's"))
    assert json.loads(run("events", "--json", "--last", "2")) == third
