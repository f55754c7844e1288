"""`litellm-compaction compact`: what it says, what it writes, and what it asks a server."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli import main
from litellm_compaction.simulator import Address, ChatCall, Fault, Model, Reply, Simulator, serve
from tests.builders import JsonDict, agent_run, assistant, broken_promises, chat, parsed, result, system, user
from tests.cli.conftest import QWEN
from tests.integration.bench import edit_plan

SUMMARY = "### Original task\nAnswer the questions.\n### Current state\nMany are answered."
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
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


def summarizing(call: ChatCall) -> Reply:
    return Reply(SUMMARY)


@pytest.fixture
def server() -> Simulator:
    """Qwen, writing summaries."""
    simulator = Simulator([Model(QWEN)], script=summarizing)
    simulator.load(QWEN, 8192)
    return simulator


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


def test_old_tool_results_are_edited(run: Run, save: Callable[[Any], str]) -> None:
    """Without any server, since no summary is needed; calls between results share their line."""
    said = run("--api-base", NOWHERE, save({"messages": agent_run(30), "tools": TOOLS}))
    assert "no summary is needed" in said
    [row] = [line for line in said.splitlines() if "edited" in line]
    assert row.endswith("of them kept")
    assert "kept, tools included" in said


def test_repeated_reads_are_dropped(run: Run, save: Callable[[Any], str]) -> None:
    """What a later read repeats does not even reach the summariser."""
    raw = [*agent_run(10, words=20), *chat(30, words=150)[1:]]
    raw = [raw[0], raw[1], *raw[2:22], assistant("Read."), *raw[22:]]
    report = json.loads(run("--dry-run", "--json", save(raw)))
    assert [message["fate"] for message in report["messages"]].count("dropped") == 9
    assert report["messages"][3] == {"role": "tool", "tokens": report["messages"][3]["tokens"], "fate": "dropped"}
    assert report["request"] is None
    assert report["decided"] == "summary"


def test_a_small_conversation_is_left_alone(run: Run, save: Callable[[Any], str]) -> None:
    """And said to be; the new request is the old one."""
    body = {"model": "any", "messages": chat(3), "temperature": 0.5}
    assert "Nothing to do: with room for the answer" in run(save(body))
    report = json.loads(run("--json", save(body)))
    assert (report["decided"], report["request"]) == ("below_trigger", body)
    assert report["tokens_before"] == report["tokens_after"]


def test_a_summary_comes_from_the_server(run: Run, save: Callable[[Any], str], server: Simulator) -> None:
    """One call; the new request is valid, smaller, holds the summary, and keeps its other fields."""
    raw = chat(30, words=150)
    with serve(server) as address:
        said = run("--json", "--api-base", f"{address.base_url}/v1", save({"messages": raw, "user": "me"}))
        assert "1 summary call of qwen/qwen3-8b in " in run("--api-base", address.base_url, save(raw))
    report = json.loads(said)
    request = report["request"]
    assert request["user"] == "me"
    assert SUMMARY in request["messages"][1]["content"]
    assert broken_promises(parsed(raw), parsed(request["messages"])) == []
    assert (report["decided"], report["summary_calls"], report["reason"]) == ("summary", 1, "")
    assert report["tokens_after"] < report["tokens_before"] / 3
    assert sum(message["tokens"] for message in report["messages"]) + report["fixed_tokens"] == report["tokens_before"]


def test_each_strategy_shows_what_it_does(run: Run, save: Callable[[Any], str], server: Simulator) -> None:
    """A dry run says what a pruning model would choose from; then by number what stayed, became shorter, and went."""
    path = save(chat(30, words=45))
    dry = run("--dry-run", "--strategy", "prune", path)
    assert re.search(r"^ +2–55 +[\d,]+ +offered$", dry, re.MULTILINE)
    server.script = lambda call: Reply(edit_plan(str(call.messages[-1]["content"])) or SUMMARY)
    with serve(server) as address:
        pruned = run("--strategy", "prune", "--api-base", f"{address.base_url}/v1", path)
        handed = run("--strategy", "handoff", "--api-base", f"{address.base_url}/v1", path)
        server.script = summarizing
        other = run("--strategy", "prune", "--api-base", f"{address.base_url}/v1", path)
    assert {line.split()[-1] for line in pruned.splitlines() if "–" in line} >= {"kept", "dropped"}
    assert "edited" in pruned
    assert "1 summary call of" in pruned
    assert "as configured" not in pruned
    assert re.search(r"^ +2–59 +[\d,]+ +summarized$", handed, re.MULTILINE)
    # A summary in place of a plan: the plain way, and the reason.
    assert "The older part gives way to a summary" in other
    assert other.endswith("It was not made as configured: invalid.\n")


def test_the_new_request_can_be_written(
    run: Run, save: Callable[[Any], str], server: Simulator, tmp_path: Path
) -> None:
    """To a file, beside the report for people."""
    new = tmp_path / "new.json"
    with serve(server) as address:
        said = run("-o", str(new), "--api-base", address.base_url, save(chat(30, words=150)))
    assert "summarized" in said
    assert SUMMARY in json.loads(new.read_text(encoding="utf-8"))["messages"][1]["content"]
    assert "cannot be written" in run("-o", str(tmp_path), save(chat(3)), code=1)


def test_the_key_and_the_address_come_from_the_environment(
    run: Run, save: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same two variables as everywhere."""
    simulator = Simulator([Model(QWEN)], script=summarizing, api_token="sk-lm")
    simulator.load(QWEN, 8192)
    path = save(chat(30, words=150))
    with serve(simulator) as address:
        monkeypatch.setenv("LM_STUDIO_API_BASE", f"{address.base_url}/v1")
        assert "answered HTTP 401" in run(path, code=1)
        monkeypatch.setenv("LM_STUDIO_API_KEY", "sk-lm")
        assert "1 summary call" in run(path)


