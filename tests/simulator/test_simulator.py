"""The simulator as a test holds it: models that it loads and drops, and what a request would count."""

from __future__ import annotations

import asyncio

import pytest

from litellm_compaction.simulator import Model, Simulator
from litellm_compaction.simulator.catalog import Instance
from tests import virtual_time
from tests.simulator.bench import KEY, BenchFactory, user


def test_concurrent_jit_requests_load_copies() -> None:
    """As LM Studio does (bt#1751)."""
    simulator = Simulator([Model(KEY)], load_ms=1500)

    async def ask_at_once() -> list[Instance]:
        return await asyncio.gather(*(simulator.resolve(KEY, None) for _ in range(4)))

    # In virtual time all four wait before the first is loaded.
    got = virtual_time.run(ask_at_once())
    assert len(simulator.instances) == len({instance.id for instance in got}) == 4


def test_idle_models_expire(bench: BenchFactory) -> None:
    """A JIT model whose idle time to live has passed is no longer loaded."""
    served = bench(None)
    served.chat(user("hi"), ttl=60)
    served.simulator.instances[0].last_used_s -= 61
    assert served.get("/api/v0/models")["data"][0]["state"] == "not-loaded"


def test_python_load_refuses_the_impossible() -> None:
    """Loading an unknown model, an impossible window, or a taken id raises."""
    simulator = Simulator([Model(KEY, max_context_length=100)])
    with pytest.raises(KeyError):
        simulator.load("nope", 10)
    with pytest.raises(ValueError, match="not within"):
        simulator.load(KEY, 101)
    simulator.load(KEY, 100, instance_id="one")
    with pytest.raises(ValueError, match="taken"):
        simulator.load(KEY, 100, instance_id="one")
