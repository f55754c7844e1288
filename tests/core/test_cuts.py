"""Where a text may be cut, and which fence or thoughts are open at its end."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.cuts import open_fence, open_think, settled_length, unstopped_length


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("", ""),
        ("word", ""),
        ("one two", "one "),
        ("x = 1\n    ", "x = "),
        ("x = 1\n    return", "x = 1\n    "),
        ("你好世界", "你好世"),
        ("你好 ", "你"),
        ("你好world", "你好"),
        ("か\u3099き\u3099", "か\u3099"),
        ("👍🏽👩‍👩‍👧", "👍🏽"),
        ("👩‍", ""),
        ("🇩🇪🇫", "🇩🇪"),
        ("a ❤️", "a "),
        ("世**", "世"),
        ("世**界", "世**"),
        ("text ```", "text "),
        ("\ud83d", ""),
        ("世\ud83d\ude00", "世"),
        ("a \u0301b", ""),
        ("\r\u200d", ""),
        ("a\n\u0301b", ""),
    ],
)
def test_settled_length_ends_before_the_last_word(text: str, settled: str) -> None:
    """The cut stands behind white space or a whole grapheme, never inside a run of punctuation."""
    assert text[: settled_length(text)] == settled


def test_a_long_word_does_not_stall() -> None:
    """Of a word of more than 64 characters all but the last 16 are settled; white space behind it is not split."""
    assert settled_length("see " + "a" * 80) == 4 + 80 - 16
    assert settled_length("a" * 80 + "   ") == 80 - 16
    assert settled_length("-" * 100) == 84
    assert settled_length("b" * 64) == 0


@given(st.text(max_size=120) | st.text("ab `*|\n世界👍🏽🇩🇪\u200d\ufe0f\u0301", max_size=120))
def test_a_settled_cut_stands_before_a_whole_character(text: str) -> None:
    """What follows a cut is neither white space nor something that belongs to the character before."""
    cut = settled_length(text)
    if cut:
        assert not text[cut].isspace()
        assert unicodedata.category(text[cut]) not in {"Mn", "Me", "Mc"}
        assert "\u200d" not in (text[cut], text[cut - 1])


@given(st.text("ab\n", max_size=60), st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=3))
def test_no_stop_string_begins_in_what_is_sent(text: str, stops: list[str]) -> None:
    """Wherever an answer is cut, a stop string stands whole in the rest; only an end that could begin one is held."""
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    sent, pending = "", ""
    # The server ends the answer where a stop string has come whole.
    for char in text[: min(ends, default=len(text) + 1) - 1]:
        pending += char
        cut = unstopped_length(pending, stops)
        sent, pending = sent + pending[:cut], pending[cut:]
        begun = [stop[:size] for stop in stops for size in range(1, len(stop)) if sent.endswith(stop[:size])]
        assert not any(stop.startswith(start + pending) for stop in stops for start in begun)
        assert not pending or any(stop.startswith(pending) and stop != pending for stop in stops)


def test_open_fence_names_the_language() -> None:
    """A longer or other fence does not close; an info string never closes."""
    assert open_fence("text") is None
    assert open_fence("```\ncode") == ""
    assert open_fence("```Python title=x\ncode") == "python"
    assert open_fence("```py\ncode\n```\n") is None
    assert open_fence("````md\n```\ncode\n") == "md"
    assert open_fence("~~~\n```\n") == ""
    assert open_fence("- item\n  ```js\n  x") == "js"
    assert open_fence("inline ```code``` only") is None


def test_open_think_sees_only_tags_that_open_a_block() -> None:
    """A tag in running text or in a fence is content."""
    assert open_think("<think>\nhm")
    assert open_think("notice\n<think>hm")
    assert not open_think("<think>hm</think>answer")
    assert not open_think("use `<think>` here")
    assert not open_think("```\n<think>\n")
