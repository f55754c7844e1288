"""The settings in force: how soon a change counts, in how many workers, and what a broken store costs."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import LIVE, DeploymentSettings, Settings, choices, settings_from
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.proxy.live_settings import (
    KEY,
    Change,
    LiveSettings,
    Overlay,
    WrongValues,
    allowed_values,
    for_deployment,
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


async def test_a_change_counts_at_once_here_and_in_a_second_there() -> None:
    """The other worker reads the store at most once a second, and then before it answers."""
    workers = Workers()
    assert await workers.one.current() is CONFIGURED
    assert await workers.two.current() is CONFIGURED
    await workers.one.write(OBSERVE)
    assert (await workers.one.current()).mode == "observe"
    workers.now_s += 1.0
    assert (await workers.two.current()).mode == "observe"
    await workers.two.write(Overlay())
    assert await workers.two.current() is CONFIGURED
    workers.now_s += 1.0
    assert await workers.one.current() is CONFIGURED


async def test_requests_are_answered_from_memory() -> None:
    """A thousand of them within a second cost one read."""
    workers = Workers()
    for _ in range(1000):
        await workers.one.current()
    await asyncio.gather(*(workers.two.current() for _ in range(100)))
    assert workers.store.reads == 2


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


async def test_a_failing_store_is_left_in_peace() -> None:
    """It is asked again after five seconds, not with every request."""
    workers = Workers()
    workers.store.fails = True
    for _ in range(10):
        await workers.one.current()
    assert workers.store.reads == 1
    workers.now_s += 5
    await workers.one.current()
    assert workers.store.reads == 2


@pytest.mark.parametrize(
    "text",
    ["{", '{"version": 9}', '{"version": 1, "changes": {"strategy": {"value": "old", "when_s": 1, "role": "a"}}}'],
)
async def test_what_no_longer_fits_is_ignored_with_one_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """config.yaml holds, and whoever looks at the page is told why."""
    workers = Workers()
    await workers.store.put_setting(KEY, text)
    for _ in range(3):
        workers.now_s += 2
        assert await workers.one.current() is CONFIGURED
    assert workers.one.known.ignored
    assert sum("settings_ignored" in record.getMessage() for record in caplog.records) == 1
    await workers.one.write(OBSERVE)
    assert not workers.one.known.ignored


async def test_what_does_not_fit_is_not_saved() -> None:
    """Neither here nor in the store."""
    workers = Workers()
    with pytest.raises(ConfigError, match="must be below"):
        await workers.one.write(Overlay({"target_ratio": Change(0.9, 1.0, "a")}))
    assert await workers.store.get_setting(KEY) is None
    assert await workers.one.current() is CONFIGURED


async def test_without_a_page_only_the_file_counts() -> None:
    """`mode: off` is then known before a request is looked at."""
    fixed = LiveSettings(settings_from({"mode": "off", "page": False}))
    assert fixed.is_asleep
    assert (await fixed.current()).mode == "off"
    assert not LiveSettings(settings_from({"mode": "off"}), Counting()).is_asleep


def test_a_change_that_contradicts_a_deployment_does_not_reach_it() -> None:
    """Its requests go on by config.yaml; nobody gets an error for what somebody chose on the page."""
    own = DeploymentSettings(streaming_ratio=0.85)
    changed = settings_from({"pre_request_ratio": 0.88, "notices": "off"})
    settings, conflict = for_deployment(changed, CONFIGURED, own)
    assert settings == CONFIGURED.for_deployment(own)
    assert "must be below" in conflict
    assert for_deployment(changed, CONFIGURED, DeploymentSettings()) == (changed, "")
    with pytest.raises(ConfigError):
        for_deployment(CONFIGURED, CONFIGURED, DeploymentSettings(streaming_ratio=0.5))


_FILE: dict[str, Any] = {"mode": "observe", "target_ratio": 0.3}
FROM_FILE = settings_from(_FILE)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_only_what_differs_from_the_file_is_kept() -> None:
    """A value that the file has anyway leaves no trace; one that stays as it was keeps its author."""
    first = Overlay().changed(FROM_FILE, {"mode": "guard", "target_ratio": 0.3}, when_s=1.0, role="proxy_admin")
    assert first.changes == {"mode": Change("guard", 1.0, "proxy_admin")}
    second = first.changed(FROM_FILE, {"mode": "guard", "notices": "off"}, when_s=2.0, role="other")
    assert second.changes == {"mode": Change("guard", 1.0, "proxy_admin"), "notices": Change("off", 2.0, "other")}
    assert second.changed(FROM_FILE, {"mode": "observe"}, when_s=3.0, role="x").changes.keys() == {"notices"}
    assert second.without(["mode"]).over(FROM_FILE) == settings_from({"notices": "off", **_FILE})


def test_the_file_s_other_settings_stay() -> None:
    """An overlay changes its own keys and nothing else."""
    overlay = Overlay({"mode": Change("off", 1.0, "a"), "pre_request_ratio": Change(0.7, 1.0, "a")})
    assert overlay.over(FROM_FILE) == settings_from({**_FILE, "mode": "off", "pre_request_ratio": 0.7})
    assert Overlay().over(FROM_FILE) is FROM_FILE


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


@pytest.mark.parametrize("text", ["", "{", '{"version": 2, "changes": {}}', '{"version": 1, "changes": {"mode": {}}}'])
def test_other_versions_are_refused(text: str) -> None:
    """Rather than half understood."""
    with pytest.raises(ConfigError):
        overlay_from_json(text)


def test_a_value_of_another_version_is_refused() -> None:
    """A strategy that this version does not know, a key that it does not have."""
    for key, value in (("strategy", "telepathy"), ("nonsense", 1.0), ("store", "memory://")):
        with pytest.raises(ConfigError, match=key):
            Overlay({key: Change(value, 1.0, "a")}).over(FROM_FILE)


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


def test_a_form_s_words_become_settings() -> None:
    """Numbers are numbers again."""
    settings = with_values(FROM_FILE, {"target_ratio": "0.25", "mode": "off"})
    assert settings == settings_from({"target_ratio": 0.25, "mode": "off"})


def test_every_key_has_its_words_or_its_range() -> None:
    """All but the model's name, which is any model of the proxy."""
    assert len(LIVE) == 9
    for key in LIVE:
        field = Settings.model_fields[key]
        assert bool(choices(field)) or key.endswith("_ratio") or key == "pruning_model"
        assert bool(allowed_values(field)) is (key != "pruning_model")
