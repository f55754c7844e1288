"""The running count of what an answer has taken: near the truth at every delta, at a constant cost."""

from __future__ import annotations

import random

import pytest

from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.registry import token_length
from litellm_compaction.tokens.counter import GeneratedTokens, TokenCounter
from tests.builders import prose

TEXTS = {
    "prose": prose("generated", 3000),
    "numbers": " ".join(str(number) for number in range(2500)),
    "code": "\n".join(f"    if (rows[{n}] != nullptr) {{ total += rows[{n}]->size(); }}" for n in range(250)),
    "table": "\n".join(f"| {n} | row {n} | {n * 37 % 101} |" for n in range(400)),
    "chinese": "".join(chr(0x4E00 + n * 7 % 5000) for n in range(3000)),
    "emoji": "👩‍💻🇩🇪🙂 " * 400,
}


def test_every_character_is_counted_once() -> None:
    """The counter sees each character exactly once, in pieces of bounded number, whatever the deltas are."""
    seen: list[str] = []

    def counted(text: str) -> int:
        seen.append(text)
        return len(text)

    source = random.Random(1)
    text = prose("once", 2000)
    generated = GeneratedTokens(counted)
    position = 0
    while position < len(text):
        step = source.choice([0, 1, 2, 5, 40, 700])
        generated.add(text[position : position + step])
        position += step
    assert generated.exact() == len(text)
    assert "".join(seen) == text
    # A piece is 256 characters, less the word that it leaves for the next one.
    assert len(seen) <= len(text) / 128 + 1
    assert generated.exact() == len(text)
    assert len("".join(seen)) == len(text)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-2-7b", "mistral-nemo", "qwen3-8b", "gpt-oss-20b"])
@pytest.mark.parametrize("name", ["prose", "code", "table", "emoji"])
def test_a_family_counts_with_its_own_vocabulary(model: str, name: str) -> None:
    """Text with words costs within half a per cent of what the vocabulary makes of all of it, however it is cut."""
    family = family_of("", model)
    generated = GeneratedTokens(TokenCounter().text_counter("t", family))
    source, position, text = random.Random(3), 0, TEXTS[name]
    while position < len(text):
        step = source.choice([1, 2, 5, 9, 40])
        generated.add(text[position : position + step])
        position += step
    assert generated.exact() == pytest.approx(token_length(family.vocabulary, text), rel=0.005)
