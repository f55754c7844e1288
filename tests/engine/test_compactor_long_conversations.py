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


@pytest.mark.parametrize("answer", [FULL, SummaryFailed("error")])
@pytest.mark.parametrize("window", [4096, 8192, 16_384])
async def test_many_turns_of_a_chat(answer: str | Exception, window: int) -> None:
    """Never over the trigger, the task always there, few model calls, and a stable beginning between them."""
    bench = Bench(ask=FakeAsk(answer))
    raw: list[JsonDict] = [system(), user(TASK)]
    before: list[str] = []
    compacted = 0
    for turn in range(36):
        prepared = await bench.guard(raw, window)
        messages = sent(raw, prepared)
        # The planner counts a record's text, the counter its JSON, where each line break is one character more.
        assert not prepared.budget.triggers(int(0.99 * prepared.count.tokens))
        assert "never touch /etc/passwd" in "".join(message.text for message in messages)
        if prepared.action == "compacted":
            compacted += 1
        else:
            assert as_bytes(messages)[: len(before)] == before
        before = as_bytes(messages)
        words = window // 40
        raw = [*raw, assistant(f"answer {turn} " + "word " * words), user(f"question {turn} " + "w " * words)]
    assert 2 <= compacted <= 10
    assert len(bench.ask.prompts) <= 2 * compacted
    assert prepared.round == compacted


@pytest.mark.parametrize("answer", [FULL, SummaryFailed("error")])
async def test_sixty_rounds_of_an_agent(answer: str | Exception) -> None:
    """One request and tool rounds without end: calls and results stay together, the request stays verbatim."""
    bench = Bench(ask=FakeAsk(answer))
    raw: list[JsonDict] = [system(), user(TASK)]
    compacted = 0
    for number in range(60):
        ids = [f"c{number}_{each}" for each in range(1 + number % 3)]
        raw = [*raw, calls(*ids), *(result(each, f"result {each} " + "data " * 100) for each in ids)]
        prepared = await bench.guard(raw)
        messages = sent(raw, prepared)
        assert not prepared.budget.triggers(prepared.count.tokens)
        assert messages[1].text.endswith(TASK)
        compacted += prepared.action == "compacted"
    assert 1 <= compacted <= 15


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


async def test_a_retry_after_a_regeneration_finds_the_shorter_record() -> None:
    """Going back some turns reuses what was made for them: the longest record that still belongs."""
    bench = Bench()
    raw: list[JsonDict] = [system(), user(TASK)]
    states: list[tuple[list[JsonDict], list[str]]] = []
    for turn in range(40):
        prepared = await bench.guard(raw)
        if prepared.action == "compacted":
            states.append((raw, as_bytes(sent(raw, prepared))))
        raw = [*raw, assistant(f"answer {turn} " + "word " * 360), user(f"question {turn} " + "w " * 100)]
    asked = len(bench.ask.prompts)
    assert len(states) >= 3
    for earlier, bytes_then in states:
        prepared = await bench.guard(earlier)
        assert prepared.action == "reused"
        assert as_bytes(sent(earlier, prepared)) == bytes_then
    assert len(bench.ask.prompts) == asked


async def test_a_window_that_shrinks_for_a_moment_does_not_cost_the_record() -> None:
    """Where the shrunk window has no room for a summary, the full record stays stored for when it grows again."""
    bench = Bench()
    before, behind = numbered("more about it", 30), numbered("and yet more", 30)
    bench.ask.answer = f"### Current state\n{before}REMEMBER-ME: the port is open.\n{behind}"
    raw: list[JsonDict] = [system(), user(TASK)]
    for number in range(20):
        raw += [calls(f"c{number}"), result(f"c{number}", f"result {number} " + "data " * 120)]
    raw += [calls("big"), result("big", "data " * 5000)]
    full = sent(raw, await bench.guard(raw))
    assert "REMEMBER-ME" in full[1].text
    shrunk = sent(raw, await bench.guard(raw, 7000))
    assert "REMEMBER-ME" not in shrunk[1].text
    assert as_bytes(sent(raw, await bench.guard(raw, 7000))) == as_bytes(shrunk)
    assert as_bytes(sent(raw, await bench.guard(raw))) == as_bytes(full)
    assert len(bench.ask.prompts) == 1


