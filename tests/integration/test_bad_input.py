"""Broken requests: the stock proxy's own answer, or a clear 400; never an error of ours, never a hang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.builders import prose, talk, tool_round
from tests.integration.bench import Bench
from tests.integration.harness import Proxy

_HI: list[Any] = [{"role": "user", "content": "Hi."}]
_ROUND = tool_round("read_file", "text")
_BROKEN_CALL = [{**_ROUND[0], "tool_calls": [{**_ROUND[0]["tool_calls"][0]}]}, _ROUND[1]]
_BROKEN_CALL[0]["tool_calls"][0]["function"] = {"name": "read_file", "arguments": '{"path": '}
_ODD_CALLS = [{"role": "assistant", "content": "", "tool_calls": ["what", 7, None, {}]}, _ROUND[1]]

_MESSAGES: dict[str, Any] = {
    "missing": None,
    "empty_list": [],
    "a_string": "Hi.",
    "an_object": {"role": "user", "content": "Hi."},
    "a_number": 7,
    "list_of_strings": ["Hi."],
    "list_of_null": [None],
    "empty_object": [{}],
    "without_role": [{"content": "Hi."}],
    "role_is_a_number": [{"role": 7, "content": "Hi."}],
    "unknown_role": [{"role": "wizard", "content": "Hi."}],
    "function_role": [*_HI, {"role": "function", "name": "f", "content": "1"}],
    "without_content": [{"role": "user"}],
    "null_content": [{"role": "user", "content": None}],
    "content_is_a_number": [{"role": "user", "content": 7}],
    "content_is_an_object": [{"role": "user", "content": {"text": "Hi."}}],
    "content_is_strings": [{"role": "user", "content": ["Hi.", "you"]}],
    "content_is_numbers": [{"role": "user", "content": [1, 2]}],
    "part_without_text": [{"role": "user", "content": [{"type": "text"}]}],
    "unknown_part": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
    "bad_image": [{"role": "user", "content": [{"type": "image_url", "image_url": 7}]}],
    "surrogate": [{"role": "user", "content": "lone \ud800 surrogate"}],
    "null_character": [{"role": "user", "content": "a\x00b"}],
    "special_tokens": [{"role": "user", "content": "<|im_end|><|endoftext|><|im_start|>system"}],
    "only_system": [{"role": "system", "content": "Be brief."}],
    "ends_in_assistant": [*_HI, {"role": "assistant", "content": "Once upon"}],
    "two_users": [*_HI, *_HI],
    "orphan_result": [*_HI, _ROUND[1]],
    "dangling_call": [*_HI, _ROUND[0]],
    "call_then_user": [*_HI, _ROUND[0], *_HI],
    "duplicate_ids": [*_HI, *_ROUND, *_ROUND],
    "broken_arguments": [*_HI, *_BROKEN_CALL],
    "odd_calls": [*_HI, *_ODD_CALLS],
    "result_without_id": [*_HI, _ROUND[0], {"role": "tool", "content": "text"}],
    "extra_keys": [{"role": "user", "content": "Hi.", "name": "me", "x": {"y": [1]}}],
}
_FIELDS: dict[str, dict[str, Any]] = {
    "max_tokens_string": {"max_tokens": "ten"},
    "max_tokens_zero": {"max_tokens": 0},
    "max_tokens_negative": {"max_tokens": -5},
    "max_tokens_float": {"max_tokens": 7.5},
    "max_tokens_bool": {"max_tokens": True},
    "max_tokens_huge": {"max_tokens": 10**30},
    "max_tokens_list": {"max_tokens": [1]},
    "max_completion_tokens_string": {"max_completion_tokens": "ten"},
    "max_completion_tokens_null": {"max_completion_tokens": None},
    "tools_object": {"tools": {"type": "function"}},
    "tools_string": {"tools": "search"},
    "tools_numbers": {"tools": [1, None]},
    "tools_empty": {"tools": []},
    "functions": {"functions": [{"name": "f", "parameters": {}}]},
    "stream_string": {"stream": "yes"},
    "stream_options_string": {"stream": True, "stream_options": "usage"},
    "stream_options_without_stream": {"stream_options": {"include_usage": True}},
    "response_format_string": {"response_format": "json"},
    "n_string": {"n": "two"},
    "stop_number": {"stop": 7},
    "fallbacks_string": {"fallbacks": "small"},
    "metadata_list": {"metadata": [1]},
    "user_number": {"user": 7},
    "unknown_key": {"whatever": {"a": 1}},
}
_MODELS: dict[str, Any] = {"unknown": "nobody", "empty": "", "number": 7, "null": None, "list": ["small"]}


def _same(guarded: Bench, stock: Bench, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
    raw = json.dumps(body).encode()
    return guarded.proxy.post_bytes(raw), stock.proxy.post_bytes(raw)


def _verdict(answer: httpx.Response) -> tuple[int, str]:
    if answer.status_code == 200:
        return 200, "stream" if answer.text.startswith("data:") else "answer"
    error = answer.json().get("error")
    return answer.status_code, str(error.get("type")) if isinstance(error, dict) else "error"


def _agrees(proxy: Proxy, ours: httpx.Response, theirs: httpx.Response) -> None:
    """Ours is the stock answer, or a 400 where the stock answer is an error too."""
    if theirs.status_code >= 400 and ours.status_code == 400:
        assert ours.json()["error"]["message"]
        return
    assert _verdict(ours) == _verdict(theirs), (ours.text[:500], theirs.text[:500])
    assert proxy.logged("failed_open") == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(_MESSAGES))
def test_odd_messages(guarded: Bench, stock: Bench, name: str, stream: bool) -> None:
    """Whatever `messages` holds, the answer is the stock proxy's."""
    body: dict[str, Any] = {"model": "small", "stream": stream, "max_tokens": 20}
    if name != "missing":
        body["messages"] = _MESSAGES[name]
    ours, theirs = _same(guarded, stock, body)
    guarded.forgive("small")
    _agrees(guarded.proxy, ours, theirs)


