"""`events`, `records` and `purge` as an operator uses them, on a file that a proxy has written."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli import main, stores
from litellm_compaction.cli.stores import Place, events
from litellm_compaction.events import CompactionEvent, TruncationAlarm, event_to_json
from litellm_compaction.stores import Store, open_store
from tests.cli.conftest import config
from tests.stores.compactions import compaction
from tests.stores.made import MemoryStore

DAY_S = 86_400.0
SECRET = "sk-of-the-environment"
TOLD = CompactionEvent(
    outcome="compacted",
    phase="pre_request",
    model="lm_studio/qwen",
    window_tokens=8192,
    window_source="api/v1",
    tokens_before=10_600,
    tokens_after=1986,
    covered_messages=42,
    round=2,
    rung="summary",
    pruning_model="small",
    summary_calls=1,
    summary_ms=1200.0,
    duration_ms=1300.0,
    excerpts=3,
    excerpt_tokens=1412,
    when_s=1_700_000_000.0,
    compaction_id="aaaa",
    continues_id="bbbb",
)
ALARM = TruncationAlarm(
    model="qwen", window_tokens=4096, expected_tokens=9000, reported_tokens=4096, reason="prompt_far_below_count"
)


def fill(store: Store) -> None:
    """Two compactions of two tenants, one fact, three events of today."""

    async def run() -> None:
        await store.put("scope-a", compaction("h1", text="The secret plan."))
        await store.put("scope-b", compaction("h2", covered=7))
        await store.put_fact("scope-a", "ratio", "1.1")
        now_s = time.time()
        for number, text in enumerate([event_to_json(TOLD), event_to_json(ALARM), '{"event": "from the future"}']):
            await store.add_event(now_s + number, text)
        await store.aclose()

    asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    monkeypatch.setenv("LITELLM_COMPACTION_HOME", str(tmp_path / "home"))
    found = tmp_path / "store.sqlite3"
    fill(open_store(f"sqlite:///{found}", ttl_s=1000, max_bytes=1_000_000, secret=lambda: SECRET))
    return found


@pytest.fixture
def run(path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command on the store; what it printed."""

    def run(*arguments: str, code: int = 0) -> str:
        assert main([*arguments, "--store", f"sqlite:///{path}"]) == code
        captured = capsys.readouterr()
        return captured.err if code and captured.err else captured.out

    return run


def ids(run: Callable[..., str]) -> dict[str, str]:
    """Scope → id, as `records` shows them."""
    rows = [line.split() for line in run("records").splitlines()[1:-1]]
    return {row[1]: row[0] for row in rows}


@pytest.mark.parametrize(
    ("arguments", "left", "events"),
    [
        (["--scope", "scope-a"], {"scope-b"}, 3),
        (["--older-than", "1h"], {"scope-a", "scope-b"}, 3),
        (["--older-than", "0s"], set(), 2),
        (["--scope", "scope-b", "--older-than", "1d"], {"scope-a", "scope-b"}, 3),
        (["--all"], set(), 0),
    ],
)
def test_purge_deletes_what_is_named(
    run: Callable[..., str], path: Path, arguments: list[str], left: set[str], events: int
) -> None:
    """And no more; the file is smaller then and holds the text no longer."""
    told, done = run("purge", *arguments, "--yes").splitlines()[:: 2 if "--scope" not in arguments else 1]
    assert told == f"This deletes {2 - len(left)} of 2 records, and the originals that they cover."
    assert done == f"{2 - len(left)} records and 0 parts of originals deleted."
    assert {row.split()[1] for row in run("records").splitlines()[1:-1]} == left
    if "scope-a" not in left:
        assert b"The secret plan." not in path.read_bytes()
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM line").fetchone() == (events,)
    connection.close()


