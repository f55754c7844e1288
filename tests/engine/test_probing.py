"""A request that is too long only by what our count may be wrong: the server is asked before it is refused."""

from __future__ import annotations

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

    def tokens(self, messages: Sequence[Message]) -> int:
        return int(self.factor * (3 + sum(count(message.text) + 5 for message in messages)))

    async def __call__(self, messages: Sequence[Message]) -> int | None:
        tokens = self.tokens(messages)
        self.asked.append(tokens)
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
