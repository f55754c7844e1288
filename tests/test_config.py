"""What an operator can set: defaults, bounds, contradictions, the shipped file; errors say what to change."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.cli.config_file import read_config
from litellm_compaction.config import (
    _REMOVED,
    Constants,
    DeploymentSettings,
    Settings,
    choices,
    deployment_settings_from,
    settings_from,
)
from litellm_compaction.core.prompts import STRATEGIES, Strategy
from litellm_compaction.errors import ConfigError

ROOT = Path(__file__).parents[1]

# For every setting values that are taken and values that are refused.
KEYS: dict[str, tuple[list[Any], list[Any]]] = {
    "mode": (["guard", "observe", "off", False], ["on", True, 1, None]),
    "page": (["on", "off", True, False], ["yes", 1, None]),
    "redact_patterns": ([(), ("x" * 2000,) * 100], ["KD", ["("], ["a*"], ["x" * 2001], ["x"] * 101, [7], None]),
    "pre_request_ratio": ([0.5, 0.9], [0, 1, 1.2, -0.1, "much", math.nan]),
    "streaming_ratio": ([0.8, 0.99], [0, 1, 90, math.inf]),
    "target_ratio": ([0.01, 0.79], [0, 1, -1]),
    "threshold_tokens": ([0, 256, 100_000_000], [-1, 100_000_001, "50k"]),
    "reserve_tokens": ([0, 10_000_000], [-1, 0.5, "some", 10_000_001]),
    "keep_recent_messages": ([1, 1000], [0, 1001, "five"]),
    "max_restarts": ([0, 20], [-1, 21]),
    "strategy": (["summary", "prune", "handoff"], ["shrink", "", None, ["summary"]]),
    "pruning_model": (["__same__", "m"], ["", 7, None]),
    "summary_timeout_s": ([0.5, 3600], [0, 3601]),
    "notices": (["content", "reasoning", "off", False], ["loud", True]),
    "admission": (["auto", "pool", "off", False], ["on", True, 1]),
    "background": (["off", "idle", False], ["on", True, "always"]),
    "carrier": (["auto", "hooks"], ["transport", True]),
    "oversized_tool_result": (["error", "excerpt"], ["cut", False]),
    "oversized_user_message": (["error", "excerpt"], ["cut"]),
    "tokenizer": (["auto", "heuristic", "models/tokenizer.json", "t"], ["", 7, None]),
    "when_not_loaded": (["warm_up", "error"], ["wait"]),
    "admins_see_text": ([True, False], ["perhaps"]),
    "allow_opt_out": ([True, False], ["perhaps"]),
    "store": (
        ["memory://", "sqlite://", "sqlite:///store.db", "sqlite:////var/lib/store.db", "sqlite:///~/store.db"],
        [
            *("http://localhost", "redis://", "redis://h:0", "rediss+cluster://h/1", "", 3),
            *("redis://u:hunter2/@h", "redis:/u:hunter2@h", "redis://h?password=hunter2"),
            *("sqlite:", "sqlite:///", "sqlite://host/db", "sqlite:///:memory:", "sqlite:///a?b=c"),
        ],
    ),
    "store_ttl_s": ([1, 1e9], [0, -1]),
    "store_max_bytes": ([1024], [1023]),
    "keep_originals": (["off", "compacted", False], ["on", True, "all"]),
    "recall": (["off", "tool", "auto", False], ["on", True]),
    "originals_ttl_s": ([1, 1e9], [0, -1]),
    "originals_max_bytes": ([1024], [1023]),
}
GOOD = [(key, value) for key, (values, _) in KEYS.items() for value in values]
BAD = [(key, value) for key, (_, values) in KEYS.items() for value in values]


def test_every_key_is_tested() -> None:
    """A new setting comes with its bounds."""
    assert set(KEYS) == set(Settings.model_fields)


@pytest.mark.parametrize("section", [None, {}])
def test_nothing_set_is_all_defaults(section: object) -> None:
    """An empty section is a configuration."""
    assert settings_from(section) == Settings()
    assert deployment_settings_from(section) == DeploymentSettings()


def test_good_values_are_taken() -> None:
    """At the bounds too; YAML's bare `off` and `on`, read as false and true, are the words."""
    for key, value in GOOD:
        taken = getattr(settings_from({key: value}), key)
        has_off = key in ("admission", "background", "keep_originals", "mode", "notices", "page", "recall")
        words = {True: "on", False: "off"} if has_off else {}
        assert taken == (words.get(value, value) if isinstance(value, bool) else value), key


