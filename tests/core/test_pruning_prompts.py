"""What a pruning model is shown: every message with its number and size, however little room there is for words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from litellm_compaction.core.pruning import pruning_prompt
from tests.builders import assistant, calls, count, parsed, result, user


def rounds(number: int, words: int) -> list[Any]:
    """So many tool rounds with an answer and a request each."""
    raw: list[Any] = []
    for each in range(number):
        raw += [
            calls(f"call_{each:04d}", arguments='{"path": "src/parser.py"}'),
            result(f"call_{each:04d}", f"r{each} " * words),
            assistant(f"Done with {each}. " + "a " * words),
            user(f"Now {each}. " + "u " * words),
        ]
    return raw


def shown(raw: list[Any], limit_tokens: int) -> list[dict[str, Any]]:
    """The lines of a prompt; none where there is no prompt."""
    messages = parsed(raw)
    sizes = [count(message.text) + 4 for message in messages]
    prompt = pruning_prompt(
        prompt="Choose.",
        values={},
        request="The request.",
        earlier="",
        messages=messages,
        sizes=sizes,
        limit_tokens=limit_tokens,
        count=count,
    )
    assert count(prompt) <= limit_tokens
    lines = [json.loads(line) for line in prompt.splitlines() if line.startswith("{")]
    assert [line["n"] for line in lines] == list(range(1, len(raw) + 1)) or not prompt
    assert [line["tokens"] for line in lines] == sizes or not prompt
    return lines


def test_with_room_everything_is_shown() -> None:
    """Texts whole, calls with their arguments and ids, results with the call that they belong to."""
    lines = shown(rounds(3, 5), 4000)
    assert lines[1]["content"] == ("r0 " * 5).strip()
    assert lines[0]["calls"] == ["run(path: src/parser.py)"]
    assert (lines[0]["ids"], lines[1]["result_of"]) == (["call_0000"], "call_0000")


def test_long_messages_give_way_tool_results_first() -> None:
    """Head and tail with a marker; what the user and the assistant say has four times the room."""
    lines = shown(rounds(6, 400), 3000)
    assert all("tokens left out" in line["content"] for line in lines if line["role"] == "tool")
    assert len(lines[2]["content"]) > 2 * len(lines[1]["content"])


@pytest.mark.parametrize("limit_tokens", [2500, 2800, 3100])
def test_many_short_messages_are_shown_by_their_first_words(limit_tokens: int) -> None:
    """Where even short excerpts with ids do not fit: number, size and first words are enough for a plan."""
    lines = shown(rounds(26, 30), limit_tokens)
    assert len(lines) == 104
    assert not any("ids" in line or "result_of" in line for line in lines)
    assert all(line["content"].startswith("r") for line in lines if line["role"] == "tool")


def test_without_room_for_the_numbers_nobody_is_asked() -> None:
    """ "" says so."""
    assert shown(rounds(26, 30), 1800) == []
