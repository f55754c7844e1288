"""The real model's file and one proxy before real engines, for all tests here; skipped where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_engine.bench import Bench, open_bench
from tests.real_engine.weights import what_is_missing, write_fast_file


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's file, in a form that a processor reads fast."""
    if missing := what_is_missing():
        pytest.skip(missing)
    return write_fast_file(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Bench]:
    """A proxy before real engines."""
    with open_bench(tmp_path_factory.mktemp("real-engine"), weights) as opened:
        yield opened
