"""Threat: a body that gets round what guards it: fields, shapes and depths, through LiteLLM's own application."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.builders import talk
from tests.integration.bench import Bench, is_question
from tests.integration.harness import CHAT
from tests.integration.plain_server import PlainServer
from tests.security.office import ROUTES, ask, body_of

_LONG = [message for message in talk("spoofs", 6000) if message["role"] != "system"]
_HI = [{"role": "user", "content": "hi"}]
_MANY = "word " * 9000
_BIG_TOOL = {"type": "function", "function": {"name": "f", "description": _MANY, "parameters": {}}}
_OFF = {"compaction": "off"}


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Fields of a body that a client may send beside a conversation that is too long.
_SPOOFS: dict[str, dict[str, Any]] = {
    **{f"provider {name}": {"custom_llm_provider": name} for name in ("hosted_vllm", "anthropic", "litellm_proxy")},
    "provider in extra_body": {"extra_body": {"custom_llm_provider": "hosted_vllm"}},
    "model in extra_body": {"extra_body": {"model": "other"}},
    "max_tokens in extra_body": {"extra_body": {"max_tokens": 10**9, "max_completion_tokens": 10**9}},
    "metadata as text": {"metadata": json.dumps(_OFF)},
    "metadata with a key of LiteLLM's": {"metadata": {"user_api_key": "sk-admin", **_OFF}},
    "mode": {"mode": "off"},
    "model_info": {"model_info": {"id": "none", "compaction": {"enabled": False, "mode": "off"}}},
    "callback_settings": {"callback_settings": {"litellm_compaction": {"mode": "off"}}},
    "internal call": {"internal_call_origin": "autorouter_compaction", "is_internal": True},
    "origin": {"metadata": {"internal_call_origin": "autorouter_compaction"}},
    "headers": {"extra_headers": {"x-litellm-compaction": "off"}},
    "guardrails": {"disable_global_guardrails": True, "guardrails": []},
    "n_predict": {"n_predict": 10**9, "max_tokens": 50},
    "n_predict without end": {"n_predict": -1},
    "n_predict in extra_body": {"extra_body": {"n_predict": 10**9}},
    **{f"a field {depth} deep": {"odd": _nested(depth)} for depth in (200, 941, 959, 990)},
}
# Conversations that come in another way than the one that is looked at.
_SMUGGLED: dict[str, dict[str, Any]] = {
    "messages": {"messages": _LONG, "max_tokens": 10**9},
    "tools": {"tools": [_BIG_TOOL]},
    "functions": {"functions": [_BIG_TOOL["function"]]},
}


def _as_json(body: Mapping[str, Any]) -> bytes:
    """A body as JSON, which Python's own encoder refuses to write where "odd" is nested too deep."""
    plain = {key: value for key, value in body.items() if key != "odd"}
    depth, value = 0, body.get("odd")
    while value:
        depth, value = depth + 1, value[0]
    odd = "" if value is None else ', "odd": ' + "[" * (depth + 1) + "]" * (depth + 1)
    return f"{json.dumps(plain)[:-1]}{odd}}}".encode()


@pytest.mark.parametrize(("group", "path"), [("foreign-hooked", CHAT), *(("small", path) for path in ROUTES)])
def test_no_field_of_the_body_switches_the_guard_off(office: Bench, group: str, path: str) -> None:
    """Compacted or refused, by each carrier and on each route; what reaches the server fits its window."""
    watch = office.watch(group)
    headers = {"Authorization": "Bearer sk-bob", "Content-Type": "application/json"}
    rows = {name: body_of(group, _LONG, path, **fields) for name, fields in _SPOOFS.items()}
    if path == CHAT:
        rows |= {f"{name} in extra_body": body_of(group, _HI, extra_body=given) for name, given in _SMUGGLED.items()}
    for name, body in rows.items():
        office.proxy.client.post(path, content=_as_json(body), headers=headers)
        assert office.findings() == [], name
        sent = [*watch.bodies, *(record.body or {} for record in watch.summaries)]
        assert all(0 <= body.get("n_predict", 0) < 4096 for body in sent), name
    # Some are refused, by LiteLLM or by us.
    assert len(watch.chats) > 10


