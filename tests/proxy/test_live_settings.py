"""The settings in force: how soon a change counts, in how many workers, and what a broken store costs."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import LIVE, Settings, WrongSettings, settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.proxy.live_settings import KEY, LiveSettings, chosen_values, with_values
from tests.stores.made import MemoryStore

CONFIGURED = settings_from({"target_ratio": 0.3, "notices": "off"})
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
# As likely good as bad, and such that contradict each other.
VALUES = st.dictionaries(
    st.sampled_from([*LIVE, "store", "x"]),
    st.sampled_from(["guard", "off", "auto", "summary", "0.5", "nan", "1e999", "-1", "", "\0", "__same__", None])
    | st.floats(0, 1)
    | JSON,
    max_size=4,
)


class Counting(MemoryStore):
    """A store that counts how often settings are read; a read can fail or hang."""

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


class Workers:
    """Two workers over one store, with one clock."""

    def __init__(self) -> None:
        self.store = Counting()
        self.now_s = 100.0
        self.one, self.two = (LiveSettings(CONFIGURED, self.store, clock=lambda: self.now_s) for _ in range(2))


@given(st.lists(VALUES, min_size=1, max_size=4))
async def test_a_change_is_in_force_within_a_second_and_a_bad_one_changes_nothing(
    changes: list[dict[str, Any]],
) -> None:
    """Here at once, in another worker after a second; what is refused names its setting, or both that do not fit."""
    workers = Workers()
    for values in changes:
        before, saved = workers.one.in_force.settings, await workers.store.get_setting(KEY)
        problems: dict[str, str] = {}
        try:
            await workers.one.write(values)
        except WrongSettings as error:
            problems = error.problems
        if problems:
            assert workers.one.in_force.settings is before
            assert await workers.store.get_setting(KEY) == saved
            assert set(values) & problems.keys()
        else:
            for key, value in values.items():
                wanted = getattr(CONFIGURED, key) if value is None else value
                now = getattr(workers.one.in_force.settings, key)
                # YAML writes `off` without quotes.
                wanted = "off" if wanted is False else wanted
                assert now == (wanted if isinstance(now, str) else float(wanted))
            assert Settings.model_validate(workers.one.in_force.settings.model_dump()) == workers.one.in_force.settings
        workers.now_s += 1.0
        assert await workers.two.current() == await workers.one.current() == workers.one.in_force.settings
        chosen = chosen_values(await workers.store.get_setting(KEY))
        assert all(getattr(CONFIGURED, key) != value for key, value in chosen.items())


async def test_administrators_at_once_lose_nothing() -> None:
    """Of one worker, and of two after each other: each sends what he has changed alone."""
    workers = Workers()
    await asyncio.gather(workers.one.write({"mode": "observe"}), workers.one.write({"strategy": "prune"}))
    await workers.two.write({"notices": "content"})
    assert chosen_values(await workers.store.get_setting(KEY)) == {
        "mode": "observe",
        "strategy": "prune",
        "notices": "content",
    }
    workers.now_s += 1.0
    assert (await workers.one.current()).notices == "content"
    await workers.two.write(dict.fromkeys(LIVE))
    assert workers.two.in_force.settings == CONFIGURED
    assert await workers.store.get_setting(KEY) == "{}"


async def test_a_store_that_hangs_does_not_hold_up_requests() -> None:
    """What is known counts until it answers."""
    workers = Workers()
    workers.store.gate.clear()
    assert await asyncio.wait_for(workers.one.current(), 60) is CONFIGURED
    workers.now_s += 1.0
    # Those that come later do not wait at all.
    assert await asyncio.wait_for(workers.one.current(), 60) is CONFIGURED
    assert workers.store.reads == 1
    await workers.store.put_setting(KEY, '{"mode": "observe"}')
    workers.store.gate.set()
    await workers.one.read()
    assert workers.one.in_force.settings.mode == "observe"


async def test_a_broken_store_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What was last read holds, the failure is told once, a save is refused; all is well when it is back."""
    workers = Workers()
    await workers.one.write({"mode": "observe"})
    workers.store.fails = True
    for _ in range(3):
        workers.now_s += 10
        assert (await workers.one.current()).mode == "observe"
        assert await workers.two.current() is CONFIGURED
    with pytest.raises(StoreError):
        await workers.one.write({"mode": None})
    assert workers.one.in_force.settings.mode == "observe"
    problem = "The store cannot be read: disk full. Nothing can be saved."
    assert workers.one.in_force.problem == problem
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"settings_not_read {problem}"] * 2
    workers.store.fails = False
    workers.now_s += 10
    assert (await workers.two.current()).mode == "observe"
    assert workers.two.in_force.problem == ""
    await workers.store.put_setting(KEY, "[]")
    for _ in range(2):
        workers.now_s += 10
        assert await workers.two.current() == CONFIGURED
    assert caplog.text.count("settings_ignored") == 1


@given(JSON | VALUES | st.just({"version": 1, "changes": {"mode": {"value": "off"}}}))
async def test_what_is_not_ours_is_ignored(stored: Any) -> None:
    """A damaged text, another version's, or values that do not fit: config.yaml holds, and saving replaces it."""
    workers = Workers()
    await workers.store.put_setting(KEY, json.dumps(stored))
    settings = await workers.one.current()
    try:
        assert settings == with_values(CONFIGURED, chosen_values(json.dumps(stored)))
    except ConfigError:
        assert settings == CONFIGURED
        assert workers.one.in_force.problem
        await workers.one.write({})
        workers.now_s += 1
        assert (await workers.two.current(), workers.two.in_force.problem) == (CONFIGURED, "")
