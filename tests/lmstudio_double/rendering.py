"""The vocabulary of the double's prompts, and how LM Studio cuts the middle of one."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Literal
from unittest import mock

import tiktoken

from litellm_compaction.simulator.rendering import (
    Block,
    Prompt,
    count,
    count_by,
    decode,
    encode,
    load_vocabulary,
    with_newest,
)

__all__ = ["Overflow", "count", "decode", "encode", "keep_tokens", "load_vocabulary", "truncate_middle"]


def _o200k() -> tiktoken.Encoding:
    """The vocabulary that LiteLLM ships: not the one that the counter under test has for any model's name."""
    spec = importlib.util.find_spec("litellm")
    assert spec is not None
    [root] = spec.submodule_search_locations or ()
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=str(Path(root, "litellm_core_utils", "tokenizers"))):
        return tiktoken.get_encoding("o200k_base")


count_by(_o200k)

Overflow = Literal["truncate_middle", "error_400_object", "error_event", "empty"]


def keep_tokens(prompt: Prompt, factor: float) -> int:
    """The tokens that middle truncation never drops: system, first user message, opening of the answer."""
    return math.ceil(Prompt(_head(prompt), prompt.opening).count_tokens() * factor)


def truncate_middle(prompt: Prompt, window_tokens: int, factor: float) -> Prompt:
    """The prompt with the middle dropped: system, first user message, and the newest messages that fit.

    The newest message loses its front if it does not fit. `keep_tokens(prompt, factor) < window_tokens` must hold.
    """
    return with_newest(prompt, window_tokens, _head(prompt), factor)


def _head(prompt: Prompt) -> tuple[Block, ...]:
    for index, block in enumerate(prompt.blocks):
        if block.role == "user":
            return prompt.blocks[: index + 1]
    return prompt.blocks[:1]
