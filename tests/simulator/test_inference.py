"""What requests to one instance share: slots, the KV cache, and the pool of its window."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from litellm_compaction import simulator
from tests.lmstudio_double import ChatCall, Gate, Model, Reply, numbered_words
from tests.simulator.bench import (
    Bench,
    BenchFactory,
    deltas,
    finish_reasons,
    long_chat,
    parse_events,
    user,
)


def _two_at_once(served: Bench, words: int, **fields: Any) -> list[Any]:
    """Two answers of two tokens a word, three quarters of both made before either goes on; the results in order."""
    barrier = threading.Barrier(2, timeout=60)
    gates = [Gate(), Gate()]
    served.simulator.script = lambda call: Reply(
        numbered_words(words), gate=gates[call.index], gate_after_tokens=words * 3 // 2
    )

    def ask(number: int) -> Any:
        barrier.wait()
        return served.chat(user(f"number {number}"), **fields)

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, number) for number in range(2)]
        for gate in gates:
            assert gate.reached.wait(60)
        for gate in gates:
            gate.open()
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_pool_fails_all_requests(bench: BenchFactory, stream: bool) -> None:
    """When the sum of parallel requests exceeds the window, every one of them fails."""
    served = bench(1000, models=[Model("m", parallel=2)])
    answers = _two_at_once(served, 300, stream=stream)
    assert [answer.status_code for answer in answers] == [200 if stream else 400] * 2
    assert all("Context size has been exceeded." in answer.text for answer in answers)
    assert [record.outcome for record in served.simulator.requests] == ["pool_overflow"] * 2
    served.simulator.script = None
    assert served.chat(user("again")).status_code == 200


FITS_NOT = (
    "Input does not fit in context length. The input has {} tokens, but the context length only supports 1000 tokens."
)


def test_middle_truncation_is_silent(bench: BenchFactory) -> None:
    """The middle is dropped with HTTP 200; system, first task, and newest question stay; usage is silent."""
    served = bench(1000)
    calls: list[ChatCall] = []
    served.simulator.script = lambda call: calls.append(call)
    response = served.chat(*long_chat())
    record = served.last
    assert response.status_code == 200
    assert (record.truncated, record.outcome) == (True, "ok")
    assert record.kept_tokens <= 1000 < record.prompt_tokens
    assert response.json()["usage"]["prompt_tokens"] == record.prompt_tokens
    for kept in ("You are terse.", "First task", "What was the first task?"):
        assert kept in calls[0].prompt_text
    assert "Step 0" not in calls[0].prompt_text
    assert "Step 0" in calls[0].sent_text
    assert record.seen_text == calls[0].prompt_text


def words(_: ChatCall) -> Reply:
    """An answer longer than the window."""
    return Reply(numbered_words(1000))


@pytest.mark.parametrize(
    ("overflow", "status", "whole", "streamed"),
    [
        ("error_400_string", 400, "(n_keep: {}>= n_ctx: 1000)", None),
        ("error_400_object", 400, FITS_NOT, None),
        ("error_event", 200, FITS_NOT, FITS_NOT),
        ("empty", 200, '"completion_tokens":0', ""),
    ],
)
def test_a_conversation_that_is_too_long_has_many_answers(
    bench: BenchFactory, overflow: str, status: int, whole: str, streamed: str | None
) -> None:
    """A bare string, an object, one error event, an empty stream; what fits is served by the same instance."""
    served = bench(1000, overflow=overflow)
    response = served.chat(*long_chat())
    assert response.status_code == status
    assert whole.format(served.last.prompt_tokens) in response.text
    response = served.chat(*long_chat(), stream=True)
    if streamed is None:
        assert response.status_code == status
    elif streamed:
        ((name, data),) = parse_events(response.text)
        assert (name, streamed.format(served.last.prompt_tokens) in data["message"]) == ("error", True)
    else:
        assert (deltas(parse_events(response.text)), finish_reasons(parse_events(response.text))) == ("", [])
    assert served.chat(user("hi")).status_code == 200


def test_the_simulator_drops_the_oldest_and_keeps_what_it_has_read(bench: BenchFactory) -> None:
    """Silently; of the next turn only the new part is computed."""
    served = bench(1000, module=simulator)
    assert served.chat(*long_chat()).status_code == 200
    assert (served.last.truncated, served.last.outcome) == (True, "ok")
    assert served.last.kept_tokens <= 875 < served.last.prompt_tokens
    assert "You are terse." not in served.last.seen_text
    assert served.last.seen_text.endswith("What was the first task?")
    asked = [user("One. " * 50)]
    answer = served.chat(*asked).json()["choices"][0]["message"]
    served.chat(*asked, {"role": "assistant", "content": answer["content"]}, user("Two."))
    assert served.last.cached_tokens > served.last.computed_tokens
