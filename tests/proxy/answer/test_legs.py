"""What follows the end of a leg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.proxy.answer.legs import MAX_CUTS, Ended, State, Step, next_leg

FRESH = State(ways=frozenset(), restarts_left=3)


@pytest.mark.parametrize(
    ("ended", "changes", "step"),
    [
        (Ended("done"), {}, "deliver"),
        (Ended("done", is_used_up=True), {}, "deliver"),
        (Ended("done", only_recalls=True), {}, "look_up"),
        (Ended("done", only_recalls=True), {"may_look_up": False}, "deliver"),
        (Ended("done", only_recalls=True, is_used_up=True), {}, "used_up"),
        (Ended("failed"), {}, "fail"),
        (Ended("failed", is_way_refused=True), {}, "other_way"),
        (Ended("overflow", is_delivered=False), {}, "harder"),
        (Ended("overflow", is_delivered=False), {"has_retried": True}, "fail"),
        (Ended("overflow", is_full=True), {}, "pressed"),
        (Ended("overflow", has_whole_calls=True), {}, "calls"),
        (Ended("limit", has_whole_calls=True, is_used_up=True), {}, "calls"),
        (Ended("limit", is_used_up=True), {}, "used_up"),
        (Ended("limit"), {}, "compacted"),
        (Ended("limit", is_full=True), {}, "pressed"),
        (Ended("limit"), {"restarts_left": 0}, "close"),
        (Ended("limit"), {"has_gained": False}, "close"),
        (Ended("limit", is_thoughts=True), {}, "compacted"),
        (Ended("limit", is_thoughts=True), {"is_closing": True}, "close"),
        (Ended("overthought", is_delivered=False, is_full=True), {}, "relaxed"),
        (Ended("overthought", is_thoughts=True), {"is_closing": True}, "close"),
        (Ended("called_back", is_delivered=False), {}, "anew"),
        (Ended("called_back"), {}, "resumed"),
        (Ended("called_back", is_stuck=True), {}, "close"),
        (Ended("spent", is_delivered=False), {}, "anew"),
        (Ended("spent", has_whole_calls=True), {}, "calls"),
        (Ended("spent"), {"restarts_left": 0}, "resumed"),
        (Ended("spent"), {"cuts": MAX_CUTS}, "compacted"),
        (Ended("spent"), {"cuts": MAX_CUTS, "restarts_left": 0}, "close"),
    ],
)
def test_each_end_has_one_step(ended: Ended, changes: dict[str, Any], step: Step) -> None:
    """What a client has is never asked for again; a stop leads on, for others as it is, but not without end."""
    assert next_leg(ended, replace(FRESH, **changes)) == step