def test_a_refusal_leaves_the_ledger(run: Run, save: Callable[[Any], str]) -> None:
    """A model that gives no summary: the older part is dropped but for what is quoted, and the reason is said."""
    simulator = Simulator([Model(QWEN)], script=lambda call: Reply("I'm sorry, I can't help with that."))
    simulator.load(QWEN, 8192)
    with serve(simulator) as address:
        said = run("--api-base", address.base_url, save(chat(30, words=150)))
    assert re.search(r"^ *2–58 +2\d,\d{3} ", said, re.MULTILINE)
    assert " dropped\n" in said
    assert "There is no summary: refusal." in said


def test_recent_messages_can_be_asked_for(run: Run, save: Callable[[Any], str]) -> None:
    """`--keep-recent` is the plug-in's setting, `--strategy` too."""
    report = json.loads(
        run("--dry-run", "--json", "--keep-recent", "9", "--strategy", "summary", save(chat(60)), window=16_384)
    )
    kept = [message["fate"] for message in report["messages"]].count("kept")
    assert kept >= 10


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ("{", "not JSON at line 1, column 2: Expecting property name enclosed in double quotes"),
        ("", "the input is empty"),
        ("[" * 100_000, "JSON that cannot be read (RecursionError)"),
        ("[]", "expected a JSON object"),
        ("{}", "messages: expected a list"),
        ({"messages": []}, "messages: expected at least one"),
        ('"text"', "expected a JSON object"),
        ({"messages": "text"}, "messages: expected a list"),
        ([{"content": "x"}], "messages[0]: expected an object with a role"),
        ([user("x"), "y"], "messages[1]: expected an object with a role"),
        ({"messages": [user("x")], "tools": {}}, None),
        ({"messages": [user("x")], "tools": "all"}, "tools: expected a list"),
    ],
)
def test_what_is_no_request_is_explained(
    run: Run, save: Callable[[Any], str], document: Any, error: str | None
) -> None:
    """In one line, with the place; no traceback."""
    path = save(document)
    if error is None:
        run(path)
        return
    said = run(path, code=1)
    assert said.startswith(f"litellm-compaction: {path}")
    assert error in said
    assert said.count("\n") == 1