async def test_old_results_give_way_without_a_model() -> None:
    """Rung 1 alone: no call, what the results said is still in the ledger, later turns get the same bytes."""
    bench = Bench()
    raw: list[JsonDict] = [system(), user(TASK)]
    before: list[str] = []
    edits = 0
    for number in range(40):
        text = f"connected to host-{number}.example.org on port {9000 + number}\n" + "some more output " * 120
        raw = [*raw, calls(f"c{number}", arguments=f'{{"cmd": "connect {number}"}}'), result(f"c{number}", text)]
        prepared = await bench.guard(raw)
        messages = sent(raw, prepared)
        if bench.ask.prompts:
            break
        if prepared.action == "compacted":
            edits += 1
            assert bench.store.kept[-1][1].level == "edit"
            assert [message.role for message in messages] == [message["role"] for message in raw]
            assert "9003" in "".join(message.text for message in messages)
        else:
            assert as_bytes(messages)[: len(before)] == before
        before = as_bytes(messages)
    assert edits >= 1
    # A summary afterwards reads the originals: nothing is lost on the way through the stubs.
    assert "port 9003" in "".join(bench.ask.prompts)


@pytest.mark.parametrize("answer", [FULL, SummaryFailed("error")])
async def test_fifty_rounds_keep_the_task_and_the_constraints(answer: str | Exception) -> None:
    """Round after round the user's own words stand verbatim in the record, and nothing grows past the target."""
    bench = Bench(ask=FakeAsk(answer))
    constraint = "My colleague reads this afterwards and she is blind."
    raw: list[JsonDict] = [system(), user(TASK), assistant("I begin."), user(constraint)]
    number = 0
    while len(bench.store.kept) < 50:
        raw += [calls(f"c{number}"), result(f"c{number}", f"result {number} of it\n" * 80)]
        if number % 4 == 3:
            raw += [assistant("Step done. " + "word " * 60), user("Go on.")]
        number += 1
        prepared = await bench.guard(raw, 4096)
        messages = sent(raw, prepared)
        text = "\n".join(message.text for message in messages)
        assert TASK in text
        assert constraint in text
        if prepared.action == "compacted":
            # The planner counts a record's text, the counter its JSON, where each line break is one character more.
            exact_tokens = prepared.count.tokens - text.count("\n") // 4
            assert exact_tokens <= prepared.budget.target_tokens(prepared.tokens_before)
    rounds = [compaction.round for _, compaction in bench.store.kept]
    assert rounds == list(range(1, 51))


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
@pytest.mark.parametrize("fixed_words", [0, 1800, 3400, 4400])
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


async def test_a_summary_over_its_bound_costs_lines_and_not_the_target() -> None:
    """A server may count otherwise and write a fifth more: the ledger beside it gives way."""
    bench = Bench(
        ask=FakeAsk(
            "### Current state\n"
            + "".join(f"- all is well with part {chr(97 + at // 26)}{chr(97 + at % 26)}\n" for at in range(130))
        )
    )
    raw: list[JsonDict] = [system(), user(TASK)]
    for number in range(60):
        names = " ".join(f"src/part_{number}/file_{each}.py" for each in range(12))
        raw += [calls(f"c{number}"), result(f"c{number}", f"{names}\n" * 2)]
    prepared = await bench.guard(raw, clear_tool_results=False)
    text = "\n".join(message.text for message in sent(raw, prepared))
    assert bench.last.outcome == "compacted"
    assert bench.ask.max_tokens[-1] < (len(bench.store.kept[-1][1].summary) + 3) // 4
    assert prepared.count.tokens - text.count("\n") // 4 <= prepared.budget.target_tokens(prepared.tokens_before)


@pytest.mark.parametrize(
    ("system_words", "rows", "window", "most"), [(5760, 200, 16384, 2), (7200, 300, 16384, 5), (15120, 300, 32768, 2)]
)
async def test_a_high_floor_is_not_compacted_every_turn(system_words: int, rows: int, window: int, most: int) -> None:
    """Half of the window is system prompt: what was compacted may outgrow the trigger before it is compacted again."""
    bench = Bench()
    raw = [system("rule " * system_words), user("Port the parser. " * 10)]
    for number in range(16):
        raw += [calls(f"c{number}", content=f"Step {number}"), result(f"c{number}", f"row {number} of it\n" * rows)]
        prepared = await bench.guard(raw, window)
        sent(raw, prepared)
        assert prepared.budget.fits(prepared.count.tokens + prepared.budget.output_buffer_tokens(prepared.count.tokens))
    assert len([outcome for outcome in bench.outcomes if outcome != "reused"]) <= most
