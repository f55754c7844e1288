"""Windows that change, models that are not loaded, and what replies and errors teach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import RequestContext
from litellm_compaction.errors import ModelNotLoaded, Overflow
from litellm_compaction.events import TruncationAlarm
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Windows
from tests.builders import as_bytes, chat, parsed
from tests.engine.bench import NOW_S, SUMMARY, Bench, FakeCounter, sent, settled
from tests.stores.made import MemoryBoard

LONG = chat(16, words=300)
BASE = "http://lmstudio.test:1234/v1"


class LMStudio:
    """Lists one model; `context_length` is None while it is not loaded."""

    def __init__(self, context_length: int | None) -> None:
        self.context_length = context_length
        self.reads = 0

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/api/v1/models":
            return httpx.Response(200, json={"error": "Unexpected endpoint."})
        self.reads += 1
        loaded = [{"id": "test-model", "config": {"context_length": self.context_length, "parallel": 1}}]
        model: dict[str, Any] = {
            "type": "llm",
            "publisher": "x",
            "key": "test-model",
            "architecture": "x",
            "loaded_instances": loaded if self.context_length else [],
            "max_context_length": 262_144,
        }
        return httpx.Response(200, json={"models": [model]})


@pytest.fixture
def server() -> LMStudio:
    return LMStudio(8192)


@pytest.fixture
async def bench(server: LMStudio) -> AsyncIterator[Bench]:
    """A bench whose windows come from `server`."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        made = Bench(windows=Windows(cache_s=1000.0, http=http))
        yield made
        await made.compactor.aclose()


def context(bench: Bench, **changes: Any) -> RequestContext:
    target = bench.target(None, api_base=BASE, is_lmstudio=True)
    return bench.context(target=target, **changes)


# ------------------------------------------------------------------ windows that change


async def test_the_window_is_what_lm_studio_has_loaded(bench: Bench, server: LMStudio) -> None:
    """Not `max_context_length`, and read once for many requests."""
    for _ in range(3):
        prepared = await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
        assert (prepared.window.tokens, prepared.window.source) == (8192, "api/v1")
    assert server.reads == 1


@pytest.mark.parametrize("smaller", [2048, 4096, 6000])
async def test_a_shrunk_window_integrates_the_record(smaller: int) -> None:
    """What was compacted for a larger window is compacted again for the smaller one, and fits."""
    bench = Bench()
    sent(LONG, await bench.guard(LONG, 8192))
    prepared = await bench.guard(LONG, smaller)
    sent(LONG, prepared)
    assert prepared.window.tokens == smaller
    again = await bench.guard(LONG, smaller)
    assert again.action == "reused"
    assert as_bytes(sent(LONG, again)) == as_bytes(sent(LONG, prepared))


async def test_a_grown_window_goes_back_to_the_originals() -> None:
    """Where the whole conversation fits, the record is not needed."""
    bench = Bench()
    await bench.guard(LONG, 8192)
    assert (await bench.guard(LONG, 100_000)).messages is None


async def test_an_overflow_error_teaches_the_limit(bench: Bench, server: LMStudio) -> None:
    """The next request stays inside of what the error named; the listing is read again."""
    await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    bench.compactor.replies.learn_overflow(context(bench), None, Overflow(None, 4096))
    prepared = await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    assert (prepared.window.tokens, prepared.window.source) == (4096, "learned")
    assert server.reads == 2


async def test_an_error_without_a_number_makes_the_listing_old(bench: Bench, server: LMStudio) -> None:
    """Something is not as we knew: LM Studio is asked again before the next request."""
    await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    server.context_length = 4096
    bench.compactor.replies.learn_overflow(context(bench), None, Overflow(None, None))
    prepared = await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    assert (prepared.window.tokens, prepared.window.source) == (4096, "api/v1")


async def test_a_window_that_shrinks_while_a_summary_is_written_is_noticed(server: LMStudio) -> None:
    """A summary takes longer than a window may be old: what goes out fits the window of then."""
    now_s = 0.0
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        bench = Bench(windows=Windows(cache_s=5.0, http=http, clock=lambda: now_s))
        bench.ask.gate = asyncio.Event()
        asked = asyncio.create_task(bench.compactor.guard(Request(messages=parsed(LONG)), context(bench)))
        await bench.ask.asked.wait()
        server.context_length, now_s = 3072, 60.0
        bench.ask.gate.set()
        prepared = await asked
        assert prepared.window.tokens == 3072
        sent(LONG, prepared)
        await bench.compactor.aclose()


