"""The library's configuration: what is refused, and how."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction import (
    CompactionConfig,
)
from litellm_compaction.errors import ConfigError
from tests.library.scripted import config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("context_window_tokens", 0),
        ("context_window_tokens", "8192"),
        ("context_window_tokens", True),
        ("context_window_tokens", 1023),
        ("trigger_ratio", 0),
        ("trigger_ratio", 80),
        ("trigger_ratio", float("nan")),
        ("keep_recent_messages", -1),
        ("keep_recent_messages", 2.5),
        ("summary_max_tokens", 0),
        ("ledger_max_tokens", -1),
        ("summary_model", ""),
        ("summary_window_tokens", 12),
        ("strategy", "magic"),
        ("strategy", ["summary"]),
        ("temperature", 3),
        ("temperature", "cold"),
        ("timeout_s", 0),
        ("timeout_s", float("inf")),
    ],
)
def test_a_bad_value_is_refused(field: str, value: Any) -> None:
    """At once, with the field, the value and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        config(**{field: value})
    assert str(refused.value).startswith(f"CompactionConfig.{field} = {value!r}: allowed is ")


def test_the_configuration_is_frozen_and_closed() -> None:
    """Unknown fields are errors, and nothing changes afterwards."""
    with pytest.raises(TypeError, match="keep_recnt"):
        config(keep_recnt=3)
    with pytest.raises(AttributeError):
        config().model = "other"
    assert config() == config()
    assert CompactionConfig(model="m", context_window_tokens=128_000).keep_recent_messages == 10
    assert config(context_window_tokens=2048).summary_tokens == config(context_window_tokens=2048).ledger_tokens == 307


def test_the_defaults_are_those_of_the_documentation() -> None:
    """Whoever sizes a window by the page gets what it says."""
    text = " ".join((Path(__file__).parents[2] / "docs" / "library.md").read_text("utf-8").split())
    numbers = {each.name: each.default for each in fields(CompactionConfig) if isinstance(each.default, (int, float))}
    assert {name: value for name, value in numbers.items() if value and f"`{name}` {value:g}" not in text} == {}
    reserves = [name for name, value in numbers.items() if not value]
    assert f"{', '.join(f'`{name}`' for name in reserves)}, all 0" in text
