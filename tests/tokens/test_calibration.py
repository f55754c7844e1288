"""What was learned of a deployment, read by threads that count texts while the event loop teaches it more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.tokens import calibration as calibrations
from litellm_compaction.tokens.calibration import PLAIN, Calibration, Calibrations, Mix, joined
from litellm_compaction.tokens.growth import Profile
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


@pytest.mark.parametrize(("doubtful", "ratio"), [(150, 1.0), (90, 0.91)])
def test_what_may_be_left_out_explains_a_low_number_from_a_tenth_on(doubtful: int, ratio: float) -> None:
    """A number that is low by just so much says nothing of the text; less is within what counts differ by."""
    calibration = Calibration()
    assert calibration.add(1000, doubtful, PLAIN, 1000 - doubtful) == pytest.approx(ratio)


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


class Clock:
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
    clock = Clock()
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


def test_a_server_that_was_replaced_is_not_taught_by_those_who_know_the_old_one() -> None:
    """Its samples are gone for whoever found that out, and do not come back with the next merge."""
    clock = Clock()
    late, found = Calibrations(Stamps(clock)), Calibrations(Stamps(clock))
    for known in (late, found):
        known.of("a").add(5000, 0, PLAIN, 6500)
    clock.now_s += 60
    for raw_tokens in (2000, 4000):
        found.of("a").explains(raw_tokens, 0, PLAIN, raw_tokens * 6 // 10)
    late.take_over(joined(late.as_json(), found.as_json(), clock=clock))
    assert {known.of("a").predict(3000, PLAIN, 0.1).factor for known in (late, found)} == {0.6}
