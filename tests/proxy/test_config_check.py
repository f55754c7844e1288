"""What a config file shows by itself: settings of ours where nobody reads them, and what stops a start."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.errors import ConfigError
from litellm_compaction.proxy import startup
from litellm_compaction.proxy.config_check import Finding, check_config


def misplaced(config: dict[str, Any]) -> list[Finding]:
    """Of what is found, what stands where nobody reads it."""
    return [found for found in check_config(config, {}) if "settings are not read here" in found.message]


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"litellm_compaction": {}}, "litellm_compaction"),
        ({"callback_settings": {"mode": "observe"}}, "callback_settings.mode"),
        ({"callback_settings": {"litellm-compaction": {}}}, "callback_settings.litellm-compaction"),
        ({"callback_settings": {"litellm_compacton": {}}}, "callback_settings.litellm_compacton"),
        ({"callback_settings": {"litellm_compaction.handler": {}}}, "callback_settings.litellm_compaction.handler"),
        (
            {"litellm_settings": {"callback_settings": {"litellm_compaction": {}}}},
            "litellm_settings.callback_settings.litellm_compaction",
        ),
    ],
)
def test_misplaced_settings_stop_the_start(config: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the place where they stand and the one where they belong."""
    assert [found.place for found in misplaced(config)] == [place]
    monkeypatch.setattr(startup, "_config", lambda: config)
    with pytest.raises(ConfigError) as raised:
        startup.load_settings()
    assert str(raised.value).startswith(f"{place}: ")
    assert "`callback_settings.litellm_compaction` (top level)" in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        {"callback_settings": {"compaction": {}}},
        {"general_settings": {"compaction": {}, "callback_settings": {"otel": {}}}},
        {"litellm_settings": {"compaction_settings": {}}},
    ],
)
def test_words_that_another_may_use_are_left_to_doctor(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy starts; who asks `doctor` is told."""
    assert [found.error for found in misplaced(config)] == [None] * sum(map(len, config.values()))
    monkeypatch.setattr(startup, "_config", lambda: config)
    startup.load_settings()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"callback_settings": None},
        {"callback_settings": "otel", "general_settings": ["x"]},
        {
            "callback_settings": {
                "litellm_compaction": {"mode": "observe"},
                "otel": {"mode": 1},
                "litellm_completion": {},
                7: {},
            }
        },
    ],
)
def test_what_is_in_its_place_or_another_callbacks_is_no_finding(config: dict[str, Any]) -> None:
    """Whatever shape the sections have."""
    assert misplaced(config) == []


def test_models_of_a_database_are_not_missed_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `model_list` nothing is known of the models, so any name may be one."""
    settings = {"pruning_model": "of-the-database"}
    monkeypatch.setattr(startup, "_config", lambda: {"callback_settings": {"litellm_compaction": settings}})
    assert startup.load_settings().pruning_model == "of-the-database"
