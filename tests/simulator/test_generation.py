"""How answers unfold: pieces, limits, stop strings, thoughts, speed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from litellm_compaction.simulator import Fault, Gate, Model, Reply, numbered_words
from tests.simulator.bench import KEY, Bench, BenchFactory, assistant, deltas, finish_reasons, parse_events, user


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


def test_whole_tool_call(served: Bench) -> None:
    """A response that is not streamed carries complete calls only; one cut by max_tokens is left out."""
    served.simulator.script = lambda call: Reply(tool_calls=[("read", '{"path": "a.py"}')])
    message = served.chat(user("hi")).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"path": "a.py"}'}
    choice = served.chat(user("hi"), max_tokens=12).json()["choices"][0]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([], "length")


TEXT = numbered_words(20)


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


def test_unload_fails_what_is_being_generated(bench: BenchFactory) -> None:
    """Unloading an instance ends its streams with an error event."""
    served = bench()
    gate = Gate()
    served.simulator.script = lambda call: Reply(TEXT, gate=gate, gate_after_tokens=2)

    def unload() -> None:
        assert gate.reached.wait(60)
        served.simulator.unload(KEY)

    unloader = threading.Thread(target=unload)
    unloader.start()
    events = served.events(user("hi"))
    unloader.join()
    assert events[-1][0] == "error"
    assert served.last.outcome == "error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_ends_an_answer(bench: BenchFactory, stream: bool) -> None:
    """A status, a cut connection, an error event, an end without a reason: at once or in mid-text, once each."""
    served = bench()
    served.simulator.fail_next(Fault("500", message="out of memory"))
    response = served.chat(user("hi"), stream=stream)
    assert (response.status_code, response.json()) == (500, {"error": "out of memory"})
    for at in ("before_first_delta", "mid_text"):
        served.simulator.fail_next(Fault("drop", at))  # type: ignore[arg-type]
        with pytest.raises(httpx.RemoteProtocolError):
            served.chat(user("hi"), stream=stream)
        assert (served.last.outcome, served.last.completion_tokens > 0) == ("fault", at == "mid_text")
    served.simulator.fail_next(Fault("error_event", "mid_text", after_tokens=6))
    response = served.chat(user("hi"), stream=stream)
    error = parse_events(response.text)[-1][1] if stream else response.json()
    assert error["error"]["message"] == "generation failed"
    assert served.chat(user("hi"), stream=stream).status_code == 200
    if stream:
        served.simulator.fail_next(Fault("empty", "mid_text"))
        events = served.events(user("hi"))
        assert (finish_reasons(events), bool(deltas(events)), events[-1][1]) == ([], True, "[DONE]")


def test_prompt_processing_finishes_after_a_disconnect(bench: BenchFactory) -> None:
    """A client that leaves during prompt processing keeps its slot until that is done, as in LM Studio."""
    # One slot: beside others the next request need not wait for this one.
    served = bench(models=[Model(KEY, parallel=1)], prompt_tokens_per_second=100)
    # It would not end by itself, however late the client comes to leave.
    endless = Reply(TEXT, gate=Gate())
    served.simulator.script = lambda call: endless if call.index == 0 else None
    body = {"messages": [user(numbered_words(8))], "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body):
        pass
    first = served.last
    served.chat(user("next"))
    assert first.outcome == "disconnected"
    assert served.last.ended_s - first.started_s >= first.computed_tokens / 100
