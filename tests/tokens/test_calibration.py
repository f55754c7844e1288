"""What was learned of a deployment, read by threads that count texts while the event loop teaches it more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.tokens import calibration as calibrations
from litellm_compaction.tokens.calibration import PLAIN, Calibration, Calibrations, Mix, joined
from litellm_compaction.tokens.growth import Growths, Profile
from litellm_compaction.tokens.samples import Stamps

NOW_S = 1e9


class _Interrupted(Mix):
    """A mix during whose comparison the server's next number comes, as it can between two steps of a thread."""

    calibration = Calibration()

    def __iter__(self) -> Iterator[float]:
        self.calibration.add(2000, 0, PLAIN, 2200)
        return super().__iter__()


class _Asked(Calibration):
    """A calibration that is asked while a thread counts the first text of another basis."""

    known = Calibrations()

    @property
    def newest_us(self) -> int:
        self.known.of("another")
        return 1


def test_a_number_that_comes_during_a_prediction_changes_the_next_one() -> None:
    """The prediction goes by what was known when it began."""
    calibration = _Interrupted.calibration
    calibration.add(1000, 0, PLAIN, 1000)
    request = _Interrupted(0.0, 0.0)
    assert calibration.predict(1000, request, 0.1).factor == 1.0
    assert calibration.predict(1000, PLAIN, 0.1).factor == 1.1


def test_a_basis_that_is_new_does_not_disturb_who_reads_the_others() -> None:
    """Its calibration is empty anyway."""
    _Asked.known._by_method["one"] = _Asked()
    assert len(_Asked.known.change_key()) == 1
    assert len(_Asked.known._by_method) == 2


