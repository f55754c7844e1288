"""When a conversation is the same although its client has edited what a record covers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.identity import chain_behind, edits, seen, words_chain
from litellm_compaction.core.messages import chain
from tests.builders import JsonDict, assistant, calls, image, parsed, raw_conversations, result, user

OUTPUT = "\n".join(f"{number}: the parser reads token {number * 37 % 101}" for number in range(120))
NOTE = "[Old tool result content cleared]"
CLINES = (
    "[[NOTE] This file read has been removed to save space in the context window. Refer to the latest file read for "
    "the most up to date version of this file.]"
)


def _talk(output: object = OUTPUT, *, said: str = "Read it.", answer: str = "Done.") -> list[JsonDict]:
    return [user(said), calls("1"), {**result("1", ""), "content": output}, assistant(answer), user("And now?")]


def _entry(was: list[JsonDict], now: list[JsonDict]) -> str | None:
    """The chain's last entry if `now` goes on from a record of all but the last message of `was`."""
    covered = parsed(was)[:-1]
    later = parsed(now)
    if words_chain(later)[len(covered)] != words_chain(covered)[-1]:
        return None
    record = seen(covered, chain(covered))
    told = edits(later[: len(record)], [each.data for each in record])
    return None if None in told else chain_behind(later, record)[-1]


@pytest.mark.parametrize(
    "output",
    [
        OUTPUT,
        NOTE,
        CLINES,
        [{"type": "text", "text": NOTE}],
        "Old environment output: (120 lines omitted)",
        "[Output of 4,021 characters was cleared]",
        "_[Old result removed]_",
        f"{OUTPUT[:1000]}... [truncated]",
        f"{OUTPUT[:500]}\n...\n{OUTPUT[-500:]}\n[Tool result trimmed: kept first 500 and last 500 characters.]",
    ],
    ids=range(9),
)
def test_what_was_cleared_or_cut_is_the_same_conversation(output: object) -> None:
    """Under the very entry that it had before, and so with its pins, handles and originals."""
    assert _entry(_talk(), _talk(output)) == chain(parsed(_talk()))[-1]


def test_a_cut_result_may_end_with_a_line_in_brackets_of_its_own() -> None:
    """Which is no client's word about the cut."""
    output = f"{OUTPUT}\n(File has 62 lines total.)"
    cut = f"{output[:400]}\n... [truncated] ...\n{output[-400:]}"
    assert _entry(_talk(output), _talk(cut)) == chain(parsed(_talk(output)))[-1]


@pytest.mark.parametrize(
    "now",
    [
        *map(_talk, ("4 files changed.", "No matches found", "[]", '["a.py"]', '{"error": "not found"}', "")),
        *map(_talk, ("[exit code 1]", "[Permission denied]", "(no output)", "Output cleared.", "[Balance: 1200]")),
        *map(_talk, ("Error: (no such file)", OUTPUT[:1000], f"{OUTPUT[:500]}another line {OUTPUT[-500:]}")),
        *map(_talk, (f"{OUTPUT[1:500]}... [truncated]", f"{OUTPUT[:1000]}... {'other words ' * 60}")),
        *map(_talk, (f"{OUTPUT}\n[more]", f"[{'a long note ' * 60}]")),
        _talk(NOTE, said="Read all."),
        _talk(NOTE, answer="Nothing."),
    ],
    ids=range(20),
)
def test_other_data_words_or_calls_are_another_conversation(now: list[JsonDict]) -> None:
    """Also if two people have one key: a record tells what the result said."""
    assert _entry(_talk(), now) is None


def test_a_short_result_or_a_note_is_never_replaced() -> None:
    """What is no longer than a note may have been one already, or says all of it."""
    assert _entry(_talk("ok"), _talk("[cleared]")) is None
    assert _entry(_talk(NOTE), _talk("[No results]")) is None
    assert _entry(_talk(NOTE), _talk(OUTPUT)) is None


@pytest.mark.parametrize("note", ["Output cleared.", "", "<MASKED>", "(output omitted)", "<cleared/>", "旧结果已清除"])
def test_a_short_text_in_the_place_of_several_results_is_a_note(note: str) -> None:
    """Whatever its form; in the place of one result, or of the same one twice, it may be a result."""

    def session(*outputs: str) -> list[JsonDict]:
        rounds = [each for n, text in enumerate(outputs) for each in (calls(f"c{n}"), result(f"c{n}", text))]
        return [user("Read them."), *rounds, assistant("Done."), user("And now?")]

    was = session(OUTPUT, OUTPUT[::-1], OUTPUT)
    assert _entry(was, session(note, note, OUTPUT)) == chain(parsed(was))[-1]
    assert _entry(was, session(OUTPUT, note, OUTPUT)) is None
    assert _entry(was, session(note, OUTPUT[::-1], note)) is None


def _shown(*parts: JsonDict) -> list[JsonDict]:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}
    return [asked, assistant("A cat."), user("?")]


def test_a_result_as_text_may_give_way_to_a_note() -> None:
    """To the end of its part, over blank lines; other parts are its client's, and the same."""

    def read(text: str, progress: str = "# Progress: 1 of 4") -> list[JsonDict]:
        texts = [f"[read_file for 'a.c'] Result:\n{text}", progress]
        message = {"role": "user", "content": [{"type": "text", "text": each} for each in texts]}
        return [user("Port it."), assistant("I read."), message, assistant("Done."), user("?")]

    was = read(f"{OUTPUT}\n\n{OUTPUT}")
    assert _entry(was, read(CLINES)) == chain(parsed(was))[-1]
    assert _entry(was, read(CLINES, "# Progress: 2 of 4")) is None


@pytest.mark.parametrize(("words", "does"), [("[Image removed]", True), ("It is mine.", False)])
def test_an_image_may_give_way_to_a_note(words: str, does: bool) -> None:
    """In a part of its own; the person's words beside it are theirs."""
    assert (_entry(_shown(image()), _shown({"type": "text", "text": words})) is not None) is does
    assert _entry(_shown(image()), _shown()) is None


def test_an_attached_file_is_data_and_the_words_around_it_are_not() -> None:
    """As `stretches` divides a message."""

    def asked(file: str, words: str = "Mend this.") -> list[JsonDict]:
        return [user(f'{words}\n<file path="a.py">\n{file}\n</file>'), assistant("Done."), user("And now?")]

    assert _entry(asked(OUTPUT), asked(NOTE)) == chain(parsed(asked(OUTPUT)))[-1]
    assert _entry(asked(OUTPUT), asked(NOTE, "Read this.")) is None


@given(raw_conversations(), st.data())
def test_any_results_may_be_cleared(raw: list[JsonDict], data: st.DataObject) -> None:
    """Whichever long results become a note, and whatever follows, the entries of before come back."""
    was = [{**each, "content": OUTPUT} if each["role"] == "tool" else each for each in raw]
    now = [{**each, "content": NOTE} if each["role"] == "tool" and data.draw(st.booleans()) else each for each in was]
    rest, later = ([each for each in parsed(raw) if not each.is_system] for raw in (was, now))
    covered = data.draw(st.integers(0, len(rest)))
    record = seen(rest[:covered], chain(rest))
    assert words_chain(later) == words_chain(rest)
    assert edits(later[:covered], [each.data for each in record]) == [
        each != other for each, other in zip(later[:covered], rest, strict=False)
    ]
    assert not covered or chain_behind(later, record)[: covered + 1] == chain(rest)[: covered + 1]
