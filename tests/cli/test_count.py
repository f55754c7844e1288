"""`count`: requests in files, and what is said about those that are none."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import agent_run, request_of, tools
from tests.cli.conftest import Run
from tests.tokenizers.test_files import small_tokenizer

AGENT: dict[str, Any] = {"messages": agent_run(6), "tools": tools(2)}
pytestmark = pytest.mark.usefixtures("without_lm_studio")


def counted(model: str, case: dict[str, Any]) -> int:
    """What the proxy's counter says."""
    asked = request_of(*case["messages"], tools=case["tools"])
    return asyncio.run(TokenCounter().count("t", family_of("", model), asked)).tokens


def test_a_request_is_counted_as_in_the_proxy(run: Run) -> None:
    """One object with the total, its certainty and each message's part."""
    code, output, errors = run("count", "--model", "qwen3-8b", "--json", "-", stdin=json.dumps(AGENT))
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert (found["tokens"], found["exact"]) == (counted("qwen3-8b", AGENT), True)
    assert len(found["messages"]) == len(AGENT["messages"])


def test_people_read_lines(run: Run, tmp_path: Path) -> None:
    """Each message, total, certainty, sources; half surrogate pairs, and nothing for a terminal."""
    odd = {"role": "\ud800\x1b[2J", "content": [{"type": "text", "text": None}, [["x"]]]}
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**AGENT, "messages": [*AGENT["messages"], odd]}), encoding="utf-8")
    code, output, _ = run("count", "--model", "qwen/qwen3-8b", str(path))
    assert code == 0
    assert re.search(r"^tokens     [\d,]+, an estimate, from [\d,]+ to [\d,]+$", output, re.MULTILINE)
    assert "with qwen2, the model's own from this package; template: qwen3, from this package" in output
    assert "2 tools" in output
    assert f"messages[{len(AGENT['messages'])}] " in output
    assert "\x1b" not in output


def test_a_tokenizer_can_be_named(run: Run, tmp_path: Path) -> None:
    """A file of the model, or four characters a token; a list is one of messages."""
    path = tmp_path / "tokenizer.json"
    small_tokenizer().save(str(path))
    ask = '[{"role": "user", "content": "abab"}]'
    for tokenizer, tokens in ((str(path), 8), ("heuristic", 1)):
        _, output, _ = run("count", "--model", "x", "--tokenizer", tokenizer, "--json", "-", stdin=ask)
        assert json.loads(output)["messages"] == [tokens]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["/nonexistent/request.json"], b"", "/nonexistent/request.json cannot be read"),
        (["--tokenizer", "/nonexistent/x.json", "-"], b"", "--tokenizer = '/nonexistent/x.json'"),
        (["--tokenizer", "nobody-knows-this", "-"], b"", "allowed: auto, heuristic"),
        (["-"], b"", "Expecting value: line 1 column 1"),
        (["-"], b'{"messages": [}', "Expecting value: line 1 column 15"),
        (["-"], b"\xff\xfe{", "utf-16"),
        (["-"], b"[" * 200_000, "RecursionError"),
        (["-"], b"{}", "KeyError"),
        (["-"], b"7", "TypeError"),
        (["-"], b'{"messages": [{"role": "user"}, 7]}', "AttributeError"),
        (["-"], b'{"messages": [{"content": "x"}]}', "a message without a role"),
        (["-"], b'{"messages": [], "tools": 7}', "TypeError"),
    ],
)
def test_a_bad_request_is_one_line_that_says_why(run: Run, arguments: list[str], stdin: bytes, words: str) -> None:
    """One line with the expected form, exit code 1, no traceback."""
    code, output, errors = run("count", "--model", "x", *arguments, stdin=stdin)
    assert (code, output) == (1, "")
    assert errors.startswith("litellm-compaction: ")
    assert words in errors
    assert ('{"messages": [...]' in errors) == (arguments == ["-"])
    assert errors.count("\n") == 1
