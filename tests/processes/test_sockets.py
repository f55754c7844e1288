"""What needs a socket: Anthropic's own library, and WebSockets, whose requests LiteLLM shows to no plug-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.builders import talk
from tests.integration.bench import KEY, Bench
from tests.integration.harness import MASTER_KEY, proxy
from tests.integration.page_forms import ANNA
from tests.integration.test_standards import TRIGGER, Running, items, opened, scripted
from tests.integration.test_ways_round import SEEN, open_ways, over
from tests.lmstudio_double import serve

__all__ = ["scripted"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with opened(tmp_path_factory.mktemp("standards"), serve, proxy) as started:
        yield started


@pytest.fixture
def claude(running: Running) -> Iterator[Any]:
    """Anthropic's own client, where it is installed."""
    with pytest.importorskip("anthropic").Anthropic(base_url=running.proxy.base_url, api_key=ANNA) as client:
        yield client


def test_a_websocket_is_guarded_and_follows_no_items(running: Running) -> None:
    """A long input is compacted. LiteLLM shows its requests to no plug-in, so a trigger is refused by name.

    One for a model that is left alone goes LiteLLM's own way.
    """
    address = running.proxy.base_url.replace("http", "ws", 1).removesuffix("/v1") + "/v1/responses"
    with connect(address, additional_headers={"Authorization": f"Bearer {ANNA}"}, max_size=None) as socket:

        def told(asked: list[dict[str, Any]], model: str = "small") -> dict[str, Any]:
            socket.send(json.dumps({"type": "response.create", "model": model, "input": asked}))
            while (event := json.loads(socket.recv(60)))["type"] not in ("response.completed", "error"):
                pass
            return dict(event)

        answer = told(items("socket"))
        assert answer["response"]["output"][-1]["content"][0]["text"] == "Understood."
        assert len(running.last) < len(items("socket"))
        refused = told([*items("socket"), TRIGGER])
        assert "is a compaction item, which is not followed over a WebSocket" in refused["error"]["message"]
        assert "compaction item" not in str(told([*items("alone", 4), TRIGGER], "alone"))


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_ways(tmp_path_factory.mktemp("ways"), "auto", process=True) as opened:
        yield opened


@pytest.mark.parametrize("name", ["lm_studio with its routes", "openai", "other openai"])
def test_no_websocket_leads_round_the_guard(ways: Bench, name: str) -> None:
    """LiteLLM would open one to the server, for as many responses as the client asks for."""
    watch = ways.watch("local" if name.startswith("other") else "lms")
    address = f"{ways.proxy.base_url.replace('http', 'ws', 1)}/v1/responses"
    asked = {"type": "response.create", "model": name, "input": talk(f"socket {name}", 6000)}
    with connect(address, additional_headers={"Authorization": f"Bearer {MASTER_KEY}"}, max_size=None) as socket:
        socket.send(json.dumps(asked))
        while (event := json.loads(socket.recv(60)))["type"] not in ("response.completed", "error"):
            pass
        assert event["type"] == "response.completed", event
        # As LiteLLM has it, a later one may name any model, for the same server.
        socket.send(json.dumps({**asked, "model": f"openai/{KEY}"}))
        assert json.loads(socket.recv(60))["type"] == "error"
    assert {record.path for record in watch.records if record.method == "POST"} <= SEEN
    assert [each.namespace for each in watch.simulator.sdk.sockets if "responses" in each.namespace] == []
    assert [problem for record in watch.records if (problem := over(record))] == []
