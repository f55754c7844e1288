"""An answer that goes on at the limit: the request that asks for it keeps the round that it is about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, applied_tokens, apply, keyed
from litellm_compaction.core.go_on import Partial, continued_request
from litellm_compaction.core.view import answered_round
from tests.builders import (
    DEPTH,
    JsonDict,
    broken_promises,
    budget,
    conversation,
    count,
    first_step,
    is_record,
    parsed,
    raw_conversations,
    user,
)
from tests.core.test_plan import WINDOWS, written


@given(raw_conversations(max_turns=4), WINDOWS, st.integers(1, 1500), st.booleans(), st.data())
def test_an_answer_keeps_the_round_that_it_is_about(
    raw: list[JsonDict], window: int, words: int, ends_in_answer: bool, data: st.DataObject
) -> None:
    """P2, P3: carried over the limit, once and again: all of the round is shown where it is small, or nothing."""
    if raw[-1]["role"] == "assistant":
        raw = raw[:-1]
    messages, stored = parsed(raw), list[Compaction]()
    for _ in range(2):
        partial = Partial(text=" ".join(f"w{at}" for at in range(words)))
        continued = continued_request(messages, partial, tail_tokens=100, count=count, ends_in_answer=ends_in_answer)
        view = conversation(continued)
        limits = budget(window, view)
        decision = first_step(view, limits, DEPTH, stored)
        words += data.draw(st.integers(1, 1500))
        if not is_record(decision):
            continue
        made = written(decision)
        sent = apply(continued, made)
        assert broken_promises(continued, sent) == []
        assert applied_tokens(view, made) <= decision.predicted_tokens
        answered = answered_round(continued)
        plain = [{**message.raw, "content": message.raw.get("content") or ""} for message in (*continued, *sent)]
        shown = [at for at in answered if plain[at] in plain[len(continued) :]]
        assert len(shown) in (0, len(answered))
        room = limits.early_start_tokens - limits.target_tokens(0)
        if not stored and sum(view.sizes[at] for at in answered) < room // 2:
            assert len(shown) == len(answered)
        stored.insert(0, keyed(continued, view.hashes, made))


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        # A paragraph that begins in the first half of what fits; else a line, else a word.
        ("w" * 44 + "\n\n" + "x" * 54, "x" * 54),
        ("w" * 54 + "\n\n" + "x" * 44, "w" * 54 + "\n\n" + "x" * 44),
        ("w" * 4 + " " + "w" * 40 + "\n" + "x" * 54, "x" * 54),
    ],
)
def test_what_stays_of_an_answer_begins_where_something_does(end: str, kept: str) -> None:
    """Verbatim, and half of what fits at least: the rest is left to a compaction."""
    partial = Partial(text="v" * 25 + end)
    *_, shown, _ = continued_request(parsed([user("Go.")]), partial, tail_tokens=100, count=len)
    assert shown.text == kept