def test_bad_values_are_refused_by_name() -> None:
    """The error names the key with its place, the value, and what is allowed."""
    for key, value in BAD:
        with pytest.raises(ConfigError) as raised:
            settings_from({key: value})
        text = str(raised.value)
        # That of `store` may hold a password.
        shown = "" if key == "store" else f" = {value!r}"
        assert text.startswith(f"callback_settings.litellm_compaction.{key}{shown}: ")
        assert len(text.partition(": ")[2]) > 10
        assert "hunter2" not in text


@pytest.mark.parametrize(
    ("section", "allowed"),
    [
        ({"mode": "on"}, "'guard', 'observe' or 'off'"),
        ({"threshold_tokens": 1}, "threshold_tokens = 1: allowed: 0 .* or from 256"),
        ({"store": "http://x"}, "allowed: sqlite:// .*, sqlite:////absolute/file, memory://, redis://"),
        # target < pre_request ≤ streaming, with the values as they are now.
        ({"target_ratio": 0.8}, r"target_ratio must be below .* \(now 0\.8, 0\.8 and 0\.9 of"),
        ({"pre_request_ratio": 0.95}, r"not above streaming_ratio \(now 0\.4, 0\.95 and 0\.9 of"),
        ({"target_ratio": 0.5, "pre_request_ratio": 0.4}, r"target_ratio must be below .* \(now 0\.5, 0\.4 and"),
    ],
)
def test_an_error_says_what_is_allowed(section: dict[str, Any], allowed: str) -> None:
    """The allowed range or words."""
    with pytest.raises(ConfigError, match=allowed):
        settings_from(section)


def test_an_error_names_everything_that_is_wrong() -> None:
    """One start, all findings."""
    with pytest.raises(ConfigError) as raised:
        settings_from({"mode": "on", "max_restarts": 99, "tempo": 3, "api_key": "sk-secret"})
    text = str(raised.value)
    known = "unknown key 'tempo'; known keys: admins_see_text, admission, "
    assert all(expected in text for expected in ("mode = 'on'", "max_restarts = 99", known))
    # Only the value of the key that is wrong is named, not what stands around it.
    assert "sk-secret" not in text


@pytest.mark.parametrize("section", [[], "guard", 7, True])
def test_a_section_is_a_mapping(section: object) -> None:
    """Anything else is refused with its type."""
    with pytest.raises(ConfigError, match=f"must be a mapping of settings, not {type(section).__name__}"):
        settings_from(section)


def test_a_deployment_goes_before_the_rest() -> None:
    """What it sets counts for it; what it leaves out follows the global settings."""
    settings = settings_from({"mode": "observe", "keep_recent_messages": 9})
    own = deployment_settings_from({"mode": "guard", "target_ratio": 0.3, "pruning_model": "m", "context_length": 256})
    joined = settings.for_deployment(own)
    assert (joined.mode, joined.target_ratio, joined.pruning_model) == ("guard", 0.3, "m")
    assert joined.keep_recent_messages == 9
    assert settings.mode == "observe"
    with pytest.raises(ConfigError, match=r"model_info\.compaction: target_ratio must be below"):
        settings.for_deployment(deployment_settings_from({"pre_request_ratio": 0.3}))


