"""A record that travels: kept by its client, or read back from messages as it was written, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.forms import Form
from litellm_compaction.core.ledger import ANCHORS_HEAD, WORDS_HEAD, ledger
from litellm_compaction.core.messages import chain, merged, parse_message, user_message
from litellm_compaction.core.portable import (
    Portable,
    bases_of,
    headed,
    ledger_messages,
    portable,
    read_record,
    unfolded,
)
from litellm_compaction.core.prompts import defused
from tests.builders import assistant, calls, chat, count, image, parsed, result, system, texts, user

COMPACTION = Compaction(
    covered_messages=4,
    covered_hash="",
    start=4,
    forms=(Form(2, "whole"),),
    round=3,
    summary="Half of it is done.",
    summarized_messages=4,
    ledger="- port 9143",
    level="summary",
)
RAW = [system(), *chat(2)[1:], user("Look."), calls("c"), result("c", "It is there.")]


def test_it_sends_what_the_compaction_sends() -> None:
    """The same bytes as while the proxy itself held the history."""
    found = portable(parsed(RAW), COMPACTION)
    folded = [system(), user("#"), assistant("Then?")]
    messages, bases = unfolded(parsed(folded), found, "#")
    [base] = bases_of(messages[1:], chain(messages), bases)
    assert base.covered_hash == chain(messages)[1]
    sent = apply(messages, base)
    assert sent[: len(sent) - 1] == apply(parsed(RAW), COMPACTION)
    assert sent[-1].text == "Then?"
    assert bases_of(messages[2:], chain(messages)[1:], bases) == []
    assert bases_of((), chain([]), bases) == []


def test_without_a_compaction_everything_stays() -> None:
    """Nothing stands for anything."""
    found = portable(parsed(RAW), None)
    assert found == Portable(base=None, kept=parsed(RAW[1:]))
    assert unfolded(parsed([system(), user("#")]), found, "#") == (parsed(RAW), ())
    # Without the placeholder nothing is put anywhere by guess.
    assert unfolded(parsed(chat(2)), found, "#") == (parsed(chat(2)), ())


def test_other_messages_of_the_users_stay_once() -> None:
    """A client that keeps them beside the item sends them before it; those that the item holds are not said twice."""
    found = portable(parsed(RAW), COMPACTION, spares_requests=True)
    known = next(message.text for message in found.kept if message.role == "user")
    said = [system(), user("Mine."), user(known), assistant("Gone."), user("#"), user("New.")]
    messages, bases = unfolded(parsed(said), found, "#")
    texts = [message.text for message in messages if message.raw["role"] == "user"]
    assert texts[1] == "Mine."
    assert texts[-1] == "New."
    assert texts.count(known) == 1
    # They give way where they do not fit: the record stands for them, too.
    assert [base.covered_messages for base in bases] == [1, 2]
    assert "Gone." not in "".join(message.text for message in messages)


def test_a_ledger_is_read_back_as_messages() -> None:
    """The user's words one by one, over several lines too; the other lines as a tool's."""
    words = ["The task:\n  never touch /etc.", "Second thoughts."]
    covered = [*map(user_message, words), *parsed([assistant("The port is 8080 in src/a.py.")])]
    quoted = ledger(covered, budget_tokens=500, count=count)
    back = ledger_messages(quoted)
    assert [message.text for message in back] == [*words, "The port is 8080 in src/a.py."]
    assert [message.role for message in back] == ["user", "user", "tool"]
    assert ledger(back, budget_tokens=500, count=count) == quoted


def test_ledgers_of_several_records_are_all_read() -> None:
    """Each begins with its own heads."""
    one, two = f"{WORDS_HEAD}\n- a\n{ANCHORS_HEAD}\n- /x", f"{WORDS_HEAD}\n- b"
    assert [message.text for message in ledger_messages(f"{one}\n{two}")] == ["a", "b", "/x"]
    assert ledger_messages("") == []
    assert ledger_messages("nothing of ours") == []


RECORD = Compaction(covered_messages=1, covered_hash="", start=1, level="summary")


@given(texts(max_repeat=3) | st.just(""), texts(max_repeat=3) | st.just(""), st.integers(1, 999), texts(max_repeat=3))
def test_a_record_is_read_back(summary: str, quoted: str, number: int, own: str) -> None:
    """Summary, ledger and round, and the user's own words behind it, byte for byte, whatever they say."""
    record = replace(RECORD, round=number, summary=summary, ledger=quoted)
    if not summary and not quoted:
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
