"""Counts against those of other programs.

golden/engine.json has what llama.cpp counts for whole requests (golden/build_engine.py asks it); golden/llama_cpp.json
what it wrote of texts (`models/ggml-vocab-*.gguf.inp` and `.out` in llama-cpp-python 0.3.36); golden/prompts.json what
transformers renders and the vendor's own vocabulary counts, or mistral-common does both.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.lib.engine_models import MODELS
from benchmarks.tokens.accuracy import parsed
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.tokens.golden.build_engine import GOLDEN, digest, golden_requests

ENGINE = json.loads(GOLDEN.read_text(encoding="utf-8"))
TEXTS, PROMPTS = (
    json.loads(GOLDEN.with_name(name).read_text(encoding="utf-8")) for name in ("llama_cpp.json", "prompts.json")
)
REQUESTS = golden_requests()
# One for all: it learns nothing here, and knows what it has counted before.
COUNTER = TokenCounter()
# What llama.cpp does in ways of its own, by model, kind and numbers of the requests: an answer begun by the client is
# gone on with, a null is nothing, a reasoning takes the answer's place, parts are joined.
OWN_WAYS = {("", "prefill"): (1, 2), ("gemma4", "calls"): (4, 5, 6, 7), ("devstral", "reasoning"): (0, 1, 4)}
OWN_WAYS |= {("ministral3", "parts"): (1, 2)}
FAMILIES = {
    "qwen2.5": family_of("qwen2", "qwen2.5-7b"),
    "qwen3": family_of("qwen3", "qwen3-8b"),
    "qwen3-coder": family_of("qwen3moe", "qwen3-coder-30b"),
    "qwq": family_of("qwen2", "qwq-32b"),
    "llama3": family_of("llama", "meta-llama-3-8b"),
    "llama3.1": family_of("llama", "llama-3.1-8b"),
    "llama3.2": family_of("llama", "llama-3.2-3b"),
    "gpt-oss": family_of("gpt-oss", "gpt-oss-20b"),
    "deepseek-v3.1": family_of("deepseek2", "deepseek-v3.1"),
    "mistral-nemo": family_of("llama", "mistral-nemo-instruct-2407"),
}


def counted(family: Family, request: Request) -> Estimate:
    return asyncio.run(COUNTER.count("t", family, request))


def test_the_golden_numbers_are_of_these_requests() -> None:
    """A request that was changed needs new numbers: run golden/build_engine.py."""
    assert ENGINE["requests"] == digest(REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", ENGINE["tokens"])
def test_requests_cost_what_the_engine_says(model: str) -> None:
    """Equal wherever we call a count exact, and covered by its margin everywhere."""
    wrong = []
    for kind, requests in REQUESTS.items():
        known = (*OWN_WAYS.get(("", kind), ()), *OWN_WAYS.get((model, kind), ()))
        for index, (request, truth) in enumerate(zip(requests, ENGINE["tokens"][model][kind], strict=True)):
            if truth is not None:
                ours = counted(MODELS[model].family, parsed(request))
                is_rendered = ours.own.rendered and index not in known and not ours.own.optional_tokens
                if (is_rendered and ours.tokens != truth) or truth > max(ours.likely, ours.tokens + MARGIN_MIN_TOKENS):
                    wrong.append(f"{kind} {index}: ours {ours.tokens}, engine {truth}")
    assert wrong == []


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_cost_what_transformers_and_the_vendor_say(name: str) -> None:
    """The same number, and called exact; mistral-common escapes tool results, which no model's template does."""
    truths: dict[str, int] = PROMPTS["tokens"]["transformers"].get(name) or {
        case: tokens for case, tokens in PROMPTS["tokens"]["mistral-common"][name].items() if "agent" not in case
    }
    for case, truth in truths.items():
        asked: dict[str, Any] = PROMPTS["cases"][case]
        request = Request(messages=tuple(map(parse_message, asked["messages"])), tools=tuple(asked.get("tools", ())))
        made = counted(FAMILIES[name], request)
        assert (made.tokens, made.own.exact) == (truth, True), case


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS["tokens"])
def test_texts_cost_what_llama_cpp_says(name: str) -> None:
    """Every text of its own test; it puts a space before a prompt in SentencePiece's vocabularies."""
    words, texts = vocabulary(name), TEXTS["texts"][TEXTS["tokens"][name]["texts"]]
    assert words.lengths_in_prompt(texts) == TEXTS["tokens"][name]["counts"]
