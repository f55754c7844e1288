"""What the processes share with the tests in one process: plain servers, and the check of promise P1."""

from __future__ import annotations

import pytest

from tests.integration.conftest import _never_over_the_window, carrier, plain
from tests.integration.restart_bench import Carrier, Restarting, shared

__all__ = ["_never_over_the_window", "carrier", "plain"]


@pytest.fixture(scope="module")
def restarting(request: pytest.FixtureRequest, carrier: Carrier) -> Restarting:
    """Models that talk past their windows, behind sockets."""
    return shared(request, carrier, process=True)
