"""The header of a .gguf file: read as llama.cpp reads it, and never more than one kind of error."""

from __future__ import annotations

import dataclasses
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from litellm_compaction.errors import CompactionError, UnusableModelFile
from litellm_compaction.tokenizers.gguf import GgufHeader, read_gguf
from tests.tokenizers.gguf_writer import Array, bpe_fields, gguf, string

VALID = gguf(bpe_fields(), tail=b"\0" * 32)
HEADER_END = len(gguf(bpe_fields()))


def read(tmp_path: Path, raw: bytes, name: str = "model.gguf") -> GgufHeader:
    path = tmp_path / name
    path.write_bytes(raw)
    return read_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_bpe_vocabulary_is_read_whole(tmp_path: Path, version: int) -> None:
    """Everything that decides a count is taken over, in both versions of the format."""
    header = read(tmp_path, gguf(bpe_fields(), version=version, tail=b"\xff" * 99))
    vocabulary = header.vocabulary
    assert (vocabulary.kind, vocabulary.pre) == ("bpe", "qwen2")
    assert vocabulary.tokens == ("a", "b", "ab", "<|end|>", "Ġa")
    assert vocabulary.merges == ("a b", "Ġ a")
    assert vocabulary.token_types == (1, 1, 1, 3, 1)
    assert (vocabulary.scores, vocabulary.bos_id, vocabulary.eos_id) == ((), None, 3)
    assert not vocabulary.adds_bos
    assert header.chat_template == "{{ messages }}"
    assert not vocabulary.adds_space_prefix


BIG = 2**63
TOO_MUCH = {
    "empty": b"",
    "magic only": b"GGUF",
    "part of the magic": b"GG",
    "another format": b"PK\3\4" + bytes(100),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "version 4": b"GGUF" + struct.pack("<IQQ", 4, 0, 0),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + bytes(100),
    "no fields": gguf({}),
    "fields without end": b"GGUF" + struct.pack("<IQQ", 3, 0, BIG),
    "a key without end": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", BIG) + bytes(100),
    "a text without end": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IQ", 8, 2**64 - 1),
    "an unknown type": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 13) + bytes(100),
    "a key twice": gguf([("k", "a"), ("k", "b")]),
    "another kind": gguf(bpe_fields(tokenizer__ggml__model="bert")),
    "tokens of another type": gguf(bpe_fields(tokenizer__ggml__tokens=Array("i32", [1, 2]))),
    "no tokens": gguf(bpe_fields(tokenizer__ggml__tokens=Array("str", []))),
    "types for too few": gguf(bpe_fields(tokenizer__ggml__token_type=Array("i32", [1]))),
    "a token without measure": gguf(bpe_fields(tokenizer__ggml__tokens=Array("str", ["x" * 20_000]))),
    "a template without measure": gguf(bpe_fields(tokenizer__chat_template="x" * (2**20 + 1))),
}
for element in (0, 4, 8, 9, 12, 77):
    for claimed in (BIG, 2**64 - 1, 2**31, 10_000_000):
        TOO_MUCH[f"{claimed} elements of {element}"] = (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, element, claimed) + bytes(99)
        )
nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(1000))
TOO_MUCH["arrays all the way down"] = (
    b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 9) + nested
)


@pytest.mark.parametrize("raw", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_file_that_is_not_as_it_should_be_is_one_error(tmp_path: Path, raw: bytes) -> None:
    """The error names the file and says what to do; nothing is allocated because a file says so."""
    tracemalloc.start()
    try:
        with pytest.raises(UnusableModelFile) as caught:
            read(tmp_path, raw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert "`tokenizer:`" in str(caught.value)
    assert isinstance(caught.value, CompactionError)
    assert peak_bytes < 30 * 2**20


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """Folders, pipes, absent and impossible paths neither hang nor raise anything else."""
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf", tmp_path / "absent.gguf", Path("a\0b"), Path("\ud800.gguf")):
        with pytest.raises(UnusableModelFile):
            read_gguf(path)


@pytest.mark.slow
@given(
    edits=st.lists(
        st.one_of(
            st.tuples(st.integers(0, HEADER_END - 1), st.binary(min_size=1, max_size=9)),
            st.tuples(
                st.integers(0, HEADER_END - 8),
                st.sampled_from([0, 1, 7, 2**20, 2**31, 2**32 - 1, BIG, 2**64 - 1]).map(lambda n: struct.pack("<Q", n)),
            ),
        ),
        min_size=1,
        max_size=6,
    ),
    end=st.one_of(st.none(), st.integers(0, HEADER_END)),
    insert=st.booleans(),
)
@example(edits=[(8, b"\xff" * 8)], end=None, insert=False)
@settings(
    max_examples=settings().max_examples * 8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_mutations_never_raise_anything_else(
    tmp_path: Path, edits: list[tuple[int, bytes]], end: int | None, insert: bool
) -> None:
    """Whatever is changed in a valid file, it is read or refused, with little memory."""
    raw = bytearray(VALID)
    for at, change in edits:
        raw[at : at if insert else at + len(change)] = change
    tracemalloc.start()
    try:
        header = read(tmp_path, bytes(raw[:end]))
        assert all(isinstance(token, str) for token in header.vocabulary.tokens)
        assert {field.name for field in dataclasses.fields(header.vocabulary)} >= {"tokens", "merges"}
    except UnusableModelFile:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # The first read of up to 20 MiB is as long as the file, which is small.
    assert peak_bytes < 24 * 2**20
