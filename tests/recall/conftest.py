"""Searches have the time that they need: a busy machine is no reason to find less."""

from __future__ import annotations

import pytest

from litellm_compaction.recall import hits


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the limits of time those stay that a test sets itself."""
    monkeypatch.setattr(hits, "_LITERAL_LIMIT_S", 60.0)
