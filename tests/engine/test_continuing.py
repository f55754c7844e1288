"""An answer that was carried over the limit, in the client's next turn: one message, and its record is found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.continuation.request import Partial, Way
from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE, Request, cleaned
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.events import CompactionEvent, Event
from tests.builders import JsonDict, assistant, calls, parsed, result, system, user
from tests.engine.bench import Bench, FakeAsk, sent

WINDOW = 4096
ASKED = [system("You write."), user("Write about rivers.")]
# At four characters a token some 3,600 tokens.
BEGUN = "\n".join(f"Line {number} of the answer tells something about rivers." for number in range(260))
REST = "\nAnd this is the end of the answer."


async def _carried(bench: Bench, raw: list[JsonDict], begun: str = BEGUN, **context: Any) -> PreparedRequest:
    request = Request(messages=parsed(raw))
    return await bench.compactor.continuing.continue_answer(
        request, Partial(text=begun), bench.context(WINDOW, **context)
    )


def _prompt(prepared: PreparedRequest) -> list[JsonDict]:
    assert prepared.messages is not None
    return [dict(message.raw) for message in prepared.messages]


def _next(answer: JsonDict, *more: JsonDict) -> list[JsonDict]:
    return [*ASKED, answer, *(more or (user("Make it shorter."),))]


async def test_the_next_turn_finds_the_record() -> None:
    """The same bytes up to where the answer was cut, and no model call: the record stands for the first part."""
    bench = Bench()
    continued = _prompt(await _carried(bench, ASKED))
    raw = _next(assistant(BEGUN + REST))
    prepared = await bench.guard(raw, WINDOW)
    assert (prepared.action, len(bench.ask.prompts)) == ("reused", 1)
    shown = _prompt(prepared)
    *before, part, _ask = continued
    assert shown[:2] == before
    assert part["content"]
    assert BEGUN.endswith(part["content"])
    assert shown[2] == assistant(part["content"] + REST)
    assert shown[3:] == [user("Make it shorter.")]
    assert BEGUN[:200] not in json.dumps(shown)
    assert [event.compaction_id for event in bench.events[:2]] == [bench.last.compaction_id] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "answer",
    [
        f"{BEGUN}\n\n{START_NOTICE}\n\n{DONE_NOTICE}\n\n{REST}",
        f"<think>\nRivers, then.\n</think>\n\n{BEGUN}{REST}",
        f"  {BEGUN}{REST}\n\n",
    ],
    ids=["notices", "thoughts", "white space"],
)
async def test_what_a_client_adds_or_trims_does_not_matter(answer: str) -> None:
    """The answer is compared in its normal form."""
    bench = Bench()
    begun = answer.split("\n\n⚙️")[0].removesuffix("\n\n").removesuffix(REST)
    await _carried(bench, ASKED, begun)
    prepared = await bench.guard([dict(cleaned(message).raw) for message in parsed(_next(assistant(answer)))], WINDOW)
    assert (prepared.action, len(bench.ask.prompts)) == ("reused", 1)
    shown = _prompt(prepared)[2]["content"]
    assert shown.rstrip().endswith(REST.strip())
    assert "⚙️" not in shown
    assert BEGUN[:200] not in shown


async def test_the_next_restart_summarizes_only_what_is_new() -> None:
    """A second restart of the same answer goes on from the first one's record."""
    bench = Bench(ask=FakeAsk("### Current state\nSo far it is about rivers."))
    await _carried(bench, ASKED)
    more = "".join(f"\nParagraph {number} goes on about lakes and seas." for number in range(260))
    continued = _prompt(await _carried(bench, ASKED, BEGUN + more))
    assert len(bench.ask.prompts) == 2
    assert "Line 3 of the answer" not in bench.ask.prompts[1]
    assert "Paragraph 3 goes on" in bench.ask.prompts[1]
    assert bench.last.round == 2
    prepared = await bench.guard(_next(assistant(BEGUN + more + REST)), WINDOW)
    assert (prepared.action, len(bench.ask.prompts)) == ("reused", 2)
    shown = _prompt(prepared)
    assert shown[1] == continued[1]
    assert shown[2]["content"] == continued[2]["content"] + REST
    # The promises are checked against the list as if the covered beginning had never been in it.
    sent(_next(shown[2]), prepared)


