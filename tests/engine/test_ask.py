"""In which mode a summary is asked for, and what is sent: the server's cache decides, and both modes fit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings

from litellm_compaction.core.messages import Message
from litellm_compaction.summarizer import SummaryAnswer
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
from tests.engine.bench import SUMMARY, Bench, Clock, FakeAsk

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


async def test_a_tool_call_is_no_summary() -> None:
    """It is discarded, and the same model is asked once more, without tools."""
    bench = Bench()
    bench.ask.calls_tool = True
    await asked_of(bench)
    assert [is_appended(asked) for asked in bench.ask.messages] == [True, False]
    assert bench.ask.tools[1] == ()
    assert bench.store.kept[-1][1].level == "summary"
    assert (bench.last.summary_calls, bench.last.reason) == (2, "")


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


async def test_what_one_tenant_makes_a_model_write_stops_nobody_else() -> None:
    """A conversation can be made to be said back."""
    bench = Bench(ask=FakeAsk("The king was very wise and kind. " * 20))
    for topic in "abc":
        await bench.guard([user(f"About {topic}."), *chat(16, words=300)], scope="red", clear_tool_results=False)
    assert bench.last.reason == "paused"
    bench.ask.answer = SUMMARY
    await bench.guard([user("About d."), *chat(16, words=300)], scope="blue", clear_tool_results=False)
    assert (bench.last.rung, bench.last.reason) == ("summary", "")
