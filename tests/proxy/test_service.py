"""What a config file shows by itself, and what stops a start: settings where nobody reads them, or that are wrong.

That a real proxy then does not start: `tests/processes/test_config_start.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from litellm_compaction.concurrency import ended
from litellm_compaction.config import Settings
from litellm_compaction.errors import ConfigError
from litellm_compaction.proxy import service
from litellm_compaction.proxy.config_check import Finding, check_config
from litellm_compaction.proxy.routing import serves
from litellm_compaction.proxy.service import Service
from tests.engine.bench import settled


def loaded(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], own: dict[str, Any] | None = None) -> Settings:
    """What the proxy makes of a configuration with one deployment."""
    monkeypatch.setattr(litellm, "callback_settings", {"litellm_compaction": settings})
    info = {"model_info": {"compaction": own}} if own is not None else {}
    monkeypatch.setattr(service, "configuration", lambda: {"model_list": [{"model_name": "local", **info}]})
    return service.load_settings()


@pytest.mark.parametrize(
    ("settings", "own", "said"),
    [
        (
            {"tokenizer": "/no/x.json"},
            None,
            r"litellm_compaction\.tokenizer = '/no/x\.json': /no/x\.json cannot be read",
        ),
        (
            {"tokenizer": "/no/x.gguf"},
            None,
            r"litellm_compaction\.tokenizer = '/no/x\.gguf': \.gguf files are not read",
        ),
        ({"models_folder": "/models"}, None, r"litellm_compaction: 'models_folder' was removed: leave it out; name"),
        ({"count": "probe"}, None, r"litellm_compaction: 'count' was removed: leave it out; the server is asked"),
        ({}, {"tokenizer": "who-is-this"}, r"model_info\.compaction of 'local'\.tokenizer = 'who-is-this': allowed"),
        (
            {"pre_request_ration": 0.8},
            None,
            r"litellm_compaction: unknown key 'pre_request_ration'; did you mean 'pre_request_ratio'\?",
        ),
        (
            {"pruning_model": "nobody"},
            None,
            r"litellm_compaction\.pruning_model: no model of this proxy is called 'nobody'; known: local",
        ),
        ({}, {"pruning_model": "nobody"}, r"model_info\.compaction of 'local'\.pruning_model: no model of this proxy"),
        (
            {"target_ratio": 0.5},
            {"pre_request_ratio": 0.45},
            r"model_info\.compaction of 'local'.*now 0\.5, 0\.45 and 0\.9",
        ),
    ],
)
def test_a_wrong_one_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], own: dict[str, Any] | None, said: str
) -> None:
    """The error names key, value and what is allowed."""
    with pytest.raises(ConfigError, match=said):
        loaded(monkeypatch, settings, own)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "qwen/qwen3-8b", True),
        ("qwen/*", "qwen/qwen3-8b", True),
        ("qwen/*", "google/gemma", False),
        ("*-8b", "qwen3-8b", True),
        ("a.*", "ab", False),
        ("fixed", "other", False),
    ],
)
def test_a_wildcard_reaches_what_its_pattern_says(pattern: str, name: str, expected: bool) -> None:
    """As LiteLLM fills in the name; what else a regular expression knows is text."""
    assert serves(pattern, name) is expected


def misplaced(config: dict[str, Any]) -> list[Finding]:
    """Of what is found, what stands where nobody reads it."""
    return [found for found in check_config(config, {}) if "settings are not read here" in found.message]


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"litellm_compaction": {}}, "litellm_compaction"),
        ({"callback_settings": {"mode": "observe"}}, "callback_settings.mode"),
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
    monkeypatch.setattr(service, "configuration", lambda: config)
    with pytest.raises(ConfigError) as raised:
        service.load_settings()
    assert str(raised.value).startswith(f"{place}: ")
    assert "`callback_settings.litellm_compaction` (top level)" in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        {"callback_settings": {"compaction": {}}},
        {"general_settings": {"compaction": {}}},
        {"litellm_settings": {"compaction_settings": {}}},
    ],
)
def test_words_that_another_may_use_are_left_to_doctor(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy starts; who asks `doctor` is told."""
    assert [found.error for found in misplaced(config)] == [None] * sum(map(len, config.values()))
    monkeypatch.setattr(service, "configuration", lambda: config)
    service.load_settings()


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


async def test_models_that_are_loaded_meanwhile_are_prepared_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list that comes while others are prepared is looked at once they are; what fails is told, and does not stay."""
    gate, looks = asyncio.Event(), list[str]()

    async def prepare(router: Any, *, is_first: bool) -> None:
        looks.append(router)
        await gate.wait()
        if is_first:
            raise RuntimeError("odd")

    monkeypatch.setattr(service, "current_router", lambda: "router")
    made = Service(Settings(store="memory://"))
    monkeypatch.setattr(made, "_prepare", prepare)
    windows = made.compactor.windows
    work = asyncio.create_task(made._keep_prepared())
    await settled()
    for _ in range(3):
        assert windows.on_loaded is not None
        windows.on_loaded()
        await settled()
    gate.set()
    await settled()
    assert looks == ["router"] * 2
    assert "failed_open" in caplog.text
    windows.on_loaded()
    await settled()
    assert len(looks) == 3
    await ended([work])
    await made.aclose()
