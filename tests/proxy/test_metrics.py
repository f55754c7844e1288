"""Events as Prometheus metrics: what is counted, bounded labels, and no trouble where the library is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import prometheus_client
import pytest

from litellm_compaction.events import TruncationAlarm
from litellm_compaction.proxy.metrics import MAX_MODELS, Metrics
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


def counted(*events: Any) -> dict[str, float]:
    library = Library()
    metrics = Metrics(lambda: library)
    for each in events:
        metrics.observe(each)
    return library.shown()


MODEL = '{model="qwen"}'
_OF_A_COMPACTION = {
    'compactions_total{model="qwen",outcome="compacted",phase="pre_request"}': 1,
    f"prompt_before_tokens_sum{MODEL}": 7000,
    f"prompt_after_tokens_sum{MODEL}": 3000,
    f"summary_calls_total{MODEL}": 1,
    f"summary_duration_seconds_sum{MODEL}": 1.2,
    f"window_fill_ratio_sum{MODEL}": 7000 / 8192,
}


@pytest.mark.parametrize(
    ("told_of", "expected", "absent"),
    [
        (event(), _OF_A_COMPACTION, "refused|ahead|restarts|alarms"),
        (event("reused", summary_calls=0, reason="prepared"), {'ahead_total{model="qwen",result="used"}': 1}, "calls"),
        # A refusal was never sent, so it has no tokens after.
        (event("refused", summary_calls=0), {f"window_fill_ratio_count{MODEL}": 1}, "prompt_after|summary"),
        (event("prepared"), {'ahead_total{model="qwen",result="prepared"}': 1}, "compactions|window_fill"),
        (ALARM, {'truncation_alarms_total{model="qwen",reason="prompt_far_below_count"}': 1}, "compactions"),
        (CUT, {'restarts_total{model="qwen",outcome="attempts"}': 1}, "compactions|restarted"),
    ],
)
def test_each_event_is_counted_by_what_it_is(told_of: Any, expected: dict[str, float], absent: str) -> None:
    """By model, phase and outcome; what is no decision about a prompt by itself."""
    shown = counted(told_of)
    assert {name: shown.get(name) for name in expected} == {name: pytest.approx(n) for name, n in expected.items()}
    assert [name for name in shown if re.search(absent, name)] == []


def test_restarts_are_counted_for_a_bounded_number_of_models() -> None:
    """A client's invented names must not fill the registry; a module that is loaded twice counts on."""
    library = Library()
    for _ in range(2):
        metrics = Metrics(lambda: library)
        for number in range(MAX_MODELS + 50):
            metrics.observe(replace(CUT, outcome="restarted", model=f"model {number}"))
    shown = {name: value for name, value in library.shown().items() if name.startswith("restarts_total")}
    assert len(shown) == MAX_MODELS + 1
    assert sum(shown.values()) == 2 * (MAX_MODELS + 50)


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
