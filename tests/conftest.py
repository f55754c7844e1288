"""Hypothesis profiles: `ci` always tries the same examples, `deep` (HYPOTHESIS_PROFILE=deep) many random ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Conversations are large values; building them is not what is being tested.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_SLOW)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
