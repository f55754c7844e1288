"""What the page is made of: whose events, which states, which models to be warned of."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.config import LIVE, Settings, settings_from
from litellm_compaction.errors import CompactionError, ModelNotLoaded, WindowUnknown
from litellm_compaction.events import CompactionEvent, event_to_json
from litellm_compaction.proxy.live_settings import Change, Known, Overlay
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.data import _state, events_for, fields_for, refused_value, useless_models
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.windows.windows import Target
from tests.stores.made import MemoryStore


def test_a_model_whose_summaries_say_nothing_is_named() -> None:
    """With what to set; by its newest summaries, which come first."""
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    known |= {"tokens_before": 9, "tokens_after": 1, "summary_calls": 1, "pruning_model": "weak-135m"}
    good = [CompactionEvent(outcome="compacted", **known)] * 6
    bad = [CompactionEvent(outcome="fallback", reason="loop", **known)] * 6
    (notice,) = useless_models([*bad, *good])
    assert notice.kind == "note"
    assert "weak-135m: 6 of 6" in notice.text
    assert "max_summary_calls: 0" in notice.text
    assert useless_models([*good, *bad]) == []


@pytest.mark.slow
async def test_a_tenant_s_events_are_found_behind_thousands_of_others() -> None:
    """However many others have written since; only its own, the newest first, as many as are shown."""
    store = MemoryStore(ttl_s=100, max_bytes=1_000_000)
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    for number in range(6000):
        tenant = "anna" if number < 300 else "bert"
        event = CompactionEvent(outcome="compacted", tokens_before=number, tokens_after=1, tenant=tenant, **known)
        await store.add_event(time.time(), event_to_json(event))
    found = await events_for(store, Visitor(role="internal_user", tenant="anna", auth=None))
    assert [event.tokens_before for event in found if isinstance(event, CompactionEvent)] == [*range(299, 99, -1)]
    assert await events_for(store, Visitor(role="", tenant="an", auth=None)) == []
    everything = await events_for(store, Visitor(role="proxy_admin", tenant="carl", auth=None))
    assert [event.tenant for event in everything] == ["bert"] * 200


_TARGET = Target(key="1|m", model="m", api_base="http://10.0.0.7/v1", api_key=None, context_length=None)


@pytest.mark.parametrize(
    ("absence", "model", "said"),
    [
        (ModelNotLoaded("m"), "m", "not loaded yet"),
        (None, "m", "its server does not answer"),
        (None, "*", "of the model that is asked for"),
    ],
)
def test_a_window_that_is_not_there_is_said_in_words(absence: CompactionError | None, model: str, said: str) -> None:
    """To everybody alike."""
    report = DeploymentReport(target=replace(_TARGET, model=model), carrier="hooks", absence=absence)
    for role in ("proxy_admin", ""):
        assert _state(report, Visitor(role=role, tenant="t", auth=None)) == said


def test_why_nobody_knows_a_window_is_not_everybodys_business() -> None:
    """The error names the server; only who sees all is told."""
    report = DeploymentReport(target=_TARGET, carrier="hooks", absence=WindowUnknown("m", tried="10.0.0.7 says no"))
    assert "10.0.0.7" in _state(report, Visitor(role="proxy_admin", tenant="t", auth=None))
    assert _state(report, Visitor(role="internal_user", tenant="t", auth=None)) == "not known"


def test_every_setting_that_can_be_changed_has_a_field() -> None:
    """With what is in force, what was entered in its place, and what is wrong with that."""
    settings = Settings(strategy="prune")
    change = Change(value="prune", when_s=0.0, role="proxy_admin")
    known = Known("{}", Overlay({"strategy": change}), settings)
    entered, problems = {"target_ratio": "many"}, {"target_ratio": "no number"}
    made = fields_for(Settings(), known, {"small": "qwen3"}, entered=entered, problems=problems)
    shown = {field.key: field for field in made}
    assert list(shown) == list(LIVE)
    assert shown["strategy"].value == "prune"
    assert shown["strategy"].change == change
    assert (shown["target_ratio"].value, shown["target_ratio"].problem) == ("many", "no number")
    assert "small" in str(shown["pruning_model"].options)


def test_a_field_says_if_config_yaml_has_its_value() -> None:
    """Its default otherwise, also if both are the same."""
    configured = settings_from({"mode": "guard"})
    made = fields_for(configured, Known("{}", Overlay(), configured), {}, entered={}, problems={})
    assert [field.key for field in made if field.is_configured] == ["mode"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("target_ratio", "35", "Compact down to: “35” is not a share (above 0, below 1; 35 % is 0.35)."),
        (
            "reasoning_budget_ratio",
            "-1",
            "End a thought at: “-1” is not a share (at least 0, at most 1; 35 % is 0.35).",
        ),
        ("mode", "on", "Mode: “on” is not one of guard, observe, off."),
        ("pruning_model", "", "Pruning model: “” is not a model of this proxy."),
    ],
)
def test_a_refused_value_is_told_as_the_form_names_it(key: str, value: str, said: str) -> None:
    """With its unit and range."""
    assert refused_value(key, value) == said
