"""In which mode a summary is asked for, and what is sent: the server's cache decides, and both modes fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from litellm_compaction.core.messages import Message
from litellm_compaction.engine.ask import SummaryClient, _Pauses
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.summarizer import SummaryAnswer
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from tests import virtual_time
from tests.builders import (
    JsonDict,
    as_bytes,
    assistant,
    broken_promises,
    calls,
    chat,
    count,
    parsed,
    raw_conversations,
    result,
    system,
    user,
)
from tests.engine.bench import SUMMARY, Bench, Clock, FakeAsk, sent

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def talk(turns: int) -> list[JsonDict]:
    raw = [system(), user("Port src/parser.py.")]
    for turn in range(turns):
        raw += [assistant(f"answer {turn} " + "word " * 150), user(f"question {turn} " + "w " * 40)]
    return raw


def is_appended(asked: tuple[Message, ...]) -> bool:
    return len(asked) > 1 and asked[-1].text.startswith("You write the record")


async def asked_of(bench: Bench, *, turns: int = 60, **context: Any) -> tuple[Message, ...]:
    """What the first summary call of a growing conversation sends."""
    for turn in range(turns):
        await bench.guard(talk(turn), tools=TOOLS, **context)
        if bench.ask.messages:
            return bench.ask.messages[0]
    raise AssertionError("nothing was asked")


async def test_the_conversation_is_sent_again_as_the_server_holds_it() -> None:
    """Append mode: same messages, same tools, and only the instruction behind them."""
    bench = Bench()
    asked = await asked_of(bench)
    assert is_appended(asked)
    assert as_bytes(asked[:-1]) == as_bytes(parsed(talk(60)))[: len(asked) - 1]
    assert asked[-2].role == "assistant"
    assert bench.ask.tools == [tuple(TOOLS)]


async def test_the_next_round_sends_the_record_along() -> None:
    """What was compacted is sent as it was: the record first, and it is to be left alone."""
    bench = Bench()
    for turn in range(120):
        before = len(bench.ask.messages)
        prepared = await bench.guard(talk(turn), tools=TOOLS)
        if len(bench.ask.messages) > before >= 1:
            break
        messages = sent(talk(turn), prepared)
    asked = bench.ask.messages[-1]
    assert is_appended(asked)
    assert as_bytes(asked[:-1]) == as_bytes(messages)[: len(asked) - 1]
    assert "The record at its beginning stays" in asked[-1].text


async def test_another_model_gets_the_text() -> None:
    """Its cache holds nothing of ours: one message, no tools."""
    bench = Bench()
    other = FakeAsk()
    models = [bench.pruning_model(other, window=8192), bench.pruning_model(bench.ask)]
    await bench.guard(talk(60), tools=TOOLS, pruning_models=models)
    assert {len(asked) for asked in other.messages} == {1}
    assert set(other.tools) == {()}


async def test_a_model_that_thinks_is_given_room_for_that() -> None:
    """As much as for the summary, on top of it; another model gets the summary's bound alone."""
    bench = Bench()
    thinking, plain = FakeAsk(""), FakeAsk()
    models = [
        bench.pruning_model(thinking, label="qwq-32b", window=8192),
        bench.pruning_model(plain, label="llama-3.1-8b-instruct", window=8192),
    ]
    await bench.guard(talk(60), pruning_models=models)
    assert thinking.max_tokens[0] == 2 * plain.max_tokens[0]


async def test_a_tool_call_is_no_summary() -> None:
    """It is discarded, and the same model is asked once more, without tools."""
    bench = Bench()
    bench.ask.calls_tool = True
    await asked_of(bench)
    assert [is_appended(asked) for asked in bench.ask.messages] == [True, False]
    assert bench.ask.tools[1] == ()
    assert bench.store.kept[-1][1].level == "summary"
    assert (bench.last.summary_calls, bench.last.reason) == (2, "")


