"""A server that counts otherwise than the family says: followed up and down, told apart from a cut prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import Count, TokenCounter

LLAMA31 = family_of("", "llama-3.1-8b")
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "


def chat(turns: int, *, words: int, name: str = "") -> Request:
    raw: Sequence[Mapping[str, JsonValue]] = [
        {"role": ("user", "assistant")[index % 2], "content": f"{name}{index}: {PROSE * words}"}
        for index in range(turns)
    ]
    return Request(messages=tuple(map(parse_message, raw)))


async def counted(counter: TokenCounter, asked: Request) -> Count:
    return await counter.count("t", LLAMA31, asked)


async def told(counter: TokenCounter, asked: Request, factor: float) -> bool:
    """Whether the server's number for a request is suspicious; learned in either case, as the engine does."""
    made = await counted(counter, asked)
    prompt_tokens = round(made.raw_tokens * factor)
    suspicious = counter.is_suspicious(made, prompt_tokens)
    counter.learn("t", made, prompt_tokens)
    return suspicious


@pytest.mark.parametrize(
    "cut",
    [
        lambda tokens: 8192.0,
        lambda tokens: 8192 - tokens % 700,
        lambda tokens: tokens - 3000,
        lambda tokens: 4096 + tokens % 1000,
        lambda tokens: tokens / 2 - 100 * (tokens % 7),
    ],
    ids=["window", "whole messages", "a fixed piece", "half a window", "by half"],
)
async def test_a_cut_prompt_stays_one(cut: object) -> None:
    """Prompts of growing size that a server cuts never become the measure of others."""
    assert callable(cut)
    counter = TokenCounter()
    for turns in range(11, 41, 2):
        asked = chat(turns, words=50)
        made = await counted(counter, asked)
        prompt_tokens = round(cut(made.raw_tokens))
        if prompt_tokens < 0.85 * made.raw_tokens:
            assert counter.is_suspicious(made, prompt_tokens)
            counter.learn("t", made, prompt_tokens)
    made = await counted(counter, chat(21, words=50))
    assert made.tokens == made.raw_tokens
