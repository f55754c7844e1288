"""Every way in which a conversation that is too long is answered."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.simulator import ChatCall, Model, Reply, numbered_words
from tests.simulator.bench import BenchFactory, deltas, finish_reasons, long_chat, system, user

FITS_NOT = (
    "Input does not fit in context length. The input has {} tokens, but the context length only supports 1000 tokens."
)


def test_middle_truncation_is_silent(bench: BenchFactory) -> None:
    """The middle is dropped with HTTP 200; system, first task, and newest question stay; usage is silent."""
    served = bench(1000)
    calls: list[ChatCall] = []
    served.simulator.script = lambda call: calls.append(call)
    response = served.chat(*long_chat())
    record = served.last
    assert response.status_code == 200
    assert (record.truncated, record.outcome) == (True, "ok")
    assert record.kept_tokens <= 1000 < record.prompt_tokens
    assert response.json()["usage"]["prompt_tokens"] == record.prompt_tokens
    for kept in ("You are terse.", "First task", "What was the first task?"):
        assert kept in calls[0].prompt_text
    assert "Step 0" not in calls[0].prompt_text
    assert "Step 0" in calls[0].sent_text
    assert record.seen_text == calls[0].prompt_text


def test_usage_may_count_what_was_kept(bench: BenchFactory) -> None:
    """Where configured, a truncated prompt is reported with the tokens that were left of it."""
    served = bench(1000, truncated_usage="kept")
    assert served.chat(*long_chat()).json()["usage"]["prompt_tokens"] == served.last.kept_tokens


def test_a_giant_newest_message_loses_its_front(bench: BenchFactory) -> None:
    """Where even the newest message does not fit, its end is kept and the window still holds."""
    served = bench(1000)
    served.chat(system("S"), user("task"), user(numbered_words(2000)))
    assert served.last.kept_tokens <= 1000
    assert served.last.seen_text.rstrip().endswith("word2000")


@pytest.mark.parametrize(
    ("wording", "text"),
    [
        ("number_of_tokens", "greater than the context length (n_keep: 8"),
        ("trying_to_keep", "Trying to keep the first 8"),
        ("cannot_truncate", "Cannot truncate prompt with n_keep (8"),
    ],
)
def test_a_first_message_beyond_the_window_is_a_400(bench: BenchFactory, wording: str, text: str) -> None:
    """When system and first user message alone exceed the window, truncation fails with a bare-string 400."""
    served = bench(1000, n_keep_wording=wording)
    response = served.chat(user(numbered_words(3000)), stream=True)
    assert response.status_code == 400
    assert text in response.json()["error"]
    assert served.last.outcome == "overflow"


def test_rolling_window_drops_the_oldest(bench: BenchFactory) -> None:
    """A rolling window forgets the system message and the first task first."""
    served = bench(1000, overflow="rolling")
    assert served.chat(*long_chat()).status_code == 200
    assert "First task" not in served.last.seen_text
    assert "What was the first task?" in served.last.seen_text


def test_error_400_string(bench: BenchFactory) -> None:
    """The older refusal is a bare string with both numbers."""
    served = bench(1000, overflow="error_400_string")
    response = served.chat(*long_chat(), stream=True)
    assert response.status_code == 400
    assert f"(n_keep: {served.last.prompt_tokens}>= n_ctx: 1000)" in response.json()["error"]


def test_error_400_object(bench: BenchFactory) -> None:
    """The newer refusal is an error object with both numbers."""
    served = bench(1000, overflow="error_400_object")
    response = served.chat(*long_chat())
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == FITS_NOT.format(served.last.prompt_tokens)


def test_error_event(bench: BenchFactory) -> None:
    """A streaming overflow is HTTP 200 with one error event, the message twice, and no `[DONE]`."""
    served = bench(1000, overflow="error_event")
    response = served.chat(*long_chat(), stream=True)
    message = FITS_NOT.format(served.last.prompt_tokens)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.startswith("event: error\ndata: ")
    assert served.events(*long_chat()) == [("error", {"error": {"message": message}, "message": message})]
    assert served.last.outcome == "overflow"


def test_error_inside_a_whole_200(bench: BenchFactory) -> None:
    """The same overflow without streaming is error JSON inside HTTP 200."""
    response = bench(1000, overflow="error_event").chat(*long_chat())
    assert (response.status_code, "message" in response.json()["error"]) == (200, True)


def test_empty_stream(bench: BenchFactory) -> None:
    """The silent overflow is an empty stream with usage and no finish reason."""
    served = bench(1000, overflow="empty")
    events = served.events(*long_chat(), stream_options={"include_usage": True})
    assert [data["usage"]["completion_tokens"] for _, data in events[:-1]] == [0]
    assert events[-1] == ("message", "[DONE]")
    whole = served.chat(*long_chat()).json()
    assert (whole["choices"][0]["message"]["content"], whole["usage"]["completion_tokens"]) == ("", 0)


def test_crash(bench: BenchFactory) -> None:
    """A crash is an error event in a stream and a 400 otherwise, and the instance serves on."""
    served = bench(1000, overflow="crash")
    ((name, data),) = served.events(*long_chat())
    assert (name, "model has crashed" in data["message"]) == ("error", True)
    assert "model has crashed" in served.chat(*long_chat()).json()["error"]
    assert served.chat(user("hi")).status_code == 200


def words(_: ChatCall) -> Reply:
    """An answer longer than the window."""
    return Reply(numbered_words(1000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "outcome", "finish"),
    [
        ("length", "mid_overflow", ["length"]),
        ("stop", "mid_overflow", ["stop"]),
        ("shift", "ok", ["stop"]),
        ("error", "mid_overflow", []),
    ],
)
def test_window_fills_while_generating(bench: BenchFactory, way: str, outcome: str, finish: list[str]) -> None:
    """A full window ends the stream as configured, after exactly the tokens that fitted."""
    served = bench(500, mid_overflow=way, script=words)
    events = served.events(user("go"))
    assert (served.last.outcome, finish_reasons(events)) == (outcome, finish)
    used = served.last.prompt_tokens + served.last.completion_tokens
    assert (used > 500) if way == "shift" else (used == 500)
    assert numbered_words(1000).startswith(deltas(events))
    if way == "error":
        assert events[-1][1]["message"] == "Context size has been exceeded."


def test_full_window_without_streaming(bench: BenchFactory) -> None:
    """Without streaming the full window is a 400 with the known text."""
    response = bench(500, mid_overflow="error", script=words).chat(user("go"))
    assert (response.status_code, response.json()) == (400, {"error": "Context size has been exceeded."})


def test_max_tokens_before_the_window_is_a_normal_length_stop(bench: BenchFactory) -> None:
    """A limit of the client's own that is reached first is no overflow."""
    served = bench(500, mid_overflow="error", script=words)
    assert finish_reasons(served.events(user("go"), max_tokens=20)) == ["length"]
    assert (served.last.outcome, served.last.completion_tokens) == ("ok", 20)


def test_tokens_factor_scales_every_count(bench: BenchFactory) -> None:
    """A model with a 20 % longer tokenizer reports 20 % more tokens and overflows earlier."""
    plain, scaled = bench(900), bench(900, models=[Model("m", tokens_factor=1.2)])
    messages: list[Any] = [user(numbered_words(380))]
    for served in (plain, scaled):
        served.simulator.overflow = "error_400_object"
    assert plain.chat(*messages).status_code == 200
    assert scaled.chat(*messages).status_code == 400
    assert scaled.last.prompt_tokens == pytest.approx(plain.last.prompt_tokens * 1.2, abs=1)