async def test_both_modes_take_from_one_budget() -> None:
    """P5: with one call left there is no second try."""
    bench = Bench()
    bench.ask.calls_tool = True
    await asked_of(bench, max_summary_calls=1)
    assert len(bench.ask.messages) == 1
    assert (bench.last.outcome, bench.last.reason) == ("fallback", "tool_call")


def test_both_modes_share_one_time_limit() -> None:
    """What the first one used up the second one has not: whoever waits, waits `summary_timeout_s` at most."""
    bench = Bench()
    asked_s: list[float] = []

    class Slow(FakeAsk):
        async def __call__(self, *given: Any, **options: Any) -> SummaryAnswer:
            asked_s.append(asyncio.get_running_loop().time())
            # Within the limit the first time; longer than what is left of it the second.
            await asyncio.sleep(20)
            return await super().__call__(*given, **options)

    bench.ask = Slow()
    bench.ask.calls_tool = True

    async def took_s() -> float:
        await asked_of(bench, summary_timeout_s=30)
        return asyncio.get_running_loop().time() - asked_s[0]

    assert virtual_time.run(took_s()) == pytest.approx(30, abs=1)
    assert len(asked_s) == 2
    assert (bench.last.outcome, bench.last.reason) == ("fallback", "timeout")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "run"}}])
async def test_a_forced_call_leaves_no_room_for_words(choice: Any) -> None:
    """With a forced `tool_choice` the text is sent instead."""
    bench = Bench()
    await bench.guard(talk(60), tools=TOOLS, tool_choice=choice)
    assert not is_appended(bench.ask.messages[0])


async def test_what_does_not_fit_is_sent_as_text() -> None:
    """A conversation far over the window cannot be sent again."""
    bench = Bench()
    await bench.guard(talk(300), tools=TOOLS)
    assert not is_appended(bench.ask.messages[0])


async def test_stubs_are_not_summarized() -> None:
    """After an edit the originals are read: what a stub hides could not be summarized."""
    bench = Bench()
    raw = [system(), user("Read it all.")]
    for number in range(60):
        text = f"marker-{number} " + "output " * 300
        raw += [calls(f"c{number}", arguments=f'{{"n": {number}}}'), result(f"c{number}", text)]
        await bench.guard(raw, tools=TOOLS)
        if bench.ask.messages:
            break
    assert any(compaction.level == "edit" for _, compaction in bench.store.kept)
    assert not is_appended(bench.ask.messages[0])
    assert "marker-1 " in bench.ask.prompts[0]


