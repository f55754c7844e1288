"""Answers that are not streamed and do not fit the window: continued, and returned as one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from litellm_compaction.simulator import Reply
from tests.builders import prose, talk, tools
from tests.integration.restart_bench import (
    LONG,
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


def test_usage_adds_up(restarting: Restarting) -> None:
    """The first prompt, and all generated tokens as the server reported them."""
    watch = restarting.watch("middle", Teller(Reply(LONG)))
    usage = restarting.proxy.chat("middle", asked("whole usage")).json()["usage"]
    generated = sum(record.completion_tokens for record in watch.chats)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (watch.chats[0].prompt_tokens, generated)
    assert usage["total_tokens"] == usage["prompt_tokens"] + generated
    prompts = [record.prompt_tokens for record in watch.chats]
    assert usage["compaction"] == {"outcome": "completed", "restarts": len(prompts) - 1, "prompt_tokens": prompts}
    assert len(watch.summaries) >= 1


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


def test_thoughts_of_both_parts_are_kept(restarting: Restarting) -> None:
    """Reasoning of the first and the second part is in the message."""
    thoughts = prose("whole thoughts", 200)
    restarting.watch("local", Teller(Reply(TEXTS["prose"], reasoning=thoughts), second_thoughts="I go on."))
    message = _choice(restarting.proxy.chat("local", asked("whole thinking")))["message"]
    assert message["content"] == TEXTS["prose"]
    assert message["reasoning_content"].startswith(thoughts)
    assert message["reasoning_content"].removeprefix(thoughts).strip() in ("I go on.", "I go on.I go on.")


def test_clients_own_limit_is_not_continued(restarting: Restarting) -> None:
    """`length` at the client's max_tokens is the answer."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    choice = _choice(restarting.proxy.chat("local", asked("whole limit"), max_tokens=1500))
    assert choice["finish_reason"] == "length"
    assert TEXTS["prose"].startswith(choice["message"]["content"])
    assert len(watch.chats) == 1


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
