"""The paths that are served, the bodies that are read, and the end of a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.lmstudio_double import Gate, Model, Reply, Simulator, numbered_words, serve
from tests.lmstudio_double.simulator import ThoughtControl
from tests.simulator.bench import KEY, Bench, BenchFactory, user

TEXT = numbered_words(20)


def test_stopping_cuts_open_streams() -> None:
    """Leaving `serve` with a stream open does not hang, and the same simulator can be served again."""
    body = {"messages": [user("hi")], "stream": True}
    simulator = Simulator([Model(KEY)])
    simulator.load(KEY, 4096)
    gate = Gate()
    simulator.script = lambda call: Reply(TEXT, gate=gate, gate_after_tokens=2) if call.index == 0 else None
    with httpx.Client(timeout=60) as client:
        with serve(simulator) as address:
            request = client.build_request("POST", f"{address.base_url}/v1/chat/completions", json=body)
            response = client.send(request, stream=True)
            assert gate.reached.wait(60)
        # Cut with its connection, not cancelled when the server had waited long enough for it.
        assert simulator.requests[0].outcome == "disconnected"
        response.close()
    with serve(simulator) as address:
        again = httpx.post(f"{address.base_url}/v1/chat/completions", json=body, timeout=60)
        assert again.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("control", ["ends", "refuses", "ignores", "absent"])
def test_llama_cpp_ends_a_thought_that_it_is_told_of(bench: BenchFactory, control: ThoughtControl) -> None:
    """As its build of 2026-10-11: by the answer's id, only if the request allowed it; older ones have no such path."""
    served = bench(api="llama.cpp", thought_control=control)
    told: list[httpx.Response] = []

    class Told(Gate):
        def is_set(self) -> bool:
            return bool(told)

    thought = numbered_words(40)
    served.simulator.script = lambda call: Reply("Four.", reasoning=thought, gate=Told(), gate_after_tokens=20)
    body = {"model": KEY, "messages": [user("hi")], "stream": True, "reasoning_control": True}

    def tell(answer_id: str) -> None:
        told.append(_control(served, answer_id))

    with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = [json.loads(line[6:]) for line in _until(answer, 3, tell)]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    seen = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert (seen == thought) is (control != "ends")
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert told[0].status_code == (404 if control == "absent" else 200)
    assert told[0].json().get("success") == {"absent": None, "refuses": False}.get(control, True)
    assert _control(served, chunks[0]["id"]).json().get("success") is (None if control == "absent" else False)


def _control(served: Bench, answer_id: str) -> httpx.Response:
    return served.client.post("/v1/chat/completions/control", json={"id": answer_id, "action": "reasoning_end"})


def _until(answer: httpx.Response, number: int, tell: Callable[[str], None]) -> Iterator[str]:
    """The lines of a stream; behind the `number`th its id is told."""
    lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
    for at, line in enumerate(lines, 1):
        if at == number:
            tell(json.loads(line[6:])["id"])
        yield line
