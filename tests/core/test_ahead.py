"""What is written before it is needed: the record of the next compaction, and when it takes effect."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.budget import MIN_GAIN_RATIO, CompactionOptions
from litellm_compaction.core.compaction import Compaction, applied_tokens, apply
from litellm_compaction.core.plan import Send, Step, expected_growth_tokens, plan_ahead, plan_reading, turn_ended
from litellm_compaction.core.prompts import STRATEGIES
from tests.builders import (
    DEPTH,
    JsonDict,
    assistant,
    broken_promises,
    budget,
    calls,
    chat,
    conversation,
    first_step,
    is_edit,
    is_record,
    next_turns,
    parsed,
    raw_conversations,
    result,
    system,
    user,
)
from tests.core.test_plan import decide, written

WINDOW = 8192
# Over 60 % of 8192, under the trigger.
FILLED = chat(30, words=72)


def ahead(
    raw: Sequence[JsonDict],
    window: int = WINDOW,
    stored: Sequence[Compaction] = (),
    *,
    answer: str = "",
    options: CompactionOptions = DEPTH,
) -> Compaction | None:
    """The record that is written ahead behind the answer to `raw`, as long as it may be."""
    view = conversation(turn_ended(parsed(raw), answer))
    decision = plan_ahead(view, budget(window, view), options, stored)
    if decision is None:
        return None
    assert is_record(decision)
    assert decision.draft.state == "ready"
    return written(decision)


def test_what_is_applied_stays_applied_until_it_does_no_more() -> None:
    """A second record waits behind the first, however much deeper it would go."""
    first_plan, _, _ = decide(chat(44, words=60), WINDOW)
    assert is_record(first_plan)
    first = written(first_plan)
    grown = [*chat(44, words=60), assistant("a " * 3000), user("And?")]
    second = ahead(grown, WINDOW, [first], answer="So.")
    assert second is not None
    assert second.round == 2
    assert second.covered_messages > first.covered_messages
    next_turn = [*grown, assistant("So."), user("Yes.")]
    assert decide(next_turn, WINDOW, [second, first])[0] == Send(compaction=first)
    full = [*next_turn, assistant("b " * 4400), user("Then?")]
    assert decide(full, WINDOW, [second, first])[0] == Send(compaction=second)


def reads(count: int, each: str) -> list[JsonDict]:
    rounds = ([calls(f"c{number}"), result(f"c{number}", each)] for number in range(count))
    return [system(), user("Read them all."), *itertools.chain.from_iterable(rounds)]


@pytest.mark.parametrize(
    ("raw", "answer", "strategy"),
    [
        # Old tool results that give way to a line each cost no model call now or later.
        (reads(12, "file " * 400), "", "summary"),
        # Where most of the prompt has to stay, a record ahead would only make compactions more frequent.
        ([system("rules " * 3600), *chat(12, words=45)[1:]], "Done.", "summary"),
        # `prune` shows the model another prompt, which would take the chat's place in its cache.
        (FILLED, "Done.", "prune"),
    ],
)
def test_nothing_is_written_that_does_not_pay(raw: list[JsonDict], answer: str, strategy: str) -> None:
    assert ahead(raw, answer=answer, options=replace(DEPTH, strategy=STRATEGIES[strategy])) is None


def test_nothing_is_written_twice() -> None:
    """While one waits to be needed, a longer conversation gets no second one."""
    made = ahead(FILLED, answer="Done.")
    assert made is not None
    assert ahead([*FILLED, assistant("Done."), user("Thanks.")], stored=[made], answer="Welcome.") is None


@given(raw=raw_conversations(max_turns=8), window=st.sampled_from([1024, 2048, 4096]), data=st.data())
def test_whatever_is_written_ahead_is_unseen_until_the_trigger(
    raw: list[JsonDict], window: int, data: st.DataObject
) -> None:
    """For any conversation and any next turn: the same decision as without it, or it in place of a new compaction."""
    if raw[-1]["role"] == "assistant":
        return
    answer = data.draw(st.sampled_from(["", "The answer."]))
    made = ahead(raw, window, answer=answer)
    if made is None:
        return
    later = data.draw(next_turns([*raw, assistant(answer), user("So?")] if answer else raw))
    without, view, limits = decide(later, window)
    decided = first_step(view, limits, DEPTH, [made])
    if not limits.triggers(view.tokens):
        assert decided == without
    elif isinstance(decided, Send) and decided.compaction:
        assert not limits.triggers(applied_tokens(view, made))
        assert broken_promises(parsed(later), apply(parsed(later), made)) == []


# ------------------------------------------------------------------ what the server reads for the next turn


def reading(
    raw: Sequence[JsonDict], window: int, stored: Sequence[Compaction], *, answer: str = "", rereads: bool = False
) -> Compaction | Step | None:
    view = conversation(turn_ended(parsed(raw), answer))
    return plan_reading(view, budget(window, view), replace(DEPTH, rereads=rereads), stored)


def test_nothing_is_read_where_the_cache_holds_what_will_be_sent() -> None:
    """Without a record ahead, or with one that is in effect already."""
    nearly = chat(30, words=84)
    made = ahead(nearly, answer="Done.")
    assert made is not None
    assert reading(nearly, WINDOW, [], answer="Done.") is None
    assert reading(nearly, WINDOW, [made], answer="Done.") == made
    assert reading(nearly, WINDOW, [made], answer="Done.", rereads=True) is None
    assert reading(nearly, WINDOW, [replace(made, state="read")], answer="Done.") is None


@pytest.mark.parametrize(
    ("results", "is_read", "is_certain"), [(11, False, False), (12, True, False), (13, True, True)]
)
def test_stubs_are_read_like_a_record(results: int, is_read: int, is_certain: int) -> None:
    """Where old results that give way to a line will do: once the next one is expected to cross the trigger."""
    raw = reads(results, "line " * 320)
    found = reading(raw, WINDOW, [])
    assert is_edit(found) == is_read
    assert is_edit(reading(raw, WINDOW, [], rereads=True)) == is_certain


def test_of_a_turn_counts_what_came_between_two_answers() -> None:
    """With the calls of the first; where nothing is known a sentence or two is expected."""
    raw = [system(), user("word " * 900), calls("a"), result("a", "r" * 400), assistant("Fine."), user("And?")]
    view = conversation(turn_ended(parsed(raw), "So."))
    assert expected_growth_tokens(view, WINDOW) == sum(view.sizes[2:4])
    assert expected_growth_tokens(conversation(turn_ended(parsed(raw[:2]), "So.")), WINDOW) == 164


@given(raw=raw_conversations(max_turns=8), left_tokens=st.integers(0, 120), data=st.data())
def test_whatever_was_read_is_what_the_next_turn_begins_with(
    raw: list[JsonDict], left_tokens: int, data: st.DataObject
) -> None:
    """However small or large it is, where it fits: put into effect the record is sent, and gains what it has to."""
    if raw[-1]["role"] == "assistant":
        return
    answer = data.draw(st.sampled_from(["", "The answer."]))
    view = conversation(turn_ended(parsed(raw), answer))
    # The trigger of windows under 10,000 tokens is at 70 %.
    window = 10 * (view.tokens + left_tokens) // 7
    made = ahead(raw, window, answer=answer)
    stored = [] if made is None else [made]
    found = reading(raw, window, stored, answer=answer)
    if found is None:
        return
    later = data.draw(next_turns([*raw, assistant(answer), user("So?")] if answer else raw))
    chosen = found if isinstance(found, Compaction) else found.draft
    effective = replace(chosen, state="read", window_tokens=window)
    assert broken_promises(parsed(later), apply(parsed(later), effective)) == []
    decided, whole, limits = decide(later, window, [effective])
    if not limits.triggers(applied_tokens(whole, effective)) and whole.tokens >= view.tokens:
        assert decided == Send(compaction=effective)
    if first_step(view, budget(window, view), DEPTH, stored) == Send():
        least_tokens = applied_tokens(view, chosen)
        assert least_tokens <= (1 - MIN_GAIN_RATIO) * (budget(window, view).trigger_tokens + 1)
