"""An answer carried over the limit: what its client reads on each route, what its server got, and who pays (P1, P6)."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.builders import talk, tools
from tests.integration.forms import END, ROUTES, ask, streams
from tests.integration.harness import Streamed
from tests.integration.restart_bench import (
    LONG,
    TEXTS,
    Restarting,
    Teller,
    asked,
    both_carriers,
    calls,
    stream_problems,
    without_restarts,
)
from tests.lmstudio_double import Reply

_numbers = itertools.count()


@streams
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_is_carried_over(restarting: Restarting, route: str, stream: bool) -> None:
    """One text with the model's own end, over several requests, of which none outgrows the window."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    messages = asked(f"carried {route} {stream}")
    said = ask(restarting, route, "local", messages, stream=stream, limit=8000)
    assert (without_restarts(said.text), said.ends) == (TEXTS["prose"], [END[route]])
    assert len(watch.chats) > 1
    assert not any(record.truncated for record in watch.records)


@both_carriers
def test_what_shapes_an_answer_holds_to_its_end(restarting: Restarting) -> None:
    """Its bound, the choice of words, and what the template is told, in `extra_body` as well."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["prose"])))
    shape = {"min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}}
    more = {"extra_body": {"max_tokens": 2300, "repeat_penalty": 1.1}, "stream_options": {"include_usage": True}}
    answer = restarting.proxy.stream("local", asked("a shape"), **shape, **more)
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 2300
    shapes = [{key: body.get(key) for key in (*shape, "repeat_penalty")} for body in watch.bodies]
    assert shapes == [{**shape, "repeat_penalty": 1.1}] * 2


@both_carriers
def test_cut_call_is_made_again_after_a_compaction(restarting: Restarting) -> None:
    """A call that does not fit beside the history comes whole from the compacted conversation, and once."""
    wanted, text = calls("tool_0", words=3700), "I write the file now. "
    again = Reply("", tool_calls=wanted)
    watch = restarting.watch("wide", Teller(Reply(text, tool_calls=wanted), later=(again,)))
    messages = talk("cut call", 4500)
    answer = restarting.proxy.stream("wide", messages, tools=tools(1))
    assert len(watch.chats) >= 2
    assert stream_problems(answer) == []
    assert answer.calls == wanted
    assert (without_restarts(answer.text), answer.finish_reasons) == (text, ["tool_calls"])
    assert watch.chats[-1].prompt_tokens < watch.chats[0].prompt_tokens
    assert watch.problems(messages) == []


@pytest.mark.parametrize("overflow", ["error_event", "error_400_object", "empty"])
@pytest.mark.parametrize("stream", [True, False])
def test_overflow_of_the_prompt_is_compacted_away(restarting: Restarting, overflow: str, stream: bool) -> None:
    """A server that counts three times what we count: its overflow is answered by a harder compaction, unnoticed."""
    name = f"overflowing-{overflow}-{stream}"
    watch = restarting.watch(name, Teller(Reply("It fits.")))
    messages = talk(f"heavier {overflow}", 780)
    answer = (restarting.proxy.stream if stream else restarting.proxy.chat)(name, messages)
    restarting.forgive(name)
    text = answer.text if isinstance(answer, Streamed) else answer.json()["choices"][0]["message"]["content"]
    assert text == "It fits."
    assert [record.outcome for record in watch.chats] == ["overflow", "ok"]
    kind = {"error_400_object": "http_400", "error_event": "error_event", "empty": "empty_stream"}[overflow]
    (line,) = restarting.proxy.expect_logged(f"(compacted|fallback) model={name} ")
    assert "(server overflow)" in line
    assert line.rstrip().endswith(f" refusal={kind}")


@both_carriers
def test_whole_answer_is_inside_of_the_window(restarting: Restarting) -> None:
    """By each carrier no request of it can outgrow the window; what the client reads is the model's own beginning."""
    watch = restarting.watch("local", Teller(Reply(TEXTS["json"])))
    messages = asked("whole json")
    (choice,) = restarting.proxy.chat("local", messages, response_format={"type": "json_object"}).json()["choices"]
    assert TEXTS["json"].startswith(choice["message"]["content"])
    assert choice["finish_reason"] == ("stop" if choice["message"]["content"] == TEXTS["json"] else "length")
    assert [watch.problems(messages, index) for index in range(len(watch.chats))] == [[]] * len(watch.chats)


def _new_key() -> tuple[str, dict[str, str]]:
    """A key that nobody has used, and the header that sends it."""
    name = f"sk-one.rows-{next(_numbers)}"
    return name, {"Authorization": f"Bearer {name}"}


@streams
def test_rows_of_a_restarted_answer(restarting: Restarting, stream: bool) -> None:
    """One row with the summed usage and one for each summary, all of the same key."""
    name, key = _new_key()
    restarting.watch("local", Teller(Reply("Hello.")))
    watch = restarting.watch("middle", Teller(Reply(LONG)))
    body = {"model": "middle", "messages": asked(f"rows {stream}"), "stream": stream}
    if stream:
        answer = restarting.proxy.stream_body(body, **key)
        assert without_restarts(answer.text) == LONG
    else:
        assert restarting.proxy.post(body, headers=key).json()["choices"][0]["message"]["content"] == LONG
    summaries = len(watch.summaries)
    assert len(watch.chats) >= 2
    assert summaries >= 1
    expected = summaries + 1
    rows = restarting.rows.of(name, expected)
    # A row too many would come at once, too: the next request's row is written after it.
    restarting.proxy.post({"model": "local", "messages": [{"role": "user", "content": "Hi."}]}, headers=key)
    assert len(restarting.rows.of(name, expected + 1)) == expected + 1
    assert [row["event"] for row in rows] == ["success"] * expected
    assert len({json.dumps(row["identity"]) for row in rows}) == 1
    assert (rows[0]["identity"]["user_id"], rows[0]["identity"]["team_id"]) == ("una", "solo")
    assert len({row["call_id"] for row in rows}) == expected
    own = [row for row in rows if not row["opening"].startswith("You write the record")]
    assert len(own) == 1
    generated = sum(record.completion_tokens for record in watch.chats)
    if not stream:
        assert own[0]["completion_tokens"] == generated
    # A stopped stream is counted with a stand-in for the model's vocabulary.
    assert own[0]["completion_tokens"] == pytest.approx(generated, rel=0.35)
    assert own[0]["prompt_tokens"] == pytest.approx(watch.chats[0].prompt_tokens, rel=0.35)
