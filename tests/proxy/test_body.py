"""A chat body, read and written again."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.proxy.wire import decode, encode, is_plain, is_same_request, with_fields, without_overrides

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | _JSON},
    optional={
        "content": _JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _JSON}), max_size=2),
        "reasoning_content": _JSON,
        "tool_calls": _JSON | st.lists(st.fixed_dictionaries({"id": _JSON, "function": _JSON}), max_size=2),
        "tool_call_id": _JSON,
        "of_tomorrow": _JSON,
    },
) | st.dictionaries(st.text(max_size=8), _JSON, max_size=2)
_BODIES = st.fixed_dictionaries(
    {"messages": st.lists(_MESSAGES, min_size=1, max_size=4)},
    optional=dict.fromkeys(("model", "tools", "functions", "tool_choice", "response_format", "of_tomorrow"), _JSON),
)


@given(_BODIES)
def test_any_chat_body_is_written_as_it_was_read(body: dict[str, Any]) -> None:
    """Every message with its own keys, every field that nobody here knows, and the client's own object untouched."""
    kept = copy.deepcopy(body)
    request = decode(body)
    assert request is not None
    written = with_fields(body, {"messages": encode(request.messages)})
    assert json.dumps(written) == json.dumps(kept) == json.dumps(body)
    assert without_overrides(body, "lm_studio") is body
    tools = body.get("tools") or body.get("functions") or []
    assert is_same_request(body, request) or not isinstance(tools, list)


@given(st.lists(_JSON, min_size=1, max_size=4))
def test_anything_among_messages_takes_its_place(odd: list[Any]) -> None:
    """It must not switch the guard off for the others: each is a message, in its order; without any there is none."""
    request = decode({"messages": odd})
    assert request is not None
    assert len(encode(request.messages)) == len(odd)
    for given_, message in zip(odd, encode(request.messages), strict=True):
        assert message == (given_ if isinstance(given_, dict) else {"role": "user", "content": message["content"]})
    for none in (odd[0], {}, [], None):
        assert decode({"messages": none}) is None or (isinstance(none, list) and none)


@given(_JSON, st.integers(0, 3))
def test_json_is_plain_and_objects_are_not(value: Any, depth: int) -> None:
    """What is plain is sent without a look at each value; anything else, however deep, is LiteLLM's to write."""
    odd: Any = object()
    for at in range(depth):
        value, odd = ([value], [value, odd]) if at % 2 else ({"a": value}, {"a": value, "b": odd})
    assert (is_plain([value]), is_plain([value, odd])) == (True, False)
    assert is_plain(value) is isinstance(value, list)
