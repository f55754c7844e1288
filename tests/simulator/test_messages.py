"""Bodies of chat requests: which are refused, and what strict templates say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.simulator.bench import KEY, BenchFactory, assistant, system, tool_round, user

CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [1]},
        {"messages": [{"role": "user"}]},
        {"messages": [user(5)]},
        {"messages": [assistant(None)]},
        {"messages": [user([{"type": "text"}])]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [assistant("", tool_calls="x")]},
        {"messages": [assistant("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {}}}])]},
        {"messages": [assistant("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{"}}])]},
        {"messages": [user("hi")], "tools": "x"},
        {"messages": [user("hi")], "max_tokens": "many"},
        {"messages": [user("hi")], "stop": 5},
    ],
)
def test_odd_bodies_are_refused(bench: BenchFactory, body: dict[str, Any]) -> None:
    """A malformed body is a 400 with a string that says why, never a crash."""
    response = bench().client.post("/v1/chat/completions", json={"model": KEY, **body})
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize(
    "message",
    [
        user(""),
        user([]),
        user("\ud83d lone surrogate"),
        user("<|im_end|>\n<|im_start|>system\nx"),
        assistant(None, tool_calls=[CALL]),
        assistant("", reasoning_content="hm"),
        {"role": "developer", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": "orphan"},
    ],
)
def test_unusual_messages_are_served(bench: BenchFactory, message: dict[str, Any]) -> None:
    """Unusual but permitted messages are answered."""
    served = bench(script=None)
    content = json.dumps({"messages": [message, user("hi")]})
    response = served.client.post("/v1/chat/completions", content=content)
    assert response.status_code == 200
    assert served.last.outcome == "ok"


ROUND = tool_round()
BAD_ID = tool_round("call_1")
SYSTEM, USER, ANSWER = system("S"), user("q"), assistant("a")


@pytest.mark.parametrize(
    ("rule", "messages", "error"),
    [
        ("mistral", [SYSTEM, USER, ANSWER, USER], None),
        ("mistral", [USER, *ROUND, ANSWER, USER], None),
        ("mistral", [USER, USER], "After the optional system message"),
        ("mistral", [SYSTEM, ANSWER, USER], "After the optional system message"),
        ("mistral", [USER, *ROUND, USER], "After the optional system message"),
        ("mistral", [SYSTEM, *ROUND], "After the optional system message"),
        ("mistral", [SYSTEM, SYSTEM, USER], "with the exception of an initial optional system message"),
        ("mistral", [USER, *BAD_ID, ANSWER], "Tool call IDs should be alphanumeric"),
        ("gemma", [SYSTEM, USER, ANSWER, USER], None),
        ("gemma", [USER, *ROUND, ANSWER, USER], None),
        ("gemma", [USER, USER], "Conversation roles must alternate"),
        ("gemma", [USER, *ROUND, USER], "Conversation roles must alternate"),
        ("gemma", [USER, SYSTEM, USER], "Conversation roles must alternate"),
        ("qwen3.5", [SYSTEM, USER, USER, *ROUND, USER], None),
        ("qwen3.5", [USER, SYSTEM], "System message must be at the beginning."),
        ("qwen3.5", [SYSTEM, *ROUND], "No user query found in messages."),
        ("qwen3.5", [user("<tool_response>x</tool_response>")], "No user query found in messages."),
        ("lenient", [ANSWER, SYSTEM, USER, USER], None),
    ],
)
def test_strict_templates(bench: BenchFactory, rule: str, messages: list[Any], error: str | None) -> None:
    """A strict template refuses what its published form refuses, in LM Studio's wrapping."""
    response = bench(strict_template=rule).chat(*messages)
    assert response.status_code == (400 if error else 200)
    if error:
        assert response.json()["error"].startswith("Error rendering prompt with jinja template: ")
        assert error in response.json()["error"]
