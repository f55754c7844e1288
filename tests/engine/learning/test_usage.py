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
from tests.engine.bench import Bench, RecordingStore, settled
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


async def test_what_was_learned_survives_a_restart() -> None:
    """The next process counts as the last one did, from the second request on."""
    store = Store()
    before = TokenCounter()
    feedback = UsageFeedback(counter=before, store=store)
    made = await counted(before, 9)
    feedback.learn("t", "served", made, round(made.raw_tokens * 1.3))
    await settled()
    assert len(store.writes) == 1
    after = TokenCounter()
    restarted = UsageFeedback(counter=after, store=store)
    restarted.recall("t")
    await settled()
    again = await counted(after, 9)
    assert again.calibrated
    assert again.tokens == pytest.approx(made.raw_tokens * 1.3, rel=0.01)
    # What was read is not written back, and read only once.
    restarted.recall("t")
    await restarted.aclose()
    assert (len(store.writes), store.reads) == (1, 1)
    assert not (await after.count("other", UNKNOWN, Request(messages=parsed(chat(9, words=150))))).calibrated


async def test_two_workers_that_learn_at_the_same_time_lose_nothing() -> None:
    """Neither overwrites what the other has written, and each counts by both."""
    store, now_s = Store(), 1e9
    counters = [TokenCounter(wall_clock=lambda: now_s), TokenCounter(wall_clock=lambda: now_s + 1)]
    workers = [UsageFeedback(counter=counter, store=store) for counter in counters]
    for worker in workers:
        worker.recall("t")
    await settled()
    for counter, worker, ratio in zip(counters, workers, (1.1, 1.3), strict=True):
        made = await counted(counter, 9)
        worker.learn("t", "served", made, round(made.raw_tokens * ratio))
    await settled()
    samples = json.loads(store.writes[-1])["calibrations"]["unknown|cl100k_base|"]["samples"]
    assert [round(ratio, 1) for _, ratio, *_ in samples] == [1.1, 1.3]
    # The second has seen the first one's when it wrote.
    assert (await counted(counters[1], 5)).calibrated
    for worker in workers:
        await worker.aclose()
    assert len(store.writes) == 2


async def test_what_another_worker_learns_is_heard_of_within_a_minute() -> None:
    """While requests come; it is read once a minute, and not written back."""
    store, now_s = Store(), [0.0]
    counters = [TokenCounter(), TokenCounter()]
    teacher, other = (UsageFeedback(counter=each, store=store, clock=lambda: now_s[0]) for each in counters)
    other.recall("t")
    await settled()
    made = await counted(counters[0], 9)
    teacher.learn("t", "served", made, round(made.raw_tokens * 1.3))
    await settled()
    for passed_s, is_heard in ((30.0, False), (30.0, True), (1.0, True)):
        now_s[0] += passed_s
        other.recall("t")
        await settled()
        assert (await counted(counters[1], 9)).calibrated is is_heard
    assert (len(store.writes), store.reads) == (1, 2)
    await other.aclose()
    assert len(store.writes) == 1


async def test_nothing_is_written_per_request() -> None:
    """Replies that say what is known already write nothing; changes are written once per interval, at the end too."""
    store, counter = Store(), TokenCounter()
    feedback = UsageFeedback(counter=counter, store=store)
    for ratio in (1.3, 1.3, 1.3, 1.3, 1.35, 1.4):
        made = await counter.count("t", UNKNOWN, Request(messages=parsed(chat(9, words=150))))
        feedback.learn("t", "served", made, round(made.raw_tokens * ratio))
        await settled()
    assert len(store.writes) == 1
    await feedback.aclose()
    assert len(store.writes) == 2
    assert "1.39" in store.writes[-1]
    same = UsageFeedback(counter=counter, store=store, write_every_s=0.0)
    for _ in range(20):
        made = await counter.count("t", UNKNOWN, Request(messages=parsed(chat(9, words=150))))
        same.learn("t", "served", made, round(made.raw_tokens * 1.4))
        await settled()
    await same.aclose()
    assert len(store.writes) <= 4


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


def kept(known: object, *, version: int = 2, counting_method: str = "unknown|cl100k_base|") -> str:
    return json.dumps({"version": version, "calibrations": {counting_method: known}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 100_000,
        kept(GOOD, version=99),
        json.dumps({"version": 2}),
        json.dumps({"version": 2, "calibrations": [GOOD]}),
        kept(7),
        kept([GOOD]),
        kept({"samples": 7, "growths": {}, "since": "x"}),
        kept({"extra_tokens": [[1, 10**9]], "tools_ratios": [[1, 10**9]]}),
        kept(GOOD, counting_method="other family"),
        *(
            kept({"samples": [row]})
            for row in (
                [],
                7,
                [1, 1.3, 5000],
                [1, "1.3", 5000, 0, 0],
                [1, True, 5000, 0, 0],
                [1, 50, 5000, 0, 0],
                [1, 1.3, -1, 0, 0],
                [1, 1.3, 5000, 2, 0],
                [1, float("nan"), 5000, 0, 0],
                [1, 1.3, float("inf"), 0, 0],
                [1, 1.3, 10**400, 0, 0],
            )
        ),
    ],
)
async def test_a_foreign_fact_is_ignored(text: str) -> None:
    """Whatever cannot have been written by this version, or is of another family, changes no count."""
    store, counter = Store(), TokenCounter()
    await store.put_fact(FACTS_SCOPE, "calibration:t", text)
    UsageFeedback(counter=counter, store=store).recall("t")
    await settled()
    fresh = TokenCounter()
    for turns in (1, 9):
        assert await counted(counter, turns) == await counted(fresh, turns)


async def test_a_fact_of_this_version_is_taken_over() -> None:
    """The one that the foreign ones above differ from."""
    counter = TokenCounter()
    counter.take_over("t", kept(GOOD))
    assert (await counted(counter, 9)).calibrated


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


async def test_the_compactor_reads_and_keeps_facts() -> None:
    """End to end over one store: learned by one compactor, known to the next."""
    bench = Bench(counter=TokenCounter())
    prepared = await bench.guard(chat(8, words=300), 100_000)
    told = int(prepared.count.raw_tokens * 1.25)
    bench.compactor.replies.learn(bench.context(100_000), prepared, prompt_tokens=told, completion_tokens=5)
    await settled()
    store = RecordingStore()
    fact = await bench.store.get_fact(FACTS_SCOPE, "calibration:id-test-model")
    assert fact is not None
    await store.put_fact(FACTS_SCOPE, "calibration:id-test-model", fact)
    second = Bench(counter=TokenCounter(), store=store)
    await second.guard(chat(2), 100_000)
    await settled()
    again = await second.guard(chat(8, words=300), 100_000)
    assert again.count.calibrated
    assert told <= again.count.tokens * 1.01


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
