"""An answer that was carried over the limit, in the client's next turn: one message, and its record is found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from litellm_compaction.core.continuation.request import Partial, Way
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.events import CompactionEvent, Event
from tests.builders import JsonDict, assistant, calls, parsed, result, system, user
from tests.engine.bench import Bench

WINDOW = 4096
ASKED = [system("You write."), user("Write about rivers.")]
# At four characters a token some 3,600 tokens.
BEGUN = "\n".join(f"Line {number} of the answer tells something about rivers." for number in range(260))


def _prompt(prepared: PreparedRequest) -> list[JsonDict]:
    assert prepared.messages is not None
    return [dict(message.raw) for message in prepared.messages]


def _next(answer: JsonDict, *more: JsonDict) -> list[JsonDict]:
    return [*ASKED, answer, *(more or (user("Make it shorter."),))]


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


def _compactions(events: Sequence[Event]) -> list[CompactionEvent]:
    return [event for event in events if isinstance(event, CompactionEvent)]
