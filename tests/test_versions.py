"""Every module is there under each Python that the package promises: `.ci/run` runs this under several."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import litellm_compaction


def test_every_module_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only a rare setting imports must not be the one that knows too new a Python."""
    # LiteLLM asks the network for prices otherwise.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    found = [each.name for each in pkgutil.walk_packages(litellm_compaction.__path__, "litellm_compaction.")]
    assert len(found) > 100
    for name in found:
        if not name.endswith("__main__"):
            importlib.import_module(name)
