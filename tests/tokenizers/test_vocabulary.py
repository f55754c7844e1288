"""Vocabularies: packs are whole, special tokens are found, pieces cost what the whole costs, data from elsewhere."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.errors import CompactionError
from litellm_compaction.templates import template
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers import vocabulary as vocabularies
from litellm_compaction.tokenizers.encoders import TiktokenEncoder, TokenizersEncoder, encoder_for
from litellm_compaction.tokenizers.registry import has_pack, read_pack, token_length, vocabulary
from litellm_compaction.tokenizers.vocabulary import Vocabulary

PACKS = Path(registry.__file__).parent / "packs"
JINJA = Path(template.__file__).parent / "jinja"
SMALL = (
    "llama3",
    "llama2",
    "phi3",
    "mistral-v1",
    "mistral-v3",
    "mistral-v7",
    "tekken",
    "qwen2",
    "deepseek-v3",
    "gpt-oss",
)
GOLDEN = json.loads((Path(__file__).parent.parent / "tokens" / "golden" / "prompts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("folder", "pattern"), [(PACKS, "*.xz"), (JINJA, "*.jinja")], ids=["packs", "templates"])
def test_files_are_those_that_were_built(folder: Path, pattern: str) -> None:
    """Every file has the SHA-256 that the build script wrote down, and no file is missing."""
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}
    assert found == sums


def test_the_packs_are_small_and_licensed() -> None:
    """At most 6 MB together, with the licences that must go with them and the attribution that Llama asks for."""
    assert sum(path.stat().st_size for path in PACKS.glob("*.xz")) <= 6_000_000
    licenses = {path.name for path in (PACKS / "licenses").iterdir()}
    assert {"LLAMA-2-COMMUNITY-LICENSE.txt", "LLAMA-3.1-COMMUNITY-LICENSE.txt", "APACHE-2.0.txt"} <= licenses
    notice = (PACKS.parents[2] / "NOTICE").read_text(encoding="utf-8")
    assert "Built with Llama" in notice
    assert "Llama 3.1 is licensed under the Llama 3.1 Community License" in notice


def test_a_damaged_pack_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose hash is another is not used."""
    (tmp_path / "llama2.json.xz").write_bytes(b"no")
    (tmp_path / "SHA256SUMS").write_text((PACKS / "SHA256SUMS").read_text())
    monkeypatch.setattr(registry, "_FOLDER", tmp_path)
    assert has_pack("llama2")
    with pytest.raises(CompactionError, match="reinstall"):
        read_pack("llama2")


@pytest.mark.parametrize(
    ("name", "prompt", "specials"),
    [
        ("qwen2", "<|im_start|>user\n<tool_response>\nx\n</tool_response><think></think>", 5),
        ("llama3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n<|eot|><|im_start|>", 3),
        ("mistral-v3", "<s>[INST] x[/INST]</s>[TOOL_CALLS]", 5),
        ("mistral-v1", "<s>[INST] x[/INST]</s>", 2),
        ("tekken", "<s>[INST]x[/INST][THINK]<SPECIAL_999><SPECIAL_1000>", 5),
        ("gpt-oss", "<|start|>system<|message|>x<|end|><|channel|><|reserved_200013|>", 5),
        ("deepseek-v3", "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜><think>", 4),
        ("phi3", "<s><|user|>\nx<|end|>\n<|assistant|>\n", 4),
        ("r1-distill-llama", "<｜begin▁of▁sentence｜><｜User｜>x<think>", 3),
    ],
)
def test_special_tokens_are_one_token_each(name: str, prompt: str, specials: int) -> None:
    """A prompt is cut at special tokens, and nothing of it is lost."""
    segments = vocabulary(name).split(prompt)
    assert sum(segment.is_special for segment in segments) == specials
    assert "".join(prompt[segment.start : segment.end] for segment in segments) == prompt


