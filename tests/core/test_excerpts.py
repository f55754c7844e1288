"""A long text cut to head and tail, or to what is about some words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.excerpts import about, excerpt
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


def test_what_is_about_some_words_is_kept_in_place_of_head_and_tail() -> None:
    """The place where most of them stand, whatever their endings and case, a rare one before a frequent one."""
    text = "The pond was quiet. " * 40 + "Then the Walruses swam to Kandrazur. " + "The pond was quiet. " * 60
    for words in (["walrus"], ["Which", "pond", "did", "the", "walrus", "like"]):
        shown = about(text, words, 40, count)
        assert "Walruses swam to Kandrazur" in shown
        assert shown.startswith("…")
        assert shown.endswith("…")
        assert count(shown) <= 40
    assert about(text, ["zebra", "of"], 40, count) == excerpt(text, 40, count)
    assert about("all of it", ["it"], 40, count) == "all of it"


@given(texts(max_repeat=30), st.lists(st.text(max_size=8), max_size=6), st.integers(0, 200))
def test_what_is_about_words_has_so_many_tokens(text: str, words: list[str], limit_tokens: int) -> None:
    """For any words, any of them a sign of a regular expression."""
    assert count(about(text, words, limit_tokens, count)) <= max(limit_tokens, count(excerpt(text, 0, count)))
