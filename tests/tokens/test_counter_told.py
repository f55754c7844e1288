"""Counts that LM Studio's protocol told: held against answers, and doubted for an hour where these say otherwise."""

from __future__ import annotations

import logging

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import Count, TokenCounter, ToldCounts
from litellm_compaction.tokens.media import MediaPrices
from tests.windows.fake_lmstudio import Clock


async def counted(text: str) -> Count:
    request = Request(messages=(parse_message({"role": "user", "content": text}),))
    return await TokenCounter().count("t", family_of("qwen3", "qwen3-8b"), request)


async def test_a_constant_between_a_count_and_its_answer_is_learned() -> None:
    """The next count of the same deployment has it on top, and no answer is awaited to confirm it."""
    told, count = ToldCounts(lambda _: MediaPrices()), await counted("word " * 2000)
    assert told.take("t", "m", count, 2000) == 2000
    assert told.is_unconfirmed("t", count)
    told.compare("t", count, 2007)
    assert told.take("t", "m", count, 2000) == 2007
    assert not told.is_unconfirmed("t", count)
    assert told.take("other", "m", count, 2000) == 2000


async def test_counts_that_answers_contradict_are_doubted_for_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    """For this deployment only; said once, with both numbers."""
    clock = Clock()
    told, count = ToldCounts(lambda _: MediaPrices(), clock=clock), await counted("word " * 2000)
    told.take("t", "m", count, 2000)
    with caplog.at_level(logging.WARNING, "litellm_compaction"):
        told.compare("t", count, 2600)
        told.compare("t", count, 2600)
    assert ["2000" in each.getMessage() and "2600" in each.getMessage() for each in caplog.records] == [True]
    assert (told.is_believed("t"), told.is_believed("other")) == (False, True)
    clock.now_s += 3599
    assert not told.is_believed("t")
    clock.now_s += 1
    assert told.is_believed("t")
