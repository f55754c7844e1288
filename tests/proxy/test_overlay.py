"""Changes at run time: what is kept, what it makes of config.yaml, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import LIVE, Settings, choices, settings_from
from litellm_compaction.errors import ConfigError
from litellm_compaction.proxy.live_settings import (
    Change,
    Overlay,
    WrongValues,
    allowed_values,
    overlay_from_json,
    with_values,
)

CONFIGURED = settings_from({"mode": "observe", "target_ratio": 0.3})
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_only_what_differs_from_the_file_is_kept() -> None:
    """A value that the file has anyway leaves no trace; one that stays as it was keeps its author."""
    first = Overlay().changed(CONFIGURED, {"mode": "guard", "target_ratio": 0.3}, when_s=1.0, role="proxy_admin")
    assert first.changes == {"mode": Change("guard", 1.0, "proxy_admin")}
    second = first.changed(CONFIGURED, {"mode": "guard", "notices": "off"}, when_s=2.0, role="other")
    assert second.changes == {"mode": Change("guard", 1.0, "proxy_admin"), "notices": Change("off", 2.0, "other")}
    assert second.changed(CONFIGURED, {"mode": "observe"}, when_s=3.0, role="x").changes.keys() == {"notices"}
    assert second.without(["mode"]).over(CONFIGURED) == settings_from({"notices": "off", **_file()})


def test_the_file_s_other_settings_stay() -> None:
    """An overlay changes its own keys and nothing else."""
    overlay = Overlay({"mode": Change("off", 1.0, "a"), "pre_request_ratio": Change(0.7, 1.0, "a")})
    assert overlay.over(CONFIGURED) == settings_from({**_file(), "mode": "off", "pre_request_ratio": 0.7})
    assert Overlay().over(CONFIGURED) is CONFIGURED


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
        overlay.over(CONFIGURED)
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
            Overlay({key: Change(value, 1.0, "a")}).over(CONFIGURED)


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"pre_request_ratio": "2"}, "pre_request_ratio", "pre_request_ratio = 2: Input should be less than 1"),
        ({"pre_request_ratio": "0,8"}, "pre_request_ratio", "(allowed: above 0, below 1)"),
        ({"streaming_ratio": "nan"}, "streaming_ratio", "streaming_ratio = nan"),
        ({"mode": "<b>"}, "mode", "(allowed: guard, observe, off)"),
        ({"pruning_model": ""}, "pruning_model", "pruning_model = "),
        ({"target_ratio": "0.85"}, "", "target_ratio < pre_request_ratio <= streaming_ratio must hold"),
        ({"store": "memory://"}, "store", "cannot be changed"),
    ],
)
def test_a_problem_names_key_value_and_range(values: dict[str, str], key: str, expected: str) -> None:
    """And nobody else's key."""
    with pytest.raises(WrongValues) as wrong:
        with_values(CONFIGURED, values)
    assert wrong.value.problems.keys() == {key}
    assert expected in wrong.value.problems[key]


def test_a_form_s_words_become_settings() -> None:
    """Numbers are numbers again."""
    settings = with_values(CONFIGURED, {"target_ratio": "0.25", "mode": "off"})
    assert settings == settings_from({"target_ratio": 0.25, "mode": "off"})


def test_every_key_has_its_words_or_its_range() -> None:
    """All but the model's name, which is any model of the proxy."""
    assert len(LIVE) == 8
    for key in LIVE:
        field = Settings.model_fields[key]
        assert bool(choices(field)) or key.endswith("_ratio") or key == "pruning_model"
        assert bool(allowed_values(field)) is (key != "pruning_model")


def _file() -> dict[str, Any]:
    return {"mode": "observe", "target_ratio": 0.3}
