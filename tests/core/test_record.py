"""What a record in a list of messages looks like, and that it is read back as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.ledger import ANCHORS_HEAD, WORDS_HEAD, ledger
from litellm_compaction.core.messages import merged, parse_message, user_message
from litellm_compaction.core.prompts import defused
from litellm_compaction.core.record import Record, ledger_messages, listable, read_record, write_record
from tests.builders import assistant, calls, count, image, parsed, result, texts, user


@given(texts(max_repeat=3) | st.just(""), texts(max_repeat=3) | st.just(""), st.integers(1, 999), texts(max_repeat=3))
def test_a_record_is_read_back(summary: str, quoted: str, number: int, own: str) -> None:
    """Summary, ledger and round, and the user's own words behind it, byte for byte, whatever they say."""
    record = Record(summary=summary, ledger=quoted, round=number)
    for original in (user_message(own), parse_message({"role": "user", "content": [image()]})):
        found = read_record(merged([original], write_record(record)))
        assert found is not None
        assert found.rest is not None
        assert found.rest.raw == original.raw
        assert found.record == Record(summary=defused(summary).strip(), ledger=defused(quoted).strip(), round=number)


def test_a_record_alone_leaves_nothing() -> None:
    """Its message goes as a whole."""
    found = read_record(user_message(write_record(Record(summary="S", ledger="", round=1)).rstrip("\n")))
    assert found is not None
    assert found.rest is None


@pytest.mark.parametrize(
    ("heading", "number"),
    [
        ("## Session Summary", 1),
        ("\n## Session Summary (Round 4)", 4),
        ("## Session Summary: round #12", 12),
        ("## Session Summary (round 0)", 1),
        ("## Session Summary (round " + "9" * 5000 + ")", 1),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_another_tools_summary_is_a_record(heading: str, number: int, role: str) -> None:
    """The whole text is the summary; a heading without a number is round 1."""
    found = read_record(parse_message({"role": role, "content": f"{heading}\nWe ported the lexer."}))
    assert found is not None
    assert found.rest is None
    assert found.record == Record(summary="We ported the lexer.", ledger="", round=number)


@pytest.mark.parametrize(
    "raw",
    [
        user("Write a ## Session Summary."),
        user("## Session Summaryish"),
        result("1", "## Session Summary\nof a file"),
        calls("1", content="## Session Summary\n"),
        user(""),
        {"role": "user", "content": []},
        {"role": "user", "content": [image()]},
        {"role": "assistant", "content": None},
    ],
)
def test_what_is_no_record(raw: dict[str, object]) -> None:
    """Other words, tool results, calls, and messages without text."""
    assert read_record(parse_message(raw)) is None


def test_a_ledger_is_read_back_as_messages() -> None:
    """The user's words one by one, over several lines too; the other lines as a tool's."""
    words = ["The task:\n- first\n- second\n  Never touch /etc.", "Second thoughts."]
    covered = [*map(listable, map(user_message, words)), *parsed([assistant("The port is 8080 in src/a.py.")])]
    quoted = ledger(covered, budget_tokens=500, count=count)
    back = ledger_messages(quoted)
    assert [message.text for message in back] == [
        "The task:\n  - first\n  - second\n  Never touch /etc.",
        "Second thoughts.",
        "The port is 8080 in src/a.py.",
    ]
    assert [message.role for message in back] == ["user", "user", "tool"]
    assert ledger(back, budget_tokens=500, count=count) == quoted


def test_ledgers_of_several_records_are_all_read() -> None:
    """Each begins with its own heads."""
    one, two = f"{WORDS_HEAD}\n- a\n{ANCHORS_HEAD}\n- /x", f"{WORDS_HEAD}\n- b"
    assert [message.text for message in ledger_messages(f"{one}\n{two}")] == ["a", "b", "/x"]
    assert ledger_messages("") == []
    assert ledger_messages("nothing of ours") == []
