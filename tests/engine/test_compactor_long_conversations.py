"""Many turns: compaction stays rare, the record goes on, and nothing grows without end."""

from __future__ import annotations

import itertools

import pytest

from litellm_compaction.core.messages import parse_message
from litellm_compaction.errors import SummaryFailed
from tests.builders import JsonDict, as_bytes, assistant, calls, numbered, result, system, user
from tests.engine.bench import Bench, FakeAsk, sent

TASK = "Port src/parser.py to Rust and never touch /etc/passwd."
# A summary as long as it may be.
FULL = "### Original task\nPort the parser.\n" + numbered("a line of the record with src/file.rs in it", 60)


async def test_segments_are_frozen_and_then_integrated() -> None:
    """Round after round the earlier summary stays, byte for byte, until it takes a quarter; then one is made of all."""
    bench = Bench()
    raw: list[JsonDict] = [system(), user(TASK)]
    grew = integrated = 0
    for turn in range(120):
        bench.ask.answer = f"### Current state\nSummary after turn {turn // 10} {turn % 10}. " + " ".join(
            f"we{chr(97 + word // 26)}{chr(97 + word % 26)}" for word in range(180)
        )
        await bench.guard(raw)
        raw = [*raw, assistant(f"answer {turn} " + "word " * 150), user(f"question {turn}")]
    records = [compaction for _, compaction in bench.store.kept]
    for earlier, later in itertools.pairwise(records):
        assert later.round == earlier.round + 1
        assert later.covered_messages > earlier.covered_messages
        if len(later.segments) > 1:
            assert later.segments[:-1] == earlier.segments
            grew += 1
        else:
            integrated += 1
    assert grew >= 2
    assert integrated >= 1


async def test_a_huge_result_does_not_cost_the_record() -> None:
    """Where it leaves no room for a summary, the record is carried shortened; later the full one goes on."""
    bench = Bench()
    bench.ask.answer = "### Current state\nREMEMBER-ME: the port is open.\n" + numbered("more about it", 40)
    raw: list[JsonDict] = [system(), user(TASK)]
    for number in range(40):
        raw += [calls(f"c{number}"), result(f"c{number}", f"result {number} " + "data " * 120)]
    await bench.guard(raw, clear_tool_results=False)
    rich = bench.store.kept[-1][1]
    assert not rich.provisional
    asked = len(bench.ask.prompts)
    huge = [*raw, calls("big"), result("big", "data " * 5800)]
    prepared = await bench.guard(huge, clear_tool_results=False)
    messages = sent(huge, prepared)
    poor = bench.store.kept[-1][1]
    assert poor.provisional
    assert (poor.round, len(bench.ask.prompts)) == (rich.round + 1, asked)
    assert (bench.last.outcome, bench.last.reason) == ("fallback", "no_room")
    assert messages[-1].text == parse_message(huge[-1]).text
    # The same request again finds its own record.
    assert as_bytes(sent(huge, await bench.guard(huge, clear_tool_results=False))) == as_bytes(messages)
    assert len(bench.store.kept) == 2
    # Two rounds later the huge result is history, and the earlier record goes on as it was.
    later = [*huge, *(each for n in range(6) for each in (calls(f"d{n}"), result(f"d{n}", "data " * 200)))]
    bench.ask.answer = "### Current state\nThe big result was read."
    prepared = await bench.guard(later, clear_tool_results=False)
    sent(later, prepared)
    next_record = bench.store.kept[-1][1]
    assert not next_record.provisional
    assert "REMEMBER-ME: the port is open." in next_record.summary
    assert "The big result was read." in next_record.summary


async def test_an_edit_of_the_history_invalidates_only_what_came_later() -> None:
    """Of three rounds the first two still hold when a message that only the third covers is changed."""
    bench = Bench()
    raw: list[JsonDict] = [system(), user(TASK)]
    turn = 0
    while len(bench.store.kept) < 3:
        bench.ask.answer = f"### Current state\nSummary of round {len(bench.store.kept) + 1}."
        await bench.guard(raw)
        raw = [*raw, assistant(f"answer {turn} " + "word " * 150), user(f"question {turn} " + "w " * 30)]
        turn += 1
    first, second, third = (compaction for _, compaction in bench.store.kept)
    asked = len(bench.ask.prompts)
    edited = [dict(message) for message in raw]
    edited[1 + third.covered_messages - 1]["content"] += " EDITED"
    assert second.covered_messages < third.covered_messages - 1
    bench.ask.answer = "### Current state\nSummary of the other round 3."
    prepared = await bench.guard(edited)
    sent(edited, prepared)
    _, anew = bench.store.kept[-1]
    assert (prepared.action, anew.round, len(bench.ask.prompts)) == ("compacted", 3, asked + 1)
    assert anew.segments[:2] == second.segments
    assert anew.segments[0] == first.segments[0]
    assert "Summary of round 3." not in anew.summary
    # What was there before the edit is still found for who did not edit it.
    assert (await bench.guard(raw)).action == "reused"


@pytest.mark.parametrize("answer", [FULL, SummaryFailed("error")])
@pytest.mark.parametrize("fixed_words", [0, 4400])
async def test_small_turns_are_never_compacted_one_by_one(answer: str | Exception, fixed_words: int) -> None:
    """However much of the window the system prompt takes: after a compaction the next turns reuse it."""
    bench = Bench(ask=FakeAsk(answer))
    raw: list[JsonDict] = [system("rule " * fixed_words), user(TASK)]
    compacted: list[int] = []
    for number in range(90):
        raw = [*raw, calls(f"c{number}"), result(f"c{number}", f"result {number} " + "data " * 30)]
        prepared = await bench.guard(raw)
        sent(raw, prepared)
        if prepared.action == "compacted":
            compacted.append(number)
    assert compacted
    gaps = [later - earlier for earlier, later in itertools.pairwise(compacted)]
    assert min(gaps, default=99) >= 3, gaps
