"""What the processes share with the tests in one process: the check of promise P1."""

from __future__ import annotations

import pytest

from tests.integration.conftest import _never_over_the_window
from tests.integration.restart_bench import Restarting, shared

__all__ = ["_never_over_the_window"]


@pytest.fixture(scope="module")
def restarting(request: pytest.FixtureRequest) -> Restarting:
    """Models that talk past their windows, behind sockets."""
    return shared(request, "auto", process=True)
