"""Answers that are not streamed and do not fit the window: continued, and returned as one."""

from __future__ import annotations

from typing import Any

from tests.builders import talk, tools
from tests.integration.restart_bench import (
    TEXTS,
    Restarting,
    Teller,
    asked,
    both_carriers,
    calls,
)
from tests.lmstudio_double import Reply


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
