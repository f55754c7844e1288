"""The header of a .gguf file: read as llama.cpp reads it, and never more than one kind of error."""

from __future__ import annotations

import dataclasses
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from litellm_compaction.errors import CompactionError, UnusableModelFile
from litellm_compaction.tokenizers import gguf as gguf_module
from litellm_compaction.tokenizers.files import load_tokenizer_file
from litellm_compaction.tokenizers.gguf import GgufHeader, first_part, read_gguf
from tests.tokenizers.gguf_writer import Array, Value, bpe_fields, gguf, string
from tests.work import grows_linearly

VALID = gguf(bpe_fields(), tail=b"\0" * 32)
HEADER_END = len(gguf(bpe_fields()))


def spm_fields(**more: Value) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": Array("str", ["<unk>", "<s>", "</s>", "▁a"]),
        "tokenizer.ggml.scores": Array("f32", [0.0, 0.0, 0.0, -1.5]),
        "tokenizer.ggml.token_type": Array("i32", [2, 3, 3, 1]),
    }
    return fields | {key.replace("__", "."): value for key, value in more.items()}


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


def test_an_spm_vocabulary_has_scores_and_llama_defaults(tmp_path: Path) -> None:
    """What the file leaves out is what llama.cpp takes for SentencePiece: BOS 1, EOS 2, both spaces and BOS added."""
    vocabulary = read(tmp_path, gguf(spm_fields())).vocabulary
    assert (vocabulary.kind, vocabulary.pre, vocabulary.merges) == ("spm", "", ())
    assert vocabulary.scores == (0.0, 0.0, 0.0, -1.5)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.adds_bos) == (1, 2, True)
    assert vocabulary.adds_space_prefix
    gemma = read(tmp_path, gguf(spm_fields(tokenizer__ggml__add_space_prefix=("bool", False))))
    assert not gemma.vocabulary.adds_space_prefix


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "tekken"}, True),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": ("bool", False)}, False),
        ({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": ("bool", False)}, True),
    ],
)
def test_bos_is_added_where_llama_cpp_adds_it(tmp_path: Path, fields: dict[str, Value], adds: bool) -> None:
    """The file's word counts, then the pre-tokenizer's habit; Gemma 4 always begins with BOS."""
    base = bpe_fields()
    del base["tokenizer.ggml.add_bos_token"]
    assert read(tmp_path, gguf(base | fields)).vocabulary.adds_bos is adds


def test_ids_outside_the_vocabulary_count_as_absent(tmp_path: Path) -> None:
    """As in llama.cpp, a bad id falls back to the kind's default, and that one needs a token too."""
    vocabulary = read(tmp_path, gguf(bpe_fields(tokenizer__ggml__eos_token_id=("u32", 5)))).vocabulary
    assert vocabulary.eos_id is None
    vocabulary = read(tmp_path, gguf(spm_fields(tokenizer__ggml__bos_token_id=("u32", 2**32 - 1)))).vocabulary
    assert vocabulary.bos_id == 1


def test_named_templates_leave_the_default_one_in_place(tmp_path: Path) -> None:
    """The default template is the vocabulary's; the one for tools is kept apart."""
    header = read(
        tmp_path,
        gguf(
            bpe_fields(
                tokenizer__chat_templates=Array("str", ["tool_use", "rag"]),
                **{"tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.chat_template.rag": "{{ documents }}"},
            )
        ),
    )
    assert header.chat_template == "{{ messages }}"
    assert header.tool_chat_template == "{{ tools }}"


@pytest.mark.parametrize(
    ("field", "rereads"),
    [
        ("attention.sliding_window", True),
        ("ssm.conv_kernel", True),
        ("attention.sliding_window_pattern", False),
        ("attention.head_count", False),
    ],
)
def test_a_file_says_whether_its_model_reads_all_again(tmp_path: Path, field: str, rereads: bool) -> None:
    """A window that slides over the prompt, or a state that runs along it; another model's fields say nothing."""
    fields = bpe_fields()
    architecture = fields["general.architecture"]
    assert read(tmp_path, gguf(fields | {f"{architecture}.{field}": ("u32", 512)})).rereads is rereads
    assert not read(tmp_path, gguf(fields | {f"other.{field}": ("u32", 512)})).rereads
    assert not read(tmp_path, gguf(fields | {f"{architecture}.attention.sliding_window": ("u32", 0)})).rereads


def test_fields_that_nobody_asks_for_are_skipped(tmp_path: Path) -> None:
    """Every type can stand in between: scalars, arrays, arrays of arrays."""
    odd: dict[str, Value] = {
        kind: (kind, 1) for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "u64", "i64", "f64")
    }
    odd["numbers"] = Array("f64", [1.0] * 100)
    odd["texts"] = Array("str", ["", "x" * 100_000])
    odd["nested"] = Array("arr", [Array("str", ["a"]), Array("arr", [Array("u8", [1, 2])]), Array("i64", [])])
    header = read(tmp_path, gguf(odd | bpe_fields()))
    assert header.vocabulary.tokens[0] == "a"


