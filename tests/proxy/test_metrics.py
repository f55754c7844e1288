"""Events as Prometheus metrics: what is counted, bounded labels, and no trouble where the library is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from litellm_compaction.events import AHEAD, ContinuationEvent, TruncationAlarm
from litellm_compaction.proxy.metrics import Metrics, add_to_trace, note_request_span
from tests.test_events import event

ALARM = TruncationAlarm(
    model="qwen", window_tokens=8192, expected_tokens=9000, reported_tokens=5000, reason="prompt_far_below_count"
)


class Series:
    """One labelled counter or histogram."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def inc(self, amount: float = 1) -> None:
        self.values.append(amount)

    def observe(self, value: float) -> None:
        self.values.append(value)


@dataclass
class FakeLibrary:
    """As much of prometheus_client as is used: instruments by name, and a registry that refuses a name twice."""

    made: dict[str, dict[tuple[str, ...], Series]] = field(default_factory=dict)
    hides_names: bool = False
    looks: dict[str, Callable[[], float]] = field(default_factory=dict)

    @property
    def REGISTRY(self) -> Any:  # noqa: N802
        names = {name: self._instrument(name) for name in self.made}
        return SimpleNamespace() if self.hides_names else SimpleNamespace(_names_to_collectors=names)

    def Counter(self, name: str, text: str, labels: tuple[str, ...]) -> Any:  # noqa: N802
        assert name.endswith("_total")
        return self._make(name, text)

    def Histogram(self, name: str, text: str, labels: tuple[str, ...], *, buckets: tuple[float, ...]) -> Any:  # noqa: N802
        assert name.rpartition("_")[2] in ("tokens", "ratio", "seconds")
        assert list(buckets) == sorted(buckets)
        return self._make(name, text)

    def Gauge(self, name: str, text: str) -> Any:  # noqa: N802
        return self._make(name, text)

    def _make(self, name: str, text: str) -> Any:
        assert text.endswith(".")
        if name in self.made:
            raise ValueError("Duplicated timeseries in CollectorRegistry")
        self.made[name] = {}
        return self._instrument(name)

    def _instrument(self, name: str) -> Any:
        return SimpleNamespace(
            labels=lambda *values: self.made[name].setdefault(values, Series()),
            set_function=lambda look: self.looks.__setitem__(name, look),
        )

    def of(self, name: str) -> dict[tuple[str, ...], list[float]]:
        return {labels: series.values for labels, series in self.made[f"litellm_compaction_{name}"].items()}


def test_what_is_held_is_shown_at_each_look() -> None:
    """From the start, without an event; a module that is loaded twice shows the newer one's."""
    library, held = FakeLibrary(), [3, 700]
    Metrics(lambda: library).show_held(lambda: (9, 9))
    Metrics(lambda: library).show_held(lambda: (held[0], held[1]))
    assert {name: look() for name, look in library.looks.items()} == {
        "litellm_compaction_room_answers": 3,
        "litellm_compaction_room_tokens": 700,
    }
    held[0] = 0
    assert library.looks["litellm_compaction_room_answers"]() == 0


def test_a_compaction_is_counted() -> None:
    """By model, phase and outcome; its tokens, how full the window was, and what the summary took."""
    library = FakeLibrary()
    Metrics(lambda: library).observe(event())
    assert library.of("compactions_total") == {("qwen", "pre_request", "compacted"): [1]}
    assert library.of("prompt_before_tokens") == {("qwen",): [7000]}
    assert library.of("prompt_after_tokens") == {("qwen",): [3000]}
    assert library.of("summary_calls_total") == {("qwen",): [1]}
    assert library.of("summary_duration_seconds") == {("qwen",): [pytest.approx(1.2)]}
    assert library.of("window_fill_ratio") == {("qwen",): [pytest.approx(7000 / 8192)]}
    assert library.of("refusals_total") == {}


def test_a_refusal_an_alarm_and_restarts_are_counted() -> None:
    """A refusal was never sent, so it has no tokens after; the others have counters of their own."""
    library = FakeLibrary()
    metrics = Metrics(lambda: library)
    metrics.observe(event("refused", summary_calls=0))
    metrics.observe(ALARM)
    metrics.restarted("qwen", 2)
    assert library.of("refusals_total") == {("qwen",): [1]}
    assert library.of("prompt_after_tokens") == {}
    assert library.of("truncation_alarms_total") == {("qwen", "prompt_far_below_count"): [1]}
    assert library.of("restarts_total") == {("qwen",): [2]}


