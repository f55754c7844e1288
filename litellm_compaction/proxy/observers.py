"""Counts the engine's events for Prometheus, numbers and names only, and keeps them in the store.

No request is held up for either. LiteLLM serves the library's default registry at `/metrics` when its `prometheus`
callback is on. A missing library, or a name that is taken, is never an error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from litellm_compaction.concurrency import Tasks
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import (
    AHEAD,
    USED_AHEAD,
    USED_EARLY,
    ContinuationEvent,
    Event,
    TruncationAlarm,
    event_to_json,
)
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")
# Lines that may wait for a slow disk; beyond that the oldest are not kept.
_MAX_WAITING = 1000
# Of further models' names.
MAX_MODELS, OTHER = 200, "other"
_TOKENS = tuple(float(1024 * 2**power) for power in range(11))
_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25, 1.5, 2.0, 4.0)
_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


# By the name that follows `litellm_compaction_`: the text, the labels behind the model's, and a histogram's buckets.
_METRICS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "compactions_total": ("Decisions about prompts above the trigger.", ("phase", "outcome"), ()),
    "prompt_before_tokens": ("Estimated prompts above the trigger, as they came.", (), _TOKENS),
    "prompt_after_tokens": ("The same prompts, as they were sent.", (), _TOKENS),
    "window_fill_ratio": ("Prompts above the trigger, as a share of the window.", (), _RATIOS),
    "summary_calls_total": ("Summary jobs of the pruning model.", (), ()),
    "summary_duration_seconds": ("In which the pruning model was asked for a compaction.", (), _SECONDS),
    "ahead_total": ("Records written before they were needed: prepared, used or given_up.", ("result",), ()),
    "restarts_total": ("Answers at the limit: restarted, or cut: attempts, aborted, unanswered.", ("outcome",), ()),
    "truncation_alarms_total": ("Replies whose usage says that the server cut the prompt.", ("reason",), ()),
}


def _additions(event: Event) -> Iterator[tuple[Any, ...]]:
    """An event's additions: a metric's name, the addition to a counter or the value for a histogram, and labels."""
    if isinstance(event, TruncationAlarm):
        yield "truncation_alarms_total", 1, event.reason
    elif isinstance(event, ContinuationEvent):
        yield "restarts_total", 1, event.outcome
    else:
        if event.summary_calls:
            yield "summary_calls_total", event.summary_calls
            yield "summary_duration_seconds", event.summary_ms / 1000
        is_ahead = event.outcome in AHEAD
        if is_ahead or event.reason in (USED_AHEAD, USED_EARLY):
            yield "ahead_total", 1, event.outcome if is_ahead else "used"
        if is_ahead:
            return
        yield "compactions_total", 1, event.phase, event.outcome
        yield "window_fill_ratio", event.filled_percent / 100
        if event.outcome != "refused":
            yield "prompt_before_tokens", event.tokens_before
            yield "prompt_after_tokens", event.tokens_after


class Metrics:
    """Never raises: a request is worth more than its metric (P8).

    The instruments are made at the first event: only then is it certain that LiteLLM has set up.
    """

    def __init__(self, load: Callable[[], Any] = lambda: import_module("prometheus_client")) -> None:
        self._load = load
        self._instruments: dict[str, Any] | None = None
        self._models: set[str] = set()

    def observe(self, event: Event) -> None:
        try:
            if self._instruments is None:
                # Tried once.
                self._instruments = {}
                self._instruments = _instruments(self._load())
            # Wildcard deployments get model names from clients.
            model = event.model if event.model in self._models or len(self._models) < MAX_MODELS else OTHER
            self._models.add(model)
            for name, value, *labels in _additions(event) if self._instruments else ():
                instrument = self._instruments[name].labels(model, *labels)
                (instrument.observe if _METRICS[name][2] else instrument.inc)(value)
        except Exception as error:  # noqa: BLE001 - see the class
            logger.debug("metrics error=%s", type(error).__name__)


@lru_cache
def _instruments(library: Any) -> dict[str, Any]:
    """Made once: a handler that is loaded anew counts on."""
    made = dict[str, Any]()
    for name, (text, labels, buckets) in _METRICS.items():
        make = partial(library.Histogram, buckets=buckets) if buckets else library.Counter
        made[name] = make(f"litellm_compaction_{name}", text, ("model", *labels))
    return made


class History:
    """Writes events to `store` in the background, for `litellm-compaction events` and the page; says a failure once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[Event] = deque(maxlen=_MAX_WAITING)
        self.writing = Tasks()
        self._warn_once = lru_cache(logger.warning)

    def __call__(self, event: Event) -> None:
        # The compaction of a restart is an event of its own.
        if not (isinstance(event, ContinuationEvent) and event.outcome == "restarted"):
            self._waiting.append(event)
            # One that has just ended stands there until the loop's next step.
            if all(task.done() for task in self.writing):
                self.writing.begin(self._write())

    async def _write(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            try:
                await self._store.add_event(event.when_s, event_to_json(event))
            except Exception as error:  # noqa: BLE001 - nothing that is only told may harm a request
                said = str(error) if isinstance(error, CompactionError) else type(error).__name__
                self._warn_once("history_failed %s; this is said once", said)
