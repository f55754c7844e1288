"""Windows that change, models that are not loaded, and what errors teach."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from litellm_compaction.errors import ModelNotLoaded, Overflow, WindowUnknown
from litellm_compaction.windows.windows import Windows
from tests.builders import chat
from tests.engine.bench import Bench


class LMStudio:
    """Lists one model by its `key`; `context_length` is None while it is not loaded, and no warm-up loads it."""

    def __init__(self) -> None:
        self.context_length: int | None = 8192
        self.key = "test-model"
        self.reads = self.warm_ups = 0

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/api/v1/models":
            return httpx.Response(200, json={"error": "Unexpected endpoint."})
        self.reads += 1
        loaded = [{"id": self.key, "config": {"context_length": self.context_length, "parallel": 1}}]
        known = {"type": "llm", "publisher": "x", "key": self.key, "architecture": "x", "max_context_length": 262_144}
        return httpx.Response(200, json={"models": [{**known, "loaded_instances": loaded * bool(self.context_length)}]})

    async def warm_up(self) -> None:
        self.warm_ups += 1


@pytest.fixture
async def known() -> AsyncIterator[tuple[Bench, LMStudio, dict[str, Any]]]:
    """A bench whose windows come from a server, and the surroundings of a request to that."""
    server = LMStudio()
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        bench = Bench(windows=Windows(cache_s=1000.0, http=http))
        target = bench.target(None, api_base="http://lmstudio.test:1234/v1", is_lmstudio=True)
        yield bench, server, {"target": target, "warm_up": server.warm_up}
        await bench.compactor.aclose()


async def test_an_overflow_error_teaches_the_limit(known: tuple[Bench, LMStudio, dict[str, Any]]) -> None:
    """The next request stays inside of what the error named; the listing is read again."""
    bench, server, surroundings = known
    await bench.guard(chat(3), **surroundings)
    bench.compactor.replies.learn_overflow(bench.context(**surroundings), None, Overflow(None, 4096))
    prepared = await bench.guard(chat(3), **surroundings)
    assert (prepared.window.tokens, prepared.window.source) == (4096, "learned")
    assert server.reads == 2


@pytest.mark.parametrize("before", [{"context_length": None}, {"key": "another"}])
async def test_a_model_that_was_loaded_since_the_list_was_read_is_served(
    known: tuple[Bench, LMStudio, dict[str, Any]], before: dict[str, Any]
) -> None:
    """Nothing is refused, or loaded once more, by a list from memory."""
    bench, server, surroundings = known
    vars(server).update(before)
    with pytest.raises((ModelNotLoaded, WindowUnknown)):
        await bench.guard(chat(3), when_not_loaded="error", **surroundings)
    server.context_length, server.key = 8192, "test-model"
    assert (await bench.guard(chat(3), when_not_loaded="error", **surroundings)).window.tokens == 8192
    assert server.warm_ups == 0


async def test_a_warm_up_that_loads_nothing_is_an_error(known: tuple[Bench, LMStudio, dict[str, Any]]) -> None:
    """Asked once more and still not loaded: the client is told."""
    bench, server, surroundings = known
    server.context_length = None
    with pytest.raises(ModelNotLoaded):
        await bench.guard(chat(3), **surroundings)
    assert server.warm_ups == 1
