"""What was learned of a deployment, read by threads that count texts while the event loop teaches it more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.tokens.calibration import PLAIN, Calibration, Calibrations, Mix, joined
from litellm_compaction.tokens.growth import Profile
from litellm_compaction.tokens.samples import Stamps

NOW_S = 1e9


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