def test_text_behind_special_tokens_follows_the_family() -> None:
    """SentencePiece's vocabularies put a space before text, byte-level ones nothing; a file named Phi-3 drops both."""
    assert vocabulary("llama2").lengths_in_prompt(["x", ""]) == [token_length("llama2", " x"), 0]
    assert vocabulary("phi3").lengths_in_prompt(["\nx"]) == [token_length("phi3", " \nx")]
    strips = Vocabulary(replace(read_pack("phi3"), strips_after_special=True))
    assert strips.lengths_in_prompt(["\nx", "\n"]) == [token_length("phi3", " x"), 0]
    assert vocabulary("qwen2").lengths_in_prompt(["\nx"]) == [token_length("qwen2", "\nx")]


@pytest.mark.parametrize("name", SMALL)
def test_pieces_cost_what_the_whole_costs(name: str) -> None:
    """Cutting long text at words, lines and Chinese punctuation changes no count, in any vocabulary."""
    dice = random.Random(5)
    words = [
        *(message["content"] for case in GOLDEN["cases"].values() for message in case["messages"]),
        *("，今天天气很好。", "它们/\n/x ", "1234567 ", "\n\n\n", "   indented\n", "don't ", "a.b(c)[d]; ", "né\n"),
    ]
    text = "".join(dice.choice(words)[: dice.randint(1, 200)] for _ in range(600))
    assert len(text) > 20_000
    words_of = vocabulary(name)
    assert words_of.length(text) == sum(words_of._encoder.lengths([text]))


@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(text=st.text(st.characters(codec=None), max_size=80), name=st.sampled_from(SMALL))
def test_more_text_never_has_fewer_tokens_by_a_word(text: str, name: str) -> None:
    """A word on a new line adds tokens, whatever stands before it."""
    assert token_length(name, f"{text}\nword") > token_length(name, text) - 1


def test_neutral_data_gives_the_same_counts_by_either_program() -> None:
    """Merges that a model file names lead to the same tokens as ranks do, and an unknown pre-tokenizer still counts."""
    data = read_pack("qwen2")
    by_ranks = encoder_for(data)
    by_merges = encoder_for(replace(data, pre="gpt-2"))
    assert isinstance(by_ranks, TiktokenEncoder)
    assert isinstance(by_merges, TokenizersEncoder)
    assert by_ranks.lengths([" hello world"]) == by_merges.lengths([" hello world"])
    unknown = Vocabulary(replace(data, pre="never heard of", token_types=(), bos_id=None, eos_id=10**9))
    assert unknown.length("hello world") == 2
    assert unknown.split("<|im_start|>")[0].is_special is False


def test_a_pack_may_be_another_one_with_some_tokens_renamed() -> None:
    """DeepSeek's distilled Llama: the base's ordinary tokens, and its own names where special ones were."""
    base, made = read_pack("llama3"), read_pack("r1-distill-llama")
    differ = [index for index, token in enumerate(made.tokens) if token != base.tokens[index]]
    assert differ == [128000, 128001, *range(128011, 128016)]
    assert (made.tokens[128000], made.token_types[128000]) == ("<｜begin▁of▁sentence｜>", 3)
    assert (made.tokens[128013], made.token_types[128013]) == ("<think>", 4)
    assert made.token_types[128002] == base.token_types[128002]
    assert (made.bos_id, made.eos_id, made.kind, made.pre) == (128000, 128001, base.kind, base.pre)


@pytest.mark.parametrize("name", ["llama2", "deepseek-v3", "tekken"])
def test_a_megabyte_is_counted(name: str) -> None:
    """Long runs of anything end, in time."""
    assert vocabulary(name).length(" " * 1_000_000) > 0
    assert vocabulary(name).length("x1\n" * 300_000) > 300_000


@pytest.mark.parametrize("alphabet", ["ab \n", "a   ", "x", " \n", "abcdefgh 。，一二三", "1，。一二 "])
def test_a_piece_ends_at_the_last_boundary_of_its_last_quarter(alphabet: str) -> None:
    """Found from behind, it is the one that a walk through all boundaries ends at."""
    source = random.Random(alphabet)
    for _ in range(20):
        text = "".join(source.choice(alphabet) for _ in range(3000)) + "y" * source.randrange(1500) + alphabet * 100
        text = text[:5000].ljust(5000, "z")
        ends = [found.end() for found in vocabularies._BOUNDARY.finditer(text, 3072, 4096)]
        assert next(vocabularies._pieces(text, vocabularies._BOUNDARY)) == text[: ends[-1] if ends else 4096]
