"""Work over a conversation leaves the event loop if it is long, by its items or by its text."""

from __future__ import annotations

import threading

import pytest

from litellm_compaction.concurrency import is_long, off_loop
from tests.builders import parsed, user

_CALLS = [{"role": "assistant", "content": None, "tool_calls": [{"id": f"{at}"} for at in range(500)]}]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (([user("a")] * 399,), False),
        (([user("a")] * 401,), True),
        (([user("a")] * 200, [{"type": "function"}] * 201), True),
        (([user("a" * 900_000)],), True),
        ((_CALLS,), True),
        ((None, "text " * 1_000_000, 3), False),
    ],
)
def test_a_list_is_long_by_all_that_is_in_it(lists: tuple[object, ...], expected: bool) -> None:
    """Messages, tools, parts, calls and texts; what is no list takes no walk."""
    assert is_long(*lists) is expected


@pytest.mark.parametrize(("chars", "stays"), [(10_000, True), (30_000, False)])
async def test_a_long_walk_runs_in_a_thread(chars: int, stays: bool) -> None:
    """A short one at once, where it costs no switch."""
    ran_in = await off_loop(parsed([user("a" * chars)]), threading.current_thread)
    assert (ran_in is threading.current_thread()) is stays
