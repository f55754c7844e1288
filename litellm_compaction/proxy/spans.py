"""OpenTelemetry spans beside LiteLLM's own: an observer of events, where LiteLLM's `otel` callback is on.

LiteLLM begins a span for each request and hands it to the hooks (`UserAPIKeyAuth.parent_otel_span`, 1.106.2 and
1.109.1); each decision about a prompt above the trigger becomes a span below it, made by LiteLLM's own tracer, so that
it goes where LiteLLM's go. Only `opentelemetry-api` is used, where it is installed. Numbers and names only; a failure
is never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from litellm_compaction.events import AHEAD, CompactionEvent, Event
from litellm_compaction.proxy.litellm_api import open_telemetry_tracer

logger = logging.getLogger("litellm_compaction")

NAME = "litellm_compaction"
# The fields of an event that say something of its request; the rest is for the history.
_ATTRIBUTES = (
    *("outcome", "phase", "model", "strategy", "rung", "reason", "pruning_model", "compaction_id"),
    *("window_tokens", "window_source", "tokens_before", "tokens_after", "covered_messages", "round"),
    *("summary_calls", "summary_ms"),
)
_TROUBLE = frozenset(("refused", "failed_open"))
# Of the request whose task this is. What the request begins inherits it: restarts inside its stream, too.
_request_span: ContextVar[object] = ContextVar("litellm_compaction_request_span", default=None)


def note_request_span(user_api_key_dict: object) -> None:
    """Notes LiteLLM's span of the request that this task serves; none where LiteLLM has none."""
    _request_span.set(getattr(user_api_key_dict, "parent_otel_span", None))


class Spans:
    """Makes a span of each compaction.

    Args:
        tracer: gives LiteLLM's own; None where it has none.
        load: gives the module `opentelemetry.trace`; raises ImportError where there is none.
    """

    def __init__(
        self,
        tracer: Callable[[], Any] = open_telemetry_tracer,
        load: Callable[[], Any] = lambda: import_module("opentelemetry.trace"),
    ) -> None:
        self._tracer = tracer
        self._load = load

    def observe(self, event: Event) -> None:
        """Tells of one event; never raises."""
        if not isinstance(event, CompactionEvent):
            # What a restart compacted is an event of its own.
            return
        try:
            tracer = self._tracer()
            if tracer is not None:
                _tell(tracer, self._load(), event)
        except Exception as error:  # noqa: BLE001 - a request is worth more than its span (P8)
            logger.debug("spans error=%s", type(error).__name__)


def _tell(tracer: Any, trace: Any, event: CompactionEvent) -> None:
    # What is written ahead belongs to no request, whichever has begun the task.
    parent = trace.INVALID_SPAN if event.outcome in AHEAD else _request_span.get()
    ended_ns = round(event.when_s * 1e9)
    span = tracer.start_span(
        f"{NAME} {event.outcome}",
        context=None if parent is None else trace.set_span_in_context(parent),
        start_time=ended_ns - round(event.duration_ms * 1e6),
        attributes={f"{NAME}.{name}": value for name in _ATTRIBUTES if (value := getattr(event, name)) != ""},
    )
    if event.outcome in _TROUBLE:
        span.set_status(trace.Status(trace.StatusCode.ERROR, event.reason or event.outcome))
    span.end(end_time=ended_ns)
