"""How answers unfold: pieces, limits, stop strings, thoughts, speed."""

from __future__ import annotations

import time

import pytest

from litellm_compaction.simulator import Reply, numbered_words
from tests.simulator.bench import Bench, BenchFactory, assistant, deltas, finish_reasons, user


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
