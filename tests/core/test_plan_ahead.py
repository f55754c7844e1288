"""What is written before it is needed: the record of the next compaction, and when it takes effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply, is_applicable
from litellm_compaction.core.conversation import applied_tokens
from litellm_compaction.core.messages import parse_message, system_prefix_length
from litellm_compaction.core.plan import CompactionOptions, Keep, Reuse, Summarize, plan, plan_ahead, turn_ended
from litellm_compaction.core.strategies import STRATEGIES
from tests.builders import (
    DEPTH,
    JsonDict,
    agent_run,
    assistant,
    broken_promises,
    budget,
    calls,
    chat,
    conversation,
    count,
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
LATER = [assistant("Answer. " + "later " * 500), user("And then?"), assistant("more " * 700), user("Go on.")]


def ahead(
    raw: Sequence[JsonDict],
    window: int = WINDOW,
    stored: Sequence[Compaction] = (),
    *,
    answer: str = "",
    depth: CompactionOptions = DEPTH,
) -> Compaction | None:
    """The record that is written ahead behind the answer to `raw`, as long as it may be."""
    weighed = conversation(turn_ended(parsed(raw), answer))
    decision = plan_ahead(weighed, budget(window, weighed), depth, stored, count)
    if decision is None:
        return None
    assert isinstance(decision, Summarize)
    assert decision.ahead
    return replace(written(decision, weighed), pinned=decision.pinned, ahead=True, window_tokens=window)


def test_all_that_the_cache_holds_is_covered() -> None:
    """Behind a text the answer, too; what the person asked last stays verbatim."""
    made = ahead(FILLED, answer="It is done.")
    assert made is not None
    assert made.covered_messages == len(FILLED)
    assert made.pinned == (len(FILLED) - 2,)
    assert is_applicable(parsed(chats := [*FILLED, assistant("It is done."), user("Next?")]), made, hashes(chats))


def test_a_call_belongs_to_the_round_that_follows() -> None:
    """Behind a call everything before it is covered, and the record fits what comes back with its results."""
    raw = agent_run(14, words=300)
    made = ahead(raw, depth=replace(DEPTH, edits=False))
    assert made is not None
    assert made.covered_messages == len(raw) - 1
    later = [*raw, calls("next"), result("next", "done " * 50)]
    assert is_applicable(parsed(later), made, hashes(later))


def test_below_the_trigger_it_changes_nothing() -> None:
    """A conversation that fits is sent as it came, as if nobody had written anything."""
    made = ahead(FILLED, answer="Done.")
    assert made is not None
    later = [*FILLED, assistant("Done."), user("Thanks.")]
    assert decide(later, WINDOW, [made])[0] == Keep()


def test_at_the_trigger_it_is_what_the_conversation_needs() -> None:
    """The next compaction needs no model, and goes about as deep as one that is made then."""
    made = ahead(FILLED, answer="Done.")
    assert made is not None
    later = [*FILLED, assistant("Done."), user("Go on."), *LATER]
    assert isinstance(decide(later, WINDOW)[0], Summarize)
    decision, weighed, limits = decide(later, WINDOW, [made])
    assert decision == Reuse(compaction=made)
    assert not limits.triggers(tokens := applied_tokens(weighed, made, count))
    assert tokens < 0.55 * WINDOW
    assert broken_promises(parsed(later), apply(parsed(later), made)) == []


def test_what_is_applied_stays_applied_until_it_does_no_more() -> None:
    """A second record waits behind the first, however much deeper it would go."""
    first_plan, weighed, _ = decide(chat(44, words=60), WINDOW)
    assert isinstance(first_plan, Summarize)
    first = replace(written(first_plan, weighed), window_tokens=WINDOW, pinned=first_plan.pinned)
    grown = [*chat(44, words=60), assistant("a " * 3000), user("And?")]
    second = ahead(grown, WINDOW, [first], answer="So.")
    assert second is not None
    assert second.round == 2
    assert second.covered_messages > first.covered_messages
    next_turn = [*grown, assistant("So."), user("Yes.")]
    assert decide(next_turn, WINDOW, [second, first])[0] == Reuse(compaction=first)
    full = [*next_turn, assistant("b " * 4400), user("Then?")]
    assert decide(full, WINDOW, [second, first])[0] == Reuse(compaction=second)


def test_an_edit_of_history_leaves_it_behind() -> None:
    """What is no prefix any more is not used."""
    made = ahead(FILLED, answer="Done.")
    assert made is not None
    edited = [*FILLED[:3], user("Something else."), *FILLED[4:], assistant("Done."), user("Go on."), *LATER]
    assert isinstance(decide(edited, WINDOW, [made])[0], Summarize)


def test_nothing_is_written_where_stubs_will_do() -> None:
    """Old tool results that give way to a line each cost no model call now or later."""
    raw = [system(), user("Read them all.")]
    for number in range(12):
        raw += [calls(f"c{number}"), result(f"c{number}", f"file {number} " * 200)]
    assert ahead(raw) is None
    assert ahead(raw, depth=replace(DEPTH, edits=False)) is not None


def test_nothing_is_written_twice() -> None:
    """While one waits to be needed, a longer conversation gets no second one."""
    made = ahead(FILLED, answer="Done.")
    assert made is not None
    assert ahead([*FILLED, assistant("Done."), user("Thanks.")], stored=[made], answer="Welcome.") is None


def test_nothing_is_written_that_gains_too_little() -> None:
    """Where most of the prompt has to stay, a record ahead would only make compactions more frequent."""
    raw = [system("rules " * 3600), *chat(12, words=45)[1:]]
    assert ahead(raw, answer="Done.") is None


def test_a_model_that_chooses_messages_is_not_asked_ahead() -> None:
    """`prune` shows the model another prompt, which would take the chat's place in its cache."""
    assert ahead(FILLED, answer="Done.", depth=replace(DEPTH, strategy=STRATEGIES["prune"])) is None


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
    without, weighed, limits = decide(later, window)
    decided = plan(weighed, limits, DEPTH, [made], count)
    if not limits.triggers(weighed.tokens):
        assert decided == without
    elif isinstance(decided, Reuse):
        assert not limits.triggers(applied_tokens(weighed, made, count))
        assert broken_promises(parsed(later), apply(parsed(later), made)) == []


def hashes(raw: Sequence[JsonDict]) -> tuple[str, ...]:
    weighed = conversation(tuple(parse_message(each) for each in raw))
    assert len(weighed.hashes) == len(raw) - system_prefix_length(weighed.messages) + 1
    return weighed.hashes
