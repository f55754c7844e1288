"""Servers that are not LM Studio, through the real proxy: opted in, they are guarded by their own window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.bench import Bench, is_summary_call, open_bench
from tests.integration.conversations import talk
from tests.integration.plain_server import PlainServer, serve_plain

pytestmark = pytest.mark.proxy

_PROPS = {"default_generation_settings": {"id": 0, "n_ctx": 6144}, "total_slots": 1, "chat_template": "…"}
_OLLAMA = {"models": [{"name": "qwen3:latest", "model": "qwen3:latest", "context_length": 5120}]}
_ON = {"compaction": {"enabled": True}}


@pytest.fixture(scope="module")
def llama() -> Iterator[PlainServer]:
    """Stands in for llama.cpp's server."""
    with serve_plain() as server:
        server.gets["/props"] = _PROPS
        yield server


@pytest.fixture(scope="module")
def bystander() -> Iterator[PlainServer]:
    """Another llama.cpp server, which nobody opted in."""
    with serve_plain() as server:
        server.gets["/props"] = _PROPS
        yield server


@pytest.fixture(scope="module")
def ollama() -> Iterator[PlainServer]:
    """Stands in for Ollama, by its OpenAI-compatible address."""
    with serve_plain() as server:
        server.gets["/api/ps"] = _OLLAMA
        yield server


@pytest.fixture(scope="module")
def others(
    tmp_path_factory: pytest.TempPathFactory, llama: PlainServer, bystander: PlainServer, ollama: PlainServer
) -> Iterator[Bench]:
    """A proxy with deployments that are opted in, and ones that are not."""

    def entry(group: str, model: str, server: PlainServer, info: dict[str, Any]) -> dict[str, Any]:
        params = {"model": model, "api_base": f"{server.base_url}/v1", "api_key": "k"}
        return {"model_name": group, "litellm_params": params, "model_info": info}

    early = {"compaction": {"enabled": True, "threshold_tokens": 1500}}
    with open_bench(
        tmp_path_factory.mktemp("others"),
        [],
        {},
        entries=[
            entry("llama", "openai/qwen", llama, _ON),
            entry("llamafile", "llamafile/qwen", llama, _ON),
            entry("early", "openai/qwen", llama, early),
            entry("ollama", "openai/qwen3", ollama, _ON),
            entry("bystander", "openai/qwen", bystander, {}),
            entry("bystander-vllm", "hosted_vllm/qwen", bystander, {}),
        ],
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as bench:
        yield bench


@pytest.mark.parametrize(("group", "window"), [("llama", 6144), ("llamafile", 6144), ("ollama", 5120)])
def test_an_opted_in_server_is_guarded_by_its_own_window(
    others: Bench, llama: PlainServer, ollama: PlainServer, group: str, window: int
) -> None:
    """Its own number is the window: a long conversation is compacted, and the answer bounded by it."""
    server = ollama if group == "ollama" else llama
    messages = talk(f"provider {group}", 12_000)
    since = len(server.requests)
    answer = others.proxy.chat(group, messages)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-litellm-compaction-window"] == str(window)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    (body,) = [call for call in (request.json for request in server.posts(since)) if not is_summary_call(call)]
    assert len(body["messages"]) < len(messages)
    assert body["messages"][-1] == messages[-1]
    assert 256 <= body["max_tokens"] < window
    source = "ollama" if group == "ollama" else r"llama\.cpp"
    assert others.proxy.expect_logged(rf"window model={group} tokens={window} source={source}")


def test_a_deployments_own_threshold_decides(others: Bench) -> None:
    """2,500 tokens are compacted where the threshold says so, and left alone where the ratio decides."""
    messages = talk("threshold", 2500)
    assert others.proxy.chat("llama", messages).headers["x-litellm-compaction"] == "none"
    assert others.proxy.chat("early", messages).headers["x-litellm-compaction"] == "compacted"


def test_a_server_nobody_opted_in_is_neither_asked_nor_changed(others: Bench, bystander: PlainServer) -> None:
    """P7: its requests go out as they came, and nobody asks for its window."""
    messages = talk("bystander", 12_000)
    since = len(bystander.requests)
    for group in ("bystander", "bystander-vllm"):
        answer = others.proxy.chat(group, messages)
        assert answer.status_code == 200, answer.text
        assert "x-litellm-compaction" not in answer.headers
    sent = bystander.posts(since)
    assert [request.json["messages"] for request in sent] == [messages] * 2
    assert all("max_tokens" not in request.json for request in sent)
    # Whether it is LM Studio is asked of a local openai/ server, as ever. LiteLLM itself lists its models.
    asked = {request.path for request in bystander.probes() if not request.headers["user-agent"].startswith("litellm")}
    assert asked == {"/api/v0/models", "/api/v1/models", "/lmstudio-greeting"}


def test_metrics_stand_beside_litellms(tmp_path: Any, llama: PlainServer) -> None:
    """`/metrics` of a proxy with LiteLLM's prometheus callback shows ours after a compaction, without any text."""
    pytest.importorskip("prometheus_client")
    params = {"model": "openai/qwen", "api_base": f"{llama.base_url}/v1", "api_key": "k"}
    with open_bench(
        tmp_path,
        [],
        {},
        entries=[{"model_name": "llama", "litellm_params": params, "model_info": _ON}],
        litellm_settings={"callbacks": ["prometheus"]},
    ) as bench:
        assert bench.proxy.chat("llama", talk("metrics", 12_000)).status_code == 200
        text = bench.proxy.client.get("/metrics/", headers=bench.proxy.headers).text
    assert "litellm_proxy_total_requests_metric" in text
    ours = [line for line in text.splitlines() if line.startswith("litellm_compaction_")]
    assert 'litellm_compaction_compactions_total{model="llama",outcome="compacted",phase="pre_request"} 1.0' in ours
    assert any(line.startswith('litellm_compaction_summary_duration_seconds_count{model="llama"}') for line in ours)
    assert "metrics" not in " ".join(ours)
