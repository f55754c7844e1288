"""Turns of conversations: told apart without keeping a word of them, and one line each in the store."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.proxy.page.turns import Drop, Turn, turn_from_json, turn_to_json

TURN = Turn(
    talk="abcdef0123",
    model="mødel\ud800",
    tenant="anna",
    when_s=1.5,
    messages=3,
    before_tokens=10,
    prompt_tokens=9,
    filled_tokens=12,
    window_tokens=8192,
    compact_ratio=0.8,
    carry_ratio=0.9,
    action="compacted",
    restarts=[Drop(7000, 2000)],
)


_BAD: list[dict[str, object]] = [
    {"when_s": float("nan")},
    {"compact_ratio": float("inf")},
    {"window_tokens": -1},
    {"filled_tokens": 10**400},
    {"action": "exploded"},
    {"restarts": [[1]]},
    {"messages": None},
]


@given(
    st.text(max_size=40) | st.sampled_from(_BAD).map(lambda bad: json.dumps({**json.loads(turn_to_json(TURN)), **bad}))
)
def test_lines_that_this_version_cannot_read_are_passed_over(text: str) -> None:
    """Whatever another version, or somebody else, has written."""
    assert turn_from_json(text) is None


@pytest.mark.parametrize("turn", [TURN, replace(TURN, action="none", restarts=[])])
def test_a_line_is_read_as_it_was_written(turn: Turn) -> None:
    """Every number of it, and any name."""
    assert turn_from_json(turn_to_json(turn)) == turn
    newer = json.dumps({**json.loads(turn_to_json(turn)), "of another version": 1})
    assert turn_from_json(newer) == turn
