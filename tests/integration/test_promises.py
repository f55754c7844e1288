"""The promises P1 to P5 and P8 of the design, over HTTP, as a client and LM Studio see them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.builders import ONE_ROUND, answered, prose, talk, tool_round, tools
from tests.integration.bench import SUMMARY, Bench, answers, is_summary_call
from tests.lmstudio_double import ChatCall, Fault, Gate, Reply

WINDOW = 8192
REFUSALS = [
    Reply(fault=Fault("500")),
    Reply("I'm sorry, but I can't help with that."),
    Reply(prose("a summary that is longer than everything", 9000), chunk_tokens=64),
]


# P1: never truncated by the server.


def test_doubt_asks_before_it_compacts(guarded: Bench) -> None:
    """What is too long by our estimate alone goes as it came: a question or two, no more later.

    Where it may be longer than the window, a part of it that certainly fits is asked about first.
    """
    watch = guarded.watch("doubted")
    messages = talk("doubted", 3000)
    for turn in range(3):
        answer = guarded.proxy.chat("doubted", messages)
        assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "none")
        assert watch.sent() == messages
        messages = answered(messages, "Understood.", f"And {turn}?")
    *parts, question = watch.questions
    assert len(parts) <= 1
    # A part of it may say enough.
    part = (question.body or {})["messages"]
    assert part == watch.sent(0)[: len(part)]
    assert watch.summaries == []


def test_growing_conversation_never_overflows(guarded: Bench) -> None:
    """Forty turns of a growing conversation all stay inside the window, and are summarized less than every fifth."""
    watch = guarded.watch("small")
    messages = talk("growth", 200)
    for turn in range(40):
        body = {"model": "small", "messages": messages, "stream": turn % 2 == 0, "max_tokens": 4000}
        assert guarded.proxy.post(body).status_code == 200
        assert watch.problems(messages) == []
        messages = answered(messages, prose(f"growth {turn}", 150), f"Next, number {turn}.")
    assert len(watch.chats) == 40
    assert 1 <= len(watch.summaries) < 8


@pytest.mark.parametrize("share", [40, 80])
def test_no_answer_begins_where_it_would_be_stopped(guarded: Bench, share: int) -> None:
    """P5: with a floor of 40 to 80 % of the window, each turn of an agent is one request below the streaming limit.

    The system prompt is the floor, and results of 40 to 450 tokens come in; beside one of 80 %, of up to 250 (issue 25,
    N1).
    """
    group = f"floor-{share}"
    watch = guarded.watch(group, answers(reply=Reply("I look at the next one.")))
    messages = [
        {"role": "system", "content": prose(f"{group} rules", WINDOW * share * 95 // 10_000)},
        {"role": "user", "content": "Read the files one after the other."},
    ]
    for turn in range(24):
        size = (40, 450, 120, 250, 300)[turn % 5]
        messages += tool_round(
            "read", prose(f"{group} {turn}", min(size, 250) if share == 80 else size), f"call_{turn:04}"
        )
        answer = guarded.proxy.stream(group, messages)
        assert answer.finish_reasons == ["stop"]
        assert watch.problems(messages) == []
    assert len(watch.chats) == 24
    # Beside a floor of 80 % a turn that fits, and of which a compaction would take little, may go as it came.
    most_ratio = 0.95 if share == 80 else 0.9
    assert max(record.prompt_tokens for record in watch.chats) <= most_ratio * WINDOW - 64
    assert min(body["max_tokens"] for body in watch.bodies) >= (500 if share == 80 else 900)
    assert len(watch.summaries) <= 4


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, None),
        ({"max_tokens": -1}, None),
        ({"max_completion_tokens": 32_000}, None),
        ({"max_tokens": 17}, 17),
        ({"max_completion_tokens": 50}, 50),
        ({"max_tokens": 70, "max_completion_tokens": 60}, 60),
    ],
)
def test_answer_is_bounded(guarded: Bench, asked: dict[str, int], expected: int | None) -> None:
    """Upstream max_tokens is the client's own where it fits, and what the window leaves where not."""
    watch = guarded.watch("local")
    for size in (300, 12_000):
        assert guarded.proxy.chat("local", talk(f"bounds {size}", size), **asked).status_code == 200
        record = watch.chats[-1]
        limit = (record.body or {})["max_tokens"]
        if expected is not None:
            assert limit == expected
        else:
            assert 256 <= limit <= WINDOW - record.prompt_tokens
            assert limit > 0.7 * (WINDOW - record.prompt_tokens - 64) - 0.3 * record.prompt_tokens
        assert (record.body or {}).get("max_completion_tokens", 0) <= limit


def _too_large() -> list[Any]:
    system = [{"role": "system", "content": prose("rules", 7000)}, {"role": "user", "content": "Begin."}]
    pasted = [{"role": "user", "content": prose("pasted", 14_000)[:70_000]}]
    read = [*talk("reading", 900), *tool_round("read_file", prose("file", 12_000))]
    return [
        pytest.param(system, tools(30), ["tools", "system messages"], id="system_and_tools"),
        pytest.param(pasted, None, ["newest user message"], id="first_user_message"),
        pytest.param(read, tools(2), ["result of tool read_file"], id="tool_result"),
    ]