def test_two_that_ask_at_the_same_time_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the event loop teaches the one must not be lost because a thread has made another."""
    known, made = Calibrations(), list[Calibration]()

    def make(*_: object) -> Calibration:
        if not made:
            made.append(Calibration())
            made.append(known.of("one"))
        return Calibration()

    monkeypatch.setattr(calibrations, "Calibration", make)
    found = known.of("one")
    assert found is made[1]
    assert known.of("one") is found


def test_what_images_cost_holds_whatever_counts_the_text() -> None:
    """Of the same server, by another template or vocabulary, in this process and in the next."""
    known, later = Calibrations(), Calibrations()
    known.of("one").media.note(1000, 600, 0.0)
    later.take_over(known.as_json())
    for each in (known, later):
        assert each.of("another").media.price().factor == 0.6


class _Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def _teach(known: Calibration, kind: str, number: float) -> None:
    if kind == "text":
        known.add(1000 + 100 * number, 0, Mix(number / 10, 0.0), round(1100 + 110 * number))
    elif kind == "tiny":
        known.add(100, 0, PLAIN, round(120 + number))
    elif kind == "tools":
        known.note_tools(number / 10, 1000)
    elif kind == "media":
        known.media.note(400, 400 + 10 * number, doubt_tokens=0)
    elif kind == "growth":
        known.growths.note(Profile(tokens=100 + number, messages=1.0), 110 + number)
    else:
        # Found on two prompts of different size: this server counts otherwise than its samples say.
        for raw_tokens in (2000, 4000):
            known.explains(raw_tokens, 0, PLAIN, raw_tokens * 6 // 10)


_LESSONS = st.tuples(
    st.sampled_from(("text", "tiny", "tools", "media", "growth", "other server")),
    st.integers(0, 9),
    st.sampled_from(("a", "b|new")),
    # Seconds that pass before it.
    st.sampled_from((0.0, 0.5, 7.0)),
)


@st.composite
def _facts(draw: Callable[..., Any]) -> str:
    """What one process has learned, about in the same minutes as others, each by a clock of its own."""
    clock = _Clock()
    clock.now_s = NOW_S - draw(st.floats(100, 200))
    known = Calibrations(Stamps(clock))
    for kind, number, counting_method, passed_s in draw(st.lists(_LESSONS, max_size=40)):
        clock.now_s += passed_s
        _teach(known.of(counting_method), kind, number)
    # As it stands in a store: what is in memory is not rounded.
    return joined("", known.as_json(), clock=lambda: NOW_S)


def _together(*facts: str) -> str:
    both = ""
    for each in facts:
        both = joined(both, each, clock=lambda: NOW_S)
    return both


@given(one=_facts(), other=_facts(), third=_facts())
def test_what_processes_learn_is_added_up(one: str, other: str, third: str) -> None:
    """The same comes out in whatever order they write, with whom first, and however often."""
    assert _together(one, other) == _together(other, one)
    assert _together(_together(one, other), third) == _together(one, _together(other, third))
    assert _together(one, other, one, other) == _together(one, other)
    assert _together(one) == _together(one, one) == one


def test_what_two_learned_in_the_same_moment_is_one_sample() -> None:
    """The same one, whoever writes first."""
    rows = (
        [7, 100, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 110, 25.0],
        [7, 101, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 111, 25.2],
    )
    known = [Growths(Stamps(_Clock())) for _ in rows]
    for growths, order in zip(known, (rows, rows[::-1]), strict=True):
        for each in order:
            growths.samples.merge([each])
    assert known[0].samples.as_json() == known[1].samples.as_json()
    assert len(known[0].samples.values) == 1


def test_old_knowledge_fades() -> None:
    """Of two that learn all the time the newest samples stay, those of both; what there is has a bound."""
    clock, facts = _Clock(), ""
    workers = [Calibrations(Stamps(clock)) for _ in range(2)]
    for number in range(100):
        clock.now_s = NOW_S + number
        workers[number % 2].of("a").add(1000 + number, 0, PLAIN, 1100 + number)
    for worker in workers:
        facts = joined(facts, worker.as_json(), clock=clock)
    rows = json.loads(facts)["calibrations"]["a"]["samples"]
    assert [row[2] for row in rows] == [1000 + number for number in range(84, 100)]


def test_a_server_that_was_replaced_is_not_taught_by_those_who_know_the_old_one() -> None:
    """Its samples are gone for whoever found that out, and do not come back with the next merge."""
    clock = _Clock()
    late, found = Calibrations(Stamps(clock)), Calibrations(Stamps(clock))
    for known in (late, found):
        known.of("a").add(5000, 0, PLAIN, 6500)
    clock.now_s += 60
    for raw_tokens in (2000, 4000):
        found.of("a").explains(raw_tokens, 0, PLAIN, raw_tokens * 6 // 10)
    late.take_over(joined(late.as_json(), found.as_json(), clock=clock))
    assert {known.of("a").predict(3000, PLAIN, 0.1).factor for known in (late, found)} == {0.6}


@pytest.mark.parametrize("stamps", [[None, 1], [0, 0], ["x", "x"], [True, None], [10**30, -1], [1.5, 2.5], [[], {}]])
def test_stamps_that_nobody_can_have_written_make_old_samples(stamps: list[Any]) -> None:
    """A clock far ahead does not keep what is learned later away."""
    rows = [[stamps[0], 1.2, 5000, 0.0, 0.0], [stamps[1], 1.3, 5000, 0.0, 0.0]]
    known = Calibrations(Stamps(_Clock()))
    known.take_over(json.dumps({"version": 2, "calibrations": {"a": {"samples": rows, "since": stamps[0]}}}))
    for _ in range(15):
        known.of("a").add(5000, 0, PLAIN, 7000)
    kept = [ratio for _, ratio, *_ in json.loads(known.as_json())["calibrations"]["a"]["samples"]]
    assert kept == [1.3] + [1.4] * 15


def test_a_clock_that_was_set_back_does_not_make_old_what_is_learned_now() -> None:
    """It is the newest all the same, here and wherever it is added."""
    clock = _Clock()
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
