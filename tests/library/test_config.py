"""The library's configuration: what is refused, and how."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.errors import ConfigError
from tests.library.scripted import config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("context_window_tokens", True),
        ("context_window_tokens", 1023),
        ("trigger_ratio", 0),
        ("trigger_ratio", float("nan")),
        ("keep_recent_messages", -1),
        ("keep_recent_messages", 2.5),
        ("summary_model", ""),
        ("summary_window_tokens", 12),
        ("strategy", "magic"),
        ("temperature", 3),
        ("timeout_s", float("inf")),
    ],
)
def test_a_bad_value_is_refused(field: str, value: Any) -> None:
    """At once, with the field, the value and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        config(**{field: value})
    assert str(refused.value).startswith(f"CompactionConfig.{field} = {value!r}: allowed is ")