@pytest.mark.parametrize(("messages", "schemas", "named"), _too_large())
def test_what_cannot_fit_is_refused_with_an_itemised_400(
    guarded: Bench, messages: list[dict[str, Any]], schemas: list[dict[str, Any]] | None, named: list[str]
) -> None:
    """A request whose protected part alone is too large gets a real 400 with the numbers, and nothing is sent."""
    watch = guarded.watch("local")
    answer = guarded.proxy.chat("local", messages, **({"tools": schemas} if schemas else {}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "maximum context length is 8192 tokens" in error["message"]
    assert "context_length_exceeded" in error["message"]
    for name in named:
        assert re.search(rf"{name} \d+ tokens", error["message"])
    assert re.search(r"context length of at least \d+ tokens", error["message"])
    assert watch.chats == []
    assert watch.summaries == []


def test_named_context_length_is_enough(guarded: Bench) -> None:
    """The context length that the error asks for is one with which the same request goes through."""
    messages = [{"role": "user", "content": prose("a long paste", 9000)}]
    refused = guarded.proxy.chat("growing", messages)
    assert refused.status_code == 400
    needed = re.search(r"context length of at least (\d+) tokens", refused.json()["error"]["message"])
    assert needed is not None
    guarded.reload("growing", int(needed[1]))
    watch = guarded.watch("growing")
    assert guarded.proxy.chat("growing", messages).status_code == 200
    assert watch.sent() == messages


# P2 and P3: what is protected stays, and the list stays valid.


# P4: one summary per round.


def test_identical_concurrent_requests_share_one_summary(guarded: Bench) -> None:
    """Four identical requests at the same time cost one summary call and send the same bytes."""
    gate = Gate()
    watch = guarded.watch("twin", answers(Reply(SUMMARY, gate=gate)))
    messages = talk("twins", ONE_ROUND)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(guarded.proxy.chat, "twin", messages) for _ in range(4)]
        assert gate.reached.wait(60)
        guarded.window_of("local")  # answered by the same event loop, after those that came before
        gate.open()
        assert [answer.result().status_code for answer in running] == [200] * 4
    assert len(watch.summaries) == 1
    assert all(watch.sent(index) == watch.sent(0) for index in range(4))


def test_shrunk_window_is_noticed_and_integrated(guarded: Bench) -> None:
    """When the model is loaded anew with half the context, requests fit it, and the record so far is built on."""

    def remembering(call: ChatCall) -> Reply:
        known = "ALPHA-7" in call.prompt_text or len(watch.summaries) == 1
        return Reply(f"### Current state\n{'ALPHA-7 holds.' if known else 'Nothing is known.'}")

    watch = guarded.watch("shrinking", lambda call: remembering(call) if is_summary_call(call.body) else None)
    messages = talk("shrinking", 12_500)
    first = guarded.proxy.chat("shrinking", messages)
    assert first.headers["x-litellm-compaction-window"] == "16384"
    assert len(watch.summaries) == 1
    guarded.reload("shrinking", 4096)
    for turn in range(12):
        messages = answered(messages, prose(f"shrink {turn}", 200), f"Next {turn}.")
        answer = guarded.proxy.chat("shrinking", messages)
        assert (answer.status_code, answer.headers["x-litellm-compaction-window"]) == (200, "4096")
        assert watch.problems(messages) == []
        assert "ALPHA-7" in str(watch.sent())
    assert 2 <= len(watch.summaries) < 8


# P5: compaction shrinks or escalates.


@pytest.mark.parametrize("refusal", REFUSALS, ids=["dead", "refuses", "longer"])
def test_useless_summariser_costs_little_and_fails_no_request(guarded: Bench, refusal: Reply) -> None:
    """Without a usable summary the request is answered all the same, valid and inside the window."""
    name = f"useless-{REFUSALS.index(refusal)}"
    # One that would go on and on is ended by its bound, and what it has said by then is used.
    event = rf"{'compacted' if refusal is REFUSALS[-1] else 'fallback'} model={name} "
    told = len(guarded.proxy.logged(event))
    watch = guarded.watch(name, answers(refusal))
    messages = talk(name, 12_000)
    answer = guarded.proxy.chat(name, messages)
    assert answer.status_code == 200
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert watch.problems(messages) == []
    assert len(watch.chats) == 1
    assert 1 <= len(watch.summaries) <= 4
    assert guarded.proxy.expect_logged(event, told + 1)


# P8: open while unknown, closed once known.


def test_defect_of_ours_fails_open_and_shows(permissive: Bench) -> None:
    """When our own counting breaks, the request goes on unchanged, and the log says where, without its words."""
    watch = permissive.watch("sabotaged-count")
    canary = "BLUE-CANARY-1138"
    messages = [*talk("broken inside", 800), {"role": "assistant", "content": "."}, {"role": "user", "content": canary}]
    for stream in (False, True):
        answer = permissive.proxy.post({"model": "sabotaged-count", "messages": messages, "stream": stream})
        assert answer.status_code == 200
        assert watch.sent() == messages
        assert "max_tokens" not in watch.bodies[-1]
    assert (
        len(permissive.proxy.expect_logged(r"ERROR: failed_open hook=pre_call error=ValueError at=sabotage\.py", 2))
        == 2
    )
    assert len(permissive.proxy.expect_logged(r"ERROR: failed_open hook=deployment error=ValueError", 2)) == 2
    assert [line for line in permissive.proxy.lines if canary in line] == []


def test_defect_after_the_answer_does_not_take_the_answer_away(permissive: Bench) -> None:
    """When learning from an answer breaks, the client has its answer all the same."""
    permissive.watch("sabotaged-learn")
    messages = talk("broken after", 800)
    answer = permissive.proxy.chat("sabotaged-learn", messages)
    assert answer.json()["choices"][0]["message"]["content"] == "Understood."
    streamed = permissive.proxy.stream("sabotaged-learn", messages)
    assert (streamed.text, streamed.lines[-1]) == ("Understood.", "data: [DONE]")
    assert [chunk for chunk in streamed.chunks if "error" in chunk] == []
