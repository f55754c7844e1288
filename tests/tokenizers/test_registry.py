"""Token lengths: any string, offline, word by word as by the whole; a damaged pack is an error."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokenizers.vocabulary import Encoder, by_tokenizers, by_words

NAMES = ("cl100k_base", "o200k_base", "gpt-oss", "llama3", "llama2", "mistral-v3", "tekken", "qwen2", "deepseek-v3")
ANY_TEXT = st.text(st.characters(codec=None))


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(text=ANY_TEXT, name=st.sampled_from(NAMES))
def test_any_string_has_a_length(text: str, name: str) -> None:
    """No string raises, none is negative, none costs more than its bytes."""
    assert 0 <= vocabulary(name).lengths([text])[0] <= max(1, 4 * len(text))


def test_loading_needs_no_network() -> None:
    """The files come from LiteLLM's folder, without importing LiteLLM."""
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from litellm_compaction.tokenizers.registry import vocabulary\n"
        "assert vocabulary('o200k_base').lengths(['hello world'])[0] == 2\n"
        "assert vocabulary('cl100k_base').lengths(['hello world'])[0] == 2\n"
        "assert 'litellm' not in sys.modules\n"
    )
    root = Path(registry.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_packs_are_those_of_the_checksums() -> None:
    """As sha256sum writes them."""
    folder = Path(registry.__file__).parent / "packs"
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(folder.glob("*.xz"))]
    assert sums == (folder / "SHA256SUMS").read_text().splitlines()


@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(
    name=st.sampled_from(["llama2", "mistral-v3", "phi3"]),
    text=st.lists(st.sampled_from(["  ", "▁", "\n", "> </", "a" * 100, " the", "né", "中文", "👍🏽"]) | ANY_TEXT).map(
        "".join
    ),
)
def test_words_take_what_the_text_takes(name: str, text: str) -> None:
    """In each vocabulary in which no token reaches over the space between two words."""
    text = text.encode("utf-8", "replace").decode()
    words, whole = program(name)
    assert words(text) == whole(text)


@cache
def program(name: str) -> tuple[Encoder, Encoder]:
    head, body = registry._read_pack(name)
    tokenizer = Tokenizer.from_buffer(body)
    return by_words(tokenizer, head["words"]), by_tokenizers(tokenizer)
