"""What follows an upstream request, for every way in which it can end."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from litellm_compaction.proxy.answer.endings import End, Ended, Step, next_step

ENDS = get_args(End)
CUT = ("limit", "overthought", "spent", "called_back", "overflow")


def ended(end: End, **facts: bool) -> Ended:
    known = {"is_way_refused": False, "is_delivered": True, "gives_way": False, "has_whole_calls": False}
    return Ended(end=end, **{**known, **facts})


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (ended("done"), "deliver"),
        (ended("done", is_delivered=False), "deliver"),
        (ended("failed"), "fail"),
        (ended("failed", is_delivered=False, gives_way=True), "fail"),
        (ended("failed", is_way_refused=True), "other_way"),
        (ended("overflow"), "go_on"),
        (ended("overflow", is_delivered=False), "harder"),
        (ended("overflow", has_whole_calls=True), "calls"),
        (ended("limit"), "go_on"),
        (ended("limit", is_delivered=False), "go_on"),
        (ended("limit", has_whole_calls=True), "calls"),
        (ended("overthought", is_delivered=False), "go_on"),
        (ended("called_back", gives_way=True, is_delivered=False), "anew"),
        (ended("called_back", gives_way=True), "go_on"),
        (ended("spent", gives_way=True, is_delivered=False), "anew"),
        (ended("spent", gives_way=True, has_whole_calls=True), "calls"),
    ],
)
def test_each_end_has_one_step(found: Ended, step: Step) -> None:
    assert next_step(found) == step


@pytest.mark.parametrize("end", CUT)
@pytest.mark.parametrize(("gives_way", "has_whole_calls"), [*product((False, True), repeat=2)])
def test_what_a_client_has_is_never_asked_for_again(end: End, gives_way: bool, has_whole_calls: bool) -> None:
    """Neither compacted harder nor repeated: it would read the beginning twice."""
    step = next_step(ended(end, gives_way=gives_way, has_whole_calls=has_whole_calls))
    assert step == ("calls" if has_whole_calls else "go_on")


@pytest.mark.parametrize("end", ENDS)
def test_a_refused_way_gives_way_to_another(end: End) -> None:
    assert next_step(ended(end, is_way_refused=True)) == "other_way"