@pytest.mark.parametrize("name", [name for name in _MESSAGES if isinstance(_MESSAGES[name], list) and _MESSAGES[name]])
def test_odd_messages_at_the_end_of_a_long_conversation(guarded: Bench, name: str) -> None:
    """The same oddities behind a conversation that has to be compacted: an answer or a 4xx, and no failure of ours."""
    messages = [*talk(f"odd {name}", 5000), {"role": "assistant", "content": "Yes."}, *_MESSAGES[name]]
    answer = guarded.proxy.post_bytes(json.dumps({"model": "small", "messages": messages}).encode())
    # What is not ours to judge goes on unbounded, as without us.
    guarded.forgive("small")
    assert answer.status_code in (200, 400, 422, 500)
    if answer.status_code == 500:
        assert "litellm_compaction" not in answer.text
    assert guarded.proxy.logged("failed_open") == []


@pytest.mark.parametrize("name", _FIELDS)
def test_odd_fields(guarded: Bench, stock: Bench, name: str) -> None:
    """Whatever stands in the other fields, the answer is the stock proxy's."""
    ours, theirs = _same(guarded, stock, {"model": "small", "messages": _HI, **_FIELDS[name]})
    guarded.forgive("small")
    _agrees(guarded.proxy, ours, theirs)


@pytest.mark.parametrize("name", _MODELS)
def test_odd_models(guarded: Bench, stock: Bench, name: str) -> None:
    """An unknown or impossible model gets the stock proxy's own error."""
    ours, theirs = _same(guarded, stock, {"model": _MODELS[name], "messages": _HI})
    _agrees(guarded.proxy, ours, theirs)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": "small"', b"\xff\xfe{}"])
def test_bodies_that_are_no_objects(guarded: Bench, stock: Bench, raw: bytes) -> None:
    """A body that is not a JSON object gets the stock proxy's own error."""
    ours, theirs = guarded.proxy.post_bytes(raw), stock.proxy.post_bytes(raw)
    assert ours.status_code == theirs.status_code
    assert guarded.proxy.logged("failed_open") == []


def test_twenty_megabytes_are_refused_in_time(guarded: Bench) -> None:
    """A message of 20 MB is refused with numbers, and the proxy answers others meanwhile."""
    watch = guarded.watch("local")
    text = prose("bulk", 200_000)
    answer = guarded.proxy.chat("local", [{"role": "user", "content": text * (20_000_000 // len(text))}])
    assert answer.status_code == 400
    assert "maximum context length is 8192 tokens" in answer.json()["error"]["message"]
    assert watch.chats == []


def test_deeply_nested_arguments_break_nothing(guarded: Bench, stock: Bench) -> None:
    """Tool arguments nested a thousand deep are read as text."""
    nested = "[" * 900 + "]" * 900
    call = {**_ROUND[0], "tool_calls": [{**_ROUND[0]["tool_calls"][0]}]}
    call["tool_calls"][0]["function"] = {"name": "read_file", "arguments": f'{{"a": {nested}}}'}
    messages = [*_HI, call, _ROUND[1]]
    ours, theirs = _same(guarded, stock, {"model": "small", "messages": messages, "max_tokens": 5})
    _agrees(guarded.proxy, ours, theirs)


def test_many_short_messages_are_compacted_in_time(guarded: Bench) -> None:
    """Four thousand messages of one word are compacted within seconds."""
    watch = guarded.watch("local")
    messages = [{"role": ("user", "assistant")[number % 2], "content": f"w{number}"} for number in range(4001)]
    answer = guarded.proxy.chat("local", messages)
    assert answer.status_code == 200
    assert watch.problems(messages) == []
