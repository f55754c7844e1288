"""Hypothesis profiles, and which files are run by the same process.

The profile `ci` always tries the same examples, `deep` (HYPOTHESIS_PROFILE=deep) many random ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Conversations are large values; building them is not what is being tested.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_SLOW)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Files that ask the same proxies: starting one takes 5 to 10 s of processor time.
_PROMISES = ("test_alarm", "test_bad_input", "test_promises", "test_routing", "test_stream", "test_untouched")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each file to one process (`--dist loadgroup`), and those that share proxies to the same one."""
    for item in items:
        name = item.path.stem
        if item.path.parent.name != "integration":
            group = str(item.path)
        elif name.startswith("test_restart_"):
            group = "restart"
        else:
            group = "promises" if name in _PROMISES else name
        item.add_marker(pytest.mark.xdist_group(group))
