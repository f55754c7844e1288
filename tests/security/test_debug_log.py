"""Threat: a log or a metric that tells. Our lines, also at DEBUG, and our labels hold no word of a conversation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.bench import Bench, is_summary_call
from tests.integration.plain_server import PlainServer
from tests.lmstudio_double import Reply
from tests.security.office import GUARDED, ROUTES, ask, body_of, conversation, forget_failures, honest, seen, words_of


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Our lines at DEBUG, tracebacks included; they go to no other logger while an application is open."""
    ours = logging.getLogger("litellm_compaction")
    with caplog.at_level(logging.DEBUG, ours.name):
        ours.addHandler(caplog.handler)
        yield caplog
        ours.removeHandler(caplog.handler)


def _fails(error: type[Exception]) -> Callable[..., Any]:
    async def fail(*given: Any, **named: Any) -> Any:
        raise error(f"cannot do {given} {named}")

    return fail


# What goes wrong, by the name of what fails and quotes what it was given.
_FAILING: dict[str, tuple[str, type[Exception]]] = {
    "the store finds": ("litellm_compaction.stores.store.Store.find", OSError),
    "the store keeps": ("litellm_compaction.stores.store.Store.put", OSError),
    "a summary": ("litellm_compaction.proxy.internal.Caller.ask", RuntimeError),
    "the measure": ("litellm_compaction.engine.measure.RequestMeasurer.measure", KeyError),
    "the compactor": ("litellm_compaction.engine.compactor.Compactor.prepare", KeyError),
}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["nothing", "the server quotes", *_FAILING])
def test_no_line_of_ours_tells_what_was_said(
    office: Bench, liar: PlainServer, trouble: str, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    """At DEBUG, whatever goes wrong and whatever its error quotes, on every route and by each carrier."""
    groups = ("leaky", "leaky-hooked") if trouble == "the server quotes" else GUARDED[:3:2]
    for group in GUARDED:
        office.watch(group, seen)
    liar.says = lambda body: (400, {"error": {"message": f"reached context length of 900 tokens: {body}"}})
    if trouble in _FAILING:
        place, error = _FAILING[trouble]
        monkeypatch.setattr(place, _fails(error))
    for group in groups:
        for path in ROUTES:
            for rounds in (4, 20, 60):
                canary = f"{trouble.replace(' ', '-')}-{ROUTES.index(path)}-{rounds}"
                ask(office, "sk-alice", body_of(group, conversation(canary, rounds), path), path)
    liar.says = honest
    if trouble in ("the measure", "the compactor"):
        # What nobody has counted passes.
        for group in GUARDED:
            office.forgive(group)
    forget_failures(office)
    # The handler is the root's, too, which has LiteLLM's lines.
    lines = [told.handler.format(record) for record in told.records if record.name.startswith("litellm_compaction")]
    assert len(lines) >= 4, "nothing is told of these requests any more"
    assert words_of(lines) == set()


def test_no_label_of_a_metric_is_what_a_client_chose(office: Bench) -> None:
    """Keys, users, ids, tags, texts: labels are the operator's groups and our own words, whoever asks for what."""
    registry = pytest.importorskip("prometheus_client").REGISTRY
    chosen = dict.fromkeys(("user", "litellm_session_id", "safety_identifier", "service_tier"), "planted")
    tagged = {"tags": ["planted"], "stop": ["planted"], "metadata": {"tags": ["planted"], "model_group": "planted"}}
    names = ("x-litellm-tags", "x-litellm-end-user-id", "user-agent", "x-litellm-call-id")
    for group in GUARDED:
        office.watch(group, lambda call: Reply("planted") if is_summary_call(call.body) else None)
        for rounds in (4, 20, 60):
            body = body_of(group, conversation("planted", rounds), **chosen, **tagged)
            ask(office, "sk-nobody.planted", body, **dict.fromkeys(names, "planted"))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    labels = {
        value for each in samples if each.name.startswith("litellm_compaction_") for value in each.labels.values()
    }
    assert set(GUARDED) <= labels
    assert [label for label in labels if "planted" in label] == []
