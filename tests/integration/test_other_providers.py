"""Servers that are not LM Studio, through the real proxy: opted in, they are guarded by their own window."""

from __future__ import annotations

import pytest

from tests.builders import talk
from tests.integration.bench import Bench, is_question, is_summary_call
from tests.integration.routes import HAS_PROMETHEUS, Servers


@pytest.mark.parametrize("group", ["llama", "llamafile"])
def test_an_opted_in_server_is_guarded_by_its_own_window(routes: Bench, servers: Servers, group: str) -> None:
    """Its own number is the window: a long conversation is compacted, and the answer bounded by it."""
    server, window = servers.llama, 6144
    messages = talk(f"provider {group}", 12_000)
    since = len(server.requests)
    answer = routes.proxy.chat(group, messages)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-litellm-compaction-window"] == str(window)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    asked = [request.json for request in server.posts(since) if request.path.endswith("/completions")]
    (body,) = [call for call in asked if not is_summary_call(call) and not is_question(call)]
    assert len(body["messages"]) < len(messages)
    assert body["messages"][-1] == messages[-1]
    assert 256 <= body["max_tokens"] < window
    named = r"lms \(8,192 tokens\), openai-lms .*, pair-16k \(16,384 tokens\), mixed-lms \(4,096 tokens\) and \d+ more"
    assert routes.proxy.expect_logged(rf"INFO: guarding {named}; mode=guard; page: /compaction, with the master key$")


@pytest.mark.skipif(not HAS_PROMETHEUS, reason="prometheus_client is not installed")
def test_metrics_stand_beside_litellms(routes: Bench) -> None:
    """`/metrics` of a proxy with LiteLLM's prometheus callback shows ours after a compaction, without any text."""
    assert routes.proxy.chat("metered", talk("gauges", 12_000)).status_code == 200
    text = routes.proxy.client.get("/metrics/", headers=routes.proxy.headers).text
    assert "litellm_proxy_total_requests_metric" in text
    ours = [line for line in text.splitlines() if line.startswith("litellm_compaction_")]
    assert 'litellm_compaction_compactions_total{model="metered",outcome="compacted",phase="pre_request"} 1.0' in ours
    assert any(line.startswith('litellm_compaction_summary_duration_seconds_count{model="metered"}') for line in ours)
    assert "gauges" not in " ".join(ours)
