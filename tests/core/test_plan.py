"""What is decided about a request, how a chain of compactions goes on over many turns, and what is written ahead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from litellm_compaction.core.budget import MIN_GAIN_RATIO, Budget, CompactionOptions
from litellm_compaction.core.compaction import Compaction, applied_tokens, apply, usable
from litellm_compaction.core.messages import system_prefix_length
from litellm_compaction.core.plan import (
    Refuse,
    Send,
    Step,
    expected_growth_tokens,
    plan,
    plan_next,
    turn_ended,
)
from litellm_compaction.core.prompts import STRATEGIES
from litellm_compaction.core.view import RECORD_TOKENS, View, legal_cuts
from tests.builders import (
    DEPTH,
    RULES,
    JsonDict,
    Planned,
    as_bytes,
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

WINDOWS = st.sampled_from([1024, 2048, 4096, 8192])


def decide(raw: Sequence[JsonDict], window: int, stored: Sequence[Compaction] = ()) -> tuple[Planned, View, Budget]:
    view = conversation(parsed(raw))
    limits = budget(window, view)
    return first_step(view, limits, DEPTH, stored), view, limits


def written(step: Step) -> Compaction:
    """The record that a step asks for, its summary and ledger as long as they may be."""
    draft = step.draft
    text = ("sum " * step.summary_tokens)[: 4 * step.summary_tokens]
    reach = draft.covered_messages
    return replace(draft, summary=text, summarized_messages=reach, ledger="l" * 4 * step.ledger_tokens)


def test_below_the_trigger_nothing_happens() -> None:
    """Not even a stored compaction is applied to a conversation that is small enough."""
    decision, _, _ = decide(chat(40, words=60), 8192)
    assert is_record(decision)
    assert decide(chat(40, words=60), 100_000, [written(decision)])[0] == Send()


@pytest.mark.parametrize(("unsteady", "is_enough"), [(18, True), (22, False)])
def test_a_record_covers_only_what_comes_again_if_that_is_enough(unsteady: int, is_enough: bool) -> None:
    """Enough is what leaves no more than the trigger."""
    view = replace(conversation(parsed(chat(40, words=60))), unsteady=unsteady)
    step = first_step(view, limits := budget(3000, view), DEPTH, ())
    assert is_record(step)
    assert (step.draft.covered_messages <= len(view.rest) - unsteady) == is_enough
    assert step.predicted_tokens <= limits.trigger_tokens


@given(raw_conversations(), WINDOWS)
def test_every_decision_can_be_sent_or_is_refused(raw: list[JsonDict], window: int) -> None:
    """P1: what is sent fits, a compaction's prediction and worst case do, only what is protected is refused.

    P5: under 10 % gain the conversation stays as it is, unless it would not fit, or leave its answer no room; then no
    model is asked.
    """
    decision, view, limits = decide(raw, window)
    if isinstance(decision, Step):
        assert system_prefix_length(view.messages) + decision.draft.covered_messages in legal_cuts(view.messages)
    if isinstance(decision, Send):
        assert limits.fits(view.tokens)
    elif is_record(decision):
        assert decision.predicted_tokens < view.tokens
        assert limits.fits(decision.predicted_tokens)
        assert applied_tokens(view, written(decision)) <= decision.predicted_tokens
        assert decision.ledger_min_tokens <= decision.ledger_tokens
        gains = decision.predicted_tokens <= view.tokens * (1 - MIN_GAIN_RATIO)
        is_late = view.tokens > limits.latest_start_tokens >= decision.predicted_tokens
        assert gains or not limits.fits(view.tokens) or (is_late and decision.draft.state == "provisional")
    elif is_edit(decision):
        assert decision.predicted_tokens <= limits.target_tokens(view.tokens) < view.tokens
        full = replace(decision.draft, ledger="x" * 4 * decision.ledger_tokens)
        assert applied_tokens(view, full) <= decision.predicted_tokens
    else:
        assert decision == Refuse()
        protected = [view.sizes[index] for index in view.protected]
        assert not limits.fits(view.fixed_tokens + sum(protected) + RECORD_TOKENS)


def sent_tokens(decision: Planned, view: View) -> int:
    """The prompt that a decision leads to; 0 where it is refused."""
    match decision:
        case Send(compaction=compaction):
            return applied_tokens(view, compaction) if compaction else view.tokens
        case Refuse():
            return 0
        case _:
            return decision.predicted_tokens


@given(raw_conversations(max_turns=8), st.sampled_from([2048, 4096, 8192, 16_384]), st.floats(0.40, 0.80), st.data())
def test_no_answer_is_stopped_at_its_beginning(
    raw: list[JsonDict], window: int, floor_ratio: float, data: st.DataObject
) -> None:
    """P5: nothing begins above the streaming limit, or within 64 tokens of it, if anything can begin below that.

    Turn by turn, with a system prompt and tools that take most of the window (issue 25, N1).
    """
    raw = [system("rule " * int(floor_ratio * window * 4 / 5)), *(each for each in raw if each["role"] != "system")]
    stored: list[Compaction] = []
    for _ in range(data.draw(st.integers(1, 4))):
        decision, view, limits = decide(raw, window, stored)
        stop = int(RULES.streaming_ratio * window)
        if limits.floor_tokens <= stop - 64:
            assert sent_tokens(decision, view) <= stop - 64
        if is_record(decision):
            stored.insert(0, written(decision))
        elif is_edit(decision):
            stored.insert(0, replace(decision.draft, ledger="l" * 4 * decision.ledger_tokens))
        raw = data.draw(next_turns(raw))


@given(raw_conversations(max_turns=8), WINDOWS)
def test_the_next_turn_reuses_what_this_one_made(raw: list[JsonDict], window: int) -> None:
    """P4: with the compaction in the store the next request is a reuse that begins with the same bytes.

    Idempotent: what comes out keeps the promises, and if it is given in again, it is not compacted below itself.
    """
    decision, view, limits = decide(raw, window)
    assume(is_record(decision))
    assert is_record(decision)
    made = written(decision)
    messages = apply(view.messages, made)
    assert broken_promises(view.messages, messages) == []
    again = conversation(messages)
    if not limits.triggers(again.tokens):
        assert plan(again, limits, DEPTH, ()) == Send()
    if limits.triggers(decision.predicted_tokens + 150):
        return
    assert decide(raw, window, [made])[0] == Send(compaction=made)
    later = [*raw, assistant("ok"), user("more")] if raw[-1]["role"] != "assistant" else [*raw, user("more")]
    assert decide(later, window, [made])[0] == Send(compaction=made)
    sent = as_bytes(messages)
    assert as_bytes(apply(parsed(later), made))[: len(sent)] == sent


@given(raw_conversations(max_turns=8), WINDOWS, WINDOWS, st.data())
def test_a_second_round_goes_on_from_the_first(
    raw: list[JsonDict], first_window: int, window: int, data: st.DataObject
) -> None:
    """Whatever was stored, for whatever window: the next decision covers no less, is legal, and can be sent."""
    decision, view, _ = decide(raw, first_window)
    assume(is_record(decision))
    assert is_record(decision)
    stored = written(decision)
    grown = [*raw, assistant("so " * data.draw(st.integers(1, 3000))), user("and " * data.draw(st.integers(1, 3000)))]
    later = grown if raw[-1]["role"] != "assistant" else data.draw(next_turns(raw))
    second, view, limits = decide(later, window, [stored])
    if isinstance(second, Send):
        assert not second.compaction or usable(view, [stored])
        assert limits.fits(sent_tokens(second, view))
    elif is_record(second):
        assert system_prefix_length(view.messages) + second.draft.covered_messages in legal_cuts(view.messages)
        if second.base is not None:
            assert second.draft.covered_messages >= stored.covered_messages
        made = written(second)
        assert limits.fits(applied_tokens(view, made))
        assert broken_promises(view.messages, apply(view.messages, made)) == []


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
    decision = plan_next(view, budget(window, view), options, stored, is_expected=False)
    if not is_record(decision):
        return None
    assert (decision.draft.state, decision.question) == ("ready", "summary")
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


def reading(
    raw: Sequence[JsonDict], window: int, stored: Sequence[Compaction], *, answer: str = "", rereads: bool = False
) -> Compaction | Step | None:
    view = conversation(turn_ended(parsed(raw), answer))
    found = plan_next(view, budget(window, view), replace(DEPTH, rereads=rereads), stored, is_expected=True)
    return None if is_record(found) else found


def test_nothing_is_read_where_the_cache_holds_what_will_be_sent() -> None:
    """Without a record ahead, or with one that is in effect already; while one waits no second one is written."""
    nearly = chat(30, words=84)
    made = ahead(nearly, answer="Done.")
    assert made is not None
    assert ahead([*nearly, assistant("Done."), user("Thanks.")], stored=[made], answer="Welcome.") is None
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
