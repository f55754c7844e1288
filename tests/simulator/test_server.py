"""The paths that are served, the bodies that are read, and the end of a server."""

from __future__ import annotations

import httpx

from tests.lmstudio_double import Gate, Model, Reply, Simulator, numbered_words, serve
from tests.simulator.bench import KEY, user

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