async def test_any_error_makes_the_listing_old(bench: Bench, server: LMStudio) -> None:
    """An error may come of a model that was loaded anew: the next request asks, however young the value is."""
    await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    server.context_length = 4096
    bench.compactor.windows.invalidate(context(bench).target)
    prepared = await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    assert prepared.window.tokens == 4096


# ------------------------------------------------------------------ not loaded


class WarmUp:
    """Loads the model, once its gate is open."""

    def __init__(self, server: LMStudio, *, loads: int | None = 8192, failure: Exception | None = None) -> None:
        self.server = server
        self.loads = loads
        self.failure = failure
        self.runs = 0
        self.running = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> None:
        self.runs += 1
        self.running.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.server.context_length = self.loads


async def test_a_model_that_is_not_loaded_is_warmed_up(bench: Bench, server: LMStudio) -> None:
    """Then its window is read, and the request goes on as always."""
    server.context_length = None
    warm_up = WarmUp(server)
    prepared = await bench.compactor.guard(Request(messages=parsed(LONG)), context(bench, warm_up=warm_up))
    assert (prepared.window.tokens, prepared.action, warm_up.runs) == (8192, "compacted", 1)


async def test_requests_share_one_warm_up(bench: Bench, server: LMStudio) -> None:
    """Concurrent loads make several copies (lmstudio-bug-tracker 1751)."""
    server.context_length = None
    warm_up = WarmUp(server)
    warm_up.gate.clear()
    request = Request(messages=parsed(chat(3)))
    tasks = [asyncio.create_task(bench.compactor.guard(request, context(bench, warm_up=warm_up))) for _ in range(3)]
    await warm_up.running.wait()
    await settled()
    warm_up.gate.set()
    assert {prepared.window.tokens for prepared in await asyncio.gather(*tasks)} == {8192}
    assert warm_up.runs == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_processes_share_one_warm_up(server: LMStudio, fails: bool) -> None:
    """Where the one that began it fails, the other one tries."""
    server.context_length = None
    board = MemoryBoard()
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        benches = [Bench(windows=Windows(cache_s=1000.0, http=http), board=board) for _ in range(2)]
        first, second = WarmUp(server, failure=ModelNotLoaded("test-model") if fails else None), WarmUp(server)
        first.gate.clear()
        request = Request(messages=parsed(chat(3)))
        began = asyncio.create_task(benches[0].compactor.guard(request, context(benches[0], warm_up=first)))
        await first.running.wait()
        waits = asyncio.create_task(benches[1].compactor.guard(request, context(benches[1], warm_up=second)))
        await asyncio.sleep(0.3)
        assert second.runs == 0
        first.gate.set()
        assert (await waits).window.tokens == 8192
        [result] = await asyncio.gather(began, return_exceptions=True)
        assert isinstance(result, ModelNotLoaded) is fails
        assert (first.runs, second.runs) == (1, int(fails))
        for each in benches:
            await each.compactor.aclose()


async def test_a_warm_up_that_loads_nothing_is_an_error(bench: Bench, server: LMStudio) -> None:
    """Asked once more and still not loaded: the client is told."""
    server.context_length = None
    warm_up = WarmUp(server, loads=None)
    with pytest.raises(ModelNotLoaded):
        await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench, warm_up=warm_up))
    assert warm_up.runs == 1


async def test_a_failed_warm_up_is_the_requests_error(bench: Bench, server: LMStudio) -> None:
    """And the next request tries again."""
    server.context_length = None
    warm_up = WarmUp(server, failure=ModelNotLoaded("test-model"))
    for _ in range(2):
        with pytest.raises(ModelNotLoaded):
            await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench, warm_up=warm_up))
    assert warm_up.runs == 2


async def test_loading_may_be_forbidden(bench: Bench, server: LMStudio) -> None:
    """`when_not_loaded: error` never touches the server's memory."""
    server.context_length = None
    warm_up = WarmUp(server)
    with pytest.raises(ModelNotLoaded, match="when_not_loaded: warm_up"):
        await bench.compactor.guard(
            Request(messages=parsed(chat(3))), context(bench, warm_up=warm_up, when_not_loaded="error")
        )
    assert warm_up.runs == 0


async def test_observing_loads_nothing(bench: Bench, server: LMStudio) -> None:
    """Nor does it raise."""
    server.context_length = None
    warm_up = WarmUp(server)
    await bench.compactor.observe(Request(messages=parsed(LONG)), context(bench, warm_up=warm_up))
    assert (warm_up.runs, bench.events) == (0, [])


