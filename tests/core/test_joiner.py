"""Joining a partial answer and its continuation: one answer, no word lost, none twice."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from litellm_compaction.core.cuts import open_think, settled_length
from litellm_compaction.core.joiner import Ending, Joiner
from tests.core.restarts import CHATTER, GENERATORS
from tests.work import grows_linearly

FOX = "The quick brown fox jumps over the lazy dog. Then the fox went "
FENCED = "Here it is:\n\n```python\nimport os\n\n\n"
CODE = "Code:\n\n```python\ndef area(width, height):\n    result = width * height\n    "
TABLE = "| name | value |\n|------|-------|\n| alpha | 0 |\n| alpha | 0 |\n"


def opened(partial: str, shown: str, continuation: str) -> tuple[str, str, str]:
    """What the client gets, how the continuation began, what was left out; the same for every way to split it."""
    results = set()
    for size in (1, 2, 3, 7, 10_000):
        joiner = Joiner(partial, shown=shown)
        deltas = [continuation[place : place + size] for place in range(0, len(continuation), size)]
        text = "".join((*map(joiner.feed, deltas), joiner.finish()))
        results.add((text, joiner.opening, joiner.echoed_text + joiner.removed_text))
    assert len(results) == 1, results
    return results.pop()


def joined(partial: str, continuation: str) -> str:
    return opened(partial, "", continuation)[0]


@pytest.mark.parametrize(
    "continuation",
    [
        "home.",
        " home.",
        "\n\nhome.",
        "Then the fox went home.",
        "Thenthefoxwent home.",
        "the fox went home.",
        FOX + "home.",
        "… the fox went home.",
        "Sure, continuing with the answer: Then the fox went home.",
        "Okay:\n" * 3 + "Then the fox went home.",
        "Sure, I'll continue.\n\nHere is the continuation:\n\nhome.",
        "*(continuing from where I stopped)*\n\nhome.",
        "Let me continue:\nhome.",
        "Here’s the rest of the answer:\nhome.",
        "Picking up where I left off:\nhome.",
        "Understood. Continuing:\nhome.",
        "Continuation:\nThen the fox went home.",
        *(f"{line}\nhome." for line in CHATTER),
        *(f"{line}\n\nThen the fox went home." for line in CHATTER),
    ],
)
def test_what_is_not_new_is_removed(continuation: str) -> None:
    """Announcements, ellipses, repeats of the end and double white space leave only the new words."""
    assert joined(FOX, continuation) == "home."


@pytest.mark.parametrize(
    ("partial", "continuation"),
    [
        ("I saw the ", "the band play."),
        ("laughing: ha ha ha ha ha ha ", "ha ha ha ha ha ha, he said."),
        ("x: " + "a" * 100, "a" * 100 + " end"),
        (TABLE, "| alpha | 0 |\n| beta | 1 |"),
        (TABLE + "| gamma delta | 0 |\n", "| gamma delta | 0 |\n"),
        (TABLE + "| gamma delta | ", "0 |\n| gamma delta | 0 |"),
        ("- item\n- item\n- ", "item\n- item"),
        ("```\n    items.append(zero)\n    items.append(zero)\n    ", "items.append(zero)\n```"),
        ("11 12 13 14 ", "15 16 17"),
        ("我们今天去公", "园玩，然后回家。"),
        ("This is ", "continuing.\n\nNext."),
        ("It rained all day.\n\n", "Continuing education matters.\nIt does."),
        ("It rained all day.\n\n", "Okay, let's continue with step 2.\nIt does."),
        ("It rained all day.\n\n", "The rest of the text is clear.\nIt does."),
        ("It rained all day.\n\n", "Continuing:\nIt does."),
        ('She said: "', "Sure, continuing from where I left off.\n"),
        ("User: go on\nAssistant: one\nUser: more\n", "Assistant: two"),
        ("const all = { ", "...rest }"),
        ("He sat on the mat with the cat ", "and with the cats"),
        ("Use the tag `<think>` in ", "prompts."),
        ("", "  anything"),
        (" \n", "Anything goes here.\n"),
        # A short repeat that may be meant: words used before, cells, types named like their variables, numbers.
        (FENCED + "func New(config ", "config.Config) {"),
        ("The estuary was wide. We reached the estuary ", "estuary pilots know it."),
        ("| name | river stone | ", "river stone | end |"),
        (FENCED + "def ", "def area():"),
        ("x:\n    return ", "return_value"),
        # Inside an open fence a bare fence closes it, another language opens none anew; outside it is content.
        (CODE, "```\n\nDone."),
        (CODE, "```js\nalert(1)"),
        ("```python\nprint(1)\nprint(2)\n```\n\n", "```python\nprint(3)\n```"),
        (FOX, "<thin ice."),
        (FOX, "Okay:\n" * 4 + "Then the fox went home."),
    ],
)
def test_what_belongs_to_the_answer_is_kept(partial: str, continuation: str) -> None:
    """Legitimate repetition, short common words, and lines that only resemble announcements stay."""
    assert joined(partial, continuation) == continuation


@pytest.mark.parametrize(
    ("partial", "continuation", "new"),
    [
        # In the middle of a line nobody begins the line again, nor doubles words that he has not used before.
        (FENCED + "limit = ", "limit = 5", "5"),
        ("The river runs past word83 ", "word83 goes on.", "goes on."),
        ("- a plum\n- quince ", "- quince goes on.", "goes on."),
        # Its own indentation, or three words of it, are evidence enough that a line was started again.
        ("x:\n  return ", "\n  return total", "total"),
        ("x:\n    y = x ", "y = x + 1", "+ 1"),
        ("It rained all day, ", "Continuing where I left off: and it snowed.", "and it snowed."),
        ("x:\n  foo(1, 2)\n  foo(1, ", "  foo(1, 2)", "2)"),
        # Exactly one indentation results, wherever a fence is reopened or the code repeated.
        (CODE, "    return result", "return result"),
        (CODE, "```python\nreturn result", "return result"),
        (CODE, "```Python\ndef area(width, height):\n    result = width * height\n    return result", "return result"),
        (CODE, "Sure, continuing:\n\n```python\n    result = width * height\n\n    return result", "return result"),
        # The documented ambiguity: nothing distinguishes this from a restarted last row.
        ("| a | b |\n| alpha beta | gamma |\n", "| alpha beta | gamma |\n| end | x |", "| end | x |"),
    ],
)
def test_a_line_or_block_that_is_started_again_is_removed(partial: str, continuation: str, new: str) -> None:
    assert joined(partial, continuation) == new


@pytest.mark.parametrize(
    ("partial", "continuation", "new"),
    [
        ("def f():\n ", "       return y", "       return y"),
        ("def f():\n       ", " return y", " return y"),
        ("def f():\n    ", "    return y", "return y"),
        ("one two three four ", "three four  five", " five"),
        ("one ", " two", "two"),
        ("one ", "\n\n two", "\n\n two"),
    ],
)
def test_white_space_goes_on_behind_a_partial_that_ends_inside_it(partial: str, continuation: str, new: str) -> None:
    """What an overflow has cut where nobody expected it: only the same white space again is none."""
    joiner = Joiner(partial, is_settled=False)
    assert joiner.feed(continuation) + joiner.finish() == new


@pytest.mark.parametrize(
    ("continuation", "new"),
    [
        ("think more</think>\n\nAnswer", "think more</think>\n\nAnswer"),
        ("<think>think more</think>Answer", "think more</think>Answer"),
        ("\n<think>\nthink more", "think more"),
    ],
)
def test_interrupted_thinking_goes_on(continuation: str, new: str) -> None:
    """A second opening tag is dropped."""
    assert joined("<think>\nI should ", continuation) == new


def test_thinking_of_the_restart_stays_out_of_the_content() -> None:
    """A reasoning block before the continuation is removed and handed to the caller."""
    joiner = Joiner(FOX)
    sent = "".join(map(joiner.feed, "\n<think>The user wants more.</think>\n\nThen the fox went home."))
    assert sent + joiner.finish() == "home."
    assert joiner.removed_text == "The user wants more.\n\nThen the fox went"
    unfinished = Joiner(FOX)
    assert unfinished.feed("<think>hm </thi") + unfinished.finish() == ""
    assert unfinished.removed_text == "hm </thi"
    # Behind a tag that is never closed an answer that is complete is not lost.
    whole = Joiner("The fox went ")
    assert whole.feed("<think>home, and ") + whole.feed("slept.") + whole.finish(is_complete=True) == "home, and slept."


@given(
    st.text("ab .\n|-`世👍", max_size=80), st.text("ab .\n|-`<…世👍", max_size=80), st.randoms(use_true_random=False)
)
def test_the_split_never_matters(partial: str, continuation: str, rng: random.Random) -> None:
    """Any text in any pieces gives one result, which is an end of the continuation."""
    whole = Joiner(partial)
    expected = whole.feed(continuation) + whole.finish()
    assert continuation.endswith(expected)
    pieces, rest = Joiner(partial), continuation
    sent = ""
    while rest:
        size = rng.randrange(1, 6)
        sent += pieces.feed(rest[:size])
        rest = rest[size:]
    assert sent + pieces.finish() == expected


def test_an_answer_that_begins_anew_teaches() -> None:
    """Announced, begun at another place, or begun at the same place with other words: it did not go on."""
    for continuation in ("Sure, here is the continuation: home.", "Then the fox went home."):
        assert opened(FOX, FOX.rstrip(), continuation)[:2] == ("home.", "anew")
    assert opened(FOX, FOX.rstrip(), "The quick brown fox jumps over the river.")[1] == "anew"


@given(st.sampled_from(GENERATORS), st.integers(0, 10_000), st.booleans(), st.booleans())
def test_a_server_that_goes_on_itself_loses_no_character(
    generate: Callable[[random.Random], str], seed: int, echoes: bool, repeats_space: bool
) -> None:
    """Whatever text, wherever it is cut: the partial answer and what a trusted server gives make the whole answer."""
    rng = random.Random(seed)
    text = generate(rng)
    partial = text[: settled_length(text[: rng.randrange(1, len(text))])]
    rest = text[len(partial) :]
    shown = partial.rstrip()
    assume(shown and rest and not open_think(partial))
    dense = "".join(shown.split())
    # Where the text goes round, its next round looks like an echo and stays.
    can_tell = (
        len(dense) >= 12 and not Ending(partial).repeats_itself(dense) and not "".join(rest.split()).startswith(dense)
    )
    space = partial[len(shown) :] if repeats_space else ""
    continuation = (shown if echoes and can_tell else "") + space + rest
    joiner = Joiner(partial, shown=shown, is_trusted=True)
    places = range(0, len(continuation), 5)
    given_text = "".join((*(joiner.feed(continuation[place : place + 5]) for place in places), joiner.finish()))
    assert given_text == rest or not can_tell


_HEADS = ("", " <", "<think>", "Sure", "Sure, continuing:\n", "...", "```python\n", "\n<think>x</think>")


@pytest.mark.parametrize("head", _HEADS)
def test_white_space_blank_by_blank_is_read_once(head: str) -> None:
    """A server may fill a window with it; all that came before was read again with each of its deltas."""

    def feeding(size: int) -> Callable[[], object]:
        joiner = Joiner("Code:\n\n```python\nx = 1 and then it went", shown="x = 1 and then it went")
        return lambda: ([joiner.feed(delta) for delta in (head, *" \n" * size, "on")], joiner.finish())

    assert grows_linearly(feeding, 600)


def test_a_repeat_that_starts_at_any_of_thousands_of_places_is_found() -> None:
    """The places are looked for one behind the other, and none is left out."""
    partial = "".join(f"row {number} of the long table says {number % 7}\n" for number in range(300)) + "and so it went"
    for start in (partial.index("row 290"), partial.index("row 299"), partial.index("and so")):
        assert joined(partial, f"{partial[start:]} on for ever.") == " on for ever."


def test_a_text_of_one_word_is_searched_once() -> None:
    """All of its ends come again, and none of them tells."""
    assert grows_linearly(lambda size: lambda: Joiner("a " * size).feed("a" * size + "b\n"), 400)
