"""Answers that are not streamed and do not fit the window: continued, and returned as one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from litellm_compaction.simulator import Reply
from tests.builders import prose, talk, tools
from tests.integration.restart_bench import (
    TEXTS,
    Restarting,
    Teller,
    asked,
    both_carriers,
    calls,
)


def _choice(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert len(body["choices"]) == 1
    choice: dict[str, Any] = body["choices"][0]
    return choice


@both_carriers
def test_whole_answer_is_inside_of_the_window(restarting: Restarting) -> None:
    """By each carrier no request of it can outgrow the window; what the client reads is the model's own beginning."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["json"])))
    messages = asked("whole json")
    choice = _choice(restarting.proxy.chat("local", messages, response_format={"type": "json_object"}))
    assert TEXTS["json"].startswith(choice["message"]["content"])
    assert choice["finish_reason"] == ("stop" if choice["message"]["content"] == TEXTS["json"] else "length")
    assert [watch.problems(messages, index) for index in range(len(watch.chats))] == [[]] * len(watch.chats)


def test_tool_calls_are_whole(restarting: Restarting) -> None:
    """A call behind a continued text is there once; a call that was cut comes from the compacted conversation."""
    wanted = calls("tool_0", words=40)
    restarting.watch("local", Teller(Reply(TEXTS["prose"], tool_calls=wanted)))
    choice = _choice(restarting.proxy.chat("local", asked("whole call"), tools=tools(1)))
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert (made, choice["message"]["content"], choice["finish_reason"]) == (wanted, TEXTS["prose"], "tool_calls")
    long = calls("tool_0", words=3700)
    again = Teller(Reply("", tool_calls=long), later=(Reply("", tool_calls=long),))
    watch = restarting.watch("wide", again)
    choice = _choice(restarting.proxy.chat("wide", talk("whole cut call", 4500), tools=tools(1)))
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert (made, choice["finish_reason"]) == (long, "tool_calls")
    assert len(watch.chats) > 1


@pytest.mark.parametrize("kind", ["text", "call", "json"])
def test_answer_that_is_alone_in_a_shared_context_is_one_request(restarting: Restarting, kind: str) -> None:
    """8,192 tokens for four requests, and nobody else there: the whole rest of the window in one go."""
    wanted = calls("tool_0", words=2000)
    text = {"text": prose("alone", 3300), "call": "", "json": json.dumps({"rows": prose("rows", 700).split()})}[kind]
    watch = restarting.watch("wide", Teller(Reply(text, tool_calls=wanted if kind == "call" else [])))
    options: dict[str, Any] = {"call": {"tools": tools(1)}, "json": {"response_format": {"type": "json_object"}}}.get(
        kind, {}
    )
    messages = talk(f"alone {kind}", 2500)
    choice = _choice(restarting.proxy.chat("wide", messages, **options))
    assert len(watch.chats) == 1
    assert watch.bodies[0]["max_tokens"] >= 3800
    made = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls") or []
    ]
    assert (choice["message"]["content"] or "", made) == (text, wanted if kind == "call" else [])
    assert choice["finish_reason"] == ("tool_calls" if kind == "call" else "stop")
