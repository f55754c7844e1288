"""Windows that change, models that are not loaded, and what replies and errors teach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.engine import RequestContext
from litellm_compaction.errors import ModelNotLoaded, Overflow, WindowUnknown
from litellm_compaction.windows.windows import Windows
from tests.builders import chat, parsed
from tests.engine.bench import Bench

BASE = "http://lmstudio.test:1234/v1"


class LMStudio:
    """Lists one model by its `key`; `context_length` is None while it is not loaded."""

    def __init__(self, context_length: int | None) -> None:
        self.context_length = context_length
        self.key = "test-model"
        self.reads = 0

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/api/v1/models":
            return httpx.Response(200, json={"error": "Unexpected endpoint."})
        self.reads += 1
        loaded = [{"id": self.key, "config": {"context_length": self.context_length, "parallel": 1}}]
        model: dict[str, Any] = {
            "type": "llm",
            "publisher": "x",
            "key": self.key,
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


async def test_an_overflow_error_teaches_the_limit(bench: Bench, server: LMStudio) -> None:
    """The next request stays inside of what the error named; the listing is read again."""
    await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    bench.compactor.replies.learn_overflow(context(bench), None, Overflow(None, 4096))
    prepared = await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench))
    assert (prepared.window.tokens, prepared.window.source) == (4096, "learned")
    assert server.reads == 2


# ------------------------------------------------------------------ not loaded


@pytest.mark.parametrize("before", [{"context_length": None}, {"key": "another"}])
async def test_a_model_that_was_loaded_since_the_list_was_read_is_served(
    bench: Bench, server: LMStudio, before: dict[str, Any]
) -> None:
    """Nothing is refused, or loaded once more, by a list from memory."""
    for name, value in before.items():
        setattr(server, name, value)
    request, warm_up = Request(messages=parsed(chat(3))), WarmUp(server)
    refusing = context(bench, when_not_loaded="error", warm_up=warm_up)
    with pytest.raises((ModelNotLoaded, WindowUnknown)):
        await bench.compactor.guard(request, refusing)
    server.context_length, server.key = 8192, "test-model"
    assert (await bench.compactor.guard(request, refusing)).window.tokens == 8192
    assert warm_up.runs == 0


class WarmUp:
    """Loads the model, once its gate is open."""

    def __init__(self, server: LMStudio, *, loads: int | None = 8192) -> None:
        self.server = server
        self.loads = loads
        self.runs = 0
        self.running = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> None:
        self.runs += 1
        self.running.set()
        await self.gate.wait()
        self.server.context_length = self.loads


async def test_a_warm_up_that_loads_nothing_is_an_error(bench: Bench, server: LMStudio) -> None:
    """Asked once more and still not loaded: the client is told."""
    server.context_length = None
    warm_up = WarmUp(server, loads=None)
    with pytest.raises(ModelNotLoaded):
        await bench.compactor.guard(Request(messages=parsed(chat(3))), context(bench, warm_up=warm_up))
    assert warm_up.runs == 1


# ------------------------------------------------------------------ replies
