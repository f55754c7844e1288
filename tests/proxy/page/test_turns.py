"""Turns of conversations: told apart without keeping a word of them, and one line each in the store."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import parse_message
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.proxy.page.turns import Drop, Talk, Turn, Turns, talks_of, turn_from_json, turn_to_json
from tests.engine.bench import Bench

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


class Log:
    """What one worker writes down, each request a second after the one before."""

    def __init__(self, *, is_alone: bool = False) -> None:
        self.lines: list[str] = []
        clock = itertools.count(1000.0)
        self.turns = Turns(
            lambda _, text: self.lines.append(text),
            secret=lambda: None if is_alone else "what all workers know",
            wall_clock=lambda: next(clock),
        )

    @property
    def talks(self) -> list[Talk]:
        return talks_of(turn for line in self.lines if (turn := turn_from_json(line)) is not None)


async def _guarded(bench: Bench, *texts: str, window: int = 8192) -> tuple[list[Any], PreparedRequest]:
    raw = [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(texts)]
    return [parse_message(each) for each in raw], await bench.guard(raw, window)


async def _ask(turns: Turns, bench: Bench, *texts: str, tenant: str = "anna", tokens: int = 100) -> None:
    messages, prepared = await _guarded(bench, *texts)
    context = replace(bench.context(), tenant=tenant)
    turns.answered(turns.sent(None, messages, context, prepared), context, prepared, tokens, 1)


async def test_a_conversation_is_followed_by_how_it_begins() -> None:
    """Turns of one conversation come together, others stay apart, and no text is kept."""
    bench, log = Bench(), Log()
    secret = "my very own secret opening"
    for texts in ([secret], [secret, "a", "b"], ["other"], [secret, "a", "b", "c", "d"]):
        await _ask(log.turns, bench, *texts)
    latest, other = log.talks
    assert [turn.when_s for turn in latest.turns] == [1000.0, 1001.0, 1003.0]
    assert [turn.messages for turn in latest.turns] == [1, 3, 5]
    assert len(other.turns) == 1
    assert latest.id != other.id
    assert secret not in str(log.lines)


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
