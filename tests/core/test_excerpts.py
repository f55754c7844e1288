"""A long text cut to head and tail."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.excerpts import condensed, excerpt
from litellm_compaction.tokenizers.registry import token_length
from tests.builders import count, texts


def _real(text: str) -> int:
    return token_length("o200k_base", text)


def test_a_short_text_is_the_same_object() -> None:
    """What fits is not touched."""
    text = "word " * 50
    assert excerpt(text, count(text), count) is text
    assert excerpt("", 0, count) == ""


def test_head_and_tail_stay_and_the_rest_is_counted() -> None:
    """60 % head, 40 % tail, and the marker says how many tokens are missing."""
    text = "".join(f"line {number:05d} of the log\n" for number in range(1000))
    short = excerpt(text, 500, count)
    head, marker, tail = re.split(r"\n(\[… \d+ tokens left out …\])\n", short)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert head.endswith("of the log")
    assert tail.startswith("line ")
    assert len(head) > len(tail)
    left_out = int(re.findall(r"\d+", marker)[0])
    assert left_out == count(text) - count(head) - count(tail)
    assert count(short) <= 500


@pytest.mark.parametrize("limit", [0, 1, 15, 16])
def test_below_the_marker_only_the_marker_is_left(limit: int) -> None:
    """There is always something that says that text is missing."""
    assert re.fullmatch(r"\n\[… \d+ tokens left out …\]\n", excerpt("word " * 5000, limit, count))


def test_dense_ends_are_cut_harder() -> None:
    """Ends that are denser than the average still come out below the limit."""
    text = "x9#/ü" * 500 + " " * 40_000 + "7Ƶ@ß" * 500
    assert _real(excerpt(text, 400, _real)) <= 400


@given(texts(max_repeat=200), st.integers(16, 2000))
def test_an_excerpt_stays_below_its_limit(text: str, limit: int) -> None:
    """With a real vocabulary and any text, and the same text gives the same bytes."""
    short = excerpt(text, limit, _real)
    assert _real(short) <= limit
    assert short == excerpt(text, limit, _real)
    assert short == text or len(short) < len(text) + 40


# ------------------------------------------------------------------ what people write


def test_long_paragraphs_go_before_short_ones() -> None:
    """A request between two pasted logs stays whole, and a marker stands for what is missing."""
    log = "2026-11-01 12:00:00 a line of the log\n" * 60
    text = f"Please look at this.\n\n{log}\n\nNever touch the tests.\n\n{log}\n\nThank you."
    shown = condensed(text, 150, count)
    assert count(shown) <= 150
    assert [part for part in shown.split("\n\n") if not part.startswith("[…")] == [
        "Please look at this.",
        "Never touch the tests.",
        "Thank you.",
    ]
    assert shown.count("tokens left out") == 2


def test_fenced_code_is_one_paragraph() -> None:
    """Blank lines inside a fence divide nothing."""
    code = "```python\n" + "import a\n\nimport b\n\n" * 40 + "```"
    shown = condensed(f"Fix this:\n\n{code}\n\nKeep it short.", 60, count)
    assert "import" not in shown
    assert "Keep it short." in shown


@given(texts(), st.integers(0, 400))
def test_a_condensed_text_is_bounded(text: str, limit: int) -> None:
    """It never weighs more than its limit, or than the marker that is left below that."""
    shown = condensed(text, limit, count)
    assert shown == condensed(text, limit, count)
    if count(text) <= limit:
        assert shown == text
    else:
        assert count(shown) <= max(limit, 20)


def test_a_heading_does_not_push_out_what_asks_something() -> None:
    """Bare headings and tags are shorter than any request, and come behind all others."""
    parts = [part for n in range(40) for part in (f"## Part {n}", "filler " * 60)]
    asked = "The people who run this still have Python 3.7, and nobody will change that."
    text = "\n\n".join(["Do the work.", *parts[:40], asked, *parts[40:], "That is all."])
    assert asked in condensed(text, 120, count)
