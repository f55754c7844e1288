"""`litellm-compaction compact`: what it says, what it writes, and what it asks a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli import main
from litellm_compaction.simulator import ChatCall, Fault, Model, Reply, Simulator, serve
from tests.builders import JsonDict, agent_run, broken_promises, chat, parsed, result, system
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


def test_what_cannot_fit_is_itemized(run: Run, save: Callable[[Any], str]) -> None:
    """As the proxy refuses it."""
    raw: list[JsonDict] = [system(), *agent_run(3)[1:-1], result("call_2", "word " * 20_000)]
    said = run("--dry-run", save(raw), code=1)
    assert "result of tool run" in said
    assert "context_length_exceeded" in said
