"""Which tokens a text becomes for the simulated models: o200k_base plus Qwen's added tokens.

Called by the renderer (prompts) and by the generation (answers). The vocabulary is read from the copy that
LiteLLM ships, so nothing is downloaded; LiteLLM itself is never imported, since that takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
from array import array
from functools import lru_cache
from pathlib import Path

import tiktoken

# One token each in the Qwen models; as plain text they would be several (llama.cpp vocabulary of Qwen3,
# 2026-11).
SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_FIRST_SPECIAL_ID = 300_000
_SPECIAL_IDS = {text: _FIRST_SPECIAL_ID + offset for offset, text in enumerate(SPECIAL_TOKENS)}
_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TOKENS) + ")")

_WIDE = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]+")

# tiktoken 0.14 panics on 1,000,000 equal characters and passes 800,000 (measured 2026-11), so long runs are
# split.
_SLICE_CHARS = 100_000
_CACHED_TEXTS = 16_384


def count(text: str) -> int:
    return len(encode(text))


def count_wide(text: str) -> int:
    """The number of tokens of its Chinese, Japanese and Korean passages, each taken by itself."""
    return 0 if text.isascii() else sum(count(passage) for passage in _WIDE.findall(text))


def token_bytes(token_id: int) -> bytes:
    if token_id >= _FIRST_SPECIAL_ID:
        return SPECIAL_TOKENS[token_id - _FIRST_SPECIAL_ID].encode()
    piece: bytes = load_vocabulary().decode_single_token_bytes(token_id)
    return piece


def decode(token_ids: array[int]) -> str:
    """The text of `token_ids`; a character cut at either end is replaced."""
    return b"".join(token_bytes(token_id) for token_id in token_ids).decode("utf-8", errors="replace")


@lru_cache(maxsize=_CACHED_TEXTS)
def encode(text: str) -> array[int]:
    """Returns the token ids of `text`, special tokens included; the array is shared and must not be changed."""
    token_ids: array[int] = array("I")
    for piece in _SPECIAL_PATTERN.split(text):
        special_id = _SPECIAL_IDS.get(piece)
        if special_id is not None:
            token_ids.append(special_id)
            continue
        for start in range(0, len(piece), _SLICE_CHARS):
            token_ids.extend(load_vocabulary().encode_ordinary(piece[start : start + _SLICE_CHARS]))
    return token_ids


@lru_cache(maxsize=1)
def load_vocabulary() -> tiktoken.Encoding:
    """Returns the vocabulary; the first call takes about 0.3 s."""
    folder = _bundled_folder()
    if folder is None or "TIKTOKEN_CACHE_DIR" in os.environ:
        return tiktoken.get_encoding("o200k_base")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    try:
        return tiktoken.get_encoding("o200k_base")
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]


def _bundled_folder() -> Path | None:
    spec = importlib.util.find_spec("litellm")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root, "litellm_core_utils", "tokenizers")
        if folder.is_dir():
            return folder
    return None
