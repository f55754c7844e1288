"""Model families: which vocabulary and which template costs stand for a model, and how it is told not to think.

Families with a template are counted by rendering it; the others, and what a template refuses, by the costs here, which
err high until the server's own numbers correct them (`tokens/calibration.py`).

Summaries and prunings ask for no thinking, where thinking only costs time. LM Studio 0.4 takes `reasoning_effort` on
`/v1/chat/completions` and does nothing with it (its bug tracker: 988, 1990, 2413): only a model's own switch is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

# The formula with the right vocabulary erred by up to 15 % on agent requests (facts, 2026-11).
FORMULA_ERROR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of a family count.

    Attributes:
        vocabulary: the name of the vocabulary that is used (`registry.py`).
        template: the name of the chat template that is rendered (`template.py`); "" where there is none at hand.
        tool_template: of the one for requests with tools; "" where `template` serves them too.
        owns_vocabulary: the vocabulary is the model's own, or so near that all kinds of text fit.
        exact: the vocabulary is the model's own and the template, or its costs, are known.
        reasons: the model thinks before it answers, so an answer needs more room.
        text_ratio: tokens of this family per token of `vocabulary`, for English text and code.
        single_digits: every digit is a token of its own.
        message_tokens: what the template puts around each message, role included.
        system_tokens: what it adds to a system message, besides `message_tokens`.
        assistant_tokens: what it adds to an assistant message, besides `message_tokens`.
        request_tokens: what it puts around the conversation: start, built-in header, generation prompt.
        default_system_tokens: what it adds when the client sends no system message.
        call_tokens: what it puts around each tool call, besides name and arguments.
        result_tokens: what it puts around each tool result, besides `message_tokens`.
        tools_tokens: the instructions that it adds once when the request has tools.
        tool_tokens: what it puts around each tool's schema.
        escapes_results: tool results are rendered as JSON strings.
        renders_ids: ids of tool calls and their results are rendered.
        image_tokens: one part that is not text, at the usual upper limit of its size.
        image_patch_px: pixels on a side of what one image token sees; 0 where every image costs the limit.
        error_ratio: before any calibration, true count ≤ count × (1 + this).
    """

    name: str
    vocabulary: str = "cl100k_base"
    template: str = ""
    tool_template: str = ""
    owns_vocabulary: bool = False
    exact: bool = False
    reasons: bool = False
    text_ratio: float = 1.0
    single_digits: bool = False
    message_tokens: int = 6
    system_tokens: int = 0
    assistant_tokens: int = 0
    request_tokens: int = 16
    default_system_tokens: int = 0
    call_tokens: int = 24
    result_tokens: int = 12
    tools_tokens: int = 250
    tool_tokens: int = 8
    escapes_results: bool = False
    renders_ids: bool = False
    image_tokens: int = 4096
    image_patch_px: int = 14
    error_ratio: float = 0.25

    def template_for(self, *, tools: bool) -> str:
        """The name of the template for requests with tools, or for those without."""
        return (tools and self.tool_template) or self.template


def _rendered(family: Family, vocabulary: str, template: str, *, error_ratio: float = 0.02) -> Family:
    """The family with a vocabulary and a template of its own; exact unless its `error_ratio` says otherwise."""
    return replace(
        family,
        vocabulary=vocabulary,
        template=template,
        owns_vocabulary=True,
        exact=error_ratio <= 0.02,
        text_ratio=1.0,
        single_digits=False,
        error_ratio=error_ratio,
    )


