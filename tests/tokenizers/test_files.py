"""A Hugging Face tokenizer.json: counted by `tokenizers`, with the template that lies beside it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from litellm_compaction.errors import UnusableModelFile
from litellm_compaction.tokenizers import files
from litellm_compaction.tokenizers.files import JsonTokenizer, read_tokenizer_json


def small_tokenizer() -> Tokenizer:
    """Bytes as tokens, one merge, and two special tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = {letter: index for index, letter in enumerate(alphabet)} | {"ab": len(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>")])
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _read_here(path: Path) -> JsonTokenizer:
    """As `read_tokenizer_json`, without a process of its own for each of hundreds of examples."""
    with pytest.MonkeyPatch.context() as patch:
        here = SimpleNamespace(run=lambda _, payload: files.examined(payload), end=lambda: None)
        patch.setattr(files, "Contained", lambda: here)
        return read_tokenizer_json(path)


def test_texts_are_counted_as_the_file_says(folder: Path) -> None:
    """Merges and added tokens apply, in a text too; the empty text is nothing."""
    tokenizer = read_tokenizer_json(folder / "tokenizer.json")
    assert tokenizer.count("") == 0
    assert tokenizer.count("abab") == 2
    assert tokenizer.count("<s>ab<|end|><tool_call>") == 4
    assert tokenizer.count("é") == 2
    assert tokenizer.special_tokens == {"<s>": 257, "<|end|>": 258}


def test_bos_is_never_counted_but_known(folder: Path) -> None:
    """Whoever renders a template decides on BOS; the file's post-processor, or its configuration, says who adds it."""
    write_config(folder, bos_token={"content": "<s>"}, eos_token="<|end|>")
    plain = _read_here(folder)
    assert (plain.bos_token, plain.eos_token, plain.adds_bos) == ("<s>", "<|end|>", False)
    tokenizer = small_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer.save(str(folder / "tokenizer.json"))
    adding = _read_here(folder)
    assert adding.adds_bos
    assert adding.count("ab") == 1
    small_tokenizer().save(str(folder / "tokenizer.json"))
    write_config(folder, bos_token="<s>", add_bos_token=True)
    assert _read_here(folder).adds_bos


@pytest.mark.parametrize("raw", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"GGUF"])
def test_what_is_no_tokenizer_json_is_one_error(tmp_path: Path, raw: bytes) -> None:
    """The error names the file and what to do."""
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(UnusableModelFile, match="is no tokenizer"):
        _read_here(tmp_path / "tokenizer.json")


def test_absent_odd_and_oversized_files_are_one_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs, and nothing large is read."""
    os.mkfifo(folder / "pipe.json")
    for path in (folder / "absent.json", folder / "pipe.json", Path("a\0b")):
        with pytest.raises(UnusableModelFile):
            read_tokenizer_json(path)
    monkeypatch.setattr(files, "_MAX_BYTES", 100)
    with pytest.raises(UnusableModelFile, match="larger than 100 bytes"):
        read_tokenizer_json(folder)


def test_a_text_that_the_file_has_no_rule_for_counts_high(tmp_path: Path) -> None:
    """A vocabulary without an unknown token refuses texts; no token is shorter than a byte."""
    Tokenizer(WordLevel(vocab={"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert _read_here(tmp_path).count("héé") == 5


@given(text=st.text(st.characters(codec=None), max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_counted(folder: Path, text: str) -> None:
    """Lone surrogates and control characters included."""
    count = _read_here(folder).count(text)
    assert (count > 0) == bool(text)
    assert count <= len(text.encode("utf-8", "surrogatepass"))


@given(data=st.data())
@settings(
    max_examples=settings().max_examples * 3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_mutations_never_raise_anything_else(folder: Path, data: st.DataObject) -> None:
    """Whatever is changed in a valid file, it is read or refused, and a tokenizer that was read counts."""
    raw = bytearray((folder / "tokenizer.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        change = data.draw(st.sampled_from([b"", b"0", b"-1", b"null", b'"', b"]", b"4294967296", b"\xff", b"[]"]))
        raw[at : at + data.draw(st.integers(0, 40))] = change
    (folder / "changed.json").write_bytes(raw)
    with suppress(UnusableModelFile):
        assert _read_here(folder / "changed.json").count("ab<s>é") >= 0
