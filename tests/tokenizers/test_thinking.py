"""Which models are told not to think."""

from __future__ import annotations

import pytest

from litellm_compaction.tokenizers.families import no_thinking_switch


@pytest.mark.parametrize("model", ["qwen/qwen3-8b", "qwen3-30b-a3b", "Qwen_Qwen3-0.6B", "unsloth/Qwen3-14B-GGUF"])
def test_models_with_a_switch(model: str) -> None:
    """Qwen 3's first models obey a word in the prompt."""
    assert no_thinking_switch(model) == "/no_think"


@pytest.mark.parametrize(
    "model",
    [
        *("qwen/qwen3-4b-thinking-2507", "qwen3-4b-instruct-2507", "qwen3-coder-30b", "qwen3.5-9b", "qwen3-vl-8b"),
        *("qwen3-next-80b", "qwen2.5-7b-instruct", "deepseek-r1-0528-qwen3-8b", "gpt-oss-20b", ""),
    ],
)
def test_models_without_one(model: str) -> None:
    """The others would take it for a word of the conversation."""
    assert no_thinking_switch(model) == ""