# text_ratio and single_digits: measured 2026-11 against the real vocabularies of Qwen 1–3, Mistral (SPM and tekken),
# DeepSeek V3 on the seven transcripts, tables, logs, code and twelve languages. With cl100k these come out 0–10 % high
# on English and code and up to 4 times too high on other scripts, never more than 25 % low except on text made of
# box-drawing characters (tekken). Not measured: GLM, Granite, Phi 4; taken from their vocabularies' kinds.
# Template costs: llama.cpp's own and its templates (2026-11), rounded up. image_tokens: the vision encoders' usual
# limits (Qwen-VL 4096 in llama.cpp, Pixtral 55 × 55 patches, Llama vision 1601), image_patch_px their patches after
# merging (Qwen-VL 28, Pixtral 16; 14, the densest in use, where unknown), not measured here.
# Near families, whose template or some special tokens may differ a little, promise 5 or 10 %.
_LLAMA_COSTS = Family(name="llama3", request_tokens=40, escapes_results=True, image_tokens=1616, image_patch_px=0)
_LLAMA31 = _rendered(_LLAMA_COSTS, "llama3", "llama3.1")
_LLAMA32 = _rendered(_LLAMA_COSTS, "llama3", "llama3.2")
_LLAMA30 = _rendered(_LLAMA_COSTS, "llama3", "llama3")
_LLAMA4 = replace(_LLAMA_COSTS, text_ratio=1.02)
_HERMES3 = _rendered(_LLAMA_COSTS, "llama3", "llama3", error_ratio=0.05)
_DISTILL_LLAMA = _rendered(_LLAMA_COSTS, "r1-distill-llama", "deepseek-r1-distill-llama", error_ratio=0.05)
_SPM = Family(name="llama2", message_tokens=8)
_LLAMA2 = _rendered(_SPM, "llama2", "llama2")
# Llama 2's vocabulary with another template or none.
_NEAR_LLAMA2 = replace(_LLAMA2, template="", exact=False, error_ratio=FORMULA_ERROR)
_MISTRAL = replace(_SPM, name="mistral", renders_ids=True, image_tokens=3080, image_patch_px=16)
_MISTRAL_V1 = _rendered(_MISTRAL, "mistral-v1", "mistral-v1")
_MISTRAL_V3 = _rendered(_MISTRAL, "mistral-v3", "mistral-v3")
_MISTRAL_V7 = _rendered(_MISTRAL, "mistral-v7", "mistral-v7")
_MIXTRAL = replace(_MISTRAL_V1, name="mixtral")
_MIXTRAL_V3 = replace(_MISTRAL_V3, name="mixtral")
_NEMO = _rendered(_MISTRAL, "tekken", "mistral-nemo")
# Small 3.x adds about 500 tokens of its own, Devstral about 1,230, when there is no system message.
_SMALL = _rendered(replace(_MISTRAL, default_system_tokens=520), "tekken", "mistral-small")
_NEAR_SMALL = _rendered(_SMALL, "tekken", "mistral-small", error_ratio=0.1)
_MINISTRAL3 = _rendered(_SMALL, "tekken", "ministral3", error_ratio=0.1)
_DEVSTRAL = _rendered(replace(_MISTRAL, default_system_tokens=1260), "tekken", "devstral")
_NEAR_DEVSTRAL = replace(_DEVSTRAL, exact=False, error_ratio=0.1)
_QWEN = Family(name="qwen2", default_system_tokens=24, image_patch_px=28)
_QWEN2 = _rendered(_QWEN, "qwen2", "qwen2.5")
_NEAR_QWEN2 = replace(_QWEN2, exact=False, error_ratio=0.05)
_QWQ = _rendered(_QWEN, "qwen2", "qwq")
_DISTILL_QWEN = _rendered(_QWEN, "r1-distill-qwen", "deepseek-r1-distill-qwen", error_ratio=0.05)
# R1-0528 on Qwen3 has DeepSeek's turns as well.
_DISTILL_QWEN3 = replace(_DISTILL_QWEN, name="qwen3", error_ratio=0.1)
_QWEN3_COSTS = replace(_QWEN, name="qwen3", default_system_tokens=0)
_QWEN3 = _rendered(_QWEN3_COSTS, "qwen2", "qwen3")
_QWEN3_CODER = _rendered(_QWEN3_COSTS, "qwen2", "qwen3-coder")
# The 2507 and VL models changed the template in small ways, Qwen3.5 the vocabulary too.
_NEAR_QWEN3 = replace(_QWEN3, exact=False, error_ratio=0.05)
_QWEN35 = replace(_QWEN3, exact=False, error_ratio=0.15)
_GEMMA_COSTS = Family(name="gemma", image_tokens=1120, image_patch_px=0)
_GEMMA4 = _rendered(_GEMMA_COSTS, "gemma4", "gemma4")
# Gemma 2 and 3 have vocabularies of the same size and making, under terms of their own.
_GEMMA = _rendered(_GEMMA_COSTS, "gemma4", "gemma2", error_ratio=0.15)
_DEEPSEEK_COSTS = Family(name="deepseek", text_ratio=1.1)
_DEEPSEEK_V31 = _rendered(_DEEPSEEK_COSTS, "deepseek-v3", "deepseek-v3.1")
_DEEPSEEK_R1 = _rendered(_DEEPSEEK_COSTS, "deepseek-v3", "deepseek-r1", error_ratio=0.05)
# Not exact without the model's own file: see `registry.py`.
_PHI3 = _rendered(replace(_SPM, name="phi"), "phi3", "phi3.5", error_ratio=0.05)
_PHI4 = Family(name="phi", text_ratio=1.05)
_GLM = Family(name="glm", text_ratio=1.05, request_tokens=20)
_GRANITE = Family(name="granite", text_ratio=1.2, single_digits=True, request_tokens=80)
_UNKNOWN = Family(
    name="unknown",
    text_ratio=1.2,
    single_digits=True,
    message_tokens=8,
    request_tokens=48,
    escapes_results=True,
    renders_ids=True,
    error_ratio=0.35,
)
# Harmony: `<|start|>role<|message|>…<|end|>`; an assistant's message names its channel, a system message becomes a
# developer message with a headline; the built-in system message takes 61 tokens and the start of the answer 2, tools
# 15 + 16 more (counted with o200k from the vendor's template, 2026-11).
_GPT_OSS = _rendered(
    Family(
        name="gpt-oss",
        message_tokens=4,
        system_tokens=4,
        assistant_tokens=2,
        request_tokens=63,
        call_tokens=12,
        result_tokens=16,
        tools_tokens=48,
        tool_tokens=8,
        escapes_results=True,
    ),
    "gpt-oss",
    "gpt-oss",
)
# Three tokens per message and three for the reply (OpenAI cookbook, "How to count tokens with tiktoken").
_GPT = Family(
    name="gpt",
    vocabulary="o200k_base",
    owns_vocabulary=True,
    exact=True,
    message_tokens=4,
    request_tokens=3,
    call_tokens=8,
    result_tokens=4,
    tools_tokens=48,
    image_tokens=1105,
    image_patch_px=0,
    error_ratio=0.05,
)
_GPT4 = replace(_GPT, vocabulary="cl100k_base")

