"""What answers look like and how they unfold, with plain HTTP and with the OpenAI client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import openai
import pytest
from sim_bench import KEY, Bench, BenchFactory, assistant, deltas, finish_reasons, system, tool_round, user

from litellm_compaction.simulator import ChatCall, Gate, Reply, numbered_words


@pytest.fixture
def served(bench: BenchFactory) -> Bench:
    """A simulator with one model loaded."""
    return bench()


@pytest.fixture
def client(served: Bench) -> Iterator[openai.OpenAI]:
    """The OpenAI client, pointed at it."""
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="lm-studio", max_retries=0) as client:
        yield client


def test_default_reply_is_deterministic(bench: BenchFactory) -> None:
    """Two simulators with the same seed answer the same requests with the same texts and ids."""
    first, second = bench(), bench()
    answers = [one.chat(user("hi")).json() | {"created": 0} for one in (first, second)]
    assert answers[0] == answers[1]


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


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_stream_is_the_text_in_small_pieces(bench: BenchFactory, chunk_tokens: int) -> None:
    """Chunks of the configured size join to exactly the text, characters of several tokens included."""
    text = "Zażółć 🎉🏳️‍🌈 gęślą — 漢字仮名 " + numbered_words(30)
    served = bench(chunk_tokens=chunk_tokens, script=lambda call: Reply(text))
    events = served.events(user("go"))
    assert deltas(events) == text
    assert events[0][1]["choices"][0]["delta"]["role"] == "assistant"
    assert sum("role" in data["choices"][0]["delta"] for _, data in events[:-1]) == 1
    assert events[-1] == ("message", "[DONE]")
    assert served.last.content == text


def test_usage_comes_last_and_only_when_asked_for(served: Bench) -> None:
    """A stream carries usage in a chunk without choices, if `include_usage` is set."""
    assert all("usage" not in data for _, data in served.events(user("hi"))[:-1])
    usage = served.events(user("hi"), stream_options={"include_usage": True})[-2][1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == served.last.completion_tokens
    assert "prompt_tokens_details" not in usage["usage"]


@pytest.mark.parametrize("limit", [0, 1, 5, -1])
def test_max_tokens(served: Bench, limit: int) -> None:
    """`max_tokens` ends the answer with `length` after exactly so many tokens, and -1 means no limit."""
    served.simulator.script = lambda call: Reply(numbered_words(40))
    events = served.events(user("go"), max_tokens=limit)
    assert finish_reasons(events) == ["stop" if limit == -1 else "length"]
    if limit >= 0:
        assert served.last.completion_tokens == limit


def test_stop_strings_end_the_text_before_them(served: Bench) -> None:
    """Generation ends before the first stop string, with `stop`."""
    served.simulator.script = lambda call: Reply(numbered_words(40))
    events = served.events(user("go"), stop=["word9", "word5"])
    assert (deltas(events), finish_reasons(events)) == ("word1 word2 word3 word4 ", ["stop"])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_in_its_own_field(bench: BenchFactory, field: str) -> None:
    """Thoughts arrive before the text in the configured field, and usage counts them."""
    served = bench(reasoning_field=field, script=lambda call: Reply("Answer.", reasoning="Hm, hm."))
    events = served.events(user("go"), stream_options={"include_usage": True})
    assert (deltas(events, field), deltas(events)) == ("Hm, hm.", "Answer.")
    assert events[-2][1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_reasoning_inline(bench: BenchFactory) -> None:
    """With `think` the thoughts are inside the text."""
    served = bench(reasoning_field="think", script=lambda call: Reply("Answer.", reasoning="Hm."))
    assert deltas(served.events(user("go"))) == "<think>\nHm.\n</think>\n\nAnswer."


def test_text_completion(served: Bench, client: openai.OpenAI) -> None:
    """The completions endpoint answers without a template, streamed or not."""
    served.simulator.script = lambda call: Reply(f"seen: {call.prompt_text}")
    answer = client.completions.create(model=KEY, prompt="once")
    assert answer.choices[0].text == "seen: once"
    assert served.last.prompt_tokens == 1
    chunks = list(client.completions.create(model=KEY, prompt="once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "seen: once"


def test_script_sees_the_call(served: Bench) -> None:
    """A script gets the body, the text with tool results and arguments, the counts, and a running index."""
    calls: list[ChatCall] = []
    served.simulator.script = lambda call: calls.append(call)
    served.chat(user("hi"))
    served.chat(system("S"), user("read a.py"), *tool_round(), temperature=0.3)
    call = calls[1]
    assert (call.index, call.stream, call.truncated, call.context_length) == (1, False, False, 8192)
    assert call.prompt_text == "S\nread a.py\n" + '{"path": "a.py"}' + "\nprint('hello')"
    assert (call.body["temperature"], call.messages[0]["content"]) == (0.3, "S")
    assert call.prompt_tokens == served.last.prompt_tokens


def test_failing_script_is_a_visible_500(served: Bench) -> None:
    """A script that raises gives a 500 that names the exception."""

    def script(call: ChatCall) -> Reply:
        raise KeyError("boom")

    served.simulator.script = script
    response = served.chat(user("hi"))
    assert (response.status_code, "boom" in response.json()["error"]) == (500, True)


def test_raw_responses(served: Bench) -> None:
    """A reply with a status or a raw body is sent as it is."""
    replies = [
        Reply(status=503, raw_body={"error": "busy"}),
        Reply(raw_body="not json"),
        Reply("why", status=429),
    ]
    served.simulator.script = lambda call: replies[call.index]
    first, second, third = (served.chat(user("hi")) for _ in replies)
    assert (first.status_code, first.json()) == (503, {"error": "busy"})
    assert (second.status_code, second.text) == (200, "not json")
    assert (third.status_code, third.json()) == (429, {"error": "why"})


def test_final_assistant_message_is_continued(served: Bench) -> None:
    """A last assistant message is left open, which costs fewer tokens than closing it and opening another."""
    served.chat(user("hi"), assistant("Once upon"))
    continued = served.last.prompt_tokens
    served.chat(user("hi"), assistant("Once upon"), user(""))
    assert continued < served.last.prompt_tokens
    assert "Once upon" in served.simulator.requests[0].seen_text


@pytest.mark.parametrize(("echoes", "begun"), [(True, "Once upon"), (False, "")])
@pytest.mark.parametrize("stream", [True, False])
def test_a_continued_message_is_repeated_before_the_rest_of_it(
    bench: BenchFactory, echoes: bool, begun: str, stream: bool
) -> None:
    """As LM Studio 0.4.16 and llama.cpp do; what is repeated is not generated, so it costs no tokens."""
    served = bench(script=lambda call: Reply(" a time"), echoes_prefill=echoes)
    messages = user("hi"), assistant("Once upon")
    if stream:
        events = served.events(*messages)
        answered = deltas(events)
        assert [bool(data["choices"][0]["delta"].get("role")) for _, data in events[:-1]].count(True) == 1
    else:
        answered = served.chat(*messages).json()["choices"][0]["message"]["content"]
    assert answered == f"{begun} a time"
    assert (served.last.content, served.last.completion_tokens) == (" a time", 2)


def test_gate_holds_the_stream(served: Bench) -> None:
    """An answer waits at its gate after the given tokens until it is opened."""
    gate = Gate()
    served.simulator.script = lambda call: Reply(numbered_words(20), gate=gate, gate_after_tokens=4)
    with served.client.stream("POST", "/v1/chat/completions", json={"messages": [user("hi")], "stream": True}) as open_:
        lines = open_.iter_lines()
        assert "word" in next(lines)
        assert gate.reached.wait(60)
        assert served.last.outcome == "running"
        gate.open()
        assert list(lines)[-2] == "data: [DONE]"
    assert served.last.outcome == "ok"


def test_speed(bench: BenchFactory) -> None:
    """Tokens come at the configured speed, streamed or not, after a prompt that takes its time."""
    served = bench(tokens_per_second=200, prompt_tokens_per_second=200, script=lambda call: Reply("a b c d e f g h"))
    for stream in (True, False):
        started_s = time.monotonic()
        served.chat(user("hi"), stream=stream)
        assert time.monotonic() - started_s >= 8 / 200
    record = served.simulator.requests[0]
    assert record.first_delta_s is not None
    assert record.first_delta_s - record.started_s >= record.computed_tokens / 200
