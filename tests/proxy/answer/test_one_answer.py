"""Chunks of an answer, joined into one."""

from __future__ import annotations

import pytest

from tests.proxy.answer.wired import USAGE_CHUNK, Wire, choice_of, chunk, sse


async def test_everything_that_a_stream_can_hold_is_joined() -> None:
    """Thoughts, calls by index, what only some servers send; what ends the choice keeps its own fields."""
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "read", "arguments": ""}}
    more = {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '{"a":1}'}}
    other = {"index": 1, "id": "b", "function": {"name": "list", "arguments": "{}"}}
    last = chunk({}, "tool_calls")
    last["choices"][0]["stop_reason"] = 17
    deltas = [{"reasoning_content": "Let me"}, {"reasoning_content": " see."}, {"tool_calls": [call]}]
    deltas += [{"tool_calls": [more]}, {"tool_calls": [other]}, {"annotations": [{"at": 1}]}]
    choice = choice_of(await Wire([lambda: sse(*map(chunk, deltas), last, USAGE_CHUNK)]).ask())
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Let me see.",
        "annotations": [{"at": 1}],
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"a":1}'}},
            {"id": "b", "type": "function", "function": {"name": "list", "arguments": "{}"}},
        ],
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", 17)


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_and_older_calls_arrive(stream: bool) -> None:
    """A delta that is neither text nor a tool call goes on, to either kind of client."""
    deltas = [{"refusal": "I can"}, {"refusal": "not."}]
    wire = Wire([lambda: sse(*map(chunk, deltas), chunk({}, "stop"), USAGE_CHUNK)])
    answer = await wire.ask(stream=stream)
    if stream:
        assert ('"I can"' in answer.text, '"not."' in answer.text) == (True, True)
    else:
        assert choice_of(answer)["message"] == {"role": "assistant", "content": None, "refusal": "I cannot."}
    deltas = [{"function_call": {"name": "read", "arguments": ""}}, {"function_call": {"arguments": '{"a":1}'}}]
    wire = Wire([lambda: sse(*map(chunk, deltas), chunk({}, "function_call"), USAGE_CHUNK)])
    answer = await wire.ask(stream=stream)
    if not stream:
        message = choice_of(answer)["message"]
        assert message["function_call"] == {"name": "read", "arguments": '{"a":1}'}