# Four characters per token, for operators who want no more than that.
HEURISTIC = Family(
    name="heuristic",
    vocabulary="heuristic",
    message_tokens=0,
    request_tokens=0,
    call_tokens=0,
    result_tokens=0,
    tools_tokens=0,
    tool_tokens=0,
    error_ratio=0.35,
)

# LM Studio's architecture names, without punctuation. `llama` is also what Mistral's and many other models say, and
# `phi3` what Phi-4 says, so that those are decided by name.
_ARCHITECTURES: tuple[tuple[str, Family], ...] = (
    (r"gptoss", _GPT_OSS),
    (r"qwen2vl|qwen25vl|qwen2moe|qwen1", _NEAR_QWEN2),
    (r"qwen2|qwen25", _QWEN2),
    (r"qwen3(moe)?$", _QWEN3),
    (r"qwen3(vl|next)", _NEAR_QWEN3),
    (r"qwen", _QWEN35),
    (r"gemma4", _GEMMA4),
    (r"gemma", _GEMMA),
    (r"deepseek", _DEEPSEEK_COSTS),
    (r"glm|chatglm", _GLM),
    (r"granite", _GRANITE),
    (r"mixtral", _MIXTRAL),
    (r"mistral3|mistral4|pixtral|ministral", _NEAR_SMALL),
    (r"llama4|mllama", _LLAMA4),
)
# First match wins; distilled models come first, since they count like the model that they were made from.
_NAMES: tuple[tuple[str, Family], ...] = (
    (r"gpt-?oss", _GPT_OSS),
    (r"distill-qwen", _DISTILL_QWEN),
    (r"r1-0528-qwen3", _DISTILL_QWEN3),
    (r"qwopus", _NEAR_QWEN2),
    (r"distill-llama", _DISTILL_LLAMA),
    (r"devstral-small-(2505|2507|1\.[01])", _DEVSTRAL),
    (r"devstral", _NEAR_DEVSTRAL),
    (r"mixtral-8x22b", _MIXTRAL_V3),
    (r"mixtral", _MIXTRAL),
    (r"nemo(?!tron)", _NEMO),
    (r"ministral-?3", _MINISTRAL3),
    (r"mistral-small-(3\.2|24b-instruct-2506|2506)|mistral-small-3\.2", _SMALL),
    (r"mistral-large-(instruct-)?2411", _MISTRAL_V7),
    (r"mistral-large|mistral-small-(instruct-)?2409|codestral(?!.*mamba)|mathstral", _MISTRAL_V3),
    (r"magistral|ministral|pixtral|mistral-(small|medium)", _NEAR_SMALL),
    (r"mistral-7b.*v0\.3", _MISTRAL_V3),
    (r"mistral-7b", _MISTRAL_V1),
    (r"mistral|zephyr", replace(_MISTRAL_V1, exact=False, error_ratio=0.1)),
    (r"llama-?2", _LLAMA2),
    (r"codellama|tinyllama|vicuna", _NEAR_LLAMA2),
    (r"llama-?4", _LLAMA4),
    (r"hermes-3", _HERMES3),
    (r"llama-?3\.2", _LLAMA32),
    (r"llama-?3\.[13]", _LLAMA31),
    (r"llama-?3", _LLAMA30),
    (r"qwq", _QWQ),
    # Qwen 2's and the VL models' templates have another default system message and no tools.
    (r"qwen-?2.*vl|qwen-?2(?!\.5|-5(?!\d)|5)", _NEAR_QWEN2),
    (r"qwen-?2", _QWEN2),
    (r"qwen-?1", _NEAR_QWEN2),
    (r"qwen-?3-?coder(?!-next)", _QWEN3_CODER),
    (r"qwen-?3\.\d", _QWEN35),
    (r"qwen-?3.*(2507|vl|next|coder|omni)", _NEAR_QWEN3),
    (r"qwen", _QWEN3),
    (r"gemma-?4", _GEMMA4),
    (r"gemma", _GEMMA),
    (r"deepseek-v3\.1", _DEEPSEEK_V31),
    (r"deepseek-(v3|r1)", _DEEPSEEK_R1),
    (r"deepseek", _DEEPSEEK_COSTS),
    (r"phi-?4", _PHI4),
    (r"phi-?3", _PHI3),
    (r"phi-?\d", _PHI4),
    (r"(?<![a-z])glm", _GLM),
    (r"granite", _GRANITE),
    (r"(?<![a-z])(gpt-4o|gpt-4\.1|gpt-4\.5|gpt-[5-9]|chatgpt|o[134](-|$))", _GPT),
    (r"(?<![a-z])gpt-(4|3\.5)(?![a-z\d])", _GPT4),
)


