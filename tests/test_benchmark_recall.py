"""The yardsticks of `benchmarks/quality/recall.py` say what they should."""

from __future__ import annotations

from benchmarks.lib.transcripts import said
from benchmarks.quality import recall


def test_recalled_evidence_counts_if_half_of_it_is_shown_in_one_hit() -> None:
    """Two hits with a quarter each are none; a fact has to stand there as a whole."""
    text = "".join(f"{number:04d}" for number in range(50))
    evidence = recall.Evidence(text, 100)
    assert evidence.stands_in(["other", f"before {text[60:180]} after"])
    assert not evidence.stands_in([text[:60], text[100:160]])
    fact = recall.Evidence("port 4812", 9)
    assert fact.stands_in(["the port 4812."])
    assert not fact.stands_in(["the port is 4812."])


def test_a_facts_cue_has_the_words_around_it_and_none_of_its_own() -> None:
    """The nearest first, so that the question is about that place."""
    assert recall._cue("we run the server on port 4812 since May", "port 4812") == "on since server May the run we"


def test_recall_finds_what_the_rows_beside_it_find() -> None:
    """Each row answers a question of an agent's transcript by its hits' texts."""
    raw = [said("user", "The staging port is 4812."), said("assistant", "Noted."), said("user", "And lunch?")]
    chat = recall._chat(raw, {"f": "4812"}, [("staging port", "cue", ["f"])], is_literal=True)
    (asked,) = chat.asked
    for row, made in recall._ROWS.items():
        assert asked.evidence[0].stands_in(made(chat)(asked.question)), row
