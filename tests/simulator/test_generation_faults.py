"""Where the simulator fails on purpose, and how it notices that the client has gone."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from litellm_compaction.simulator import Fault, Gate, Model, Reply, numbered_words
from tests.simulator.bench import KEY, BenchFactory, deltas, finish_reasons, user

TEXT = numbered_words(20)


@pytest.mark.parametrize("stream", [True, False])
def test_500(bench: BenchFactory, stream: bool) -> None:
    """A 500 before the first delta is a real status with an error body, once per queued fault."""
    served = bench()
    served.simulator.fail_next(Fault("500", message="out of memory"))
    response = served.chat(user("hi"), stream=stream)
    assert (response.status_code, response.json()) == (500, {"error": "out of memory"})
    assert served.last.outcome == "fault"
    assert served.chat(user("hi"), stream=stream).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", ["before_first_delta", "mid_text"])
def test_drop(bench: BenchFactory, at: str, stream: bool) -> None:
    """A dropped connection is a protocol error for the client, after half of the text for `mid_text`."""
    served = bench(script=lambda call: Reply(TEXT, fault=Fault("drop", at)))  # type: ignore[arg-type]
    with pytest.raises(httpx.RemoteProtocolError):
        served.chat(user("hi"), stream=stream)
    assert served.last.outcome == "fault"
    assert (served.last.completion_tokens > 0) == (at == "mid_text")


def test_mid_text_error_event(bench: BenchFactory) -> None:
    """An error in the middle of a stream is an error event after the text so far."""
    served = bench(script=lambda call: Reply(TEXT, fault=Fault("error_event", "mid_text", after_tokens=6)))
    events = served.events(user("hi"))
    assert TEXT.startswith(deltas(events))
    assert deltas(events)
    assert events[-1] == (
        "error",
        {"error": {"message": "generation failed"}, "message": "generation failed"},
    )
    assert served.chat(user("hi")).json()["error"]["message"] == "generation failed"


@pytest.mark.parametrize("at", ["before_first_delta", "mid_text"])
def test_end_without_finish_reason(bench: BenchFactory, at: str) -> None:
    """An `empty` fault ends the stream cleanly without a finish reason, at once or in the middle."""
    served = bench(script=lambda call: Reply(TEXT, fault=Fault("empty", at)))  # type: ignore[arg-type]
    events = served.events(user("hi"))
    assert (finish_reasons(events), bool(deltas(events))) == ([], at == "mid_text")
    assert events[-1] == ("message", "[DONE]")


def test_slow(bench: BenchFactory) -> None:
    """A slow answer comes whole, after its delay."""
    served = bench(script=lambda call: Reply(TEXT, fault=Fault("slow", "mid_text", delay_ms=60)))
    assert deltas(served.events(user("hi"))) == TEXT
    assert served.last.ended_s - served.last.started_s >= 0.06


@pytest.mark.parametrize("stream", [True, False])
async def test_hang_ends_with_the_client(bench: BenchFactory, stream: bool) -> None:
    """A hanging answer is still to come when a later one has ended, until the client gives up, which is recorded."""
    served = bench(models=[Model(KEY, parallel=2)])
    simulator = served.simulator
    simulator.script = lambda call: Reply(TEXT, fault=Fault("hang") if call.index == 0 else None)
    body = {"messages": [user("hi")], "stream": stream}
    async with httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=60) as client:
        waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(simulator.wait_until, lambda: bool(simulator.requests))
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        first, second = simulator.requests
        assert (first.outcome, second.outcome) == ("running", "ok")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.to_thread(simulator.wait_until, lambda: first.outcome == "disconnected")
    assert first.completion_tokens == 0


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


def test_a_plain_answer_is_generated_to_its_end_for_nobody(bench: BenchFactory) -> None:
    """Where the client has gone its slot stays taken until the model has ended, as on a real engine; or where asked."""
    for runs_on, words in ((True, 40), (False, 0)):
        served = bench(models=[Model(KEY, parallel=1)], runs_on=runs_on)
        gate = Gate()
        script = {0: Reply(numbered_words(40), gate=gate), 1: Reply("next")}
        served.simulator.script = lambda call, script=script: script[call.index]
        with pytest.raises(httpx.ReadTimeout):
            served.chat_within(0.2, user("hi"))
        served.simulator.wait_until(lambda served=served: served.last.disconnected_s is not None)
        gate.open()
        assert served.chat(user("next")).status_code == 200
        first, second = served.simulator.requests
        assert (first.outcome, first.content) == ("disconnected", numbered_words(words))
        assert first.ended_s <= second.first_delta_s


def test_disconnect_frees_the_slot(bench: BenchFactory) -> None:
    """After a disconnect the next request in line is served."""
    served = bench(models=[Model(KEY, parallel=1)])
    gate = Gate()
    served.simulator.script = lambda call: Reply("x", gate=gate) if call.index == 0 else None
    with served.client.stream("POST", "/v1/chat/completions", json={"messages": [user("hi")], "stream": True}):
        assert gate.reached.wait(60)
    assert served.chat(user("next")).status_code == 200


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
