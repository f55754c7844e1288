"""Hypothesis profiles, and which files are run by the same process.

The profile `ci` always tries the same examples, `deep` (HYPOTHESIS_PROFILE=deep) many random ones.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

# Conversations are large values; building them is not what is being tested.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_SLOW)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Files that ask the same proxies: starting one takes 5 to 10 s of processor time.
_PROMISES = ("test_alarm", "test_bad_input", "test_promises", "test_routing", "test_stream", "test_untouched")


class _TogetherScheduling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist's types are not exported
    """Like `--dist loadfile`; files that share proxies go to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        name = PurePath(file).stem
        if name in _PROMISES:
            return "promises"
        return "restart" if "integration/test_restart_" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules `--dist loadfile` so that few proxies have to be started twice."""
    return _TogetherScheduling(config, log) if config.getoption("dist") == "loadfile" else None
