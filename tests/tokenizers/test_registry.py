"""Token lengths: any string, offline, word by word as by the whole; a damaged pack is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.encoders import by_tokenizers, by_words
from litellm_compaction.tokenizers.registry import token_length, vocabulary

NAMES = ("cl100k_base", "o200k_base", "gpt-oss", "llama3", "llama2", "mistral-v3", "tekken", "qwen2", "deepseek-v3")
ANY_TEXT = st.text(st.characters(codec=None))


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(text=ANY_TEXT, name=st.sampled_from(NAMES))
def test_any_string_has_a_length(text: str, name: str) -> None:
    """No string raises, none is negative, none costs more than its bytes."""
    assert 0 <= token_length(name, text) <= max(1, 4 * len(text))


@pytest.mark.parametrize("folder", [None, "empty"])
def test_loading_needs_no_network_and_leaves_the_environment(folder: str | None, tmp_path: Path) -> None:
    """The files come from LiteLLM's folder, without importing LiteLLM, and TIKTOKEN_CACHE_DIR stays as it was."""
    code = (
        "import os, socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "before = os.environ.get('TIKTOKEN_CACHE_DIR')\n"
        "from litellm_compaction.tokenizers.registry import token_length\n"
        "assert token_length('o200k_base', 'hello world') == 2\n"
        "assert token_length('cl100k_base', 'hello world') == 2\n"
        "assert os.environ.get('TIKTOKEN_CACHE_DIR') == before\n"
        "assert 'litellm' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TIKTOKEN_CACHE_DIR"}
    if folder is not None:
        environment["TIKTOKEN_CACHE_DIR"] = str(tmp_path) if folder else ""
    root = Path(registry.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


PACKS = Path(registry.__file__).parent / "packs"


def test_a_damaged_pack_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose hash is another is not used, nor tried again."""
    (tmp_path / "llama2.json.xz").write_bytes(b"no")
    (tmp_path / "SHA256SUMS").write_text((PACKS / "SHA256SUMS").read_text())
    for name, value in (("_FOLDER", tmp_path), ("_loaded", {})):
        monkeypatch.setattr(registry, name, value)
    for _ in range(2):
        with pytest.raises(CompactionError, match="reinstall"):
            vocabulary("llama2")
    assert "damaged" in registry.why_broken("llama2")


BY_WORDS = ("llama2", "mistral-v3", "phi3", "gemma4")
PIECE = st.one_of(
    st.sampled_from(
        [
            " ",
            "  ",
            "▁",
            "\n",
            "\n\n",
            "\t",
            "\r\n",
            ">",
            "</",
            "> </",
            ">▁</",
            "a",
            "the",
            " the",
            "né",
            "中文",
            "👍🏽",
        ]
    ),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=6),
)
TEXT = st.lists(PIECE, max_size=30).map("".join)


@lru_cache
def packed(name: str) -> tuple[Tokenizer, str, list[str]]:
    head, body = registry._read_pack(name)
    return Tokenizer.from_buffer(body), head["words"], head["across"]


@settings(max_examples=settings().max_examples * 7, deadline=None)
@given(name=st.sampled_from(BY_WORDS), texts=st.lists(TEXT, max_size=3))
@example(name="gemma4", texts=["<b> </b> <i> </i>\n> </"])
@example(name="llama2", texts=["", " ", "a" * 100 + " b"])
def test_words_take_what_the_text_takes(name: str, texts: list[str]) -> None:
    """Any text, also one in which a token reaches over a space, in each vocabulary that is counted by words."""
    tokenizer, pattern, across = packed(name)
    whole, by_word = by_tokenizers(tokenizer), by_words(tokenizer, pattern, across)
    assert list(map(by_word, texts)) == list(map(whole, texts))
