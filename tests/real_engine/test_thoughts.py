"""A thought of a real llama.cpp, ended while it is written: what the simulator plays, and what a proxy makes of it.

The model thinks nothing by itself; a chat template like Qwen's opens a block for it, which it never closes in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import proxy, write_config
from tests.real_engine.engine import Engine, running

_TEMPLATE = """
{%- for message in messages -%}
{%- set content = message.content or '' -%}
{%- if message.role == 'assistant' -%}
{%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' -%}
{{- '<|im_start|>assistant\\n<think>\\n' + thoughts + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' -}}
{%- endif -%}
"""
_QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def thinker(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose model begins each answer with a thought."""
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text(_TEMPLATE, "utf-8")
    with running(weights, 2048, template=template) as engine:
        yield engine


def test_a_proxy_ends_a_thought_in_the_stream(thinker: Engine, tmp_path: Path) -> None:
    """Some 60 tokens are thought in place of 240, in one request."""
    params = {"model": "openai/smol", "api_base": f"{thinker.base_url}/v1", "api_key": "none"}
    info = {"compaction": {"enabled": True}}
    entry = {"model_name": "thinker", "litellm_params": params, "model_info": info}
    with proxy(write_config(tmp_path, [entry], {"background": "off", "reasoning_budget_ratio": 0.03})) as running_proxy:
        options = {"temperature": 0, "max_tokens": 300, "stream_options": {"include_usage": True}}
        answer = running_proxy.stream("thinker", _QUESTION, **options)
        assert answer.status == 200
        assert running_proxy.expect_logged("thought_ended model=thinker tokens=")
        assert running_proxy.logged("restart outcome") == []
    thought = "".join(delta.get("reasoning_content") or "" for delta in answer.deltas)
    assert 30 < len(thought.split()) < 130
    (usage,) = [chunk["usage"] for chunk in answer.chunks if chunk.get("usage")]
    assert "compaction" not in usage
