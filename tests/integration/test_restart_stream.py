"""What a client reads of an answer carried over the limit, and what the server got for it (promises P1, P6)."""

from __future__ import annotations

import pytest

from tests.builders import talk, tools
from tests.integration.harness import Streamed
from tests.integration.restart_bench import (
    Restarting,
    Teller,
    asked,
    both_carriers,
    calls,
    stream_problems,
    without_restarts,
)
from tests.lmstudio_double import Reply


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


@pytest.mark.parametrize("history", [0, 1300])
def test_call_larger_than_the_window_is_given_up(restarting: Restarting, history: int) -> None:
    """No more room than the last time, no other try: `length`, the numbers, and nothing of the call."""
    wanted = calls("tool_0", words=3000)
    # How much room there is, is known when the server has counted such texts.
    restarting.watch("local", Teller(Reply("So it does.")))
    for tokens in (300, 600):
        restarting.proxy.chat("local", asked("what words cost", tokens)).raise_for_status()
    watch = restarting.watch("local", Teller(Reply("", tool_calls=wanted), later=(Reply("", tool_calls=wanted),)))
    messages = talk("huge call", history) if history else asked("huge call")
    answer = restarting.proxy.stream("local", messages, tools=tools(1))
    assert stream_problems(answer) == []
    assert (answer.calls, answer.finish_reasons) == ([], ["length"])
    streamed = len(watch.chats)
    # A doubt of its count may end a request first, which is then asked anew.
    prompts = list(dict.fromkeys(record.prompt_tokens for record in watch.chats))
    assert len(prompts) == (2 if history else 1)
    assert prompts == sorted(prompts, reverse=True)
    whole = restarting.proxy.chat("local", asked("huge whole call"), tools=tools(1)).json()["choices"][0]
    assert (whole["message"].get("tool_calls"), whole["finish_reason"]) == (None, "length")
    ends = [record.prompt_tokens + record.completion_tokens for record in watch.chats[streamed:]]
    assert len(ends) <= 2
    assert ends[-1] > 0.9 * 2048


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