# What servers write into the prompt besides messages and tools, each longer than the window.
_RENDERED: dict[str, dict[str, Any]] = {
    "documents": {"documents": [{"title": "a", "text": _MANY}]},
    "documents that are text": {"documents": _MANY},
    "an argument of the template": {"chat_template_kwargs": {"note": _MANY}},
    "an argument's names": {"chat_template_kwargs": {f"name of argument {number}": 1 for number in range(9000)}},
    "messages as an argument": {"chat_template_kwargs": {"messages": _LONG * 4}},
    "effort": {"reasoning_effort": _MANY},
    "tools as text": {"tools": _MANY},
    "functions beside tools": {"tools": [{"type": "function", "function": {"name": "g"}}], "functions": [_BIG_TOOL]},
    "suffix": {"suffix": _MANY},
}
# Templates of a client's own, which may write anything any number of times.
_TEMPLATES: dict[str, dict[str, Any]] = {
    "template": {"chat_template": "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}"},
    "template as an argument": {"chat_template_kwargs": {"chat_template": "{{ messages }}" * 99}},
}
# What shapes how an answer is chosen, and is in no prompt: however long, it takes no room in the window.
_NOT_RENDERED: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": _MANY},
    "prediction": {"prediction": {"type": "content", "content": _MANY}},
    "few arguments": {"chat_template_kwargs": {"enable_thinking": False}},
}


@pytest.mark.parametrize("group", ["quoting", "quoting-hooked"])
def test_what_a_server_renders_takes_room_and_nothing_else_does(office: Bench, liar: PlainServer, group: str) -> None:
    """Over the window nothing leaves, in the body or in `extra_body`; what is in no prompt leaves as it came."""
    for name, fields in {**_RENDERED, **_TEMPLATES}.items():
        for given in (fields, {"extra_body": fields}):
            before = len(liar.bodies)
            answer = ask(office, "sk-bob", body_of(group, _HI, **given))
            # A server may be asked for its count before a refusal.
            asked = [each for each in liar.bodies[before:] if not is_question(each)]
            assert (answer.status_code, asked) == (400, []), name
            told = "chat_template" if name in _TEMPLATES else "maximum context length is 4096 tokens"
            assert told in answer.text or "not supported" in answer.text, (name, answer.text[:300])
    for name, fields in _NOT_RENDERED.items():
        before = len(liar.bodies)
        assert ask(office, "sk-bob", body_of(group, _HI, extra_body=fields)).status_code == 200, name
        [left] = liar.bodies[before:]
        assert (left["max_tokens"], left.get(*fields)) == (50, *fields.values()), name


_GIANT = "word " * 9000
# What stands at the beginning of a conversation, before enough of it to be compacted.
_SHAPES: dict[str, list[Any]] = {
    "a part nested 200 deep": [{"role": "user", "content": [{"type": "text", "text": "x", "odd": _nested(200)}]}],
    "no role": [{"content": "hi"}],
    **{f"role {role!r}": [{"role": role, "content": _GIANT}] for role in (7, None, ["user"], "user ", "developer")},
    **{
        f"content {type(content).__name__}": [{"role": "user", "content": content}]
        for content in (True, {"text": _GIANT}, [[_GIANT]], None)
    },
    "a part of an unknown type": [{"role": "user", "content": [{"type": "odd", "text": _GIANT}]}],
    "a part whose text is an object": [{"role": "user", "content": [{"type": "text", "text": {"text": _GIANT}}]}],
    "a giant name": [{"role": "user", "name": "n" * 45_000, "content": "hi"}],
    "a giant refusal": [{"role": "assistant", "content": None, "refusal": _GIANT}],
    "giant thoughts": [{"role": "assistant", "content": "hi", "reasoning_content": _GIANT}],
    "calls that are no list": [{"role": "assistant", "content": "hi", "tool_calls": {"function": _GIANT}}],
    "an older call": [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": json.dumps({"x": _GIANT})}},
        {"role": "function", "name": "f", "content": _GIANT},
    ],
    "a result without a call": [{"role": "tool", "tool_call_id": "c", "content": _GIANT}],
    "a message that is text": [_GIANT],
}


@pytest.mark.parametrize("group", ["quoting", "quoting-hooked"])
def test_no_shape_of_a_message_switches_the_guard_off(office: Bench, liar: PlainServer, group: str) -> None:
    """What no server expects is compacted or refused like the rest: what leaves is short, or nothing does."""
    for name, shape in _SHAPES.items():
        before = len(liar.bodies)
        answer = ask(office, "sk-bob", body_of(group, [*shape, *_LONG[1:]]))
        left = liar.bodies[before:]
        assert all(len(json.dumps(body)) < 30_000 for body in left), name
        assert (answer.status_code == 200) == bool(left) or answer.status_code in (400, 500), name
