"""A record in a list of messages is read back as it was written, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, Segment
from litellm_compaction.core.messages import merged, parse_message, user_message
from litellm_compaction.core.prompts import defused
from litellm_compaction.core.record import headed, read_record
from tests.builders import calls, image, parsed, result, system, texts, user

RECORD = Compaction(covered_messages=1, covered_hash="", start=1, level="summary")


@given(texts(max_repeat=3) | st.just(""), texts(max_repeat=3) | st.just(""), st.integers(1, 999), texts(max_repeat=3))
def test_a_record_is_read_back(summary: str, quoted: str, number: int, own: str) -> None:
    """Summary, ledger and round, and the user's own words behind it, byte for byte, whatever they say."""
    segments = (Segment(text=summary, round=number, covered_messages=1),) if summary else ()
    record = replace(RECORD, round=number, segments=segments, ledger=quoted)
    if not record.segments and not quoted:
        record = replace(record, ledger="x")
    for original in (user_message(own), parse_message({"role": "user", "content": [image()]})):
        found = read_record([headed(merged([original], record.record), number)])
        assert found is not None
        assert found.rest is not None
        assert found.rest.raw == original.raw
        assert found.base.summary == defused(record.summary).strip()
        assert (found.base.ledger, found.base.round) == (defused(record.ledger).strip(), number)


@pytest.mark.parametrize(
    ("heading", "number"),
    [
        ("## Session Summary", 1),
        ("\n### Session Summary (Compaction Round 4)", 4),
        ("## Session Summary: round #12", 12),
        ("## Session Summary (round 0)", 1),
        ("## Session Summary (round " + "9" * 5000 + ")", 1),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_another_tools_summary_is_a_record(heading: str, number: int, role: str) -> None:
    """The whole text is the summary; the conversation is unfolded behind the system messages."""
    raw = parsed([system(), {"role": role, "content": f"{heading}\nWe ported the lexer."}, user("And now?")])
    found = read_record(raw)
    assert found is not None
    assert (found.at, found.rest, found.base.summary, found.base.round) == (1, None, "We ported the lexer.", number)
    own, places = found.unfolded(raw)
    assert [message.text for message in own] == [raw[0].text, found.base.record, "And now?"]
    assert places == [0, 1, 2]


@pytest.mark.parametrize(
    "raw",
    [
        user("Write a ## Session Summary."),
        user("## Session Summaryish"),
        result("1", "## Session Summary\nof a file"),
        calls("1", content="## Session Summary\n"),
        {"role": "user", "content": []},
        {"role": "user", "content": [image()]},
        {"role": "assistant", "content": None},
    ],
)
def test_what_is_no_record(raw: dict[str, object]) -> None:
    """Other words, tool results, calls, messages without text, and words of a later message."""
    assert read_record(parsed([raw])) is None
    assert read_record(parsed([user("Hello."), user("## Session Summary\nA.")])) is None
