"""A proxy that ends in order: what it had not written is written, and what others would wait for is given back.

In the middle of streams: `tests/processes/test_fleet.py`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from litellm_compaction.config import Settings
from litellm_compaction.events import TruncationAlarm
from litellm_compaction.proxy import callback
from litellm_compaction.proxy.callback import CompactionHandler
from litellm_compaction.stores import open_store
from tests.security.hooks import Client, Scene, conversation, use_router

# Of LiteLLM's chunks.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")


async def test_what_was_told_last_is_in_the_history(tmp_path: Path) -> None:
    """An event is written behind the request's back, and the proxy may end in that moment."""
    address = f"sqlite:///{tmp_path}/store.sqlite3"
    handler = CompactionHandler(Settings(store=address))
    told = TruncationAlarm(
        model="local", window_tokens=9, expected_tokens=2, reported_tokens=1, reason="cut", when_s=time.time()
    )
    handler._history(told)
    await handler.aclose()
    store = open_store(address, ttl_s=1e9, max_bytes=10**9)
    assert len(await store.events()) == 1
    await store.aclose()


async def test_a_part_that_hangs_or_fails_keeps_no_proxy_from_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told to the log, and that is all."""
    monkeypatch.setattr(callback, "_END_LIMIT_S", 0.01)

    async def hangs() -> None:
        await asyncio.sleep(60)

    async def fails() -> None:
        raise RuntimeError("out of order")

    for broken in (hangs, fails):
        handler = CompactionHandler(Settings(store=f"sqlite:///{tmp_path}/store.sqlite3"))
        monkeypatch.setattr(handler._history, "settle", broken)
        await handler.aclose()
        await handler._compactor.aclose()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    use_router(monkeypatch, made.router)
    return made


def counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each time that a request is measured."""
    measured: list[str] = []
    measurer = scene.handler._compactor._measurer
    weigh = measurer.measure

    async def counting(request: Any, context: Any) -> Any:
        measured.append(context.label)
        return await weigh(request, context)

    monkeypatch.setattr(measurer, "measure", counting)
    return measured


@pytest.mark.parametrize("group", ["carried", "hooked"])
@pytest.mark.parametrize("rounds", [0, 4], ids=["short", "compacted"])
async def test_a_request_whose_deployment_is_foreseen_is_measured_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, group: str, rounds: int
) -> None:
    """And sent as if it had been measured twice: compacted where it has to be, its answer whole."""
    measured = counted(scene, monkeypatch)
    client = Client(scene, "sk-alice", conversation("alice", rounds), attempts=[group])
    await client.send()
    assert client.error is None
    assert len(measured) == 1
    assert client.headers["x-litellm-compaction"] == ("compacted" if rounds else "none")
    assert "CANARY-alice" in client.read
