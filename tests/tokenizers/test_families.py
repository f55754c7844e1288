"""Which family a model belongs to."""

from __future__ import annotations

import re

import pytest

from litellm_compaction.tokenizers.families import _read, family_of, no_thinking_switch


@pytest.mark.parametrize(
    ("architecture", "model", "name"),
    [
        ("qwen3", "my-finetune", "qwen3"),
        ("qwen35moe", "x", "qwen3"),
        ("qwen2", "deepseek-r1-distill-qwen-7b", "qwen2"),
        ("llama", "deepseek-r1-distill-llama-8b", "llama3"),
        ("llama", "llama-2-7b-chat", "llama2"),
        ("llama", "mistral-7b-instruct-v0.3", "mistral"),
        ("llama", "mixtral-8x7b-instruct", "mixtral"),
        ("llama", "something-else", "unknown"),
        ("mistral3", "mistralai/ministral-3-8b", "mistral"),
        ("gpt-oss", "openai/gpt-oss-20b", "gpt-oss"),
        ("gemma4", "google/gemma-4-26b-a4b", "gemma"),
        ("deepseek2", "x", "deepseek"),
        ("phi3", "phi-4", "phi"),
        ("glm4moe", "zai-org/glm-4.6", "glm"),
        ("", "qwen/qwen3-8b@q4_k_m", "qwen3"),
        ("", "Qwen2.5-Coder-7B", "qwen2"),
        ("", "gpt-4o-mini", "gpt"),
        ("", "o3-mini", "gpt"),
        ("", "mistral-nemo-instruct-2407", "mistral"),
        ("", "devstral-small-2", "mistral"),
        ("nemotron_h_moe", "nvidia/nemotron-3-nano", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_architecture_first_then_name(architecture: str, model: str, name: str) -> None:
    """LM Studio's architecture decides where it tells families apart, else the name, else unknown."""
    assert family_of(architecture, model).name == name


@pytest.mark.parametrize(
    ("architecture", "model", "vocabulary", "template"),
    [
        ("llama", "meta-llama-3.1-8b-instruct", "llama3", "llama3.1"),
        ("llama", "llama-3.2-3b-instruct", "llama3", "llama3.2"),
        ("llama", "meta-llama-3-8b-instruct", "llama3", "llama3"),
        ("llama", "llama-2-7b-chat", "llama2", "llama2"),
        ("llama", "mistral-7b-instruct-v0.2", "mistral-v1", "mistral-v1"),
        ("llama", "mistral-7b-instruct-v0.3", "mistral-v3", "mistral-v3"),
        ("llama", "mistral-nemo-instruct-2407", "tekken", "mistral-nemo"),
        ("mistral3", "mistralai/mistral-small-3.2", "tekken", "mistral-small"),
        ("llama", "devstral-small-2507", "tekken", "devstral"),
        ("gpt-oss", "x", "gpt-oss", "gpt-oss"),
        ("qwen2", "qwen2.5-coder-7b-instruct", "qwen2", "qwen2.5"),
        ("qwen3", "qwen3-8b", "qwen2", "qwen3"),
        ("qwen3moe", "qwen3-coder-30b", "qwen2", "qwen3-coder"),
        ("gemma4", "x", "gemma4", "gemma4"),
        ("deepseek2", "deepseek-v3.1", "deepseek-v3", "deepseek-v3.1"),
    ],
)
def test_known_models_are_counted_exactly(architecture: str, model: str, vocabulary: str, template: str) -> None:
    """Where vocabulary and template are the model's own, the family promises 2 %."""
    family = family_of(architecture, model)
    assert (family.vocabulary, family.template, family.exact) == (vocabulary, template, True)
    assert family.error_ratio == 0.02


@pytest.mark.parametrize(
    ("architecture", "model", "least_error"),
    [
        ("qwen35moe", "x", 0.15),
        ("qwen3moe", "qwen3-30b-a3b-instruct-2507", 0.05),
        ("qwen2", "qwen2-7b-instruct", 0.05),
        ("qwen2vl", "qwen2.5-vl-7b-instruct", 0.05),
        ("gemma3", "gemma-3-4b", 0.15),
        ("mistral3", "something-new", 0.1),
        ("llama", "deepseek-r1-distill-llama-8b", 0.05),
        ("qwen3", "deepseek/deepseek-r1-0528-qwen3-8b", 0.1),
        ("phi3", "phi-3.5-mini-instruct", 0.05),
        ("deepseek2", "deepseek-coder-v2-lite", 0.25),
        ("lfm2", "x", 0.35),
    ],
)
def test_stand_ins_promise_less(architecture: str, model: str, least_error: float) -> None:
    """A near template, a near vocabulary, a foreign one: the promise is as wide as the difference may be."""
    family = family_of(architecture, model)
    assert not family.exact
    assert family.error_ratio >= least_error


@pytest.mark.parametrize(
    ("architecture", "model", "reasons"),
    [
        ("qwen3", "qwen3-8b", True),
        ("qwen3moe", "qwen3-coder-30b", False),
        ("qwen3", "qwen3-4b-thinking-2507", True),
        ("gpt-oss", "renamed", True),
        ("llama", "deepseek-r1-distill-llama-8b", True),
        ("", "qwq-32b", True),
        ("", "gemma-3-4b", False),
    ],
)
def test_reasoning_models_are_known(architecture: str, model: str, reasons: bool) -> None:
    """Models that think first need more room for an answer."""
    assert family_of(architecture, model).reasons is reasons


def test_a_name_without_end_is_read_at_its_end() -> None:
    """A client's, of 1 MB, at a wildcard deployment: searched whole, its patterns would take minutes."""
    assert family_of("", "qwen-2" * 200_000 + "/llama-3.1-8b").name == "llama3"
    assert family_of("qwen" * 250_000, "x").name == "qwen3"
    assert no_thinking_switch("qwen3-" * 200_000 + "/qwen3-8b") == "/no_think"


TABLES = """
architectures = []
names = [["toy", "toy"]]
retrained = ["dolphin"]
reasons = ["think"]
answers_at_once = ["instruct"]
rereads = ["mamba"]
no_thinking_switches = []
[families.unknown]
name = "unknown"
[families.heuristic]
name = "heuristic"
[families.toy]
like = "unknown"
message_tokens = 3
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("message_tokens = 3", 'message_tokens = "many"'),
        ("message_tokens = 3", "mesage_tokens = 3"),
        ('like = "unknown"', 'like = "nobody"'),
        ('[["toy", "toy"]]', '[["toy", "nobody"]]'),
        ('[["toy", "toy"]]', '[["(", "toy"]]'),
        ('["dolphin"]', "7"),
        ('reasons = ["think"]', ""),
    ],
)
def test_a_table_with_a_mistake_is_no_table(old: str, new: str) -> None:
    """A wrong key, type or name ends the start, and with it every test."""
    assert old in TABLES
    with pytest.raises((ValueError, KeyError, re.error)):
        _read(TABLES.replace(old, new))


@pytest.mark.parametrize(
    ("architecture", "model", "rereads"),
    [
        ("gemma3", "google/gemma-3-12b", True),
        ("gpt-oss", "openai/gpt-oss-20b", True),
        ("granitehybrid", "ibm/granite-4-h-tiny", True),
        ("", "qwen3.5-9b", True),
        ("llama", "gemma-3-distill-llama-8b", False),
        ("gemma", "google/gemma-7b", False),
        ("", "qwen3-35b", False),
        ("", "", False),
    ],
)
def test_which_models_read_all_of_a_prompt_again(architecture: str, model: str, rereads: bool) -> None:
    """By what the server calls the architecture; by name where it says nothing."""
    assert family_of(architecture, model).rereads is rereads


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
