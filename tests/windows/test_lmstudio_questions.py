"""OpenAI's messages in the words of LM Studio's protocol: nothing is lost, and nothing is made up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import parse_message
from litellm_compaction.windows.lmstudio_rpc import History, history_of
from tests.builders import request_of


def said(*messages: dict[str, Any], tools: tuple[Any, ...] = ()) -> History:
    return history_of(request_of(*messages, tools=tools))


def call(name: str, arguments: Any, call_id: str = "1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_roles_and_texts() -> None:
    """`developer` is LM Studio's `system`; each part of a content stays one; empty contents stay messages."""
    history = said(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {"url": "x"}}, text("b")]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    )
    assert history.messages == [
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [text("")]},
        {"role": "user", "content": [text("")]},
    ]
    assert (history.tools, history.unsaid) == ([], "")


def test_calls_and_results() -> None:
    """Several calls in one answer, with words or without; results in any order, each with its call."""
    history = said(
        {"role": "assistant", "content": None, "tool_calls": [call("a", '{"x": [1]}', "1"), call("b", "{}", "2")]},
        {"role": "tool", "tool_call_id": "2", "content": "second", "name": "b"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("c", {"y": 1}, "")]},
    )

    def requested(name: str, arguments: Any, **more: str) -> dict[str, Any]:
        said = {"type": "function", "name": name, "arguments": arguments, **more}
        return {"type": "toolCallRequest", "toolCallRequest": said}

    assert history.messages == [
        {"role": "assistant", "content": [requested("a", {"x": [1]}, id="1"), requested("b", {}, id="2")]},
        {"role": "tool", "content": [{"type": "toolCallResult", "content": "second", "toolCallId": "2", "name": "b"}]},
        {"role": "tool", "content": [{"type": "toolCallResult", "content": "first", "toolCallId": "1"}]},
        {"role": "assistant", "content": [text("I look."), requested("c", {"y": 1})]},
    ]
    assert history.unsaid == ""


@pytest.mark.parametrize("arguments", ["", "no JSON", "[1, 2]", '{"x": NaN}', "[" * 100_000])
def test_arguments_and_names_without_a_place_are_counted_besides(arguments: str) -> None:
    """Arguments that are no object, names, and the older form of calls: some templates write them."""
    history = said(
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", arguments)]},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": 1}'}},
        {"role": "function", "name": "look", "content": "blue"},
        {"role": "critic", "content": "Hm."},
    )
    assert [message["role"] for message in history.messages] == ["user", "assistant", "assistant", "tool", "user"]
    (part,) = history.messages[1]["content"]  # type: ignore[misc]
    assert part["toolCallRequest"]["arguments"] == {}
    assert history.messages[3]["content"] == [{"type": "toolCallResult", "content": "blue", "name": "look"}]
    assert all(word in history.unsaid for word in (json.dumps(arguments), "Ada", "look", "at"))


def test_tools_as_the_protocol_takes_them() -> None:
    """What it drops is counted besides; so are tools that are no functions."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    usual = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": schema}}
    odd = {
        "type": "function",
        "function": {"name": "odd", "strict": True, "parameters": {**schema, "$schema": "draft-07", "oneOf": [1]}},
        "cache_control": {"type": "ephemeral"},
    }
    history = said({"role": "user", "content": "x"}, tools=(usual, odd, {"type": "web_search"}, "text"))
    assert history.tools == [usual, {"type": "function", "function": {"name": "odd", "parameters": schema}}]
    assert all(word in history.unsaid for word in ("strict", "draft-07", "oneOf", "ephemeral", "web_search", "text"))
    assert said({"role": "user", "content": "x"}, tools=(usual,)).unsaid == ""


TEXTS = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(call, TEXTS, TEXTS | st.dictionaries(TEXTS, JSON).map(json.dumps), TEXTS)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "other"]),
        "content": st.none() | TEXTS | st.lists(TEXTS.map(text), max_size=3),
    },
    optional={"tool_calls": st.lists(CALLS, max_size=3), "name": TEXTS, "tool_call_id": TEXTS},
)
TOOLS = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.dictionaries(TEXTS | st.sampled_from(["name", "parameters"]), JSON)}
)


@given(st.lists(MESSAGES, max_size=6), st.lists(TOOLS | JSON, max_size=3))
def test_every_text_is_said_or_counted_besides(messages: list[dict[str, Any]], tools: list[Any]) -> None:
    """One message for each, of the protocol's roles; no text, argument or tool is lost; all of it is JSON."""
    history = said(*messages, tools=tuple(tools))
    assert len(history.messages) == len(messages)
    assert {message["role"] for message in history.messages} <= {"system", "user", "assistant", "tool"}
    written = json.dumps([history.messages, history.tools], allow_nan=False)
    everything = written + json.dumps(history.unsaid)
    for message in map(parse_message, messages):
        for part in message.text.split("\n"):
            assert json.dumps(part)[1:-1] in everything
        for each in message.calls:
            parsed = _object_or_none(each.arguments)
            if message.role == "assistant" and parsed is not None:
                assert json.dumps(each.name) in written
                assert json.dumps(parsed) in written
            else:
                assert json.dumps(each.arguments, ensure_ascii=False) in history.unsaid
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict):
            for key in (key for key, value in function.items() if value is not None):
                assert json.dumps(key) in written or json.dumps(key, ensure_ascii=False) in history.unsaid


def _object_or_none(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
