"""Old tool results, cleared as a client orders it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.clear_order import ClearOrder, cleared
from litellm_compaction.core.messages import Message
from tests.builders import agent_conversations, calls, parsed, result, user

RAW = [user("Look."), *(each for n in "abcd" for each in (calls(n, name=f"tool_{n}"), result(n, f"Result of {n}.")))]


def results(messages: tuple[Message, ...]) -> list[str]:
    return [message.text for message in messages if message.role == "tool"]


@pytest.mark.parametrize(
    ("order", "gone"),
    [
        (ClearOrder(above_calls=3, keep=1), "abc"),
        (ClearOrder(above_calls=4, keep=1), ""),
        (ClearOrder(above_tokens=99, keep=2), "ab"),
        (ClearOrder(above_tokens=100, keep=2), ""),
        (ClearOrder(above_calls=1, keep=0), "abcd"),
        (ClearOrder(above_calls=1, keep=9), ""),
        (ClearOrder(above_calls=1, keep=1, excluded=frozenset({"tool_b"})), "ac"),
    ],
)
def test_the_oldest_results_go(order: ClearOrder, gone: str) -> None:
    """When the conversation is as large as the order says, all but the newest and those of excluded tools."""
    found = cleared(parsed(RAW), order, 100)
    assert [name for name, text in zip("abcd", results(found.messages), strict=True) if "Result" not in text] == [*gone]
    assert found.calls == len(gone)
    assert [message.call_id for message in found.messages] == [message.call_id for message in parsed(RAW)]
    # What is cleared stays so, and is not counted again.
    assert cleared(found.messages, order, 100).calls == 0


@pytest.mark.parametrize(("inputs", "kept"), [(False, "abcd"), (True, "cd"), (frozenset({"tool_b"}), "acd")])
def test_arguments_go_only_if_that_is_ordered(inputs: bool | frozenset[str], kept: str) -> None:
    """Of all tools, or of those named."""
    found = cleared(parsed(RAW), ClearOrder(above_calls=1, keep=2, inputs=inputs), 100)
    arguments = {call.id: call.arguments for message in found.messages for call in message.calls}
    assert [name for name in "abcd" if arguments[name] != "{}"] == [*kept]


@given(agent_conversations(), st.integers(0, 5), st.integers(0, 5))
def test_nothing_but_results_changes(raw: list[dict[str, object]], calls_above: int, keep: int) -> None:
    """No message comes or goes, whatever the conversation."""
    messages = parsed(raw)
    found = cleared(messages, ClearOrder(above_calls=calls_above, keep=keep), 100)
    assert len(found.messages) == len(messages)
    for old, new in zip(messages, found.messages, strict=True):
        assert new == old or new.role == "tool"
