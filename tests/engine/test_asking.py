"""A request that is too long only by what our count may be wrong, and what a compaction made: the server is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Window, Windows
from tests.builders import chat, prose, system, user
from tests.engine.bench import Bench
from tests.lmstudio_double.rendering import count

WINDOW = 4096


class Server:
    """Counts prompts by its own vocabulary; cuts what is longer than its window, as LM Studio may."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[int] = []
        self.requests: list[Request] = []

    def tokens(self, messages: Sequence[Message]) -> int:
        return int(self.factor * (3 + sum(count(message.text) + 5 for message in messages)))

    async def __call__(self, request: Request, *, answer_tokens: int = 1) -> int | None:
        tokens = self.tokens(request.messages)
        self.asked.append(tokens)
        self.requests.append(request)
        return min(tokens, WINDOW)


async def test_nothing_is_asked_twice() -> None:
    """Both hooks of a request, its retries, and the next request that begins alike go by what was told."""
    server, engine = Server(1.2), Bench(counter=TokenCounter())
    asked = [system(prose("rules", 1700)), user(prose("question", 1700))]
    for attempts in (one := Attempts(summary_calls_left=4), one, Attempts(summary_calls_left=4)):
        with pytest.raises(DoesNotFit):
            await engine.guard(asked, WINDOW, measure=server, attempts=attempts)
    told = [request.messages for request in server.requests]
    assert len(told) == len(set(map(str, told))) <= 3


class Counting(Windows):
    """Of a server that counts a request for nothing, as llama.cpp and vLLM do."""

    def __init__(self, server: Server) -> None:
        super().__init__(cache_s=5.0)
        self.server = server

    async def tokens_of(self, target: Target, request: Request) -> int | None:
        return self.server.tokens(request.messages)


async def test_what_costs_nothing_is_asked_about_a_compaction() -> None:
    """Whether or not our doubt would decide: what is sent is counted to the token, and no prompt is read for it."""
    server = Server(1.3)
    engine = Bench(counter=TokenCounter(), windows=Counting(server))
    prepared = await engine.guard(chat(60, words=60), WINDOW, measure=server)
    assert prepared.messages is not None
    assert prepared.count.is_told
    assert prepared.count.tokens == server.tokens(prepared.messages)
    assert server.requests == []


class Reloaded(Windows):
    """Of a model that is loaded anew, with a quarter of its window, after it was looked at twice."""

    looks = 0

    async def resolve(self, target: Target, *, fresh: bool = False) -> Window:
        self.looks += 1
        window = await super().resolve(target, fresh=fresh)
        return window if self.looks <= 2 else replace(window, tokens=window.tokens // 4)


async def test_nothing_is_asked_that_does_not_surely_fit_the_window_of_now() -> None:
    """A server may cut a longer question without a word, and its number would be believed."""
    server = Server(1.2)
    engine = Bench(counter=TokenCounter(), windows=Reloaded(cache_s=5.0))
    prepared = await engine.guard(chat(100, words=60), 4 * WINDOW, measure=server)
    assert prepared.window.tokens == WINDOW
    assert max(server.asked) <= WINDOW
