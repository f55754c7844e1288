"""Windows that change, models that are not loaded, and what errors teach."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from litellm_compaction.errors import ModelNotLoaded, Overflow, WindowUnknown
from litellm_compaction.windows.windows import Window, Windows
from tests.builders import chat
from tests.engine.bench import Bench
from tests.windows.fake_lmstudio import BASE, FakeLMStudio, v1_model


@dataclass
class Known:
    """A bench whose windows come from a server, and the surroundings of a request to that."""

    bench: Bench
    server: FakeLMStudio
    surroundings: dict[str, Any]
    warm_ups: int = 0

    async def warm_up(self) -> None:
        """Loads nothing."""
        self.warm_ups += 1

    async def guard(self, **context: Any) -> Window:
        return (await self.bench.guard(chat(3), warm_up=self.warm_up, **self.surroundings, **context)).window


@pytest.fixture
async def known() -> AsyncIterator[Known]:
    server = FakeLMStudio()
    server.list_v1(v1_model("test-model", _=8192))
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.handle)) as http:
        bench = Bench(windows=Windows(cache_s=1000.0, http=http))
        yield Known(bench, server, {"target": bench.target(None, api_base=BASE, is_lmstudio=True)})
        await bench.compactor.aclose()


async def test_an_overflow_error_teaches_the_limit(known: Known) -> None:
    """The next request stays inside of what the error named; the listing is read again."""
    await known.guard()
    known.bench.compactor.replies.learn_overflow(known.bench.context(**known.surroundings), None, Overflow(None, 4096))
    window = await known.guard()
    assert (window.tokens, window.source) == (4096, "learned")
    assert len(known.server.requests) == 2


@pytest.mark.parametrize("before", [v1_model("test-model"), v1_model("another", _=8192)])
async def test_a_model_that_was_loaded_since_the_list_was_read_is_served(
    known: Known, before: dict[str, object]
) -> None:
    """Nothing is refused, or loaded once more, by a list from memory."""
    known.server.list_v1(before)
    with pytest.raises((ModelNotLoaded, WindowUnknown)):
        await known.guard(when_not_loaded="error")
    known.server.list_v1(v1_model("test-model", _=8192))
    assert (await known.guard(when_not_loaded="error")).tokens == 8192
    assert known.warm_ups == 0


async def test_a_warm_up_that_loads_nothing_is_an_error(known: Known) -> None:
    """Asked once more and still not loaded: the client is told."""
    known.server.list_v1(v1_model("test-model"))
    with pytest.raises(ModelNotLoaded):
        await known.guard()
    assert known.warm_ups == 1
