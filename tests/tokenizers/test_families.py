"""Which family a model belongs to."""

from __future__ import annotations

import pytest

from litellm_compaction.tokenizers.families import family_of, no_thinking_switch


@pytest.mark.parametrize(
    ("architecture", "model", "error"),
    [
        ("qwen35moe", "x", 0.15),
        ("qwen2", "dolphin-qwen2.5-7b", 0.1),
        ("qwen2", "qwen2-7b-instruct", 0.05),
        ("qwen2vl", "qwen2.5-vl-7b-instruct", 0.05),
        ("gemma3", "gemma-3-4b", 0.15),
        ("mistral3", "something-new", 0.1),
        ("llama", "deepseek-r1-distill-llama-8b", 0.05),
        ("qwen3", "deepseek/deepseek-r1-0528-qwen3-8b", 0.1),
        ("phi3", "phi-3.5-mini-instruct", 0.05),
        ("deepseek2", "deepseek-coder-v2-lite", 0.35),
        ("lfm2", "x", 0.35),
    ],
)
def test_stand_ins_promise_less(architecture: str, model: str, error: float) -> None:
    """A near template, a near vocabulary, a foreign one: the promise is as wide as the difference may be."""
    family = family_of(architecture, model)
    assert not family.exact
    assert family.error_ratio == error


def test_a_name_without_end_is_read_at_its_end() -> None:
    """A client's, of 1 MB, at a wildcard deployment: searched whole, its patterns would take minutes."""
    assert family_of("", "qwen-2" * 200_000 + "/llama-3.1-8b").name == "llama3"
    assert [family_of("", "llama-3" + "x" * more).name for more in (249, 250)] == ["llama3", "unknown"]
    assert family_of("qwen" * 250_000, "x").name == "qwen3"
    assert no_thinking_switch("qwen3-" * 200_000 + "/qwen3-8b") == "/no_think"


@pytest.mark.parametrize(
    ("model", "switch"),
    [
        *((model, "/no_think") for model in ("qwen/qwen3-8b", "qwen3-30b-a3b", "unsloth/Qwen3-14B-GGUF")),
        *((model, "") for model in ("qwen3-4b-instruct-2507", "qwen3-coder-30b", "qwen3.5-9b", "gpt-oss-20b", "")),
    ],
)
def test_models_with_a_switch(model: str, switch: str) -> None:
    """Qwen 3's first models obey a word in the prompt; others would take it for a word of the conversation."""
    assert no_thinking_switch(model) == switch


def test_which_models_think_and_which_servers_read_again() -> None:
    """By the name, whatever runs them; what is asked to answer at once does not think."""
    names = ("gpt-oss-20b", "qwen3-8b", "qwen3-4b-instruct-2507", "gemma-3-4b", "llama-3.1-8b", "qwen3-next-thinking")
    families = {name: family_of("", name) for name in names}
    assert [name for name in names if families[name].reasons] == ["gpt-oss-20b", "qwen3-8b", "qwen3-next-thinking"]
    assert [name for name in names if families[name].rereads] == ["gpt-oss-20b", "gemma-3-4b", "qwen3-next-thinking"]
    assert (family_of("gptoss", "x").reasons, family_of("gemma3", "x").rereads) == (True, True)
