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
