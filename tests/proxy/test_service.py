"""What a config file shows by itself, and what stops a start: settings where nobody reads them, or that are wrong.

That a real proxy then does not start: `tests/processes/test_config_start.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import litellm
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.errors import ConfigError
from litellm_compaction.proxy import service
from litellm_compaction.proxy.config_check import check_config


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
            r"compaction\.tokenizer = '/no/x\.json': /no/x\.json cannot be read or used",
        ),
        (
            {"tokenizer": "x.gguf"},
            None,
            r"compaction\.tokenizer = 'x\.gguf': \.gguf .* any more: write the path of the mo",
        ),
        ({"models_folder": "/models"}, None, r"litellm_compaction: 'models_folder' was removed: leave it out; name"),
        ({"count": "probe"}, None, r"litellm_compaction: 'count' was removed: leave it out; the server is asked"),
        ({}, {"tokenizer": "who-is-this"}, r"model_info\.compaction of 'local'\.tokenizer = 'who-is-this': allowed"),
        (
            {"pre_request_ration": 0.8},
            None,
            r"compaction: unknown key 'pre_request_ration'; did you mean 'pre_request_rat",
        ),
        ({"target_ratio": 0.5}, {"pre_request_ratio": 0.45}, r"compaction of 'local'.*now 0\.5, 0\.45 and 0\.9"),
    ],
)
def test_a_wrong_one_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], own: dict[str, Any] | None, said: str
) -> None:
    """The error names key, value and what is allowed."""
    with pytest.raises(ConfigError, match=said):
        loaded(monkeypatch, settings, own)


_INNER = {"litellm_settings": {"callback_settings": {"litellm_compaction": {}}}}
_OTHERS = {"litellm_compaction": {"mode": "observe"}, "otel": {"mode": 1}, "litellm_completion": {}, 7: {}}
_OWN = {"model_list": [{"compaction": {}, "litellm_params": {"model": "m", "strategy": "prune"}}]}


@pytest.mark.parametrize(
    ("config", "places", "stops"),
    [
        ({"litellm_compaction": {}}, ["litellm_compaction"], True),
        ({"callback_settings": {"mode": "observe"}}, ["callback_settings.mode"], True),
        ({"callback_settings": {"litellm_compacton": {}}}, ["callback_settings.litellm_compacton"], True),
        (
            {"callback_settings": {"litellm_compaction.handler": {}}},
            ["callback_settings.litellm_compaction.handler"],
            True,
        ),
        (_INNER, ["litellm_settings.callback_settings.litellm_compaction"], True),
        # A word that another callback may use: who asks `doctor` is told.
        ({"callback_settings": {"compaction": {}}}, ["callback_settings.compaction"], False),
        (_OWN, ["model_list[0].compaction", "model_list[0].litellm_params.strategy"], False),
        # Whatever shape the sections have.
        ({}, [], False),
        ({"callback_settings": None}, [], False),
        ({"callback_settings": "otel", "general_settings": ["x"]}, [], False),
        ({"callback_settings": _OTHERS}, [], False),
    ],
)
def test_settings_where_nobody_reads_them(
    config: dict[str, Any], places: list[str], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the place where they stand and the one where they belong; what is surely ours stops the start."""
    found = [each for each in check_config(config, {}) if "settings are not read here" in each.message]
    assert [each.place for each in found] == places
    monkeypatch.setattr(service, "configuration", lambda: config)
    with pytest.raises(ConfigError, match=r"compaction` \(top level\)") if stops else nullcontext():
        service.load_settings()