async def test_a_pruning_model_is_never_loaded(bench: Bench, server: LMStudio) -> None:
    """LM Studio might evict the served model for it: the record has to do without a summary."""
    server.context_length = None
    unloaded = bench.pruning_model(bench.ask, window=1)
    unloaded = replace(unloaded, target=bench.target(None, api_base=BASE, is_lmstudio=True))
    prepared = await bench.guard(LONG, pruning_models=[unloaded])
    sent(LONG, prepared)
    assert (bench.last.outcome, bench.last.reason, bench.ask.prompts) == ("fallback", "pruning_model_not_loaded", [])


# ------------------------------------------------------------------ replies


@pytest.mark.parametrize(
    ("prompt_tokens", "completion_tokens", "reason"),
    [
        (9000, 10, "prompt_above_window"),
        (8192, 0, "empty_at_full_window"),
        (8030, 0, "empty_at_full_window"),
        (1000, 10, "prompt_far_below_count"),
    ],
)
async def test_a_truncated_reply_raises_the_alarm(prompt_tokens: int, completion_tokens: int, reason: str) -> None:
    """One event with the numbers; such a reply teaches the counter nothing."""
    bench = Bench()
    raw = chat(12, words=300)
    prepared = await bench.guard(raw)
    events = len(bench.events)
    bench.compactor.replies.learn(
        bench.context(), prepared, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
    )
    assert bench.events[events:] == [
        TruncationAlarm(
            model="served",
            window_tokens=8192,
            expected_tokens=prepared.count.tokens,
            reported_tokens=prompt_tokens,
            reason=reason,
            when_s=NOW_S,
        )
    ]
    assert isinstance(bench.counter, FakeCounter)
    assert bench.counter.learned == []


@pytest.mark.parametrize(
    ("prompt_tokens", "completion_tokens", "context_length", "alarms"),
    [
        (1000, 10, 8192, 0),
        (1000, 10, 1024, 1),
        (1, 10, 8192, 0),
        (9000, 10, 8192, 1),
        (9000, 10, 16384, 0),
        (8192, 0, 8192, 1),
        (8192, 0, 16384, 0),
        (8192, 1, 8192, 0),
    ],
)
async def test_a_number_is_an_alarm_only_where_the_window_of_today_says_so(
    bench: Bench, server: LMStudio, prompt_tokens: int, completion_tokens: int, context_length: int, alarms: int
) -> None:
    """A prompt that fits the window as it is read again has not been cut: its server counts otherwise, or has grown."""
    raw = chat(12, words=300)
    prepared = await bench.compactor.guard(Request(messages=parsed(raw)), context(bench))
    server.context_length = context_length
    events = len(bench.events)
    bench.compactor.replies.learn(
        context(bench), prepared, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
    )
    await bench.compactor.windows.resolve(context(bench).target, fresh=True)
    await settled()
    assert [isinstance(event, TruncationAlarm) for event in bench.events[events:]] == [True] * alarms


@pytest.mark.parametrize(("ratio", "completion_tokens"), [(1.0, 10), (0.95, 10), (1.05, 0)])
async def test_an_honest_reply_trains_the_counter(ratio: float, completion_tokens: int) -> None:
    """Empty answers too, where the window was not full."""
    bench = Bench()
    prepared = await bench.guard(LONG)
    told = int(prepared.count.tokens * ratio)
    bench.compactor.replies.learn(bench.context(), prepared, prompt_tokens=told, completion_tokens=completion_tokens)
    assert isinstance(bench.counter, FakeCounter)
    assert bench.counter.learned == [("id-test-model", told)]
    assert bench.outcomes == ["compacted"]


async def test_what_was_learned_makes_the_next_count_larger() -> None:
    """With the real counter: a server that counts a quarter more is compacted for sooner."""
    bench = Bench(counter=TokenCounter())
    raw = chat(8, words=300)
    before = await bench.guard(raw, 100_000)
    for _ in range(3):
        told = int(before.count.raw_tokens * 1.25)
        bench.compactor.replies.learn(bench.context(100_000), before, prompt_tokens=told, completion_tokens=5)
    after = await bench.guard(raw, 100_000)
    assert after.count.calibrated
    assert after.count.tokens * 1.01 >= told
    assert after.count.error_ratio < before.count.error_ratio


# ------------------------------------------------------------------ its end


async def test_ending_ends_everything(server: LMStudio) -> None:
    """Clients and store are closed in one place."""
    bench = Bench()
    await bench.guard(LONG)
    await bench.compactor.aclose()
    assert await bench.store.find("team", [kept.covered_hash for _, kept in bench.store.kept]) == []
    assert SUMMARY in bench.store.kept[0][1].summary
