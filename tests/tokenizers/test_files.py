"""A tokenizer.json that an operator names: counted by `tokenizers`, whatever it says; what is none is one error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers.registry import _load_once
from litellm_compaction.tokenizers.vocabulary import CONTROL, Vocabulary


def read(path: Path) -> Vocabulary:
    """The vocabulary of a file that may be another one the next time."""
    found = _load_once(f"file:{path}")
    if isinstance(found, CompactionError):
        raise found
    return found


def small_tokenizer() -> Tokenizer:
    """Bytes as tokens, one merge, and two special tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = {letter: index for index, letter in enumerate(alphabet)} | {"ab": len(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer


def test_texts_are_counted_as_the_file_says(tmp_path: Path) -> None:
    """Merges apply, and special tokens are found; neither padding nor a cut is counted, nor what would be added."""
    tokenizer = small_tokenizer()
    tokenizer.enable_padding(length=10**5)
    tokenizer.enable_truncation(max_length=1)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        words = read(path)
        assert words.lengths(["", "abab", "é", "\ud800"]) == [0, 2, 2, 3]
        assert words.split("<s>ab<|end|>") == ["", "<s>", "ab", "<|end|>", ""]


def test_a_text_that_the_file_has_no_rule_for_counts_high(tmp_path: Path) -> None:
    """A vocabulary without an unknown token refuses texts; no token is shorter than a byte."""
    Tokenizer(WordLevel(vocab={"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path).lengths(["héé"]) == [5]


def test_a_panic_counts_high_and_an_interrupt_ends() -> None:
    """tiktoken and `tokenizers` are Rust, whose panics are no Exception and have no class to import."""

    def fails(piece: str) -> int:
        raise KeyboardInterrupt if piece == "stop" else type("PanicException", (BaseException,), {})

    assert Vocabulary(fails).lengths(["héé"]) == [5]
    with pytest.raises(KeyboardInterrupt):
        Vocabulary(fails).lengths(["stop"])


def test_control_tokens_in_a_text_are_broken() -> None:
    """Not one that is a single character, begins like a word or is no control token."""
    special = {"<|a|>": CONTROL, "<|a|><b>": CONTROL, "ab": CONTROL, "§": CONTROL, "_c": CONTROL, "<d>": 4}
    assert Vocabulary(len, special).defused("<|a|><b>§ab_c<d>") == "< |a|><b>§ab_ c<d>"
    assert Vocabulary(len).defused("<|a|>") == "<|a|>"


@pytest.mark.parametrize("raw", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"GGUF"])
def test_a_file_that_is_no_tokenizer_json_is_one_error(tmp_path: Path, raw: bytes) -> None:
    """It names the folder."""
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(CompactionError, match="cannot be read or used"):
        read(tmp_path)


def test_absent_odd_and_giant_files_are_one_error(tmp_path: Path) -> None:
    """None is waited for, or read to its end."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    for name, size in (("sparse", 2**27 + 1), ("largest", 2**27)):
        with (tmp_path / f"{name}.json").open("wb") as file:
            file.truncate(size)
    for name in ("absent", "pipe", "zero", "loop", "sparse", "a\0b"):
        with pytest.raises(CompactionError, match="no ordinary file of at most 128 MiB"):
            read(tmp_path / f"{name}.json")
    with pytest.raises(CompactionError, match=r"cannot be read or used \((?!ValueError: no ordinary)"):
        read(tmp_path / "largest.json")
