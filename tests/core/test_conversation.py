"""Which stored compactions a conversation may use."""

from __future__ import annotations

import copy
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, mark_of
from litellm_compaction.core.conversation import focus_wanted, is_undone
from litellm_compaction.core.messages import system_prefix_length
from tests.builders import (
    JsonDict,
    assistant,
    chat,
    conversation,
    parsed,
    result,
    user,
)
from tests.core.test_compaction import applicable, covering, cut_conversations


@given(cut_conversations(), st.data())
def test_an_edited_history_has_no_compaction(drawn: tuple[list[JsonDict], Compaction], data: st.DataObject) -> None:
    """One changed, missing or added word in what is covered, and the record is not for this conversation."""
    raw, compaction = drawn
    prefix = system_prefix_length(parsed(raw))
    at = data.draw(st.integers(prefix, prefix + compaction.covered_messages - 1))
    edited = copy.deepcopy(raw)
    edited[at]["content"] = f"{edited[at]['content'] or ''} edited"
    assert not applicable(edited, compaction)
    assert not applicable([*raw[:at], *raw[at + 1 :]], compaction)
    assert not applicable([*raw[:at], user("inserted"), *raw[at:]], compaction)


def test_a_conversation_cut_short_has_no_compaction() -> None:
    """Going back to a message inside the covered part leaves nothing to apply."""
    raw = chat(4)
    compaction = covering(parsed(raw), 5)
    assert applicable(raw[:6], compaction)
    assert not applicable(raw[:5], compaction)
    assert not applicable(raw[:3], compaction)
    assert not applicable([], compaction)


def test_a_cut_that_is_not_legal_any_more_is_not_used() -> None:
    """What is behind the covered part decides too: a result may not lose its call."""
    raw = [user("a"), assistant("b"), user("c")]
    compaction = covering(parsed(raw), 2)
    assert not applicable([user("a"), assistant("b"), result("1", "orphan"), user("c")], compaction)


def test_the_newest_request_is_not_covered_unless_pinned() -> None:
    """A record that swallowed a request which is the newest again would break P2."""
    raw = [user("a"), assistant("b"), assistant("c"), user("d")]
    compaction = covering(parsed(raw), 2)
    assert compaction.pinned == ()
    assert applicable(raw, compaction)
    assert not applicable(raw[:3], compaction)


def test_a_mark_stands_for_nothing() -> None:
    """Of a record that was undone: until more is said, and for this conversation alone."""
    raw = chat(4)
    mark = mark_of(covering(parsed(raw), 5), undone_messages=len(raw) - 1)
    assert not applicable(raw, mark)
    assert is_undone(conversation(parsed(raw)), [mark])
    assert is_undone(conversation(parsed(raw[:6])), [mark])
    assert not is_undone(conversation(parsed([*raw, assistant("Done."), user("More.")])), [mark])
    assert not is_undone(conversation(parsed([raw[0], user("Another."), *raw[2:]])), [mark])
    assert not is_undone(conversation(parsed(raw)), [covering(parsed(raw), 5)])


def test_a_focus_is_wanted_until_a_record_of_its_round_is_made() -> None:
    """Whichever messages that one covers; earlier rounds, and records written ahead, are not it."""
    raw = chat(4)
    first, second = covering(parsed(raw), 3), replace(covering(parsed(raw), 5), round=2)
    mark = mark_of(second, focus="ports")
    of = conversation(parsed(raw))
    assert focus_wanted(of, [mark]) == focus_wanted(of, [mark, first]) == "ports"
    assert focus_wanted(of, [mark, first, replace(second, ahead=True)]) == "ports"
    assert focus_wanted(of, [mark, first, replace(covering(parsed(raw), 7), round=2)]) == ""
    assert focus_wanted(of, [first, second]) == ""
    assert focus_wanted(conversation(parsed([raw[0], user("Another."), *raw[2:]])), [mark]) == ""
