"""A compaction as data: what applying it does to a conversation, and to which conversations it belongs."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply, begins, part_covered_by, shown_behind, usable
from litellm_compaction.core.cuts import open_think
from litellm_compaction.core.forms import Form
from litellm_compaction.core.messages import Message, chain, normal_text, parse_message, system_prefix_length
from litellm_compaction.core.view import legal_cuts
from tests.builders import (
    JsonDict,
    as_bytes,
    broken_promises,
    conversation,
    next_turns,
    parsed,
    raw_conversations,
    texts,
    user,
)


def covering(messages: Sequence[Message], cut: int, *, summary: str = "What happened.", ledger: str = "") -> Compaction:
    """A first compaction that covers everything between the prefix and `cut`."""
    covered = cut - system_prefix_length(messages)
    covered_hash = chain(messages)[covered]
    return Compaction(
        covered_messages=covered,
        covered_hash=covered_hash,
        start=covered,
        forms=tuple(Form(at, "whole") for at in conversation(messages).pinned(covered)),
        round=1,
        summary=summary,
        summarized_messages=covered if summary else 0,
        ledger=ledger,
        level="summary" if summary else "truncate",
    )


def applicable(raw: Sequence[JsonDict], compaction: Compaction) -> bool:
    return bool(usable(conversation(parsed(raw)), [compaction]))


@st.composite
def cut_conversations(draw: st.DrawFn) -> tuple[list[JsonDict], Compaction]:
    """A conversation and a compaction at any of its cuts, with hostile text in its record."""
    raw = draw(raw_conversations().filter(lambda each: bool(legal_cuts(parsed(each)))))
    messages = parsed(raw)
    cut = draw(st.sampled_from(legal_cuts(messages)))
    summary, ledger = draw(st.just("") | texts(max_repeat=3)), draw(st.just("") | texts(max_repeat=3))
    return raw, covering(messages, cut, summary=summary, ledger=ledger)


@given(cut_conversations(), st.data())
def test_every_cut_keeps_the_promises(drawn: tuple[list[JsonDict], Compaction], data: st.DataObject) -> None:
    """P2 and P3 hold wherever a valid conversation is cut, and whatever the record says.

    P4: the compaction belongs to the next request, too, whose list begins with this one's, byte for byte.
    """
    raw, compaction = drawn
    before, messages = copy.deepcopy(raw), parsed(raw)
    assert applicable(raw, compaction)
    sent = as_bytes(apply(messages, compaction))
    assert broken_promises(messages, apply(messages, compaction)) == []
    assert raw == before
    later = data.draw(next_turns(raw))
    assert applicable(later, compaction)
    assert as_bytes(apply(parsed(later), compaction))[: len(sent)] == sent
    assert broken_promises(parsed(later), apply(parsed(later), compaction)) == []


# ------------------------------------------------------------------ a record that reaches into an answer


@given(texts(), texts())
def test_nothing_is_lost_at_the_cut(head: str, rest: str) -> None:
    """Beginning and rest are the whole normal text, also where white space, notices or thoughts open the answer."""
    assume(rest.strip() and not open_think(head) and "⚙️" not in head + rest)
    message = parse_message({"role": "assistant", "content": head + rest, "tool_calls": []})
    covered_part = part_covered_by(head)
    whole = normal_text(message)
    if covered_part is None:
        assert whole == normal_text(parse_message({"role": "assistant", "content": rest}))
        return
    assert begins(message, covered_part)
    (behind,) = shown_behind([message], 0, covered_part)
    assert whole.removesuffix(behind.text).strip() == whole[: covered_part.chars].strip()
    assert behind.text == whole[covered_part.chars :]
    assert behind.raw["tool_calls"] == []


@given(texts().filter(str.strip), texts().filter(str.strip))
def test_another_beginning_is_not_taken(head: str, rest: str) -> None:
    """One changed character, or nothing behind it, and the record is not for this answer; nor for a user's words."""
    covered_part = part_covered_by(head)
    assume(covered_part is not None)
    assert covered_part is not None
    assert not begins(parse_message({"role": "assistant", "content": f"x{head}{rest}"}), covered_part)
    assert not begins(parse_message({"role": "assistant", "content": head.strip()}), covered_part)
    assert not begins(parse_message({"role": "user", "content": head + rest}), covered_part)
    # Inside a reasoning block nothing has been said yet that a later turn would show.
    assert part_covered_by(f"<think>\n{head.replace('think', '')}") is None


# ------------------------------------------------------------------ which stored compactions a conversation may use


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
    assert not applicable(raw[: at + 1], compaction)
