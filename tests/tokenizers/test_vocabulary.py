"""Vocabularies: packs are whole, special tokens are found, pieces cost what the whole costs, data from elsewhere."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from litellm_compaction.errors import CompactionError
from litellm_compaction.templates import template
from litellm_compaction.tokenizers import registry
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
