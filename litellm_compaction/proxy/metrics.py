"""Prometheus metrics beside LiteLLM's own: an observer of events, where `prometheus_client` is installed.

LiteLLM serves the library's default registry at `/metrics` when its `prometheus` callback is on (integrations/
prometheus.py, 1.106.2). Numbers and names only; a missing library, or a name that is taken, is never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from litellm_compaction.events import AHEAD, USED_AHEAD, USED_EARLY, CarryEvent, CompactionEvent, Event, TruncationAlarm

logger = logging.getLogger("litellm_compaction")

# Wildcard deployments get model names from clients; every further one counts as `OTHER`.
MAX_MODELS = 200
OTHER = "other"

_TOKEN_BUCKETS = tuple(float(1024 * 2**power) for power in range(11))
_RATIO_BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25, 1.5, 2.0, 4.0)
_SECOND_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class _Kind(NamedTuple):
    """What an instrument says, by which labels: a histogram where it has buckets, else a counter."""

    text: str
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()


# By the name that follows `litellm_compaction_`.
_KINDS = {
    "compactions_total": _Kind(
        "Decisions about prompts above the trigger, by phase and outcome.", ("model", "phase", "outcome")
    ),
    "prompt_before_tokens": _Kind("Estimated prompts above the trigger, as they came.", buckets=_TOKEN_BUCKETS),
    "prompt_after_tokens": _Kind("The same prompts, as they were sent.", buckets=_TOKEN_BUCKETS),
    "window_fill_ratio": _Kind("Prompts above the trigger, as a share of the window.", buckets=_RATIO_BUCKETS),
    "summary_calls_total": _Kind("Summary jobs of the pruning model."),
    "summary_duration_seconds": _Kind(
        "In which the pruning model was asked for a compaction.", buckets=_SECOND_BUCKETS
    ),
    "ahead_total": _Kind(
        "Records written before they were needed, by what became of them: prepared, used or given_up.",
        ("model", "result"),
    ),
    "restarts_total": _Kind("Running answers that were stopped, compacted and continued."),
    "answers_ended_total": _Kind(
        "Answers that the window has cut: attempts, aborted, or unanswered where the model only thought.",
        ("model", "outcome"),
    ),
    "truncation_alarms_total": _Kind("Replies whose usage says that the server cut the prompt.", ("model", "reason")),
    "refusals_total": _Kind("Requests refused because they cannot be made to fit."),
}

# The library's counters and histograms, by the same names.
_Instruments: TypeAlias = dict[str, Any]


class Metrics:
    """Counts events. The instruments are made at the first one: only then is it certain that LiteLLM has set up.

    Args:
        load: gives the module `prometheus_client`; raises ImportError where there is none.
    """

    def __init__(self, load: Callable[[], Any] = lambda: import_module("prometheus_client")) -> None:
        self._load = load
        self._is_loaded = False
        self._instruments: _Instruments | None = None
        self._models: set[str] = set()

    def observe(self, event: Event) -> None:
        """Counts one event; never raises."""
        self._safely(lambda instruments: self._count(instruments, event))

    def restarted(self, model: str, restarts: int) -> None:
        """Counts how often one answer was carried over the limit; never raises."""
        self._safely(lambda instruments: instruments["restarts_total"].labels(self._known(model)).inc(restarts))

    def _safely(self, count: Callable[[_Instruments], None]) -> None:
        try:
            instruments = self._loaded()
            if instruments is not None:
                count(instruments)
        except Exception as error:  # noqa: BLE001 - a request is worth more than its metric (P8)
            logger.debug("metrics error=%s", type(error).__name__)

    def _count(self, instruments: _Instruments, event: Event) -> None:
        model = self._known(event.model)
        if isinstance(event, TruncationAlarm):
            instruments["truncation_alarms_total"].labels(model, event.reason).inc()
        elif isinstance(event, CarryEvent):
            if event.outcome != "restarted":
                instruments["answers_ended_total"].labels(model, event.outcome).inc()
        else:
            _count_compaction(instruments, event, model)

    def _known(self, model: str) -> str:
        """The model as a label; a bounded number of them."""
        if model not in self._models:
            if len(self._models) >= MAX_MODELS:
                return OTHER
            self._models.add(model)
        return model

    def _loaded(self) -> _Instruments | None:
        if not self._is_loaded:
            self._is_loaded = True
            try:
                library = self._load()
                self._instruments = {name: _registered(library, name, kind) for name, kind in _KINDS.items()}
            except ImportError:
                logger.debug("metrics off: prometheus_client is not installed")
        return self._instruments


def _count_compaction(instruments: _Instruments, event: CompactionEvent, model: str) -> None:
    is_ahead = event.outcome in AHEAD
    if is_ahead or event.reason in (USED_AHEAD, USED_EARLY):
        instruments["ahead_total"].labels(model, event.outcome if is_ahead else "used").inc()
    if event.summary_calls:
        instruments["summary_calls_total"].labels(model).inc(event.summary_calls)
        instruments["summary_duration_seconds"].labels(model).observe(event.summary_ms / 1000)
    if is_ahead:
        return
    instruments["compactions_total"].labels(model, event.phase, event.outcome).inc()
    instruments["window_fill_ratio"].labels(model).observe(event.filled_percent / 100)
    if event.outcome == "refused":
        instruments["refusals_total"].labels(model).inc()
        return
    instruments["prompt_before_tokens"].labels(model).observe(event.tokens_before)
    instruments["prompt_after_tokens"].labels(model).observe(event.tokens_after)


def _registered(library: Any, name: str, kind: _Kind) -> Any:
    """A new instrument, or the one that has this name already: the module may be loaded twice in one process.

    Raises:
        ValueError: the name is taken, and the library does not show by what.
    """
    full_name = f"litellm_compaction_{name}"
    try:
        if kind.buckets:
            return library.Histogram(full_name, kind.text, kind.labels, buckets=kind.buckets)
        return library.Counter(full_name, kind.text, kind.labels)
    except ValueError:
        found = getattr(library.REGISTRY, "_names_to_collectors", {}).get(full_name)
        if found is None:
            raise
        return found