@pytest.mark.parametrize("key", ["sk-of-another-proxy", ""])
def test_with_another_key_records_are_counted_and_deleted(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Or with none: it says what to do in place of an empty list, and a purge needs no key."""
    record = ids(run)["scope-a"]
    monkeypatch.setenv("LITELLM_MASTER_KEY", key)
    for said in (run("records"), run("records", record, code=1), run("records", record, "--undo", code=1)):
        assert "2 records cannot be read" in said
        assert "Set LITELLM_MASTER_KEY to the proxy's" in said
        assert "No records yet" not in said
    assert "1 records and 0 parts of originals deleted." in run("purge", "--scope", "scope-a", "--yes")
    monkeypatch.setenv("LITELLM_MASTER_KEY", SECRET)
    assert set(ids(run)) == {"scope-b"}


@pytest.mark.parametrize("arguments", [[], ["--all", "--scope", "a"], ["--all", "--older-than", "1d"]])
def test_purge_wants_to_know_what(run: Callable[..., str], arguments: list[str]) -> None:
    """Nothing by default, and no contradiction."""
    assert "name what to delete" in run("purge", "--yes", *arguments, code=1)
    assert len(ids(run)) == 2


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("Yes", 0, 0), ("", 1, 2), ("n", 1, 2)])
def test_purge_asks(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int
) -> None:
    """It says how many first; only a yes deletes, and nobody's silence."""
    assert "add --yes" in run("purge", "--all", code=1)
    terminal = io.StringIO(f"{answer}\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    told = run("purge", "--all", code=code)
    assert told.startswith("This deletes 2 of 2 records, and the originals that they cover.\nIt deletes the facts")
    assert len(ids(run)) == left


def test_events_are_lines_for_people(run: Callable[..., str]) -> None:
    """Oldest first, as the log has them, with the record's id; another version's are told as such."""
    compacted, alarm, future = run("events").splitlines()
    assert " compacted model=lm_studio/qwen phase=pre_request 10600/8192 tokens" in compacted
    assert compacted.endswith("excerpts=3 excerpt_tokens=1412 record=aaaa after=bbbb")
    assert "  truncation_alarm model=qwen " in alarm
    assert future.endswith("(written by another version)")


def test_events_are_json_for_programs(run: Callable[..., str]) -> None:
    """One object a line with all fields, also those of another version; `--last` takes the newest."""
    first, second, third = map(json.loads, run("events", "--json").splitlines())
    assert (first["number"], first["event"], first["tokens_before"], first["rung"]) == (
        1,
        "compaction",
        10_600,
        "summary",
    )
    assert second["event"] == "truncation_alarm"
    assert third == {"number": 3, "event": "from the future"}
    assert json.loads(run("events", "--json", "--last", "1")) == third


class _Later(MemoryStore):
    """Has new events whenever it is asked again: two, none, one; then its reader is interrupted."""

    left = (2, 0, 1)

    async def events(self, **asked: Any) -> Any:
        if "after" in asked:
            if not self.left:
                raise KeyboardInterrupt
            number, *self.left = self.left  # type: ignore[assignment]
            for _ in range(number):
                await self.add_event(time.time(), event_to_json(TOLD))
        return await super().events(**asked)


def test_follow_goes_on_until_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new event once, in order, however many come between two looks."""
    monkeypatch.setattr(stores, "_POLL_S", 0)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(events(Place(_Later(ttl_s=100, max_bytes=100_000), None), last=10, follow=True, as_json=True))
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [1, 2, 3]


def test_the_config_names_the_store(
    tmp_path: Path, path: Path, write: Callable[[Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--config` reads the setting; a memory store is explained."""
    assert main(["records", "--config", str(write(config(settings={"store": f"sqlite:///{path}"})))]) == 0
    assert "2 records" in capsys.readouterr().out
    for command in (["records"], ["events"]):
        assert main([*command, "--config", str(write(config(settings={"store": "memory://"})))]) == 1
        assert "memory:// lives in the proxy's process" in capsys.readouterr().err
