"""What requests to one instance share: slots, the KV cache, and the pool of its window."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from litellm_compaction.simulator import ChatCall, Gate, Model, Reply, numbered_words
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


def test_without_a_unified_cache_each_request_has_the_window(bench: BenchFactory) -> None:
    """With separate caches the same two requests both succeed."""
    served = bench(1000, models=[Model("m", parallel=2)], unified_kv=False)
    assert [answer.status_code for answer in _two_at_once(served, 300)] == [200, 200]


def test_a_prompt_that_does_not_fit_beside_another_fails_both(bench: BenchFactory) -> None:
    """A new prompt that makes the pool overflow ends the running generation too."""
    served = bench(1000, models=[Model("m", parallel=2)])
    gate = Gate()
    served.simulator.script = lambda call: Reply("x", gate=gate)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.chat, user(numbered_words(280)))
        assert gate.reached.wait(60)
        late = served.chat(user(numbered_words(280)))
        assert (running.result().status_code, late.status_code) == (400, 400)
    assert {record.outcome for record in served.simulator.requests} == {"pool_overflow"}


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
        ("crash", 400, "model has crashed", "model has crashed"),
    ],
)
def test_a_conversation_that_is_too_long_has_many_answers(
    bench: BenchFactory, overflow: str, status: int, whole: str, streamed: str | None
) -> None:
    """A bare string, an object, one error event, an empty stream, a crash; what fits is served by the same instance."""
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


def test_a_first_message_beyond_the_window_is_a_400(bench: BenchFactory) -> None:
    """When system and first user message alone exceed the window, truncation fails with a bare-string 400."""
    served = bench(1000)
    response = served.chat(user(numbered_words(3000)), stream=True)
    assert (response.status_code, served.last.outcome) == (400, "overflow")
    assert "greater than the context length (n_keep: 8" in response.json()["error"]


def test_requests_beyond_the_slots_wait_in_order(bench: BenchFactory) -> None:
    """With one slot a second request starts only when the first has ended."""
    served = bench(models=[Model("m", parallel=1)])
    gate = Gate()
    served.simulator.script = lambda call: Reply("x", gate=gate) if call.index == 0 else None
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.chat, user("one"))
        assert gate.reached.wait(60)
        second = pool.submit(served.chat, user("two"))
        served.simulator.wait_until(lambda: len(served.simulator.requests) == 2)
        gate.open()
        assert first.result().status_code == second.result().status_code == 200
    one, two = served.simulator.requests
    assert one.ended_s is not None
    assert two.first_delta_s is not None
    assert two.first_delta_s > one.ended_s
