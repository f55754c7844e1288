"""What the engine does with servers' counts: one warning, an alarm that ends, a fact that survives a restart."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine.learning.usage import UsageFeedback
from litellm_compaction.errors import Overflow, StoreError
from litellm_compaction.stores import FACTS_SCOPE, Join
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import Count, TokenCounter
from tests.builders import chat, parsed
from tests.engine.bench import Bench, settled
from tests.stores.made import MemoryStore

LLAMA31 = family_of("", "llama-3.1-8b")
UNKNOWN = family_of("", "nobody-knows")


class Store(MemoryStore):
    """Counts what is done with it; fails or waits when told."""

    def __init__(self) -> None:
        super().__init__(ttl_s=3600, max_bytes=1_000_000)
        self.reads = 0
        self.writes: list[str] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def get_fact(self, scope: str, key: str) -> str | None:
        self.reads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().get_fact(scope, key)

    async def merge_fact(self, scope: str, key: str, text: str, join: Join) -> str:
        if self.error is not None:
            raise self.error
        both = await super().merge_fact(scope, key, text, join)
        self.writes.append(both)
        return both


async def counted(counter: TokenCounter, turns: int) -> Count:
    return await counter.count("t", UNKNOWN, Request(messages=parsed(chat(turns, words=150))))


async def test_a_slow_store_holds_nobody_up() -> None:
    """A request is counted while the fact is still being read; what was learned meanwhile stays the newest."""
    store, counter = Store(), TokenCounter()
    teacher = TokenCounter()
    made = await counted(teacher, 9)
    teacher.learn("t", made, round(made.raw_tokens * 1.1))
    await store.put_fact(FACTS_SCOPE, "calibration:t", teacher.as_json("t"))
    store.gate = asyncio.Event()
    feedback = UsageFeedback(counter=counter, store=store)
    feedback.recall("t")
    made = await counted(counter, 9)
    assert not made.calibrated
    feedback.learn("t", "served", made, round(made.raw_tokens * 1.3))
    store.gate.set()
    await settled()
    await feedback.aclose()
    samples = json.loads(store.writes[-1])["calibrations"]["unknown|cl100k_base|"]["samples"]
    assert [round(ratio, 1) for _, ratio, *_ in samples] == [1.1, 1.3]


@pytest.mark.parametrize("error", [StoreError("down"), RuntimeError("odd"), TimeoutError()])
async def test_a_broken_store_is_told_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Reading and writing fail in silence after one warning, and the counter learns all the same."""
    store, counter = Store(), TokenCounter()
    store.error = error
    feedback = UsageFeedback(counter=counter, store=store, write_every_s=0.0)
    with caplog.at_level(logging.WARNING):
        feedback.recall("t")
        for ratio in (1.1, 1.2, 1.3):
            made = await counted(counter, 9)
            feedback.learn("t", "served", made, round(made.raw_tokens * ratio))
            await settled()
        await feedback.aclose()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["calibration_not_kept"]
    assert (await counted(counter, 9)).calibrated


GOOD = {"samples": [[1, 1.3, 5000, 0.0, 0.0]]}


@pytest.mark.slow
async def test_a_deviation_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """More than 5 % off on a known family: one warning with both numbers."""
    counter = TokenCounter()
    feedback = UsageFeedback(counter=counter, store=Store())
    request = Request(messages=parsed(chat(9, words=150)))
    with caplog.at_level(logging.WARNING):
        for turns in (9, 11, 13):
            request = Request(messages=parsed(chat(turns, words=150)))
            made = await counter.count("t", LLAMA31, request)
            told = round(made.raw_tokens * 1.2)
            feedback.learn("t", "served", made, told)
    (record,) = caplog.records
    first = await TokenCounter().count("t", LLAMA31, Request(messages=parsed(chat(9, words=150))))
    assert record.getMessage().startswith(
        f"count_deviation model=served expected={first.tokens} reported={round(first.raw_tokens * 1.2)} tokens"
    )
    await feedback.aclose()


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


async def test_a_compacted_list_is_the_anchor_of_the_next_turn() -> None:
    """What was really sent is remembered: the next turn of a compacted conversation is counted from there."""
    bench = Bench(counter=TokenCounter())
    raw = chat(30, words=150)
    prepared = await bench.guard(raw)
    assert prepared.messages is not None
    told = round(prepared.count.raw_tokens * 1.1)
    bench.compactor.replies.learn(bench.context(), prepared, prompt_tokens=told, completion_tokens=5)
    again = await bench.guard([*raw, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}])
    assert again.action == "reused"
    assert again.count.anchor is not None
    assert again.count.anchor.prompt_tokens == told
    assert told < again.count.tokens < told + 60


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
