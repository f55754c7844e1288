"""A thought of a real llama.cpp, ended while it is written: what the simulator plays, and what a proxy makes of it.

The model thinks nothing by itself; a chat template like Qwen's opens a block for it, which it never closes in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
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


def _end(engine: Engine, answer_id: str, action: str = "reasoning_end") -> httpx.Response:
    body = {"id": answer_id, "action": action}
    return httpx.post(f"{engine.base_url}/v1/chat/completions/control", json=body, timeout=60)


def _thought_told(engine: Engine, **extra: Any) -> tuple[list[httpx.Response], int, int]:
    """The answers to the control after 40 pieces of a thought, and the pieces of thought and text in all."""
    body = {"messages": _QUESTION, "stream": True, "max_tokens": 200, "temperature": 0, "ignore_eos": True, **extra}
    told: list[httpx.Response] = []
    thoughts = texts = 0
    with httpx.stream("POST", f"{engine.base_url}/v1/chat/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                thoughts += bool(choice["delta"].get("reasoning_content"))
                texts += bool(choice["delta"].get("content"))
            if thoughts == 40 and not told:
                told = [_end(engine, chunk["id"]), _end(engine, "chatcmpl-none"), _end(engine, chunk["id"], "odd")]
    return told, thoughts, texts


def test_it_ends_a_thought_that_it_is_told_of(thinker: Engine) -> None:
    """By the answer's id and a known action, with the field in the request; text follows in the same stream."""
    told, thoughts, texts = _thought_told(thinker, reasoning_control=True)
    assert [answer.status_code for answer in told] == [200, 200, 400]
    assert [answer.json().get("success") for answer in told] == [True, False, None]
    # How many come before it is a matter of speed.
    assert 40 <= thoughts < 190
    assert texts > 0


def test_it_ends_none_that_was_not_asked_for_so(thinker: Engine) -> None:
    """Without the field it says no, and thinks on."""
    told, thoughts, texts = _thought_told(thinker)
    assert told[0].json()["success"] is False
    assert thoughts > 100
    assert texts == 0


def test_a_proxy_ends_a_thought_in_the_stream(thinker: Engine, tmp_path: Path) -> None:
    """Some 60 tokens are thought in place of 240, in one request."""
    params = {"model": "openai/smol", "api_base": f"{thinker.base_url}/v1", "api_key": "none"}
    info = {"compaction": {"enabled": True, "reasoning_budget_ratio": 0.03}}
    entry = {"model_name": "thinker", "litellm_params": params, "model_info": info}
    with proxy(write_config(tmp_path, [entry], {"background": "off"})) as running_proxy:
        options = {"temperature": 0, "max_tokens": 300, "stream_options": {"include_usage": True}}
        answer = running_proxy.stream("thinker", _QUESTION, **options)
        assert answer.status == 200
        assert running_proxy.expect_logged("thought_ended model=thinker tokens=")
        assert running_proxy.logged("restart outcome") == []
    thought = "".join(delta.get("reasoning_content") or "" for delta in answer.deltas)
    assert 30 < len(thought.split()) < 130
    (usage,) = [chunk["usage"] for chunk in answer.chunks if chunk.get("usage")]
    assert "compaction" not in usage
