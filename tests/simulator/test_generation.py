"""How answers unfold: pieces, limits, stop strings, thoughts; and what a script may answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.lmstudio_double import Gate, Reply, numbered_words
from tests.simulator.bench import KEY, Bench, BenchFactory, deltas, user


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_stream_is_the_text_in_small_pieces(served: Bench, chunk_tokens: int) -> None:
    """Chunks of the configured size join to exactly the text, characters of several tokens included."""
    text = "Zażółć 🎉🏳️‍🌈 gęślą — 漢字仮名 " + numbered_words(30)
    served.simulator.chunk_tokens, served.simulator.script = chunk_tokens, lambda call: Reply(text)
    events = served.events(user("go"))
    assert deltas(events) == text
    assert events[0][1]["choices"][0]["delta"]["role"] == "assistant"
    assert sum("role" in data["choices"][0]["delta"] for _, data in events[:-1]) == 1
    assert events[-1] == ("message", "[DONE]")
    assert served.last.content == text


@pytest.fixture
def client(served: Bench) -> Iterator[openai.OpenAI]:
    """The OpenAI client, pointed at it."""
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="lm-studio", max_retries=0) as client:
        yield client


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


def test_disconnect_ends_the_generation(bench: BenchFactory) -> None:
    """A client that leaves stops an answer that would never end, and the partial answer is on record."""
    reply = Reply(numbered_words(1000), gate=Gate(), gate_after_tokens=40)
    served = bench(script=lambda call: reply)
    with served.client.stream("POST", "/v1/chat/completions", json={"messages": [user("hi")], "stream": True}) as open_:
        lines = open_.iter_lines()
        for _ in range(6):
            next(lines)
    served.simulator.wait_until(lambda: served.last.outcome == "disconnected")
    record = served.last
    assert 0 < record.completion_tokens <= 40
    assert numbered_words(1000).startswith(record.content)
    assert record.content


def test_a_request_for_a_summary_gets_one_of_what_was_shown(served: Bench) -> None:
    """Behind the conversation, or with a transcript of it; a newcomer's log has no junk, and says nothing of it."""
    behind = served.chat(user("The port is 4812."), user("You write the record of a conversation."))
    assert behind.json()["choices"][0]["message"]["content"] == "### What the user said\n- The port is 4812."
    transcript = "You write the record.\n\nCONVERSATION TO CONDENSE:\nUSER:\nThe port is 4812.\n\nASSISTANT:\nFine."
    alone = served.chat(user(transcript))
    assert alone.json()["choices"][0]["message"]["content"] == "### What the user said\n- The port is 4812."
