"""Bodies, read and written again, and LiteLLM's answers: what is read out of them, and what is written into them."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from litellm.types.llms.openai import ResponseAPIUsage

from litellm_compaction.core.messages import Request
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.sse import json_object

_END = b'event: message_delta\ndata: {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {}}\n\n'
_CUT, _WHOLE = {"outcome": "attempts", "restarts": 3}, {"outcome": "completed", "restarts": 1}


def test_the_details_of_an_answer_stand_in_its_usage() -> None:
    """On Anthropic's route with its own word for the window's end, and in a copy: LiteLLM logs its own message."""
    told = json_object(wire.with_details(_END, _CUT).partition(b"data:")[2])
    assert (told["usage"], told["delta"]) == ({"compaction": _CUT}, {"stop_reason": "model_context_window_exceeded"})
    assert wire.with_details(_END, _WHOLE).count(b"max_tokens") == 1
    message = {"type": "message", "usage": {"input_tokens": 3}, "stop_reason": "max_tokens"}
    usage = {"input_tokens": 3, "compaction": _CUT}
    assert wire.with_details(message, _CUT) == {
        **message,
        "usage": usage,
        "stop_reason": "model_context_window_exceeded",
    }
    assert (message["stop_reason"], message["usage"]) == ("max_tokens", {"input_tokens": 3})
    shown = ResponseAPIUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    wire.with_details(SimpleNamespace(response=SimpleNamespace(usage=shown)), _CUT)
    assert shown.model_dump()["compaction"] == _CUT
    assert wire.with_details(_END, None) is _END


def test_anything_else_than_such_an_end_stays_as_it_is() -> None:
    """Other events, other routes' answers, half an event."""
    half = b'event: message_delta\ndata: {"delta": {"stop_reason": "max_tok'
    odd = [b"event: message_delta\ndata: %s\n\n" % data for data in (b"[1]", b'{"delta": null}', b"{1}")]
    turn = _END.replace(b"max_tokens", b"end_turn").replace(b', "usage": {}', b"")
    chat = {"object": "chat.completion", "stop_reason": "max_tokens", "usage": {}}
    for other in (b"", half, *odd, turn, _END.replace(b"delta\n", b"start\n", 1), chat, {"type": "message"}, "a", None):
        assert wire.with_details(other, _CUT) == other


def test_usage_is_the_whole_prompts_or_none() -> None:
    """A number without what the server had in its cache would look like a prompt that was cut."""
    for prompt, cached, whole in ((900, 800, 900), (100, 800, 900), *((900, odd, 900) for odd in (0, -1, True, None))):
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        assert wire.usage_of({"usage": {"prompt_tokens": prompt, "completion_tokens": 3, **details}}) == (whole, 3)
    assert wire.usage_of({"usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": 7}}) == (9, 3)
    for odd in (0, None, True):
        assert wire.usage_of({"usage": {"prompt_tokens": odd, "completion_tokens": 3}}) is None
    assert wire.usage_of({"usage": {"prompt_tokens": 900}}) is None is wire.usage_of({"usage": None})


def test_a_limit_is_read_as_lenient_servers_read_it() -> None:
    """512.5 and "512" are 512 there; what is no number stays for them to refuse, beside a bound of llama.cpp's own."""
    asked = {"max_tokens": 1e9, "max_completion_tokens": 600.0, "n_predict": -1}
    assert wire.asked_output_tokens(asked) == 600
    assert wire.with_output_limit(asked, 512) == {"max_tokens": 512, "max_completion_tokens": 512, "n_predict": 512}
    for value, tokens in ((10.5, 10), ("600", 600), (" 600.5 ", 600), (10**400, 10**400), (-1, None), ("-1", None)):
        assert wire.asked_output_tokens({"max_tokens": value}) == tokens
        assert wire.with_output_limit({"max_tokens": value}, 512) == {"max_tokens": 512}
    for odd in (math.inf, math.nan, True, "many", "9" * 19, [9]):
        assert wire.asked_output_tokens({"max_tokens": odd}) is None
        assert wire.with_output_limit({"max_tokens": odd}, 512) == {"n_predict": 512}
        assert wire.with_output_limit({"max_completion_tokens": odd}, 512) == {"max_tokens": 512, "n_predict": 512}


