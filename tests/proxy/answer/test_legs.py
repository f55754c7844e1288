"""What follows the end of a leg."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from litellm_compaction.proxy.answer.legs import End, State, Step, next_leg


@pytest.mark.parametrize(
    ("end", "marks", "changes", "step"),
    [
        ("done", "", {}, "deliver"),
        ("done", "used_up", {}, "deliver"),
        ("done", "recalls", {}, "look_up"),
        ("done", "recalls", {"may_look_up": False}, "deliver"),
        ("done", "recalls used_up", {}, "used_up"),
        ("failed", "", {}, "fail"),
        ("failed", "another_way", {}, "other_way"),
        ("overflow", "nothing_sent", {}, "harder"),
        ("overflow", "nothing_sent", {"has_retried": True}, "fail"),
        ("overflow", "full", {}, "pressed"),
        ("limit", "begun held used_up", {}, "calls"),
        ("limit", "used_up", {}, "used_up"),
        ("limit", "", {}, "compacted"),
        ("limit", "", {"restarts_left": 0}, "close"),
        ("limit", "", {"has_gained": False}, "close"),
        ("limit", "thoughts", {}, "compacted"),
        ("limit", "thoughts", {"is_closing": True}, "close"),
        ("overthought", "nothing_sent full", {}, "relaxed"),
        ("called_back", "", {}, "resumed"),
        ("called_back", "begun", {}, "close"),
        ("spent", "nothing_sent", {}, "anew"),
        ("spent", "", {"restarts_left": 0}, "resumed"),
        ("spent", "", {"cuts": 23}, "resumed"),
        ("spent", "", {"cuts": 24}, "compacted"),
        ("spent", "", {"cuts": 24, "restarts_left": 0}, "close"),
    ],
)
def test_each_end_has_one_step(end: End, marks: str, changes: dict[str, Any], step: Step) -> None:
    """What a client has is never asked for again; a stop leads on, for others as it is, but not without end."""
    calls = SimpleNamespace(has_begun="begun" in marks, held="held" in marks, of=lambda _: [])
    leg = SimpleNamespace(has_another_way="another_way" in marks)
    one = SimpleNamespace(is_delivered="nothing_sent" not in marks)
    relay: Any = SimpleNamespace(end=end, calls=calls, leg=leg, one=one, has_begun=False)
    relay.recalls, relay.is_full = "recalls" in marks, "full" in marks
    state = State(ways=frozenset(), **{"restarts_left": 3, **changes})
    assert next_leg(relay, state, is_used_up="used_up" in marks, is_thoughts="thoughts" in marks) == step