def test_odd_tokens_survive(tmp_path: Path) -> None:
    """Null characters, empty tokens and bytes that are no UTF-8 stay in their places."""
    tokens = Array("str", ["a\0b", "", b"\xff\xc3", "é", "\0"])
    vocabulary = read(tmp_path, gguf(bpe_fields(tokenizer__ggml__tokens=tokens))).vocabulary
    assert vocabulary.tokens == ("a\0b", "[EMPTY_1]", "��", "é", "\0")


def loaded(path: Path, raw: bytes) -> str:
    """The name under which the vocabulary of a file is loaded."""
    path.write_bytes(raw)
    return load_tokenizer_file(path).vocabulary


def test_files_whose_vocabularies_count_alike_share_one(tmp_path: Path) -> None:
    """Quantizations of one model and other templates; not one with another merge, or another way with white space."""
    first = loaded(tmp_path / "a.gguf", gguf(bpe_fields()))
    same = bpe_fields(general__name="Tiny Q8", tokenizer__chat_template="x")
    assert loaded(tmp_path / "b.gguf", gguf(same, tail=b"weights")) == first
    merges = {"tokenizer.ggml.merges": Array("str", ["Ġ a", "a b"])}
    for name, change in (("c", merges), ("d", {"general.name": "Phi-3"})):
        assert loaded(tmp_path / f"{name}.gguf", gguf(bpe_fields() | change)) != first


def test_any_part_of_a_split_model_leads_to_its_first(tmp_path: Path) -> None:
    """The first part holds the metadata."""
    first = tmp_path / "big-00001-of-00003.gguf"
    first.write_bytes(VALID)
    third = tmp_path / "big-00003-of-00003.gguf"
    third.write_bytes(gguf({"split.no": ("u16", 2)}))
    assert read_gguf(third) == read_gguf(first)
    assert first_part(tmp_path / "small.gguf") == tmp_path / "small.gguf"


def test_a_link_is_followed_to_its_file(tmp_path: Path) -> None:
    """`lms import` may link instead of copying; a link to nothing or to itself is an error like any other."""
    (tmp_path / "model.gguf").write_bytes(VALID)
    link = tmp_path / "link.gguf"
    link.symlink_to("model.gguf")
    assert read_gguf(link) == read_gguf(tmp_path / "model.gguf")
    for name, target in (("gone.gguf", "nowhere"), ("loop.gguf", "loop.gguf")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UnusableModelFile, match="cannot be read"):
            read_gguf(tmp_path / name)


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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_names_the_permissions(tmp_path: Path) -> None:
    """The operator learns whose permissions to check."""
    (tmp_path / "model.gguf").write_bytes(VALID)
    (tmp_path / "model.gguf").chmod(0)
    with pytest.raises(UnusableModelFile, match="permissions"):
        read_gguf(tmp_path / "model.gguf")


def test_a_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """An unfinished download gives an error, never half a vocabulary."""
    for end in range(HEADER_END):
        with pytest.raises(UnusableModelFile):
            read(tmp_path, VALID[:end])
    assert read(tmp_path, VALID[:HEADER_END]) == read(tmp_path, VALID)


def test_a_long_header_is_read_in_steps_and_a_longer_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is no limit, the last one is."""
    monkeypatch.setattr(gguf_module, "_READ_STEPS_BYTES", (64, 200, HEADER_END))
    assert read(tmp_path, VALID).vocabulary.tokens[2] == "ab"
    monkeypatch.setattr(gguf_module, "_READ_STEPS_BYTES", (64, HEADER_END - 1))
    with pytest.raises(UnusableModelFile, match=f"more than {HEADER_END - 1} bytes"):
        read(tmp_path, VALID)


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


@pytest.mark.slow
def test_a_full_size_vocabulary_is_read_in_linear_work(tmp_path: Path) -> None:
    """150,000 tokens and merges. What that takes in milliseconds: `benchmarks/cost/rungs.py`."""

    def written(size: int) -> Callable[[], GgufHeader]:
        tokens = [f"Ġword{index}" for index in range(size)]
        merges = [f"Ġw ord{index}" for index in range(size)]
        fields = bpe_fields(
            tokenizer__ggml__tokens=Array("str", tokens),
            tokenizer__ggml__merges=Array("str", merges),
            tokenizer__ggml__token_type=Array("i32", [1] * size),
        )
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(gguf(fields))
        return lambda: read_gguf(path)

    assert grows_linearly(written, 1000)
    read = written(150_000)().vocabulary
    assert (len(read.tokens), read.tokens[-1], read.merges[-1]) == (150_000, "Ġword149999", "Ġw ord149999")


@pytest.mark.parametrize(
    ("title", "strips"), [("Phi-3.5-mini", True), ("Phi3", True), ("Phi 3.5 Mini", False), ("", False)]
)
def test_a_files_name_decides_whether_phi_drops_white_space(tmp_path: Path, title: str, strips: bool) -> None:
    """As llama.cpp decides it."""
    assert read(tmp_path, gguf(bpe_fields(general__name=title))).vocabulary.strips_after_special is strips
