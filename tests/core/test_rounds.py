"""Which results answer which calls: by id over the whole turn, by place where ids repeat."""

from __future__ import annotations

import pytest
from hypothesis import given

from litellm_compaction.core.messages import NO_RESPONSE, rounds, with_every_result
from tests.builders import (
    JsonDict,
    agent_conversations,
    assistant,
    calls,
    image,
    parsed,
    raw_conversations,
    result,
    system,
    user,
)

PICTURE = {"role": "user", "content": [image()]}


@pytest.mark.parametrize(
    ("behind", "unanswered"),
    [
        ([result("call_a", "x"), PICTURE, result("call_b", "y"), PICTURE], []),
        ([user("Wait."), result("call_a", "x"), system("late"), result("call_b", "y")], []),
        # A call that nothing answers, and one whose result comes too late for it.
        ([result("call_a", "x"), user("Stop.")], ["call_b"]),
        ([PICTURE, result("call_b", "y"), PICTURE], ["call_a"]),
        ([result("call_a", "x"), assistant("Well."), user("Go on."), result("call_b", "y")], ["call_b"]),
        ([], ["call_a", "call_b"]),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_filler_stands_only_for_what_nothing_answers(
    behind: list[JsonDict], unanswered: list[str], apart: bool
) -> None:
    """After the results that are there, before the next assistant message."""
    made = [calls("call_a"), calls("call_b")] if apart else [calls("call_a", "call_b")]
    messages = parsed([user("u"), *made, *behind, assistant("Done.")])
    shown = with_every_result(messages)
    fillers = [message for message in shown if message.text == NO_RESPONSE]
    assert [message.call_id for message in fillers] == unanswered
    assert [made.call.id for each in rounds(messages) for made in each.unanswered] == unanswered
    assert [message for message in shown if message not in fillers] == [*messages]
    assert with_every_result(shown) == shown


@given(raw_conversations() | agent_conversations())
def test_where_all_is_answered_nothing_is_added(raw: list[JsonDict]) -> None:
    """Whatever stands between the results, and whatever the ids are."""
    messages = parsed(raw)
    assert with_every_result(messages) == messages
