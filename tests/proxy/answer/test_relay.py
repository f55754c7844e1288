"""Chunks of an answer, taken as they come and joined into one."""

from __future__ import annotations

import pytest

from litellm_compaction.core.continuation.text import settled_length
from litellm_compaction.proxy.answer import relay
from tests.proxy.answer.wired import USAGE_CHUNK, Body, Wire, choice_of, chunk, sse


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


async def test_white_space_blank_by_blank_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the window's end a word is held until the next begins; what stands behind it was read with each blank."""
    looked = [0]

    def counting(text: str) -> int:
        looked[0] += len(text)
        return settled_length(text)

    monkeypatch.setattr(relay, "settled_length", counting)
    pieces = ["word " * 1_400, *[" "] * 4_000, "last"]
    wire = Wire([lambda: sse(*map(said, pieces), chunk({}, "stop"))], window_tokens=2048)
    answer = await wire.ask()
    assert choice_of(answer)["message"]["content"] == "".join(pieces)
    assert 0 < looked[0] < 20_000


def said(text: str) -> Body:
    return chunk({"content": text})
