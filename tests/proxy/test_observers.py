"""Events as Prometheus metrics: what is counted, bounded labels, and no trouble where the library is missing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import prometheus_client
import pytest

from litellm_compaction.events import TruncationAlarm
from litellm_compaction.proxy.observers import Metrics
from tests.test_events import CUT, event

ALARM = TruncationAlarm(
    model="qwen", window_tokens=8192, expected_tokens=9000, reported_tokens=5000, reason="prompt_far_below_count"
)


class Library:
    """The real one, with a registry of its own."""

    def __init__(self) -> None:
        self.REGISTRY = prometheus_client.CollectorRegistry()
        for name in ("Counter", "Histogram"):
            setattr(self, name, partial(getattr(prometheus_client, name), registry=self.REGISTRY))

    def shown(self) -> dict[str, float]:
        """By name and labels, as Prometheus reads them; of histograms sums and counts."""
        text = prometheus_client.generate_latest(self.REGISTRY).decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
        return {
            name.removeprefix("litellm_compaction_"): float(value)
            for name, _, value in lines
            if "_bucket" not in name and "_created" not in name
        }


def test_restarts_are_counted_for_a_bounded_number_of_models() -> None:
    """A client's invented names must not fill the registry; a module that is loaded twice counts on."""
    library = Library()
    for _ in range(2):
        metrics = Metrics(lambda: library)
        for number in range(250):
            metrics.observe(replace(CUT, outcome="restarted", model=f"model {number}"))
    shown = {name: value for name, value in library.shown().items() if name.startswith("restarts_total")}
    assert len(shown) == 201
    assert sum(shown.values()) == 2 * 250


@pytest.mark.parametrize("error", [ImportError(), ValueError("Duplicated timeseries in CollectorRegistry")])
def test_without_the_library_or_the_names_nothing_happens(error: Exception) -> None:
    """No error, requests go on, and it is tried once."""
    tried: list[int] = []

    def load() -> Any:
        tried.append(1)
        raise error

    metrics = Metrics(load)
    for _ in range(3):
        metrics.observe(event())
    assert tried == [1]
