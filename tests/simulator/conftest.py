"""The fixtures of the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from litellm_compaction.simulator import Model, Simulator, serve
from tests.simulator.bench import KEY, Bench, BenchFactory


@pytest.fixture
def bench() -> Iterator[BenchFactory]:
    """Makes a served simulator with one model, loaded unless `context_length` is None."""
    with ExitStack() as stack:

        def make(
            context_length: int | None = 8192,
            *,
            models: list[Model] | None = None,
            headers: dict[str, str] | None = None,
            **settings: Any,
        ) -> Bench:
            simulator = Simulator(models or [Model(KEY)], **settings)
            if context_length is not None:
                simulator.load(simulator.models[0].key, context_length)
            address = stack.enter_context(serve(simulator))
            client = stack.enter_context(httpx.Client(base_url=address.base_url, headers=headers, timeout=60))
            return Bench(simulator, client, address.base_url)

        yield make


@pytest.fixture
def served(bench: BenchFactory) -> Bench:
    """A simulator with one model loaded."""
    return bench()