TALK = [
    system("You write."),
    user("Which rivers are there?"),
    assistant("Many. " * 40),
    user("Write about one of them."),
]
FOUND = "The river is the Aare, 288 km long; it rises at the Unteraar glacier."
ROUND = [calls("c1", name="look_up", arguments='{"what": "rivers"}'), result("c1", FOUND)]


@pytest.mark.parametrize("way", ["turn", "prefill"])
async def test_the_round_that_is_answered_stays(way: Way) -> None:
    """A short call and its result, though the beginning of the answer behind them gives way (issue 25, B5)."""
    bench = Bench()
    request = Request(messages=parsed([*TALK, *ROUND]))
    # Another model than the served one: it is shown nothing but what the record will stand for.
    context = bench.context(WINDOW, pruning_models=[bench.pruning_model(bench.ask, label="other", window=8192)])
    context = replace(context, target=replace(context.target, is_lmstudio=True)) if way == "prefill" else context
    prepared = await bench.compactor.continuing.continue_answer(request, Partial(text=BEGUN), context, ways=(way,))
    shown = _prompt(prepared)
    assert prepared.way == way
    assert [message["role"] for message in shown[:5]] == ["system", "user", "assistant", "tool", "assistant"]
    assert shown[2:4] == [{**ROUND[0], "content": ""}, ROUND[1]]
    assert shown[1]["content"].endswith("Write about one of them.")
    assert BEGUN[:200] not in json.dumps(shown)
    assert FOUND not in bench.ask.prompts[0]


@pytest.mark.parametrize("text", ["", " \n", "<think>"])
@pytest.mark.parametrize("is_long", [False, True])
async def test_thoughts_stay_whole_where_they_leave_room(text: str, is_long: bool) -> None:
    """In whichever field they came; else their end stays, and no compaction is made for them."""
    bench = Bench()
    thoughts = BEGUN if is_long else BEGUN[:4_000]
    partial = Partial(text=text, reasoning=thoughts, closes=True)
    if text.strip():
        partial = Partial(text=text + thoughts, closes=True)
    context = bench.context(WINDOW)
    context = replace(context, target=replace(context.target, is_lmstudio=True))
    plan = await bench.compactor.continuing.plan(Request(messages=parsed(ASKED)), partial, context, ways=("raw",))
    assert plan.ways == ("raw",)
    assert isinstance(plan.prepared, PreparedRequest)
    shown = plan.messages[-1].text
    assert (shown == thoughts) != is_long
    assert thoughts.endswith(shown)
    assert len(shown) > 400


async def test_the_next_turns_show_the_round_and_then_summarize_it() -> None:
    """The same bytes for as long as the record does; the next summary is of the round as well."""
    bench = Bench()
    continued = _prompt(await _carried(bench, [*TALK, *ROUND]))
    raw = [*TALK, *ROUND, assistant(BEGUN + REST), user("Make it shorter.")]
    prepared = await bench.guard(raw, WINDOW)
    assert (prepared.action, len(bench.ask.prompts)) == ("reused", 1)
    assert _prompt(prepared)[:4] == continued[:4]
    for number in range(8):
        raw += [assistant(f"Answer {number}. " + "It says this and that. " * 60), user(f"Question {number}?")]
    prepared = await bench.guard(raw, WINDOW)
    assert prepared.round == 2
    assert FOUND in bench.ask.prompts[-1]
    assert "tool" not in [message["role"] for message in _prompt(prepared)]


async def test_a_record_that_is_found_for_going_on_is_told_of_when_it_is_sent() -> None:
    """Once, and as part of an answer; asking for it as often as one likes leaves no trace."""
    bench = Bench()
    talk = [user(f"Question {number}. {'x' * 900}") if number % 2 else assistant("y" * 900) for number in range(1, 18)]
    await bench.guard([system("You write."), *talk], WINDOW)
    before, request = len(bench.events), Request(messages=parsed([system("You write."), *talk]))
    context = bench.context(WINDOW)
    for _ in range(2):
        plan = await bench.compactor.continuing.plan(request, Partial(text=BEGUN[:400]), context)
    assert isinstance(plan.prepared, PreparedRequest)
    assert (plan.prepared.action, bench.events[before:], context.attempts.told_hash) == ("reused", [], "")
    await bench.compactor.continuing.continued(plan)
    assert [(event.outcome, event.phase) for event in _compactions(bench.events[before:])] == [("reused", "streaming")]


def _compactions(events: Sequence[Event]) -> list[CompactionEvent]:
    return [event for event in events if isinstance(event, CompactionEvent)]