def _read(*messages: Any, **fields: Any) -> Request:
    request = wire.decode({"messages": list(messages), **fields})
    assert request is not None
    return request


def test_a_body_in_other_words_is_the_same_request() -> None:
    """LiteLLM writes a text as a part, or strips it; anything else was never measured, and is looked at anew."""
    request = _read({"role": "user", "content": "Go."})
    for content, fields, is_same in (
        ("Go.", {}, True),
        ([{"type": "text", "text": "Go. "}], {}, True),
        ([{"type": "text", "text": "Stay."}], {}, False),
        ("Go.", {"tools": [{"type": "function"}]}, False),
    ):
        assert wire.is_same_request({"messages": [{"role": "user", "content": content}], **fields}, request) is is_same
    # LiteLLM's Presidio writes over the text of a message, or of a content part that both share.
    for message in ({"content": "42"}, {"content": [{"text": "42"}]}):
        body: dict[str, Any] = {"messages": [{"role": "user", **message}]}
        masked = body["messages"][0] if isinstance(message["content"], str) else message["content"][0]
        request = _read(*body["messages"])
        assert wire.is_same_request(body, request)
        masked["content" if isinstance(message["content"], str) else "text"] = "<MASKED>"
        assert not wire.is_same_request(body, request)
    # It leaves references to tools out behind us; what is planned with one would be planned once more without it.
    reference, done = {"type": "tool_reference", "tool_name": "read"}, {"type": "text", "text": "Done."}
    for parts, left in (([reference, done], [done]), ([reference], "")):
        result = {"role": "tool", "tool_call_id": "c"}
        assert wire.is_same_request({"messages": [{**result, "content": left}]}, _read({**result, "content": parts}))


def test_a_call_to_chats_alone_hides_its_server_and_gets_it_back() -> None:
    """LiteLLM sees no provider, address, key or route of the deployment until it makes a chat of the call."""
    kwargs = {
        "model": "openai/responses/x",
        "api_base": "http://10.0.0.7:1234/v1",
        "api_key": "secret",
        "litellm_credential_name": "local",
        "model_info": {"id": "a", "supported_endpoints": ["/v1/responses"]},
        "input": "text",
    }
    sent = wire.to_chats_alone(kwargs, "openai")
    info = sent.pop("model_info")
    nowhere = {"custom_llm_provider": "custom_openai", "api_base": "http://guarded.invalid/v1"}
    assert sent == {"model": "custom_openai/x", "input": "text", **nowhere}
    assert info["supported_endpoints"] is None
    chat = {"messages": [], "model": "x", "model_info": info, **nowhere}
    own = {key: value for key, value in kwargs.items() if key != "input"}
    assert wire.from_chats_alone(chat) == {**own, "messages": []}
    assert wire.from_chats_alone(kwargs) is kwargs
    another = {**chat, "model": "openai/another"}
    assert wire.from_chats_alone(another) is another


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
    request = wire.decode(body)
    assert request is not None
    written = {**body, **wire.added(body, {"messages": wire.encode(request.messages)})}
    assert json.dumps(written) == json.dumps(kept) == json.dumps(body)
    assert wire.without_overrides(body, "lm_studio") is body
    tools = body.get("tools") or body.get("functions") or []
    assert wire.is_same_request(body, request) or not isinstance(tools, list)


@given(st.lists(_JSON, min_size=1, max_size=4))
def test_anything_among_messages_takes_its_place(odd: list[Any]) -> None:
    """It must not switch the guard off for the others: each is a message, in its order; without any there is none."""
    request = wire.decode({"messages": odd})
    assert request is not None
    assert len(wire.encode(request.messages)) == len(odd)
    for given_, message in zip(odd, wire.encode(request.messages), strict=True):
        assert message == (given_ if isinstance(given_, dict) else {"role": "user", "content": message["content"]})
    for none in (odd[0], {}, [], None):
        assert wire.decode({"messages": none}) is None or (isinstance(none, list) and none)