def test_what_is_no_decision_about_a_prompt_is_counted_by_itself() -> None:
    """Records that are written ahead, with what they cost among all summaries; answers that the window has cut."""
    library = FakeLibrary()
    metrics = Metrics(lambda: library)
    metrics.observe(event("prepared"))
    metrics.observe(event("given_up", summary_calls=0, reason="arrived"))
    metrics.observe(event("reused", summary_calls=0, reason="prepared"))
    sizes = {"window_tokens": 8192, "attempt": 0, "attempts": 3, "tokens_before": 8000, "tokens_after": 8000}
    for outcome in ("restarted", "attempts", "aborted"):
        metrics.observe(ContinuationEvent(outcome=outcome, model="qwen", **sizes))  # type: ignore[arg-type]
    ahead = {outcome: values for (_, outcome), values in library.of("ahead_total").items()}
    assert ahead == {"prepared": [1], "given_up": [1], "used": [1]}
    assert sum(map(len, library.of("compactions_total").values())) == 1
    assert sum(map(len, library.of("summary_duration_seconds").values())) == 1
    assert library.of("answers_ended_total") == {("qwen", "attempts"): [1], ("qwen", "aborted"): [1]}


def test_without_the_library_nothing_happens() -> None:
    """No error, and the import is tried once."""
    tried: list[int] = []

    def load() -> Any:
        tried.append(1)
        raise ImportError

    metrics = Metrics(load)
    for _ in range(3):
        metrics.observe(event())
        metrics.restarted("qwen", 1)
    assert tried == [1]


def test_a_name_that_somebody_else_has_is_no_error() -> None:
    """Then there are no metrics, and requests go on."""
    library = FakeLibrary(made={"litellm_compaction_compactions_total": {}}, hides_names=True)
    metrics = Metrics(lambda: library)
    for _ in range(2):
        metrics.observe(event())
    assert library.of("compactions_total") == {}


def test_the_real_library_takes_them() -> None:
    """Names, labels and buckets are valid for prometheus_client; its default registry shows them."""
    prometheus_client = pytest.importorskip("prometheus_client")
    for _ in range(2):
        Metrics().observe(event())
    text = prometheus_client.generate_latest().decode()
    labels = '{model="qwen",outcome="compacted",phase="pre_request"}'
    assert f"litellm_compaction_compactions_total{labels} 2.0" in text
    assert 'litellm_compaction_window_fill_ratio_bucket{le="0.9",model="qwen"} 2.0' in text


class Span:
    """LiteLLM's span of a request, as far as it is used."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any], int]] = []

    def add_event(self, name: str, attributes: dict[str, Any], timestamp: int) -> None:
        self.events.append((name, attributes, timestamp))


def request(span: Any) -> Any:
    """What LiteLLM's authentication knows of a request."""
    return SimpleNamespace(parent_otel_span=span)


def told(*events: Any) -> list[tuple[str, dict[str, Any], int]]:
    """What the span of a request gets in a task that serves it."""
    span = Span()

    async def serve() -> None:
        note_request_span(request(span))
        for each in events:
            add_to_trace(each)

    asyncio.run(serve())
    return span.events


def test_a_compaction_is_an_event_of_its_request() -> None:
    """With what was decided, and how long that took, in numbers."""
    ((name, attributes, time_ns),) = told(event(when_s=1000.0))
    assert (name, time_ns) == ("litellm_compaction compacted", 1_000_000_000_000)
    assert (
        attributes.items()
        >= {
            "litellm_compaction.outcome": "compacted",
            "litellm_compaction.strategy": "summary",
            "litellm_compaction.model": "qwen",
            "litellm_compaction.tokens_before": 7000,
            "litellm_compaction.tokens_after": 3000,
            "litellm_compaction.duration_ms": 1234.5,
        }.items()
    )


def test_what_belongs_to_no_request_or_is_told_already_is_left_out() -> None:
    """What is written ahead, though a request has begun its task; a restart, whose compaction is told."""
    continued = ContinuationEvent(
        outcome="restarted", model="qwen", window_tokens=1, attempt=1, attempts=3, tokens_before=1, tokens_after=1
    )
    assert told(*map(event, sorted(AHEAD)), continued) == []


def test_a_request_without_a_span_gets_none_of_another_request() -> None:
    """A task that serves one request after the other tells each of its own."""
    span = Span()

    async def serve() -> None:
        for each in (request(span), SimpleNamespace(), None):
            note_request_span(each)
            add_to_trace(event())

    asyncio.run(serve())
    assert len(span.events) == 1