@settings(max_examples=settings().max_examples * 2 // 3)
@given(raw=raw_conversations(max_turns=10, repeats=60))
async def test_whatever_is_asked_is_valid_and_fits(raw: list[JsonDict]) -> None:
    """P1 and P3 hold for our own calls, too."""
    bench = Bench()
    for end in range(2, len(raw) + 1):
        if raw[end - 1]["role"] == "user":
            await bench.guard(raw[:end], 4096, oversized_user_message="excerpt", clear_tool_results=False)
    for asked, limit in zip(bench.ask.messages, bench.ask.max_tokens, strict=True):
        assert sum(count(message.text) for message in asked) + limit <= 4096
        if is_appended(asked):
            # A client's `null` is sent again as it was sent before.
            assert set(broken_promises(asked, asked)) <= {"null content"}


async def test_another_model_takes_as_large_a_prompt_as_the_same_one() -> None:
    """Window and family decide; how sure a count is, is asked of a prompt as it is sent, which every template takes."""
    bench, counter, sources = Bench(), TokenCounter(), Sources()
    measurer = RequestMeasurer(windows=bench.windows, counter=counter, sources=sources)
    client = SummaryClient(windows=bench.windows, counter=counter, sources=sources)
    context = bench.context(target=bench.target(8192, model="qwen3-8b"))
    measured = await measurer.measure(bench.request([user("hello " * 500)]), context)
    other = bench.pruning_model(bench.ask, label="qwen3-4b", window=8192)
    assert other.is_same is False
    limit = await client.prompt_limit(measured, other, 400)
    assert limit.tokens == (await client.prompt_limit(measured, replace(other, is_same=True), 400)).tokens


async def test_a_model_whose_summaries_are_rejected_pauses(caplog: pytest.LogCaptureFixture) -> None:
    """Two in a row: for two minutes nobody waits for it, and one line says what to do; then it has one try.

    The line is not said again before a summary was good.
    """
    clock = Clock()
    bench = Bench(ask=FakeAsk("The king was very wise and kind. " * 20), clock=clock)

    async def compacted(topic: str) -> tuple[str, str, int]:
        asked = len(bench.ask.prompts)
        await bench.guard([user(f"About {topic}."), *chat(16, words=300)], clear_tool_results=False)
        return bench.last.rung, bench.last.reason, len(bench.ask.prompts) - asked

    assert await compacted("a") == ("truncate", "loop", 1)
    bench.ask.answer = SUMMARY
    assert await compacted("b") == ("summary", "", 1)
    bench.ask.answer = "The king was very wise and kind. " * 20
    assert [await compacted(topic) for topic in "cdef"] == [
        ("truncate", "loop", 1),
        ("truncate", "loop", 1),
        ("truncate", "paused", 0),
        ("truncate", "paused", 0),
    ]
    clock.now_s += 121
    assert await compacted("g") == ("truncate", "loop", 1)
    assert await compacted("h") == ("truncate", "paused", 0)
    clock.now_s += 121
    bench.ask.answer = SUMMARY
    assert [await compacted(topic) for topic in "ij"] == [("summary", "", 1)] * 2
    warned = [record.message for record in caplog.records if "summaries_rejected" in record.message]
    assert len(warned) == 1
    assert "max_summary_calls: 0" in warned[0]
    bench.ask.answer = "The king was very wise and kind. " * 20
    assert [await compacted(topic) for topic in "kl"] == [("truncate", "loop", 1)] * 2
    assert len([record for record in caplog.records if "summaries_rejected" in record.message]) == 2


async def test_a_pause_ends_with_the_first_good_answer() -> None:
    """One that another conversation was still waiting for when the pause began."""
    pauses, model = _Pauses(Clock()), Bench().pruning_model(FakeAsk(SUMMARY), label="a", window=8192)
    for is_useless in (True, True, False):
        pauses.note("", model, is_useless=is_useless)
    assert not pauses.has("", model)


async def test_one_model_pauses_and_the_next_is_asked() -> None:
    """A pause belongs to the model that earned it."""
    pauses, bench = _Pauses(Clock()), Bench()
    one, other = (bench.pruning_model(bench.ask, label=label, window=8192) for label in ("a", "b"))
    for _ in range(2):
        pauses.note("", one, is_useless=True)
    assert (pauses.has("", one), pauses.has("", other)) == (True, False)


async def test_a_model_whose_summaries_come_too_late_pauses() -> None:
    """What nobody can use costs whoever waits as much as what is no use."""
    bench = Bench(ask=FakeAsk(SummaryFailed("timeout")))
    for topic, reason in (("a", "timeout"), ("b", "timeout"), ("c", "paused")):
        await bench.guard([user(f"About {topic}."), *chat(16, words=300)], clear_tool_results=False)
        assert bench.last.reason == reason


async def test_what_one_tenant_makes_a_model_write_stops_nobody_else() -> None:
    """A conversation can be made to be said back."""
    bench = Bench(ask=FakeAsk("The king was very wise and kind. " * 20))
    for topic in "abc":
        await bench.guard([user(f"About {topic}."), *chat(16, words=300)], scope="red", clear_tool_results=False)
    assert bench.last.reason == "paused"
    bench.ask.answer = SUMMARY
    await bench.guard([user("About d."), *chat(16, words=300)], scope="blue", clear_tool_results=False)
    assert (bench.last.rung, bench.last.reason) == ("summary", "")


async def test_a_failure_of_the_server_is_no_rejected_summary() -> None:
    """It says nothing of what the model writes."""
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    for topic in "abc":
        await bench.guard([user(f"About {topic}."), *chat(16, words=300)], clear_tool_results=False)
        assert bench.last.reason == "error"
