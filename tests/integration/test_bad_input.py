"""Broken requests: the stock proxy's own answer, or a clear 400; never an error of ours, never a hang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.builders import talk, tool_round
from tests.integration.bench import Bench

_HI: list[Any] = [{"role": "user", "content": "Hi."}]
_ROUND = tool_round("read_file", "text")


def _called(arguments: str) -> list[dict[str, Any]]:
    call = {**_ROUND[0]["tool_calls"][0], "function": {"name": "read_file", "arguments": arguments}}
    return [{**_ROUND[0], "tool_calls": [call]}, _ROUND[1]]


# Behind a conversation that has to be compacted each is tried as well.
_MESSAGES: dict[str, list[Any]] = {
    "strings": ["Hi."],
    "nulls": [None],
    "without role": [{"content": "Hi."}],
    "role is a number": [{"role": 7, "content": "Hi."}],
    "unknown role": [{"role": "wizard", "content": "Hi."}],
    "without content": [{"role": "user"}],
    "content is an object": [{"role": "user", "content": {"text": "Hi."}}],
    "content is numbers": [{"role": "user", "content": [1, 2]}],
    "part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "unknown part": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}],
    "bad image": [{"role": "user", "content": [{"type": "image_url", "image_url": 7}]}],
    "surrogate": [{"role": "user", "content": "lone \ud800 surrogate"}],
    "orphan result": [*_HI, _ROUND[1]],
    "dangling call": [*_HI, _ROUND[0]],
    "duplicate ids": [*_HI, *_ROUND, *_ROUND],
    "broken arguments": [*_HI, *_called('{"path": ')],
    "nested arguments": [*_HI, *_called(f'{{"a": {"[" * 900}{"]" * 900}}}')],
    "odd calls": [*_HI, {"role": "assistant", "content": "", "tool_calls": ["what", 7, None, {}]}, _ROUND[1]],
    "result without id": [*_HI, _ROUND[0], {"role": "tool", "content": "text"}],
}
_FIELDS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": None},
    "no list of messages": {"messages": {"role": "user", "content": "Hi."}},
    "limit is a string": {"max_tokens": "ten"},
    "limit is negative": {"max_tokens": -5},
    "limit is huge": {"max_tokens": 10**30},
    "tools are numbers": {"tools": [1, None]},
    "options are a string": {"stream": True, "stream_options": "usage"},
    "fallbacks are a string": {"fallbacks": "small"},
    "metadata is a list": {"metadata": [1]},
    "unknown model": {"model": "nobody"},
    "model is a number": {"model": 7},
}
_BODIES = {
    **{name: json.dumps({"model": "small", "messages": messages}).encode() for name, messages in _MESSAGES.items()},
    **{name: json.dumps({"model": "small", "messages": _HI, **fields}).encode() for name, fields in _FIELDS.items()},
    "nothing": b"",
    "half an object": b'{"model": "small"',
    "no object": b"[]",
    "no text": b"\xff\xfe{}",
}


def _verdict(answer: httpx.Response) -> tuple[int, str]:
    if answer.status_code == 200:
        return 200, "stream" if answer.text.startswith("data:") else "answer"
    # What LiteLLM fails at, it answers in plain text.
    is_json = answer.headers["content-type"].startswith("application/json")
    error = answer.json().get("error") if is_json else None
    return answer.status_code, str(error.get("type")) if isinstance(error, dict) else "error"


def test_odd_bodies_get_the_stock_proxys_own_answer(guarded: Bench, stock: Bench) -> None:
    """Or a 400 with words where the stock answer is an error, too."""
    ours = {name: guarded.proxy.post_bytes(body) for name, body in _BODIES.items()}
    # What is not ours to judge goes on unbounded, as without us.
    guarded.forgive("small")
    theirs = {name: stock.proxy.post_bytes(body) for name, body in _BODIES.items()}
    differing = {
        name: (answer.text[:300], theirs[name].text[:300])
        for name, answer in ours.items()
        if _verdict(answer) != _verdict(theirs[name])
        and not (answer.status_code == 400 <= theirs[name].status_code and answer.json()["error"]["message"])
    }
    assert differing == {}
    assert guarded.proxy.logged("failed_open") == []


@pytest.mark.parametrize("name", _MESSAGES)
def test_odd_messages_at_the_end_of_a_long_conversation(guarded: Bench, name: str) -> None:
    """Behind a conversation that has to be compacted: an answer or an error, and no failure of ours."""
    messages = [*talk(f"odd {name}", 5000), {"role": "assistant", "content": "Yes."}, *_MESSAGES[name]]
    answer = guarded.proxy.post_bytes(json.dumps({"model": "small", "messages": messages}).encode())
    guarded.forgive("small")
    assert answer.status_code in (200, 400, 422, 500)
    assert "litellm_compaction" not in answer.text
    assert guarded.proxy.logged("failed_open") == []
