"""Which family a model belongs to."""

from __future__ import annotations

import re

import pytest

from litellm_compaction.tokenizers.families import _read, family_of, no_thinking_switch


@pytest.mark.parametrize(
    ("architecture", "model", "name"),
    [
        ("qwen3", "my-finetune", "qwen3"),
        ("qwen3moe", "qwen/qwen3-30b-a3b", "qwen3"),
        ("qwen35moe", "x", "qwen3"),
        ("qwen2", "deepseek-r1-distill-qwen-7b", "qwen2"),
        ("qwen2_5_vl", "x", "qwen2"),
        ("llama", "deepseek-r1-distill-llama-8b", "llama3"),
        ("llama", "meta-llama-3.1-8b-instruct", "llama3"),
        ("llama", "llama-2-7b-chat", "llama2"),
        ("llama", "mistral-7b-instruct-v0.3", "mistral"),
        ("llama", "mixtral-8x7b-instruct", "mixtral"),
        ("llama", "something-else", "unknown"),
        ("mistral3", "mistralai/ministral-3-8b", "mistral"),
        ("gpt-oss", "openai/gpt-oss-20b", "gpt-oss"),
        ("gpt_oss", "x", "gpt-oss"),
        ("gemma4", "google/gemma-4-26b-a4b", "gemma"),
        ("deepseek2", "x", "deepseek"),
        ("phi3", "phi-4", "phi"),
        ("glm4moe", "zai-org/glm-4.6", "glm"),
        ("granitehybrid", "ibm/granite-4-h-tiny", "granite"),
        ("", "qwen/qwen3-8b@q4_k_m", "qwen3"),
        ("", "Qwen2.5-Coder-7B", "qwen2"),
        ("", "openai/gpt-oss-120b", "gpt-oss"),
        ("", "gpt-4o-mini", "gpt"),
        ("", "gpt-4", "gpt"),
        ("", "o3-mini", "gpt"),
        ("", "mistral-nemo-instruct-2407", "mistral"),
        ("", "nvidia/nemotron-3-nano", "unknown"),
        ("", "devstral-small-2", "mistral"),
        ("nemotron_h_moe", "nvidia/nemotron-3-nano", "unknown"),
        ("lfm2", "liquid/lfm2-1.2b", "unknown"),
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
        ("llama", "llama-3.3-70b", "llama3", "llama3.1"),
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
        ("", "qwen2_5-14b", "qwen2", "qwen2.5"),
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
        ("qwen2", "qwen2-57b-a14b", 0.05),
        ("qwen2vl", "qwen2.5-vl-7b-instruct", 0.05),
        ("", "qwen2_5-vl-3b", 0.05),
        ("gemma3", "gemma-3-4b", 0.15),
        ("mistral3", "something-new", 0.1),
        ("llama", "deepseek-r1-distill-llama-8b", 0.05),
        ("deepseek2", "deepseek-r1", 0.05),
        ("qwen3", "deepseek/deepseek-r1-0528-qwen3-8b", 0.1),
        ("phi3", "phi-3.5-mini-instruct", 0.05),
        ("deepseek2", "deepseek-coder-v2-lite", 0.25),
        ("phi3", "phi-4", 0.25),
        ("glm4", "x", 0.25),
        ("lfm2", "x", 0.35),
    ],
)
def test_stand_ins_promise_less(architecture: str, model: str, least_error: float) -> None:
    """A near template, a near vocabulary, a foreign one: the promise is as wide as the difference may be."""
    family = family_of(architecture, model)
    assert not family.exact
    assert family.error_ratio >= least_error


@pytest.mark.parametrize("name", ["my-gpt", "acme/gpt-turbo-ft", "gpt4all", "nanogpt", "gpt-j-6b"])
def test_a_name_with_gpt_counts_as_gpt_by_estimate(name: str) -> None:
    """No family claims it: OpenAI's vocabulary, and an estimate's margin."""
    family = family_of("", name)
    assert (family.name, family.vocabulary, family.exact, family.error_ratio) == ("gpt", "o200k_base", False, 0.25)


def test_a_quantization_is_no_family() -> None:
    assert family_of("", "yi-34b-GPTQ").name == "unknown"


def test_the_gpt_generations_have_their_vocabularies() -> None:
    """GPT-4 and 3.5 use cl100k, later ones o200k, gpt-oss o200k with harmony's special tokens."""
    assert family_of("", "gpt-3.5-turbo").vocabulary == "cl100k_base"
    assert family_of("", "gpt-4.1").vocabulary == "o200k_base"
    assert family_of("gpt-oss", "x").vocabulary == "gpt-oss"
    assert family_of("", "gpt-4o").error_ratio == 0.05


@pytest.mark.parametrize(
    ("architecture", "model", "reasons"),
    [
        ("qwen3", "qwen3-8b", True),
        ("qwen3moe", "qwen3-coder-30b", False),
        ("qwen3", "qwen3-4b-instruct-2507", False),
        ("qwen3", "qwen3-4b-thinking-2507", True),
        ("gpt-oss", "renamed", True),
        ("llama", "deepseek-r1-distill-llama-8b", True),
        ("llama", "llama-3.1-8b-instruct", False),
        ("", "qwq-32b", True),
        ("", "gemma-3-4b", False),
    ],
)
def test_reasoning_models_are_known(architecture: str, model: str, reasons: bool) -> None:
    """Models that think first need more room for an answer."""
    assert family_of(architecture, model).reasons is reasons


def test_default_system_prompts_are_counted() -> None:
    """Families whose template adds a prompt of its own say how long it is."""
    assert family_of("mistral3", "devstral-small-2").default_system_tokens > 1000
    assert family_of("mistral3", "mistral-small-3.2").default_system_tokens > 500
    assert family_of("llama", "mistral-7b").default_system_tokens == 0


@pytest.mark.parametrize(
    "model", ["dolphin-2.9-llama3-8b", "hermes-2-pro-llama-3-8b", "openhermes-2.5-mistral-7b", "nous-hermes-llama2-13b"]
)
def test_retrained_models_are_not_called_exact(model: str) -> None:
    """They have the vocabulary of the model in their name, and another template."""
    family = family_of("llama", model)
    assert family.owns_vocabulary
    assert not family.exact
    assert family.error_ratio >= 0.1


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


def test_a_family_goes_on_from_another() -> None:
    """What it does not say is the other one's."""
    family = _read(TABLES).families["toy"]
    assert (family.name, family.message_tokens, family.request_tokens) == ("unknown", 3, 16)


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
        ("qwen35moe", "qwen/qwen3.5-35b-a3b", True),
        ("granitehybrid", "ibm/granite-4-h-tiny", True),
        ("", "google/gemma-3n-e4b", True),
        ("", "qwen3.5-9b", True),
        ("llama", "gemma-3-distill-llama-8b", False),
        ("qwen3", "qwen/qwen3-8b", False),
        ("gemma", "google/gemma-7b", False),
        ("", "qwen3-35b", False),
        ("", "llama-3.1-8b-instruct", False),
        ("", "", False),
    ],
)
def test_which_models_read_all_of_a_prompt_again(architecture: str, model: str, rereads: bool) -> None:
    """By what the server calls the architecture; by name where it says nothing."""
    assert family_of(architecture, model).rereads is rereads


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