def test_numbers_that_were_settings_are_those_of_the_changelog() -> None:
    """An operator who had set one reads there which holds now."""
    told = re.findall(r"`(\w+)` \(([\d.,]+)\)", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert len(told) >= 12
    for name, number in told:
        assert getattr(Constants(), name) == float(number.replace(",", "")), name


def test_a_strategy_from_outside_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a place in the page's list; an unknown one is refused by all their names."""
    added = Strategy(name="timeline", prompt="List what happened.", keeps_recent=False, lead_in="The user goes on: ")
    monkeypatch.setitem(STRATEGIES, added.name, added)
    assert settings_from({"strategy": "timeline"}).strategy == added.name
    assert choices(Settings.model_fields["strategy"])[-1] == added.name
    with pytest.raises(ConfigError, match=r"Input should be .*'handoff', 'timeline'"):
        settings_from({"strategy": "magic"})


def test_constants_stay_with_settings() -> None:
    """Whatever is put on top of them; no key of a configuration leads to them."""
    few = settings_from(None).with_constants(replace(Constants(), keep_images=1))
    joined = few.for_deployment(deployment_settings_from({"mode": "off"})).with_store({})
    assert (joined.mode, joined.constants.keep_images) == ("off", 1)
    assert few.with_values({"target_ratio": 0.2}).constants == few.constants != settings_from(None).constants
    for key in ("constants", "_constants"):
        with pytest.raises(ConfigError, match="unknown key"):
            settings_from({key: {"keep_images": 1}})


@pytest.mark.parametrize(
    ("section", "finding"),
    [
        ({"context_length": 255}, "context_length = 255: "),
        ({"context_length": 100_000_001}, "context_length = 100000001: "),
        ({"enabled": "maybe"}, "enabled = 'maybe': "),
        ({"store": "memory://"}, "unknown key 'store'; known keys: background, context_length, enabled, keep"),
    ],
)
def test_a_deployment_is_named_in_its_errors(section: dict[str, Any], finding: str) -> None:
    """By the place that the caller gives, else by the section's own name."""
    with pytest.raises(ConfigError) as raised:
        deployment_settings_from(section, "model_list[2].model_info.compaction")
    assert str(raised.value).startswith("model_list[2].model_info.compaction")
    assert finding in str(raised.value)


@pytest.mark.parametrize("name", _REMOVED)
def test_a_removed_setting_says_what_replaces_it(name: str) -> None:
    """At the start, and in the changelog."""
    with pytest.raises(ConfigError, match=f"{name!r} was removed: {re.escape(_REMOVED[name])}"):
        settings_from({name: True})
    with pytest.raises(ConfigError, match="was removed"):
        deployment_settings_from({name: True})
    assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text("utf-8").partition("### Removed")[2]


def test_the_shipped_config_shows_real_settings_with_their_defaults() -> None:
    """Each commented key exists, and its value is the default."""
    text = (ROOT / "config.yaml").read_text(encoding="utf-8")
    shown = re.findall(r"^    # (\w+): (\S+)", text.partition("    # for example:\n")[2], re.MULTILINE)
    assert len(shown) >= 5
    for name, value in shown:
        default = Settings.model_fields[name].default
        assert value in (str(default), f"{default:.2f}" if isinstance(default, float) else str(default))


def test_the_shipped_config_has_the_defaults() -> None:
    """Nothing else is set, so that the defaults of the code count: on one's own machine originals are kept."""
    shipped = settings_from(read_config(ROOT / "config.yaml").settings)
    assert shipped == settings_from({"keep_originals": "compacted"})
    assert shipped != settings_from(None)


def test_a_deployment_that_contradicts_is_refused() -> None:
    """Two ratios that are each fine may not be so together."""
    settings = settings_from({"target_ratio": 0.6})
    with pytest.raises(ConfigError, match=r"model_info\.compaction: target_ratio must be below"):
        settings.for_deployment(deployment_settings_from({"pre_request_ratio": 0.5}))
