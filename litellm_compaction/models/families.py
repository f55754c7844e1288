"""Which vocabulary and which template costs stand for a model.

Called by the engine once per deployment. LiteLLM ships two vocabularies; whatever is neither GPT nor gpt-oss is
counted with a stand-in that errs high, until the server's own numbers correct it (`calibration.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of a family count.

    Attributes:
        encoding: the vocabulary that is used.
        exact: the vocabulary is the model's own and the template's costs are known.
        reasons: the model thinks before it answers, so an answer needs more room.
        text_ratio: tokens of this family per token of `encoding`, for English text and code.
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
    encoding: str = "cl100k_base"
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


# text_ratio and single_digits: measured 2026-11 against the real vocabularies of Qwen 1–3, Mistral (SPM and tekken),
# DeepSeek V3 on the seven transcripts, tables, logs, code and twelve languages. With cl100k these come out 0–10 % high
# on English and code and up to 4 times too high on other scripts, never more than 25 % low except on text made of
# box-drawing characters (tekken). Not measured: Gemma, GLM, Granite, Phi; taken from their vocabularies' kinds.
# Template costs: llama.cpp's own and its templates (2026-11), rounded up. image_tokens: the vision encoders' usual
# limits (Qwen-VL 4096 in llama.cpp, Pixtral 55 × 55 patches, Llama vision 1601), image_patch_px their patches after
# merging (Qwen-VL 28, Pixtral 16; 14, the densest in use, where unknown), not measured here.
_LLAMA3 = Family(
    name="llama3", text_ratio=1.02, request_tokens=40, escapes_results=True, image_tokens=1616, image_patch_px=0
)
_SPM = Family(name="llama2", text_ratio=1.3, single_digits=True, message_tokens=8)
_LLAMA2 = _SPM
_MISTRAL_SPM = replace(_SPM, name="mistral", renders_ids=True, image_tokens=3080, image_patch_px=16)
_MIXTRAL = replace(_MISTRAL_SPM, name="mixtral")
_TEKKEN = replace(_MISTRAL_SPM, text_ratio=1.08)
# Small 3.x adds about 500 tokens of its own, Devstral about 1,230, when there is no system message.
_TEKKEN_SMALL = replace(_TEKKEN, default_system_tokens=520)
_DEVSTRAL = replace(_TEKKEN, default_system_tokens=1260)
_QWEN2 = Family(name="qwen2", text_ratio=1.05, single_digits=True, default_system_tokens=24, image_patch_px=28)
_QWEN3 = replace(_QWEN2, name="qwen3", default_system_tokens=0)
_GEMMA = Family(name="gemma", text_ratio=1.1, single_digits=True, image_tokens=1120, image_patch_px=0)
_DEEPSEEK = Family(name="deepseek", text_ratio=1.1)
_PHI3 = replace(_SPM, name="phi")
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
_GPT_OSS = Family(
    name="gpt-oss",
    encoding="o200k_base",
    exact=True,
    message_tokens=4,
    system_tokens=4,
    assistant_tokens=2,
    request_tokens=63,
    call_tokens=12,
    result_tokens=16,
    tools_tokens=48,
    tool_tokens=8,
    escapes_results=True,
    error_ratio=0.05,
)
# Three tokens per message and three for the reply (OpenAI cookbook, "How to count tokens with tiktoken").
_GPT = Family(
    name="gpt",
    encoding="o200k_base",
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
_GPT4 = replace(_GPT, encoding="cl100k_base")

# LM Studio's architecture names, without punctuation. `llama` is also what Mistral's and many other models say, and
# `phi3` what Phi-4 says, so that those are decided by name.
_ARCHITECTURES: tuple[tuple[str, Family], ...] = (
    (r"gptoss", _GPT_OSS),
    (r"qwen2|qwen25|qwen1", _QWEN2),
    (r"qwen", _QWEN3),
    (r"gemma", _GEMMA),
    (r"deepseek", _DEEPSEEK),
    (r"glm|chatglm", _GLM),
    (r"granite", _GRANITE),
    (r"mixtral", _MIXTRAL),
    (r"mistral3|mistral4|pixtral|ministral", _TEKKEN_SMALL),
    (r"llama4|mllama", _LLAMA3),
)
# First match wins; distilled models come first, since they count like the model that they were made from.
_NAMES: tuple[tuple[str, Family], ...] = (
    (r"gpt-?oss", _GPT_OSS),
    (r"distill-qwen|qwopus", _QWEN2),
    (r"distill-llama", _LLAMA3),
    (r"devstral", _DEVSTRAL),
    (r"mixtral", _MIXTRAL),
    (r"nemo(?!tron)", _TEKKEN),
    (r"magistral|ministral|pixtral|mistral-(small|medium|large)", _TEKKEN_SMALL),
    (r"mistral|codestral|mathstral|zephyr", _MISTRAL_SPM),
    (r"llama-?2|codellama|tinyllama|vicuna", _LLAMA2),
    (r"llama-?[34]|hermes-3", _LLAMA3),
    (r"qwen-?(1|2)|qwq", _QWEN2),
    (r"qwen", _QWEN3),
    (r"gemma", _GEMMA),
    (r"deepseek", _DEEPSEEK),
    (r"phi-?4", _PHI4),
    (r"phi-?\d", _PHI3),
    (r"(?<![a-z])glm", _GLM),
    (r"granite", _GRANITE),
    (r"(?<![a-z])(gpt-4o|gpt-4\.1|gpt-4\.5|gpt-[5-9]|chatgpt|o[134](-|$))", _GPT),
    (r"(?<![a-z])gpt-(4|3\.5)(?![a-z\d])", _GPT4),
)


# Models that think before they answer unless told otherwise; by name, since most architectures have both kinds.
_REASONS = re.compile(
    r"gpt-?oss|gpt-5|(?<![a-z])o[134](-|$)|think|reason|(?<![a-z])r1(?!\d)|qwq|magistral|deepseek-(v3\.[1-9]|v[4-9])"
    r"|qwen-?3|qwopus|gemma-?4|glm-?(4\.[5-9]|[5-9]|z)|nemotron-?3|minimax-?m\d|seed-oss|smollm3|kimi-k[2-9]"
)
_ANSWERS_AT_ONCE = re.compile(r"instruct|coder|no-?think|non-?reason")


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
    thinks = family.name == "gpt-oss" or _REASONS.search(name) is not None
    return replace(family, reasons=thinks and _ANSWERS_AT_ONCE.search(name) is None)


def _named(name: str, *, within: Family | None) -> Family:
    for candidate in (name.rpartition("/")[2], name):
        for pattern, family in _NAMES:
            if re.search(pattern, candidate) and (within is None or within.name == family.name):
                return family
    return within if within is not None else _UNKNOWN
