"""A request that is too long only by what our count may be wrong, and what a compaction made: the server is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.models.counter import TokenCounter
from litellm_compaction.models.families import family_of
from litellm_compaction.simulator.vocabulary import count
from tests.core.conversations import parsed
from tests.engine.bench import Bench
from tests.integration.conversations import prose

WINDOW = 4096


class Server:
    """Counts prompts by its own vocabulary; cuts what is longer than its window, as LM Studio may."""

    def __init__(self, factor: float = 0.8, *, says: bool = True) -> None:
        self.factor = factor
        self.says = says
        self.asked: list[int] = []
        self.answer_tokens: list[int] = []
        self.requests: list[Request] = []

    def tokens(self, messages: Sequence[Message]) -> int:
        return int(self.factor * (3 + sum(count(message.text) + 5 for message in messages)))

    async def __call__(self, request: Request, *, answer_tokens: int = 1) -> int | None:
        tokens = self.tokens(request.messages)
        self.asked.append(tokens)
        self.answer_tokens.append(answer_tokens)
        self.requests.append(request)
        return min(tokens, WINDOW) if self.says else None


def bench() -> Bench:
    return Bench(counter=TokenCounter())


def conversation(tokens: int) -> list[dict[str, object]]:
    """System prompt and one question, of so many of the server's unscaled tokens."""
    return [
        {"role": "system", "content": prose("rules", tokens // 2)},
        {"role": "user", "content": prose("question", tokens // 2)},
    ]


async def test_what_the_server_counts_low_enough_is_sent() -> None:
    """One sample, smaller than the window, is counted; then the request fits, and goes as it came."""
    server = Server()
    guarded = await bench().guard(conversation(2750), WINDOW, measure=server)
    assert guarded.messages is None
    assert len(server.asked) == 1
    assert 1000 < server.asked[0] < WINDOW
    assert guarded.count.tokens + guarded.count.margin_tokens + guarded.max_output_tokens(None) <= WINDOW


async def test_without_an_answer_it_is_refused() -> None:
    """A server that does not say, or that nobody may ask, changes nothing."""
    for measure in (Server(says=False), None):
        with pytest.raises(DoesNotFit):
            await bench().guard(conversation(2750), WINDOW, measure=measure)


async def test_one_client_request_asks_once() -> None:
    """Both hooks of a request, and its retries, share one sample."""
    server, attempts, engine = Server(1.2), Attempts(summary_calls_left=4), bench()
    for _ in range(3):
        with pytest.raises(DoesNotFit):
            await engine.guard(conversation(3400), WINDOW, measure=server, attempts=attempts)
    assert len(server.asked) == 1


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.25])
async def test_a_sample_is_never_cut(factor: float) -> None:
    """However the server counts, the sample stays below its window: a cut one would teach a wrong ratio."""
    server = Server(factor)
    request = conversation(3200)
    try:
        guarded = await bench().guard(request, WINDOW, measure=server)
    except DoesNotFit:
        guarded = None
    assert all(asked < WINDOW for asked in server.asked)
    if guarded is not None:
        assert server.tokens(parsed(request)) + guarded.max_output_tokens(None) <= WINDOW


async def test_hopeless_and_certain_requests_are_not_asked_for() -> None:
    """Twice the window cannot fit by any count; a count that is certain needs no confirmation."""
    server = Server()
    with pytest.raises(DoesNotFit):
        await bench().guard(conversation(9000), WINDOW, measure=server)
    exact = bench()
    target = exact.target(WINDOW, model="gpt-oss-20b")
    messages = parsed(conversation(4000))
    counted = await exact.counter.count("k", family_of("", "gpt-oss-20b"), Request(messages=messages))
    assert counted.exact
    with pytest.raises(DoesNotFit):
        await exact.guard(conversation(4000), WINDOW, measure=server, target=target)
    assert server.asked == []


def long_talk() -> list[dict[str, object]]:
    """More than the window, of turns that may be summarised."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": prose(f"turn {index}", 350)} for index in range(15)]
    return [{"role": "system", "content": "Rules."}, *turns]


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.25])
async def test_what_a_compaction_made_is_counted_by_the_server(factor: float) -> None:
    """One request of 16 tokens with the very messages and tools that are sent; its number is then the count."""
    server, attempts, engine = Server(factor), Attempts(summary_calls_left=4), bench()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    guarded = await engine.guard(long_talk(), WINDOW, tools=tools, measure=server, attempts=attempts, count="probe")
    assert guarded.action == "compacted"
    assert server.answer_tokens == [16]
    assert server.requests[0].messages == guarded.messages
    assert server.requests[0].tools == tuple(tools)
    assert guarded.count.tokens == server.asked[0]
    assert guarded.count.error_ratio < 0.05
    assert attempts.summary_calls_left == 2
    assert server.asked[0] + guarded.max_output_tokens(None) <= WINDOW
    again = await engine.guard(long_talk(), WINDOW, tools=tools, measure=server, attempts=attempts, count="probe")
    assert (again.action, len(server.asked)) == ("reused", 1)
    assert again.count.tokens == server.asked[0]


async def test_recounting_is_an_option_with_an_end() -> None:
    """Not without the setting, not without a call left, not twice for one request, not for what is sent as it came."""
    server = Server()
    await bench().guard(long_talk(), WINDOW, measure=server)
    short = [{"role": "user", "content": "hello"}]
    await bench().guard(short, WINDOW, measure=server, count="probe")
    spent = Attempts(summary_calls_left=1)
    await bench().guard(long_talk(), WINDOW, measure=server, attempts=spent, count="probe")
    assert spent.summary_calls_left == 0
    assert server.asked == []
    attempts, engine = Attempts(summary_calls_left=4), bench()
    for talk in (long_talk(), [*long_talk(), {"role": "user", "content": prose("other", 2000)}]):
        await engine.guard(talk, WINDOW, measure=server, attempts=attempts, count="probe")
    assert len(server.asked) == 1


@pytest.mark.parametrize("says", [None, 10, 5 * WINDOW])
async def test_a_recount_that_fails_leaves_the_estimate(says: int | None) -> None:
    """No number, and numbers that can only be those of a cut prompt or of another one."""
    expected = await bench().guard(long_talk(), WINDOW)

    async def measure(request: Request, *, answer_tokens: int = 1) -> int | None:
        return says

    guarded = await bench().guard(long_talk(), WINDOW, measure=measure, count="probe")
    assert guarded.messages == expected.messages
    assert guarded.count == expected.count


async def test_a_result_that_the_server_counts_too_large_is_not_sent() -> None:
    """What our count let through and the server's does not goes one rung further, and fits by both."""
    engine = bench()

    async def measure(request: Request, *, answer_tokens: int = 1) -> int | None:
        return WINDOW - 20

    guarded = await engine.guard(long_talk(), WINDOW, measure=measure, count="probe")
    assert guarded.budget.fits(guarded.count.tokens)
    assert guarded.count.tokens < WINDOW - 20 - guarded.budget.rules.answer_min_tokens


async def settled(engine: Bench) -> None:
    """Everything that was to be read or written has been."""
    while engine.compactor._lessons._tasks:
        await asyncio.gather(*engine.compactor._lessons._tasks)


async def test_what_a_probe_taught_is_kept() -> None:
    """Sample and recount reach the store as every other number does."""
    for raw, settings in ((conversation(2750), {}), (long_talk(), {"count": "probe"})):
        engine, server = bench(), Server()
        # What an earlier run learned has been read by then.
        await engine.guard([{"role": "user", "content": "hello"}], WINDOW)
        await settled(engine)
        await engine.guard(raw, WINDOW, measure=server, **settings)
        assert len(server.asked) == 1
        await settled(engine)
        kept = await engine.store.get_fact("models", "calibration:id-test-model")
        assert kept is not None
        assert json.loads(kept)["calibrations"]
