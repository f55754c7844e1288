"""Where a conversation may be cut, and which messages are sacred."""

from __future__ import annotations

import pytest
from hypothesis import given

from litellm_compaction.core.boundaries import latest_cut, legal_cuts, sacred_indices
from litellm_compaction.core.messages import lead_length, newest_user_index
from tests.core.conversations import JsonDict, assistant, calls, parsed, raw_conversations, result, system, user

ROUND = [calls("1", "2"), result("1", "x"), result("2", "y")]


@pytest.mark.parametrize(
    ("raw", "cuts", "sacred"),
    [
        ([], (), set()),
        ([system()], (), {0}),
        ([user("u")], (), {0}),
        ([system(), user("u")], (), {0, 1}),
        ([system(), user("u"), assistant("a")], (2,), {0, 1, 2}),
        ([system(), user("u"), assistant("a"), user("v")], (2, 3), {0, 3}),
        ([user("u"), *ROUND], (1,), {0, 1, 2, 3}),
        ([user("u"), *ROUND, assistant("a"), user("v")], (1, 4, 5), {5}),
        ([user("u"), *ROUND, *ROUND], (1, 4), {0, 4, 5, 6}),
        ([user("u"), assistant("a"), user("v"), *ROUND], (1, 2, 3), {2, 3, 4, 5}),
        ([user("u"), assistant("a"), system("late"), user("v")], (1, 3), {3}),
        ([user("u"), assistant("a"), result("orphan", "x")], (1,), {0, 2}),
    ],
)
def test_cuts_and_sacred_messages(raw: list[JsonDict], cuts: tuple[int, ...], sacred: set[int]) -> None:
    """Cuts lie before users and assistants up to the sacred tail; lead, newest user message and tail are sacred."""
    messages = parsed(raw)
    assert legal_cuts(messages) == cuts
    assert sacred_indices(messages) == sacred


@given(raw_conversations())
def test_a_cut_never_divides_a_round(raw: list[JsonDict]) -> None:
    """Behind every cut each result has its call, before it each call its result; the sacred tail stays whole."""
    messages = parsed(raw)
    for cut in legal_cuts(messages):
        assert lead_length(messages) < cut <= latest_cut(messages)
        for side in (messages[:cut], messages[cut:]):
            called = {call.id for message in side for call in message.calls}
            assert called == {message.call_id for message in side if message.role == "tool"}


@given(raw_conversations())
def test_whatever_is_longer_than_its_sacred_part_can_be_cut(raw: list[JsonDict]) -> None:
    """Only conversations that are sacred from beginning to end have no cut, but for a lone request in front."""
    messages = parsed(raw)
    sacred = sacred_indices(messages)
    assert newest_user_index(messages) in sacred
    if len(sacred) < len(messages):
        assert legal_cuts(messages)[-1] == latest_cut(messages)
