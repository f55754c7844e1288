"""The settings in force: how soon a change counts, in how many workers, and what a broken store costs."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.proxy.live_settings import (
    KEY,
    Change,
    LiveSettings,
    Overlay,
    WrongValues,
    overlay_from_json,
    with_values,
)
from tests.stores.made import MemoryStore

CONFIGURED = settings_from(None)
OBSERVE = Overlay({"mode": Change("observe", 1.0, "proxy_admin")})


class Counting(MemoryStore):
    """A store that counts how often settings are read, and can fail or hang."""

    def __init__(self) -> None:
        super().__init__(ttl_s=100, max_bytes=1_000_000)
        self.reads = 0
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def get_setting(self, key: str) -> str | None:
        self.reads += 1
        await self.gate.wait()
        if self.fails:
            raise StoreError("disk full")
        return await super().get_setting(key)

    async def put_setting(self, key: str, text: str) -> None:
        if self.fails:
            raise StoreError("disk full")
        await super().put_setting(key, text)


class Workers:
    """Two workers over one store, with one clock."""

    def __init__(self) -> None:
        self.store = Counting()
        self.now_s = 100.0
        self.one, self.two = (LiveSettings(CONFIGURED, self.store, clock=lambda: self.now_s) for _ in range(2))


async def test_a_store_that_hangs_does_not_hold_up_requests() -> None:
    """What is known counts until it answers."""
    workers = Workers()
    workers.store.gate.clear()
    assert await asyncio.wait_for(workers.one.current(), 60) is CONFIGURED
    # Those that come within the next second do not wait at all.
    for _ in range(9):
        with pytest.raises(StopIteration):
            workers.one.current().send(None)
    workers.now_s += 1.0
    assert await asyncio.wait_for(workers.one.current(), 60) is CONFIGURED
    assert workers.store.reads == 1
    await workers.store.put_setting(KEY, OBSERVE.to_json())
    workers.store.gate.set()
    assert (await workers.one.read()).settings.mode == "observe"


async def test_a_broken_store_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What was last read holds, the failure is told once, a save is refused; all is well when it is back."""
    workers = Workers()
    await workers.one.write(OBSERVE)
    workers.store.fails = True
    for _ in range(3):
        workers.now_s += 10
        assert (await workers.one.current()).mode == "observe"
        assert await workers.two.current() is CONFIGURED
    with pytest.raises(StoreError):
        await workers.one.write(Overlay())
    assert workers.one.known.settings.mode == "observe"
    assert workers.one.known.failure == "disk full"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["settings_not_read disk full; those last known hold"] * 2
    workers.store.fails = False
    workers.now_s += 10
    assert (await workers.two.current()).mode == "observe"
    assert workers.two.known.failure == ""


_FILE: dict[str, Any] = {"mode": "observe", "target_ratio": 0.3}
FROM_FILE = settings_from(_FILE)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_what_is_kept_can_be_read_again() -> None:
    """Also an empty overlay, and one that was never written."""
    overlay = Overlay({"pruning_model": Change("naïve/🙂", 1.5, "proxy_admin"), "target_ratio": Change(0.25, 2.0, "r")})
    assert overlay_from_json(overlay.to_json()) == overlay
    assert overlay_from_json(Overlay().to_json()) == overlay_from_json(None) == Overlay()


@given(JSON | st.fixed_dictionaries({"version": st.just(1), "changes": JSON}))
def test_what_is_not_ours_is_an_error(found: Any) -> None:
    """Never anything but an overlay or a ConfigError."""
    try:
        overlay = overlay_from_json(json.dumps(found))
        overlay.over(FROM_FILE)
    except ConfigError:
        return


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"pre_request_ratio": "2"}, "pre_request_ratio", "pre_request_ratio = 2: Input should be less than 1"),
        ({"pre_request_ratio": "0,8"}, "pre_request_ratio", "(allowed: above 0, below 1)"),
        ({"streaming_ratio": "nan"}, "streaming_ratio", "streaming_ratio = nan"),
        ({"mode": "<b>"}, "mode", "(allowed: guard, observe, off)"),
        ({"pruning_model": ""}, "pruning_model", "pruning_model = "),
        ({"target_ratio": "0.85"}, "", "target_ratio must be below pre_request_ratio"),
        ({"store": "memory://"}, "store", "cannot be changed"),
    ],
)
def test_a_problem_names_key_value_and_range(values: dict[str, str], key: str, expected: str) -> None:
    """And nobody else's key."""
    with pytest.raises(WrongValues) as wrong:
        with_values(FROM_FILE, values)
    assert wrong.value.problems.keys() == {key}
    assert expected in wrong.value.problems[key]
