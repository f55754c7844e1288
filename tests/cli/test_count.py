"""`count`: requests from files and lines, and what is said about those that are none."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.simulator import Address
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from tests.cli.conftest import GPT_OSS, QWEN, Run
from tests.tokenizers.gguf_writer import bpe_fields, gguf

CASES = json.loads((Path(__file__).parents[1] / "tokens" / "golden" / "prompts.json").read_text("utf-8"))["cases"]
AGENT = CASES["agent, 6 calls"]
pytestmark = pytest.mark.usefixtures("without_lm_studio")


def counted(model: str, case: dict[str, Any]) -> int:
    """What the proxy's counter says."""
    asked = Request(messages=tuple(map(parse_message, case["messages"])), tools=tuple(case.get("tools", ())))
    return asyncio.run(TokenCounter().count("t", family_of("", model), asked)).tokens


def test_a_request_is_counted_as_in_the_proxy(count: Run) -> None:
    """All parts are there and add up; without a server the window is not known."""
    code, output, errors = count("--model", "qwen3-8b", "--json", "-", stdin=json.dumps(AGENT))
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert found["tokens"] == counted("qwen3-8b", AGENT)
    parts = [message["tokens"] for message in found["messages"]]
    assert found["tokens"] == sum(parts) + found["tools_tokens"] + found["overhead_tokens"]
    assert [message["role"] for message in found["messages"]] == [message["role"] for message in AGENT["messages"]]
    assert found["exact"] is True
    assert (found["family"], found["tokenizer"], found["tokenizer_source"]) == ("qwen3", "qwen2", "pack")
    assert found["template"] == "package"
    assert (found["window_tokens"], found["window_source"], found["used_ratio"]) == (None, "", None)


def test_the_window_is_lm_studios(count: Run, address: Address, tmp_path: Path) -> None:
    """With the share of it that the request takes."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(AGENT), encoding="utf-8")
    api_base = f"{address.base_url}/v1"
    _, output, _ = count("--model", QWEN, "--json", str(path), api_base=api_base)
    found = json.loads(output)
    assert (found["window_tokens"], found["window_source"]) == (8192, "api/v1")
    assert found["used_ratio"] == round(found["tokens"] / 8192, 4)
    _, output, _ = count("--model", GPT_OSS, "--json", str(path), api_base=api_base)
    assert json.loads(output)["window_tokens"] is None


def test_people_read_lines(count: Run, address: Address) -> None:
    """Total, certainty, window, sources, and one line per message; half surrogate pairs, and nothing for a terminal."""
    odd = {"role": "\ud800\x1b[2J", "content": [{"type": "text", "text": None}, [["x"]]]}
    asked = json.dumps({**AGENT, "messages": [*AGENT["messages"], odd]})
    code, output, _ = count("--model", QWEN, "-", stdin=asked, api_base=f"{address.base_url}/v1")
    assert code == 0
    assert re.search(r"^tokens     [\d,]+, an estimate, from [\d,]+ to [\d,]+$", output, re.MULTILINE)
    assert "window     8,192 tokens, from api/v1: " in output
    assert "tokenizer  qwen2, the model's own from this package\n" in output
    assert "2 tools" in output
    assert f"messages[{len(AGENT['messages'])}] " in output
    assert "\x1b" not in output


def test_a_tokenizer_can_be_named(count: Run, tmp_path: Path) -> None:
    """A file of the model, or four characters a token."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(bpe_fields(tokenizer__chat_template="{{ messages[0].content }}<|end|>")))
    ask = '{"messages": [{"role": "user", "content": "abab"}]}'
    _, output, _ = count("--model", "x", "--tokenizer", str(path), "--json", "-", stdin=ask)
    found = json.loads(output)
    assert (found["tokens"], found["tokenizer"], found["template"]) == (3, str(path), "file")
    _, output, _ = count("--model", "x", "--tokenizer", "heuristic", "--json", "-", stdin=ask)
    assert json.loads(output)["tokens"] == 1


def test_a_bad_line_is_answered_with_an_error(count: Run) -> None:
    """On its own line; the others are counted, and the exit code tells."""
    good = json.dumps({"model": "qwen3-8b", "messages": [{"role": "user", "content": "x"}]})
    bad = ["not json", "", "[]", '{"model": "m"}', json.dumps(AGENT), '{"model": 7, "messages": []}']
    code, output, _ = count("--batch", "-", stdin="\n".join([good, *bad, good]) + "\n")
    answers = [json.loads(line) for line in output.splitlines()]
    assert code == 1
    assert ["error" in answer for answer in answers] == [False, *[True] * len(bad), False]
    assert "model: it is missing" in answers[5]["error"]
    assert answers[0] == answers[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-"], "--model is missing"),
        (["--model", "x", "/nonexistent/request.json"], "/nonexistent/request.json: cannot be read"),
        (["--model", "x", "--tokenizer", "/nonexistent/x.gguf", "-"], "--tokenizer = '/nonexistent/x.gguf'"),
        (["--batch", "--tokenizer", "nobody-knows-this", "-"], "allowed: auto, heuristic"),
    ],
)
def test_wrong_arguments_are_said(count: Run, arguments: list[str], words: str) -> None:
    """Before anything is counted."""
    code, output, errors = count(*arguments, stdin='{"messages": []}')
    assert (code, output) == (1, "")
    assert words in errors


pytestmark = pytest.mark.usefixtures("without_lm_studio")


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (b"", "the input is empty"),
        (b'{"messages": [}', "not JSON at line 1, column 15"),
        (b"\xff\xfe{", "not"),
        (b"[" * 200_000, "cannot be read"),
        (b"{}", "messages: expected a list"),
        (b'{"messages": [{"role": "user"}, 7]}', "messages[1]: expected an object with a role"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]: expected an object with a role"),
        (b'{"messages": [], "tools": {"a": 1}}', "tools: expected a list"),
    ],
)
def test_what_is_no_request_is_said(count: Run, stdin: bytes, words: str) -> None:
    """One line, exit code 1, no traceback."""
    code, output, errors = count("--model", "x", "-", stdin=stdin)
    assert (code, output) == (1, "")
    assert words in errors
    assert errors.count("\n") == 1
