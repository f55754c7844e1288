"""Compactions in LiteLLM's traces: what they tell, of which request, and no trouble where LiteLLM traces nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from litellm_compaction.events import AHEAD, ContinuationEvent
from litellm_compaction.proxy.metrics import add_to_trace, note_request_span
from tests.test_events import event


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


def test_an_event_tells_nothing_of_whose_request_it_was() -> None:
    """Only names, words of our own, and numbers; and nothing that is not known."""
    ((_, attributes, _),) = told(event(tenant="fingerprint"))
    assert "fingerprint" not in attributes.values()
    assert "litellm_compaction.reason" not in attributes
    assert all(isinstance(value, str | int | float) for value in attributes.values())


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


def test_a_failure_never_harms_the_request() -> None:
    """Whatever LiteLLM puts in the place of a span."""

    async def serve() -> None:
        note_request_span(request(object()))
        add_to_trace(event())

    asyncio.run(serve())
