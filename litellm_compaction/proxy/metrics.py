"""Prometheus metrics beside LiteLLM's own, and events in its traces: observers of the engine's decisions.

LiteLLM serves the library's default registry at `/metrics` when its `prometheus` callback is on (integrations/
prometheus.py, 1.106.2), and begins a span for each request when its `otel` callback is (1.106.2 and 1.109.1). Numbers
and names only; a missing library, or a name that is taken, is never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

from litellm_compaction.events import (
    AHEAD,
    USED_AHEAD,
    USED_EARLY,
    CompactionEvent,
    ContinuationEvent,
    Event,
    TruncationAlarm,
)

logger = logging.getLogger("litellm_compaction")

# Wildcard deployments get model names from clients; every further one counts as `OTHER`.
MAX_MODELS = 200
OTHER = "other"

_TOKEN_BUCKETS = tuple(float(1024 * 2**power) for power in range(11))
_RATIO_BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25, 1.5, 2.0, 4.0)
_SECOND_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


# The fields of an event that describe its request; the rest is for the history.
_ATTRIBUTES = (
    *("outcome", "phase", "model", "strategy", "rung", "reason", "pruning_model", "compaction_id"),
    *("window_tokens", "window_source", "tokens_before", "tokens_after", "covered_messages", "round"),
    *("summary_calls", "summary_ms", "duration_ms"),
)
# Of the request whose task this is. Tasks that it begins inherit it: restarts inside its stream, too.
_request_span: ContextVar[Any] = ContextVar("litellm_compaction_request_span", default=None)


class _Kind(NamedTuple):
    """A histogram if it has buckets, else a counter."""

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
# Of this process, over all its contexts; what they show is there without an event.
_GAUGES = {
    "room_answers": "Answers that run, or that wait for room in a context that several share.",
    "room_tokens": "Tokens that answers hold of the contexts that they share.",
}


class Metrics:
    """Counts events. The instruments are made at the first one: only then is it certain that LiteLLM has set up."""

    def __init__(self, load: Callable[[], Any] = lambda: import_module("prometheus_client")) -> None:
        self._load = load
        self._is_loaded = False
        self._instruments: dict[str, Any] | None = None
        self._models: set[str] = set()

    def show_held(self, held: Callable[[], tuple[int, int]]) -> None:
        """Has the answers and tokens that are held now shown at each look; never raises."""

        def shown(place: int) -> Callable[[], float]:
            return lambda: held()[place]

        def gauge(text: str) -> Callable[[str], Any]:
            return lambda name: library.Gauge(name, text)

        try:
            library = self._load()
            for place, (name, text) in enumerate(_GAUGES.items()):
                _named(library, name, gauge(text)).set_function(shown(place))
        except Exception as error:  # noqa: BLE001 - the proxy serves without its metrics (P8)
            logger.debug("metrics error=%s", type(error).__name__)

    def observe(self, event: Event) -> None:
        """Never raises."""
        self._safely(lambda instruments: self._count(instruments, event))

    def restarted(self, model: str, restarts: int) -> None:
        """Counts how often one answer was carried over the limit; never raises."""
        self._safely(lambda instruments: instruments["restarts_total"].labels(self._known(model)).inc(restarts))

    def _safely(self, count: Callable[[dict[str, Any]], None]) -> None:
        try:
            instruments = self._loaded()
            if instruments is not None:
                count(instruments)
        except Exception as error:  # noqa: BLE001 - a request is worth more than its metric (P8)
            logger.debug("metrics error=%s", type(error).__name__)

    def _count(self, instruments: dict[str, Any], event: Event) -> None:
        model = self._known(event.model)
        if isinstance(event, TruncationAlarm):
            instruments["truncation_alarms_total"].labels(model, event.reason).inc()
        elif isinstance(event, ContinuationEvent):
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

    def _loaded(self) -> dict[str, Any] | None:
        if not self._is_loaded:
            self._is_loaded = True
            try:
                library = self._load()
                self._instruments = {name: _registered(library, name, kind) for name, kind in _KINDS.items()}
            except ImportError:
                logger.debug("metrics off: prometheus_client is not installed")
        return self._instruments


def _count_compaction(instruments: dict[str, Any], event: CompactionEvent, model: str) -> None:
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
    if kind.buckets:
        return _named(library, name, lambda full: library.Histogram(full, kind.text, kind.labels, buckets=kind.buckets))
    return _named(library, name, lambda full: library.Counter(full, kind.text, kind.labels))


def _named(library: Any, name: str, make: Callable[[str], Any]) -> Any:
    """A new instrument, or the one that has this name already: the module may be loaded twice in one process.

    Raises:
        ValueError: another instrument, which the library does not show, has the name.
    """
    full_name = f"litellm_compaction_{name}"
    try:
        return make(full_name)
    except ValueError:
        found = getattr(library.REGISTRY, "_names_to_collectors", {}).get(full_name)
        if found is None:
            raise
        return found


def note_request_span(user_api_key_dict: object) -> None:
    """Notes LiteLLM's span of the request that this task serves; none if LiteLLM traces nothing."""
    _request_span.set(getattr(user_api_key_dict, "parent_otel_span", None))


def add_to_trace(event: Event) -> None:
    """Adds a decision to LiteLLM's span of its request; never raises."""
    span = _request_span.get()
    # A restart is told by its compaction. A record that is written ahead belongs to no request.
    if span is None or not isinstance(event, CompactionEvent) or event.outcome in AHEAD:
        return
    attributes = {f"litellm_compaction.{name}": found for name in _ATTRIBUTES if (found := getattr(event, name)) != ""}
    try:
        span.add_event(f"litellm_compaction {event.outcome}", attributes, round(event.when_s * 1e9))
    except Exception as error:  # noqa: BLE001 - a request is worth more than its trace (P8)
        logger.debug("trace error=%s", type(error).__name__)
