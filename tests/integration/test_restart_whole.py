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
    WINDOW,
    Restarting,
    Teller,
    asked,
    calls,
)


def _choice(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert len(body["choices"]) == 1
    choice: dict[str, Any] = body["choices"][0]
    return choice


@pytest.mark.parametrize("kind", ["prose", "code", "table", "json"])
def test_answer_is_one_message(restarting: Restarting, kind: str) -> None:
    """Two upstream answers come back as one, without notices, with the last finish reason."""
    messages = asked(f"whole {kind}")
    watch = restarting.watch("local", Teller(Reply(TEXTS[kind])))
    choice = _choice(restarting.proxy.chat("local", messages))
    assert choice["message"]["content"] == TEXTS[kind]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    assert len(watch.chats) > 1
    assert [record.finish_reason for record in watch.chats[:-1]] == ["length"] * (len(watch.chats) - 1)
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


def test_json_mode_is_one_document(restarting: Restarting) -> None:
    """A joined document parses."""
    restarting.watch("local", Teller(Reply(TEXTS["json"])))
    choice = _choice(restarting.proxy.chat("local", asked("whole json"), response_format={"type": "json_object"}))
    assert json.loads(choice["message"]["content"]) == json.loads(TEXTS["json"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("limit", [100, 1500])
def test_clients_own_limit_is_not_continued(restarting: Restarting, limit: int) -> None:
    """`length` at the client's max_tokens is the answer."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    choice = _choice(restarting.proxy.chat("local", asked(f"whole limit {limit}"), max_tokens=limit))
    assert choice["finish_reason"] == "length"
    assert TEXTS["prose"].startswith(choice["message"]["content"])
    assert len(watch.chats) == 1


def test_two_choices_are_left_alone(restarting: Restarting) -> None:
    """Several choices cannot be joined: the server's answer is returned as it is."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    answer = restarting.proxy.chat("local", asked("two choices"), n=2)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert len(watch.chats) == 1
    assert watch.chats[0].prompt_tokens + watch.bodies[0]["max_tokens"] <= WINDOW


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 4000}], ids=["no limit", "limit"])
@pytest.mark.parametrize("kind", ["text", "call", "json"])
def test_answer_that_is_alone_in_a_shared_context_is_one_request(
    restarting: Restarting, kind: str, limits: dict[str, int]
) -> None:
    """8,192 tokens for four requests, and nobody else there: the whole rest of the window in one go."""
    wanted = calls("tool_0", words=2000)
    text = {"text": prose("alone", 3300), "call": "", "json": json.dumps({"rows": prose("rows", 700).split()})}[kind]
    watch = restarting.watch("wide", Teller(Reply(text, tool_calls=wanted if kind == "call" else [])))
    options: dict[str, Any] = {"call": {"tools": tools(1)}, "json": {"response_format": {"type": "json_object"}}}.get(
        kind, {}
    )
    messages = talk(f"alone {kind} {limits}", 2500)
    choice = _choice(restarting.proxy.chat("wide", messages, **options, **limits))
    assert len(watch.chats) == 1
    assert watch.bodies[0]["max_tokens"] >= 3800
    made = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls") or []
    ]
    assert (choice["message"]["content"] or "", made) == (text, wanted if kind == "call" else [])
    assert choice["finish_reason"] == ("tool_calls" if kind == "call" else "stop")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
def test_every_route_has_the_whole_rest_of_the_window(restarting: Restarting, path: str) -> None:
    """Anthropic's, responses and text completions without a stream: one request, all of its text."""
    if restarting.carrier == "hooks":
        pytest.skip("the hooks carry chat completions")
    text = prose(f"alone {path}", 3300)
    watch = restarting.watch("wide", Teller(Reply(text)))
    question = prose(f"question {path}", 2500)
    body: dict[str, Any] = {
        "/v1/messages": {"max_tokens": 4000, "messages": [{"role": "user", "content": question}]},
        "/v1/responses": {"max_output_tokens": 4000, "input": question},
        "/v1/completions": {"max_tokens": 4000, "prompt": question},
    }[path]
    answer = restarting.proxy.post({"model": "wide", **body}, path)
    assert answer.status_code == 200, answer.text
    assert json.dumps(text[-200:])[1:-1] in json.dumps(answer.json())
    assert len(watch.chats) == 1
