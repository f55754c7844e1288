"""Which requests are refused, what strict templates say, and how prompts are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiktoken
from sim_bench import KEY, BenchFactory, assistant, system, tool_round, user

from litellm_compaction.simulator import summary_of_facts
from litellm_compaction.simulator.rendering import count, decode, encode

CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [1]},
        {"messages": [{}]},
        {"messages": [{"role": "user"}]},
        {"messages": [user(None)]},
        {"messages": [user(5)]},
        {"messages": [assistant(None)]},
        {"messages": [user([{"type": "text"}])]},
        {"messages": [user([None])]},
        {"messages": [user([{"type": "image_url", "image_url": {}}])]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [assistant("", tool_calls="x")]},
        {"messages": [assistant("", tool_calls=[{}])]},
        {"messages": [assistant("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {}}}])]},
        {"messages": [assistant("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{"}}])]},
        {"messages": [assistant("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "[]"}}])]},
        {"messages": [user("hi")], "tools": "x"},
        {"messages": [user("hi")], "tool_choice": {"type": "function"}},
        {"messages": [user("hi")], "max_tokens": "many"},
        {"messages": [user("hi")], "max_tokens": 1.5},
        {"messages": [user("hi")], "stop": 5},
    ],
)
def test_odd_bodies_are_refused(bench: BenchFactory, body: dict[str, Any]) -> None:
    """A malformed body is a 400 with a string that says why, never a crash."""
    response = bench().client.post("/v1/chat/completions", json={"model": KEY, **body})
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("limit", ["1e999", "-1e999", "NaN"])
def test_limits_beyond_numbers_are_refused(bench: BenchFactory, limit: str) -> None:
    """Infinite and undefined limits are a 400 too."""
    raw = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + limit + "}"
    assert bench().client.post("/v1/chat/completions", content=raw).status_code == 400


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_json_object_are_refused(bench: BenchFactory, raw: bytes) -> None:
    """Bytes that are not a JSON object are a 400, on both completion endpoints."""
    served = bench()
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert served.client.post(path, content=raw).status_code == 400
    assert served.last.body is None


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


def test_error_shape_of_newer_servers(bench: BenchFactory) -> None:
    """Newer servers wrap template errors in an object."""
    response = bench(strict_template="gemma", error_shape="object").chat(USER, USER)
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_prompt_is_counted_as_rendered(bench: BenchFactory) -> None:
    """The count is that of the ChatML text, its special tokens being one token each."""
    served = bench()
    served.chat(system("You are terse."), user("Hello there"))
    text = "<|im_start|>system\nYou are terse.<|im_end|>\n"
    text += "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert served.last.prompt_tokens == count(text)


def test_tools_cost_their_schema_and_instructions(bench: BenchFactory) -> None:
    """Tools are rendered into a system block with instructions, and more of them cost more."""
    served = bench()
    sizes = []
    for tools in ([], [TOOL], [TOOL, TOOL]):
        served.chat(user("hi"), tools=tools)
        sizes.append(served.last.prompt_tokens)
    assert sizes[1] - sizes[0] > 100
    assert 0 < sizes[2] - sizes[1] < 60


def test_images_cost_a_fixed_number_of_tokens(bench: BenchFactory) -> None:
    """An image costs 1000 tokens whatever its data, and text parts are counted as text."""
    served = bench()
    served.chat(user("look here"))
    plain = served.last.prompt_tokens
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 20_000}}
    served.chat(user([{"type": "text", "text": "look here"}, image]))
    assert served.last.prompt_tokens == plain + 1000
    assert "QUJD" not in served.last.seen_text


@pytest.mark.slow
def test_vocabulary_is_o200k_and_survives_pathological_text() -> None:
    """Ordinary text is tokenized as o200k_base does, and a million spaces do not panic."""
    text = "def f(x): return x  # naïve 漢字"
    assert list(encode(text)) == tiktoken.get_encoding("o200k_base").encode_ordinary(text)
    assert decode(encode(text)) == text
    assert 0 < count(" " * 1_000_000) < 100_000


def test_summary_keeps_the_facts_that_occur() -> None:
    """A summary holds the facts that stand in the text, or a stable share of them, within its bound."""
    facts = [f"src/module_{number}.py:{number}" for number in range(100)]
    text = " ".join(facts[:80])
    ideal = summary_of_facts(text, facts)
    assert [fact in ideal for fact in facts] == [True] * 80 + [False] * 20
    lossy = summary_of_facts(text, facts, keep_ratio=0.5)
    assert 20 < sum(f"- {fact}\n" in lossy for fact in facts) < 60
    assert lossy == summary_of_facts(text, facts, keep_ratio=0.5)
    assert len(summary_of_facts(text, facts, max_chars=600)) <= 600
