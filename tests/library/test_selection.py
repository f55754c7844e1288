"""Which messages the library would keep; without a model."""

from __future__ import annotations

from litellm_compaction import (
    select_messages,
)
from tests.builders import calls, chat, result, system, user
from tests.library.scripted import config


def test_a_selection_says_what_goes_where() -> None:
    """System, the part that a summary would stand for, the recent part; nothing is lost."""
    raw = chat(20)
    chosen = select_messages(raw, config())
    assert chosen.system == raw[:1]
    assert chosen.to_summarize == raw[1:-10]
    assert chosen.to_keep == raw[-10:]
    assert (chosen.reason, chosen.round, chosen.earlier_summary) == ("", 0, "")


def test_an_earlier_summary_is_found() -> None:
    """With its round, and not among what is to be summarized."""
    chosen = select_messages([system(), user("## Session Summary (round 2)\nA."), *chat(20)[1:]], config())
    assert (chosen.round, chosen.earlier_summary) == (2, "A.")
    assert chosen.to_summarize[0]["content"].startswith("Question 0.")


def test_nothing_to_summarize_has_a_reason() -> None:
    """And everything is kept."""
    raw = chat(4)
    chosen = select_messages(raw, config())
    assert (chosen.reason, chosen.to_summarize, [*chosen.system, *chosen.to_keep]) == ("all_recent", [], raw)
    only = [system(), user("## Session Summary\nA."), calls("1"), result("1", "ok")]
    chosen = select_messages(only, config(keep_recent_messages=2))
    assert (chosen.reason, chosen.round, [*chosen.system, *chosen.to_keep]) == ("nothing_new", 1, only)
