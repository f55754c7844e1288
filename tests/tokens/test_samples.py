"""Which samples stay when processes merge theirs, and in which order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from litellm_compaction.tokens.calibration import PLAIN, Calibrations, joined
from litellm_compaction.tokens.growth import Growths
from litellm_compaction.tokens.samples import Stamps
from tests.tokens.test_calibration import NOW_S, Clock


def test_what_two_learned_in_the_same_moment_is_one_sample() -> None:
    """The same one, whoever writes first."""
    rows = (
        [7, 100, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 110, 25.0],
        [7, 101, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 111, 25.2],
    )
    known = [Growths(Stamps(Clock())) for _ in rows]
    for growths, order in zip(known, (rows, rows[::-1]), strict=True):
        for each in order:
            growths.samples.merge([each])
    assert known[0].samples.as_json() == known[1].samples.as_json()
    assert len(known[0].samples.values) == 1


def test_old_knowledge_fades() -> None:
    """Of two that learn all the time the newest samples stay, those of both; what there is has a bound."""
    clock, facts = Clock(), ""
    workers = [Calibrations(Stamps(clock)) for _ in range(2)]
    for number in range(100):
        clock.now_s = NOW_S + number
        workers[number % 2].of("a").add(1000 + number, 0, PLAIN, 1100 + number)
    for worker in workers:
        facts = joined(facts, worker.as_json(), clock=clock)
    rows = json.loads(facts)["calibrations"]["a"]["samples"]
    assert [row[2] for row in rows] == [1000 + number for number in range(84, 100)]


@pytest.mark.parametrize("stamps", [[None, 1], [0, 0], ["x", "x"], [True, None], [10**30, -1], [1.5, 2.5], [[], {}]])
def test_stamps_that_nobody_can_have_written_make_old_samples(stamps: list[Any]) -> None:
    """A clock far ahead does not keep what is learned later away."""
    rows = [[stamps[0], 1.2, 5000, 0.0, 0.0], [stamps[1], 1.3, 5000, 0.0, 0.0]]
    known = Calibrations(Stamps(Clock()))
    known.take_over(json.dumps({"version": 2, "calibrations": {"a": {"samples": rows, "since": stamps[0]}}}))
    for _ in range(15):
        known.of("a").add(5000, 0, PLAIN, 7000)
    kept = [ratio for _, ratio, *_ in json.loads(known.as_json())["calibrations"]["a"]["samples"]]
    assert kept == [1.3] + [1.4] * 15


def test_a_clock_that_was_set_back_does_not_make_old_what_is_learned_now() -> None:
    """It is the newest all the same, here and wherever it is added."""
    clock = Clock()
    known = Calibrations(Stamps(clock))
    for _ in range(16):
        known.of("a").add(5000, 0, PLAIN, 6000)
    before = known.as_json()
    clock.now_s -= 1800
    other = Calibrations(Stamps(clock))
    other.take_over(before)
    for _ in range(16):
        other.of("a").add(5000, 0, PLAIN, 7000)
    assert {
        row[1] for row in json.loads(joined(before, other.as_json(), clock=clock))["calibrations"]["a"]["samples"]
    } == {1.4}
