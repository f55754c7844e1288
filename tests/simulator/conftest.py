"""The fixtures of the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from litellm_compaction import simulator
from tests import lmstudio_double
from tests.simulator.bench import KEY, Bench, BenchFactory


@pytest.fixture
def bench() -> Iterator[BenchFactory]:
    """Makes a served simulator with one model, loaded unless `context_length` is None."""
    with ExitStack() as stack:

        def make(
            context_length: int | None = 8192,
            *,
            models: list[Any] | None = None,
            module: Any = lmstudio_double,
            **settings: Any,
        ) -> Bench:
            made = module.Simulator(models or [module.Model(KEY)], **settings)
            if context_length is not None:
                made.load(made.models[0].key, context_length)
            address = stack.enter_context(module.serve(made))
            client = stack.enter_context(httpx.Client(base_url=address.base_url, timeout=60))
            return Bench(made, client, address.base_url)

        yield make


@pytest.fixture(params=[simulator, lmstudio_double], ids=["simulator", "double"])
def served(bench: BenchFactory, request: pytest.FixtureRequest) -> Bench:
    """Either of them with one model loaded."""
    return bench(module=request.param)
