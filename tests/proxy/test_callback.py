"""A proxy that ends in order: what it had not written is written, and what others would wait for is given back.

In the middle of streams: `tests/processes/test_fleet.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.config import Settings
from litellm_compaction.errors import ConfigError
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


@pytest.mark.parametrize("configured", [False, True])
def test_compactions_are_told_in_a_log_that_nobody_configured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], configured: bool
) -> None:
    """LiteLLM gives a place to its own loggers only; an operator's handler stays the only one."""
    logger = logging.Logger("told")
    logger.parent = logging.Logger("root", logging.WARNING)
    if configured:
        logger.addHandler(logging.NullHandler())
    monkeypatch.setattr(callback, "logger", logger)
    for name in ("hold_contexts", "provide_master_key", "provide_api_base"):
        monkeypatch.setattr(callback, name, lambda: None)

    def refuse() -> Settings:
        raise ConfigError("there is nothing to load here")

    monkeypatch.setattr(callback, "load_settings", refuse)
    with pytest.raises(ConfigError):
        callback.load_handler()
    logger.info("compaction outcome=%s", "compacted")
    assert ("told:INFO: compaction outcome=compacted" in capfd.readouterr().err) is not configured
    assert len(logger.handlers) == 1


@pytest.mark.parametrize("is_looking", [True, False])
async def test_a_look_at_servers_ends_with_the_proxy(is_looking: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One that waits for a server would hold the proxy's end up; a proxy that ends at once has begun none."""
    handler = CompactionHandler(Settings(store="memory://"))
    look = asyncio.ensure_future(asyncio.sleep(60))
    if is_looking:
        handler._probe = look
    await handler.aclose()
    assert look.cancelled() is is_looking
    assert not caplog.records
    look.cancel()


def test_what_is_loaded_is_ended_with_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM tells no callback of its end; without this the last events and the holds of others would be lost."""
    ends: list[Any] = []
    for name in ("hold_contexts", "provide_master_key", "provide_api_base"):
        monkeypatch.setattr(callback, name, lambda: None)
    for name in ("start", "show_page"):
        monkeypatch.setattr(CompactionHandler, name, lambda self: None)
    monkeypatch.setattr(callback, "logger", logging.Logger("loaded"))
    monkeypatch.setattr(callback, "load_settings", lambda: Settings(store="memory://"))
    monkeypatch.setattr(callback, "before_end", ends.append)
    handler = callback.load_handler()
    assert ends == [handler.aclose]
