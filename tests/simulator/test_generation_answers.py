"""Answers as clients read them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from litellm_compaction.simulator import Reply
from tests.simulator.bench import KEY, Bench, user


@pytest.fixture
def client(served: Bench) -> Iterator[openai.OpenAI]:
    """The OpenAI client, pointed at it."""
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="lm-studio", max_retries=0) as client:
        yield client


def test_openai_client_reads_a_whole_answer(served: Bench, client: openai.OpenAI) -> None:
    """The OpenAI client understands a response that is not streamed."""
    served.simulator.script = lambda call: Reply("Hello.", reasoning="Greet.")
    answer = client.chat.completions.create(model=KEY, messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].message.model_extra == {"reasoning_content": "Greet."}
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == served.last.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_reads_a_streamed_tool_call(served: Bench, client: openai.OpenAI) -> None:
    """A call begins with nine-digit id and name, goes on in fragments without id, and ends as tool_calls."""
    arguments = json.dumps({"path": "src/a.py", "lines": [1, 2, 3]})
    served.simulator.script = lambda call: Reply("Reading.", tool_calls=[("read", arguments), ("list", "{}")])
    chunks = list(client.chat.completions.create(model=KEY, messages=[{"role": "user", "content": "hi"}], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    starts = [call for call in calls if call.id]
    assert [call.function.name for call in starts if call.function] == ["read", "list"]
    assert all(call.id and len(call.id) == 9 and call.id.isdigit() for call in starts)
    joined = "".join(call.function.arguments or "" for call in calls if call.function and call.index == 0)
    assert joined == arguments
    assert len(calls) > 5
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_whole_tool_call(served: Bench) -> None:
    """A response that is not streamed carries complete calls only; one cut by max_tokens is left out."""
    served.simulator.script = lambda call: Reply(tool_calls=[("read", '{"path": "a.py"}')])
    message = served.chat(user("hi")).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"path": "a.py"}'}
    choice = served.chat(user("hi"), max_tokens=12).json()["choices"][0]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([], "length")


def test_usage_comes_last_and_only_when_asked_for(served: Bench) -> None:
    """A stream carries usage in a chunk without choices, if `include_usage` is set."""
    assert all("usage" not in data for _, data in served.events(user("hi"))[:-1])
    usage = served.events(user("hi"), stream_options={"include_usage": True})[-2][1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == served.last.completion_tokens
    assert "prompt_tokens_details" not in usage["usage"]


def test_text_completion(served: Bench, client: openai.OpenAI) -> None:
    """The completions endpoint answers without a template, streamed or not."""
    served.simulator.script = lambda call: Reply(f"seen: {call.prompt_text}")
    answer = client.completions.create(model=KEY, prompt="once")
    assert answer.choices[0].text == "seen: once"
    assert served.last.prompt_tokens == 1
    chunks = list(client.completions.create(model=KEY, prompt="once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "seen: once"
