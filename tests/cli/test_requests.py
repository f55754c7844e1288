"""Requests as the commands read them, from a file or from lines."""

from __future__ import annotations

import json

import pytest

from litellm_compaction.cli import requests
from tests.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("without_lm_studio")


def test_a_list_of_messages_is_a_request_too(count: Run) -> None:
    """As for `compact`: one reader for both."""
    messages = [{"role": "user", "content": "Hello!"}]
    _, whole, _ = count("--model", "qwen3-8b", "--json", "-", stdin=json.dumps({"messages": messages}))
    _, alone, _ = count("--model", "qwen3-8b", "--json", "-", stdin=json.dumps(messages))
    assert json.loads(alone) == json.loads(whole)


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (b"", "the input is empty"),
        (b" \n ", "the input is empty"),
        (b'{"messages": [}', "not JSON at line 1, column 15"),
        (b"\xff\xfe{", "not"),
        (b"[" * 200_000, "cannot be read"),
        (b"[]", "expected a JSON object"),
        (b"{}", "messages: expected a list"),
        (b'{"messages": {}}', "messages: expected a list"),
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


def test_huge_input_is_refused(count: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole or as one line, whose rest is skipped."""
    monkeypatch.setattr(requests, "MAX_BYTES", 100)
    huge = '{"messages": [{"role": "user", "content": "' + "x" * 1000 + '"}]}'
    code, _, errors = count("--model", "x", "-", stdin=huge)
    assert code == 1
    assert "larger than 100 bytes" in errors
    small = '{"messages": [{"role": "user", "content": "x"}]}'
    code, output, _ = count("--batch", "--model", "x", "-", stdin=f"{huge}\n{small}")
    first, second = (json.loads(line) for line in output.splitlines())
    assert code == 1
    assert "larger than 100 bytes" in first["error"]
    assert second["tokens"] > 0
