"""What follows the end of a leg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from litellm_compaction.proxy.answer.legs import MAX_CUTS, RESTARTS, End, Ended, State, Step, next_leg

ENDS = get_args(End)
CUT = ("limit", "overthought", "spent", "called_back", "overflow")
FRESH = State(ways=frozenset(), restarts_left=3)


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (Ended("done"), "deliver"),
        (Ended("failed"), "fail"),
        (Ended("failed", is_way_refused=True), "other_way"),
        (Ended("overflow", is_full=True), "pressed"),
        (Ended("overflow", is_delivered=False), "harder"),
        (Ended("overflow", has_whole_calls=True), "calls"),
        (Ended("limit"), "compacted"),
        (Ended("limit", has_whole_calls=True), "calls"),
        (Ended("overthought", is_delivered=False), "relaxed"),
        (Ended("called_back", is_delivered=False), "anew"),
        (Ended("called_back"), "resumed"),
        (Ended("spent", is_delivered=False), "anew"),
        (Ended("spent", has_whole_calls=True), "calls"),
        (Ended("done", only_recalls=True), "look_up"),
        (Ended("done", only_recalls=True, is_used_up=True), "used_up"),
        (Ended("limit", is_used_up=True), "used_up"),
        (Ended("done", is_used_up=True), "deliver"),
        (Ended("limit", is_used_up=True, has_whole_calls=True), "calls"),
    ],
)
def test_each_end_has_one_step(found: Ended, step: Step) -> None:
    assert next_leg(found, FRESH) == step


def test_what_an_answer_has_used_up_is_not_done_again() -> None:
    """It is compacted harder once, and a model that calls for more than it may look up has ended its answer."""
    assert next_leg(Ended("overflow", is_delivered=False), replace(FRESH, has_retried=True)) == "fail"
    assert next_leg(Ended("done", only_recalls=True), replace(FRESH, may_look_up=False)) == "deliver"


@pytest.mark.parametrize("end", CUT)
@pytest.mark.parametrize("has_whole_calls", [False, True])
def test_what_a_client_has_is_never_asked_for_again(end: End, has_whole_calls: bool) -> None:
    """Neither compacted harder nor repeated: it would read the beginning twice."""
    step = next_leg(Ended(end, has_whole_calls=has_whole_calls), FRESH)
    assert step in (("calls",) if has_whole_calls else RESTARTS)


@pytest.mark.parametrize("end", ENDS)
def test_a_refused_way_gives_way_to_another(end: End) -> None:
    assert next_leg(Ended(end, is_way_refused=True), FRESH) == "other_way"


@pytest.mark.parametrize(
    ("found", "changes", "step"),
    [
        (Ended("limit"), {}, "compacted"),
        (Ended("limit", is_full=True), {}, "pressed"),
        (Ended("overthought", is_full=True), {}, "relaxed"),
        (Ended("spent"), {}, "resumed"),
        (Ended("spent"), {"restarts_left": 0}, "resumed"),
        (Ended("spent"), {"cuts": MAX_CUTS}, "compacted"),
        (Ended("spent"), {"cuts": MAX_CUTS, "restarts_left": 0}, "close"),
        (Ended("called_back", is_stuck=True), {}, "close"),
        (Ended("limit"), {"restarts_left": 0}, "close"),
        (Ended("limit"), {"has_gained": False}, "close"),
        (Ended("limit", is_thoughts=True), {}, "compacted"),
        (Ended("limit", is_thoughts=True), {"is_closing": True}, "close"),
        (Ended("overthought", is_thoughts=True), {"is_closing": True}, "close"),
    ],
)
def test_a_stop_has_to_lead_on(found: Ended, changes: dict[str, Any], step: Step) -> None:
    """For others as it is, but not without end; thoughts are closed once, and a compaction has to gain room."""
    assert next_leg(found, replace(FRESH, **changes)) == step
