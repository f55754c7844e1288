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


@pytest.mark.parametrize("factor", [1.2, 0.8])
@pytest.mark.parametrize("words", [20, 100], ids=["short", "long"])
async def test_a_family_that_is_counted_otherwise_is_followed(factor: float, words: int) -> None:
    """After two replies of different size the count is the server's, for this conversation and for others."""
    counter = TokenCounter()
    for turns in (3, 5):
        await told(counter, chat(turns, words=words), factor)
    for asked in (chat(7, words=words), chat(7, words=words, name="another "), chat(21, words=words)):
        made = await counted(counter, asked)
        truth = made.raw_tokens * factor
        assert made.tokens == pytest.approx(truth, rel=0.02)
        assert truth <= made.tokens + made.margin_tokens
    for turns in (7, 9, 21):
        assert not await told(counter, chat(turns, words=words), factor)


async def test_short_prompts_clear_long_ones() -> None:
    """Nothing can be cut from a few hundred tokens: once they show a ratio, long prompts may have it too."""
    counter = TokenCounter()
    for turns in (3, 5):
        assert not await told(counter, chat(turns, words=5), 0.8)
    assert not await told(counter, chat(41, words=50), 0.8)


async def test_another_template_under_the_same_name_is_followed_down() -> None:
    """After 1.2 was confirmed often, 0.95 is believed with the second size, and the old ratios go."""
    counter = TokenCounter()
    for turns in range(3, 23, 2):
        await told(counter, chat(turns, words=50), 1.2)
    assert await told(counter, chat(21, words=50, name="new "), 0.95)
    assert await told(counter, chat(31, words=50, name="new "), 0.95)
    made = await counted(counter, chat(35, words=50, name="other "))
    assert made.tokens == pytest.approx(0.95 * made.raw_tokens, rel=0.01)


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
