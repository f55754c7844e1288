"""What the engine does with servers' counts: one warning, an alarm that ends, a fact that survives a restart."""

from __future__ import annotations

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.errors import Overflow
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import Count, TokenCounter
from tests.builders import chat, parsed
from tests.engine.bench import Bench

UNKNOWN = family_of("", "nobody-knows")


async def counted(counter: TokenCounter, turns: int) -> Count:
    return await counter.count("t", UNKNOWN, Request(messages=parsed(chat(turns, words=150))))


async def test_the_alarm_ends_where_a_server_counts_otherwise() -> None:
    """A server with 0.8 of our exact count raises one alarm, and none once it is understood."""
    bench = Bench(counter=TokenCounter())
    target = bench.target(1_000_000, model="llama-3.1-8b")
    for turns in (20, 40, 44, 60):
        context = bench.context(target=target)
        prepared = await bench.guard(chat(turns, words=150), target=target)
        told = round(prepared.count.raw_tokens * 0.8)
        bench.compactor.replies.learn(context, prepared, prompt_tokens=told, completion_tokens=5)
    assert bench.outcomes == ["prompt_far_below_count"]
    assert prepared.count.tokens == pytest.approx(told, rel=0.02)


async def test_an_overflow_is_no_anchor() -> None:
    """Its number may have a part of the answer in it: it is no base for the same conversation, compacted or not."""
    bench = Bench(counter=TokenCounter())
    raw = chat(8, words=150)
    prepared = await bench.guard(raw, 100_000)
    told = round(prepared.count.raw_tokens * 1.4)
    bench.compactor.replies.learn_overflow(bench.context(100_000), prepared, Overflow(told, None))
    again = await bench.guard(raw, 100_000)
    assert again.count.anchor is None
    assert again.count.tokens >= told
