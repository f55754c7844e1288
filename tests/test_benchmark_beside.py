"""The yardsticks of `benchmarks/quality/beside.py` say what they should."""

from __future__ import annotations

import asyncio

from benchmarks.lib.measuring import Transcript
from benchmarks.lib.transcripts import said
from benchmarks.quality import beside, recall
from tests.engine.test_quoting import FACT, LONG, QUESTION


def test_evidence_is_looked_for_with_excerpts_and_without() -> None:
    """A fact that the record has lost stands in the excerpts; one that it keeps, in both; one of nobody's, in none."""
    facts = {"lost": FACT, "kept": "Well.", "none": "a whale"}
    asked = [(QUESTION, "cue", [name]) for name in facts]
    chat = recall._chat(LONG[1:], facts, asked, is_literal=True)
    lost, kept, none = asyncio.run(beside.answered(chat, 8192))
    assert (lost.without, lost.with_excerpts) == ([False], [True])
    assert lost.tokens > 100
    assert (kept.without, kept.with_excerpts) == ([True], [True])
    assert (none.without, none.with_excerpts) == ([False], [False])


def test_excerpts_are_told_from_the_prompt() -> None:
    """Without them the prompt is what it would have been; where there are none, it is the same."""
    frame = f"{beside.BEGIN}\nquoted\n{beside.END}\n\n"
    plain = [said("user", "a"), said("assistant", "b"), said("user", "record\n\nc")]
    quoting = [*plain[:-1], said("user", f"record\n\n{frame}c")]
    assert beside.parted(quoting) == (frame, plain)
    assert beside.parted(plain) == ("", plain)
    again = beside._with_frames(Transcript("t", plain, [], []), {0: frame})
    assert again.messages[0] == said("user", f"{frame}a")
    assert plain[0] == said("user", "a")
