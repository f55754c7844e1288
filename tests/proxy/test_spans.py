"""Compactions as spans: what they tell, below which request, and no trouble where LiteLLM or the library has none."""

from __future__ import annotations

import asyncio
import itertools
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from litellm_compaction.events import AHEAD, CarryEvent
from litellm_compaction.proxy.litellm_api import open_telemetry_tracer
from litellm_compaction.proxy.spans import NAME, Spans, note_request_span
from tests.security.hooks import Client, Scene, conversation, use_router
from tests.test_events import event

trace = pytest.importorskip("opentelemetry.trace")


@dataclass
class Span:
    """As LiteLLM's exporter would get it."""

    name: str
    parent: int
    start_time: int
    attributes: dict[str, Any]
    status: Any = None
    end_time: int = 0

    def set_status(self, status: Any) -> None:
        self.status = status

    def end(self, end_time: int) -> None:
        self.end_time = end_time


@dataclass
class Tracer:
    """Keeps spans; a parent is known by its number, 0 for none."""

    spans: list[Span] = field(default_factory=list)

    def start_span(self, name: str, context: Any, start_time: int, attributes: dict[str, Any]) -> Span:
        parent = trace.get_current_span(context).get_span_context().span_id
        self.spans.append(Span(name, parent, start_time, attributes))
        return self.spans[-1]


def request(number: int) -> Any:
    """What LiteLLM's authentication knows of a request whose span has a number."""
    context = trace.SpanContext(trace_id=7, span_id=number, is_remote=False)
    return SimpleNamespace(parent_otel_span=trace.NonRecordingSpan(context))


def observed(*events: Any, of: Any = None) -> list[Span]:
    """The spans of events in a task that serves a request."""
    tracer = Tracer()

    async def serve() -> None:
        note_request_span(of)
        for each in events:
            Spans(lambda: tracer).observe(each)

    asyncio.run(serve())
    return tracer.spans


def test_a_compaction_is_a_span_below_its_request() -> None:
    """Of the time it took, with what was decided, in numbers."""
    (span,) = observed(event(when_s=1000.0), of=request(5))
    assert (span.name, span.parent) == ("litellm_compaction compacted", 5)
    assert (span.start_time, span.end_time) == (998_765_500_000, 1_000_000_000_000)
    assert (
        span.attributes.items()
        >= {
            f"{NAME}.outcome": "compacted",
            f"{NAME}.strategy": "summary",
            f"{NAME}.model": "qwen",
            f"{NAME}.tokens_before": 7000,
            f"{NAME}.tokens_after": 3000,
        }.items()
    )
    assert span.status is None


def test_a_span_tells_nothing_of_whose_request_it_was() -> None:
    """Only what an event has for logs: names, words of our own, and numbers; and nothing that is not known."""
    (span,) = observed(event(tenant="fingerprint"))
    assert "fingerprint" not in span.attributes.values()
    assert f"{NAME}.reason" not in span.attributes
    assert all(isinstance(value, str | int | float) for value in span.attributes.values())


def test_a_refusal_is_an_error_of_its_span() -> None:
    """And says why where there is a word for it."""
    refused, failed = observed(event("refused", reason="required"), event("failed_open"))
    assert (refused.status.status_code, refused.status.description) == (trace.StatusCode.ERROR, "required")
    assert failed.status.description == "failed_open"


@pytest.mark.parametrize("outcome", sorted(AHEAD))
def test_what_is_written_ahead_belongs_to_no_request(outcome: Any) -> None:
    """Though a request has begun the task in which it is written."""
    (span,) = observed(event(outcome), of=request(5))
    assert span.parent == 0


def test_a_request_without_a_span_has_none_of_another_request() -> None:
    """A task that serves one request after the other tells each of its own."""
    tracer = Tracer()

    async def serve() -> None:
        for each in (request(5), SimpleNamespace(), None):
            note_request_span(each)
            Spans(lambda: tracer).observe(event())

    asyncio.run(serve())
    assert [span.parent for span in tracer.spans] == [5, 0, 0]


def test_a_restart_is_told_once() -> None:
    """By the compaction that it brings."""
    carried = CarryEvent(
        outcome="restarted", model="qwen", window_tokens=1, attempt=1, attempts=3, tokens_before=1, tokens_after=1
    )
    assert observed(carried) == []


def test_nothing_is_loaded_where_litellm_traces_nothing() -> None:
    """LiteLLM's `otel` callback is off by default."""

    def load() -> Any:
        raise AssertionError("loaded")

    Spans(lambda: None, load).observe(event())


@pytest.mark.parametrize("error", [ImportError("no module"), AttributeError("renamed"), RuntimeError("exporter")])
def test_a_failure_never_harms_the_request(error: Exception) -> None:
    """Neither a missing library nor a tracer that fails."""

    def load() -> Any:
        raise error

    Spans(Tracer, load).observe(event())
    Spans(lambda: object()).observe(event())


def test_the_tracer_is_that_of_litellms_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one that the proxy has registered; none before that, and none where it has another shape."""
    server: Any = ModuleType("litellm.proxy.proxy_server")
    monkeypatch.setitem(sys.modules, "litellm.proxy.proxy_server", server)
    assert open_telemetry_tracer() is None
    server.open_telemetry_logger = None
    assert open_telemetry_tracer() is None
    server.open_telemetry_logger = object()
    assert open_telemetry_tracer() is None
    server.open_telemetry_logger = SimpleNamespace(tracer="it")
    assert open_telemetry_tracer() == "it"


@pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")
async def test_requests_at_the_same_time_have_their_own_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By either carrier, streamed or not; and no span holds a word of a conversation."""
    tracer = Tracer()
    server: Any = ModuleType("litellm.proxy.proxy_server")
    server.open_telemetry_logger = SimpleNamespace(tracer=tracer)
    scene, clients = Scene(), []
    use_router(monkeypatch, scene.router)
    for number, (group, stream) in enumerate(itertools.product(("carried", "hooked"), (False, True))):
        client = Client(
            scene,
            f"sk-key-only.{number}",
            conversation(f"c{number}", 6),
            f"call-{number}",
            attempts=(group,),
            stream=stream,
        )
        client.auth = request(100 + number)
        clients.append(client)
    monkeypatch.setattr("litellm_compaction.proxy.litellm_api._PROXY", "fake.proxy_server")
    monkeypatch.setitem(sys.modules, "fake.proxy_server", server)
    await asyncio.gather(*(asyncio.create_task(client.send()) for client in clients))
    assert [client.error for client in clients] == [None] * 4
    assert sorted(span.parent for span in tracer.spans) == [100, 101, 102, 103]
    assert "CANARY" not in repr(tracer.spans)