def test_files_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    """Missing, a folder, or not text."""
    assert "cannot be read: No such file" in run(str(tmp_path / "missing.json"), code=1)
    assert "cannot be read" in run(str(tmp_path), code=1)
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff")
    assert "not UTF-8 at byte 0" in run(str(tmp_path / "picture"), code=1)


def test_stdin_is_a_dash(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a byte order mark, too, as PowerShell writes it."""
    piped = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + json.dumps(chat(3)).encode()))
    monkeypatch.setattr(sys, "stdin", piped)
    assert run("-").startswith("6 messages, ")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(status=404, raw_body={"error": "no such model"}), "answered HTTP 404 and no chat completion"),
        (Reply(raw_body={"error": "Unexpected endpoint"}), "answered HTTP 200 and no chat completion"),
        (Reply(raw_body="<html>"), "answered HTTP 200 and no chat completion"),
        (Reply(raw_body={"choices": []}), "answered HTTP 200 and no chat completion"),
        (Reply(fault=Fault("drop")), "gave no summary"),
    ],
)
def test_a_server_that_does_not_do(run: Run, save: Callable[[Any], str], reply: Reply, error: str) -> None:
    """What it said, and what to change."""
    simulator = Simulator([Model(QWEN)], script=lambda call: reply)
    simulator.load(QWEN, 8192)
    with serve(simulator) as address:
        said = run("--api-base", address.base_url, save(chat(30, words=150)), code=1)
    assert error in said
    assert "--api-base" in said


def test_no_server_at_all(run: Run, save: Callable[[Any], str]) -> None:
    """Start it, name it, or do without."""
    said = run("--api-base", NOWHERE, save(chat(30, words=150)), code=1)
    assert "nothing answers at http://127.0.0.1:9/v1/chat/completions" in said
    assert "--dry-run" in said
    for address in ("ftp://x", "not a url", "http://[::1"):
        assert "Is --api-base right?" in run("--api-base", address, save(chat(30, words=150)), code=1)


def test_what_cannot_fit_is_itemized(run: Run, save: Callable[[Any], str]) -> None:
    """As the proxy refuses it."""
    raw: list[JsonDict] = [system(), *agent_run(3)[1:-1], result("call_2", "word " * 20_000)]
    said = run("--dry-run", save(raw), code=1)
    assert "result of tool run" in said
    assert "context_length_exceeded" in said


def test_a_dry_run_writes_nothing(run: Run, save: Callable[[Any], str], tmp_path: Path) -> None:
    """Two options that contradict each other."""
    assert "--dry-run makes no new request" in run("--dry-run", "-o", str(tmp_path / "x"), save(chat(3)), code=1)


def test_progress_is_shown_on_stderr(
    save: Callable[[Any], str], capsys: pytest.CaptureFixture[str], address_of_slow: Address
) -> None:
    """From the first second on, and not among the results."""
    arguments = ["--model", QWEN, "--window", "8192", "--api-base", address_of_slow.base_url, "--json"]
    assert main(["compact", *arguments, save(chat(30, words=150))]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"asking {QWEN} for a summary … ")
    assert _PROGRESS.sub("", captured.err) == ""
    assert json.loads(captured.out)["decided"] == "summary"


@pytest.fixture
def address_of_slow() -> Any:
    """A server that takes more than a second for its summary."""
    simulator = Simulator([Model(QWEN)], script=lambda call: Reply(SUMMARY, delay_ms=1300))
    simulator.load(QWEN, 8192)
    with serve(simulator) as address:
        yield address
