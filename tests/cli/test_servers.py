"""Servers that are asked without a proxy: what a probe sends, and what it finds."""

from __future__ import annotations

import pytest

from litellm_compaction.simulator import Address, Model, Simulator, serve
from tests.cli.conftest import GPT_OSS, QWEN, Report, at, config, deployment, messages
from tests.integration.plain_server import PlainServer

pytestmark = pytest.mark.usefixtures("without_lm_studio")


def test_a_probe_compares_our_count_with_the_servers(report: Report, address: Address) -> None:
    """Two requests for 16 tokens each; the simulator has another vocabulary, which is a problem where we claim ours."""
    code, found = report(config(deployment(params=at(address))), probes=True)
    [row] = found["deployments"]
    assert all(probe["rpc_tokens"] == probe["server_tokens"] for probe in row["probes"])
    assert [probe["tools"] for probe in row["probes"]] == [False, True]
    assert all(probe["server_tokens"] > 50 and probe["exact"] for probe in row["probes"])
    off = [probe for probe in row["probes"] if abs(probe["counted_tokens"] / probe["server_tokens"] - 1) > 0.02]
    assert len(messages(found)) == len(off) > 0
    assert code == 1
    assert all("though it should be exact" in message and "tokenizer:" in message for message in messages(found))


def test_findings_behind_a_wildcard_name_the_model(report: Report, simulator: Simulator, address: Address) -> None:
    """Of two that are off in different ways, each has its own."""
    simulator.load(GPT_OSS, 16_384)
    _, found = report(config(deployment("lm_studio/*", "lm_studio/*", params=at(address))), probes=True)
    places = {finding["place"] for finding in found["findings"] if "our count" in finding["message"]}
    assert places == {f"lm_studio/* → {QWEN}", f"lm_studio/* → {GPT_OSS}"}


def test_a_stand_in_may_be_off(report: Report) -> None:
    """Usage corrects it, so it is a note, and exact counting is offered."""
    simulator = Simulator([Model("someone/unknown", architecture="unheard")])
    simulator.load("someone/unknown", 8192)
    with serve(simulator) as address:
        code, found = report(config(deployment("lm_studio/someone/unknown", params=at(address))), probes=True)
    assert found["deployments"][0]["tokenizer_source"] == "stand_in"
    assert code == 0
    assert all("usage corrects it" in message for message in messages(found, "note") if "our count" in message)


def test_another_server_is_probed_where_it_loads_nothing_for_it(report: Report, plain: PlainServer) -> None:
    """llama.cpp's has one model, and has it loaded; Ollama would load what it is asked for."""
    plain.gets["/props"] = {"default_generation_settings": {"n_ctx": 6144}}
    info = {"compaction": {"enabled": True}}
    _, found = report(
        config(deployment("openai/qwen3", params={"api_base": f"{plain.base_url}/v1"}, info=info)), probes=True
    )
    assert [probe["tools"] for probe in found["deployments"][0]["probes"]] == [False, True]
    del plain.gets["/props"]
    plain.gets["/api/ps"] = {"models": [{"name": "qwen3:latest", "context_length": 16384}]}
    params = {"api_base": plain.base_url}
    _, found = report(config(deployment("ollama_chat/qwen3", params=params, info=info)), probes=True)
    assert (found["deployments"][0]["window_source"], found["deployments"][0]["probes"]) == ("ollama", [])
