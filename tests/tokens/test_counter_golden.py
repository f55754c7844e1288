"""Counts of whole prompts against other programs.

golden/prompts.json was made once by golden/build_prompts.py, which says which program counted what;
golden/llama_cpp.json holds numbers that llama.cpp itself wrote (`models/ggml-vocab-*.gguf.inp` and `.out` in
llama-cpp-python 0.3.36), of texts without any template.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens.counter import Count, TokenCounter

GOLDEN = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text(encoding="utf-8"))
LLAMA_CPP = json.loads((Path(__file__).parent / "golden" / "llama_cpp.json").read_text(encoding="utf-8"))
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
    "mistral-v1": family_of("llama", "mistral-7b-instruct-v0.2"),
    "mistral-v3": family_of("llama", "mistral-7b-instruct-v0.3"),
    "mistral-nemo": family_of("llama", "mistral-nemo-instruct-2407"),
}


def count(family: Family, case: dict[str, Any]) -> Count:
    request = Request(messages=tuple(map(parse_message, case["messages"])), tools=tuple(case.get("tools", ())))
    return asyncio.run(TokenCounter().count("t", family, request))