# Trained on by others, nearly always with another chat template than the one that their names lead to, often ChatML.
_RETRAINED = re.compile(
    r"dolphin|hermes|openchat|wizard|orca|starling|alpaca|airoboros|samantha|neural|tulu|lumimaid|stheno|saiga"
)
_RETRAINED_ERROR = 0.1

# Models that think before they answer unless told otherwise; by name, since most architectures have both kinds.
_REASONS = re.compile(
    r"gpt-?oss|gpt-5|(?<![a-z])o[134](-|$)|think|reason|(?<![a-z])r1(?!\d)|qwq|magistral|deepseek-(v3\.[1-9]|v[4-9])"
    r"|qwen-?3|qwopus|gemma-?4|glm-?(4\.[5-9]|[5-9]|z)|nemotron-?3|minimax-?m\d|seed-oss|smollm3|kimi-k[2-9]"
)
_ANSWERS_AT_ONCE = re.compile(r"instruct|coder|no-?think|non-?reason")


def stand_in(family: Family) -> Family:
    """What counts where the family's own vocabulary cannot be loaded: another one, and if that fails too, none."""
    if family.vocabulary == _UNKNOWN.vocabulary:
        return replace(HEURISTIC, reasons=family.reasons)
    return replace(_UNKNOWN, reasons=family.reasons)


@lru_cache(maxsize=1024)
def family_of(architecture: str, model: str) -> Family:
    """The family of a model: by LM Studio's architecture where that is telling, else by name, else `unknown`.

    Args:
        architecture: as LM Studio lists it; "" when it was not asked.
        model: name without provider prefix; a publisher before a slash is ignored unless the rest says nothing.
    """
    plain = re.sub(r"[^a-z0-9]", "", architecture.casefold())
    name = model.casefold().replace("_", "-")
    told = next((family for pattern, family in _ARCHITECTURES if plain and re.match(pattern, plain)), None)
    family = _named(name, within=told)
    if family.template and _RETRAINED.search(name):
        family = replace(family, exact=False, error_ratio=max(family.error_ratio, _RETRAINED_ERROR))
    thinks = family.name == "gpt-oss" or _REASONS.search(name) is not None
    return replace(family, reasons=thinks and _ANSWERS_AT_ONCE.search(name) is None)


def _named(name: str, *, within: Family | None) -> Family:
    for candidate in (name.rpartition("/")[2], name):
        for pattern, family in _NAMES:
            if re.search(pattern, candidate) and (within is None or within.name == family.name):
                return family
    return within if within is not None else _UNKNOWN


# Qwen 3's first models (model card of Qwen3-8B, "soft switches"); those of 2507 and later think always or never.
_SWITCHES = ((re.compile(r"(?:^|/)(?:qwen-)?qwen-?3-\d(?!.*(?:2507|think|instruct|coder))"), "/no_think"),)


def no_thinking_switch(model: str) -> str:
    """What has to stand at the end of a user message; "" for a model that has no such switch, or does not think.

    Args:
        model: as LM Studio names it, with its publisher or without.
    """
    name = model.casefold().replace("_", "-")
    return next((switch for pattern, switch in _SWITCHES if pattern.search(name)), "")
