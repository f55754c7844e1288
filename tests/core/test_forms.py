"""Old results that become lines or go as a client orders it: which, and that nothing else changes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply, as_sent, hidden_messages, usable
from litellm_compaction.core.forms import ClearOrder, Form, cleared, in_forms, lines_for
from litellm_compaction.core.identity import prints, words_chain
from litellm_compaction.core.messages import chain, newest_user_index, system_prefix_length
from tests.builders import (
    JsonDict,
    agent_conversations,
    as_bytes,
    assistant,
    broken_promises,
    calls,
    conversation,
    image,
    parsed,
    raw_conversations,
    result,
    user,
)


def test_reasoning_and_images_go() -> None:
    """`reasoning_content`, `<think>` blocks and images; words and calls stay."""
    messages = parsed(
        [
            {"role": "user", "content": [{"type": "text", "text": "Look."}, image()]},
            {**calls("c1", content="<think>hm\nhm</think>I call."), "reasoning_content": "long thoughts"},
            result("c1", "ok"),
            assistant("<think>only thoughts</think>"),
        ]
    )
    shown = [each for each in in_forms(messages, {}) if each is not None]
    assert shown[0].other_parts == ()
    assert shown[0].text == "Look.\n[An image was here; it was removed.]"
    assert (shown[1].reasoning, shown[1].text, shown[1].calls) == ("", "I call.", messages[1].calls)
    assert shown[2] is messages[2]
    assert shown[3].text == "[Old reasoning was removed.]"
    assert in_forms(messages, {0: "whole"})[0] is messages[0]


@st.composite
def edits(draw: st.DrawFn) -> tuple[list[JsonDict], Compaction]:
    """A conversation and an edit of it: any legal length, any of its results."""
    raw = draw(raw_conversations(repeats=5))
    messages = parsed(raw)
    prefix, newest = system_prefix_length(messages), newest_user_index(messages)
    assert newest is not None
    hashes = chain(messages)
    covered = draw(st.integers(0, len(messages) - prefix - 1))
    rest = messages[prefix : prefix + covered]
    chosen = draw(st.sets(st.sampled_from(sorted(lines_for(rest))))) if lines_for(rest) else set()
    pinned = (newest - prefix,) if newest - prefix < covered else ()
    return raw, Compaction(
        covered_messages=covered,
        covered_hash=hashes[covered],
        ledger=draw(st.sampled_from(["", "- port 8080"])),
        level="edit",
        start=0,
        forms=tuple(sorted([*(Form(at, "line") for at in chosen - {*pinned}), *(Form(at, "whole") for at in pinned)])),
    )


@given(edits())
def test_an_edit_keeps_every_promise(made: tuple[list[JsonDict], Compaction]) -> None:
    """P2 and P3: same number, roles, ids and pairs; system, tail and newest words as they were; same bytes again."""
    raw, compaction = made
    before = copy.deepcopy(raw)
    messages = parsed(raw)
    if not usable(conversation(messages), [compaction]):
        return
    sent = apply(messages, compaction)
    assert raw == before
    assert broken_promises(messages, sent) == []
    assert [message.role for message in sent] == [message.role for message in messages]
    assert [message.calls for message in sent] == [message.calls for message in messages]
    assert [message.call_id for message in sent] == [message.call_id for message in messages]
    covered = system_prefix_length(messages) + compaction.covered_messages
    assert [each.text for each in sent[max(covered, 2) :]] == [each.text for each in messages[max(covered, 2) :]]
    assert as_bytes(apply(parsed(raw), compaction)) == as_bytes(sent)


@given(edits())
def test_what_is_hidden_is_what_is_not_sent_as_it_was(made: tuple[list[JsonDict], Compaction]) -> None:
    """One mapping says for each covered message if it is sent, and what of it the ledger may quote."""
    raw, compaction = made
    rest = parsed(raw)[system_prefix_length(parsed(raw)) :]
    for edit in (compaction, replace(compaction, start=compaction.covered_messages, forms=compaction.forms[:0])):
        sent = as_sent(rest, edit)
        assert {at for at, each in enumerate(sent) if each is None} == edit.gone
        assert edit.gone <= hidden_messages(rest, edit).keys()
        assert all(sent[at] is rest[at] for at in edit.pinned)


RAW = [user("Look."), *(each for n in "abcd" for each in (calls(n, name=f"tool_{n}"), result(n, f"Result of {n}.")))]


@pytest.mark.parametrize(("inputs", "kept"), [(False, "abcd"), (True, "cd"), (frozenset({"tool_b"}), "acd")])
def test_arguments_go_only_if_that_is_ordered(inputs: bool | frozenset[str], kept: str) -> None:
    """Of all tools, or of those named. The client sends all of it again, so that its record is found by that."""
    messages, _ = cleared(parsed(RAW), ClearOrder(above_calls=1, keep=2, inputs=inputs), 100)
    arguments = {call.id: call.arguments for message in messages for call in message.calls}
    assert [name for name in "abcd" if arguments[name] != "{}"] == [*kept]
    assert [made(messages) for made in (chain, words_chain)] == [made(parsed(RAW)) for made in (chain, words_chain)]
    assert list(map(prints, messages)) == list(map(prints, parsed(RAW)))


@given(agent_conversations(), st.integers(0, 5), st.integers(0, 5))
def test_nothing_but_results_changes(raw: list[dict[str, object]], calls_above: int, keep: int) -> None:
    """No message comes or goes, whatever the conversation."""
    messages = parsed(raw)
    changed, _ = cleared(messages, ClearOrder(above_calls=calls_above, keep=keep), 100)
    assert len(changed) == len(messages)
    for old, new in zip(messages, changed, strict=True):
        assert new == old or new.role == "tool"
