"""What may be used of a summary: good ones as they are, degenerate ones not at all, and of others their good lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.judging import Judgement, Unfolding, judged
from litellm_compaction.core.prompts import FRAME_NOTE
from litellm_compaction.core.strategies import STRATEGIES, strategy_of, writer_of
from tests.core.good_summaries import GOOD, INSTRUCTION, REAL, WORK, Good, source

TASK = "### Original task\nThe user's first request, verbatim, and every constraint and change of mind since.\n"


def look(summary: str, said: str | None = None) -> Judgement:
    return judged(summary, instruction=INSTRUCTION, source=source() if said is None else source(said))


def test_there_are_forty_good_ones() -> None:
    """In five languages, of every strategy."""
    assert len(GOOD) == 40
    assert {each.strategy for each in GOOD} == set(STRATEGIES)


@pytest.mark.parametrize("good", GOOD, ids=range(len(GOOD)))
def test_a_good_summary_keeps_every_character(good: Good) -> None:
    """Whatever its language and shape: sections that are nearly empty, tables, lists with one word in each row."""
    instruction = strategy_of(writer_of(good.strategy)).instruction(words=200, round_number=2)
    assert judged(good.text, instruction=instruction, source=[*source(good.said), *WORK]) == Judgement(good.text, "")


@pytest.mark.parametrize(
    ("summary", "fault"),
    [
        (TASK * 3, "echo"),
        (INSTRUCTION, "echo"),
        (f"{FRAME_NOTE}\n{FRAME_NOTE}", "echo"),
        ("### Original task\n" + "### Error message\n" * 40, "empty"),
        ("### Original task\n\n### Pending\n- [ ]\n", "empty"),
        ("", "empty"),
        ("The king was very wise and very kind. He was wise. " * 10, "loop"),
        ("endless " * 60, "loop"),
        ("很好很好" * 40, "script"),
        ("Mercury: 0.382 AU away\nVenus: 0.72 AU away\nEarth: 1 AU away\n" * 8, "loop"),
        (
            "Let me see.\nUSER:\nNow do the next one, please.\nASSISTANT:\nOf course, here it is, as you wished.",
            "dialogue",
        ),
        ("ASSISTANT CALLED read_file(a)\nTOOL RESULT:\nline one of the file\nline two of the file", "dialogue"),
        (
            "用户想要一个关于狐狸和乌鸦的故事，狐狸很聪明，乌鸦也很聪明，它们是很好的朋友，每天都在一起玩耍，从来没有分开过。",
            "script",
        ),
        ("Лисица и ворона были добрыми друзьями и очень любили друг друга, и помогали всем.", "script"),
    ],
)
def test_a_degenerate_summary_is_not_used(summary: str, fault: str) -> None:
    """Echoes, loops, dialogue, another script than the conversation's, headings without content."""
    assert look(summary) == Judgement("", fault)


LONG = "Please port src/parser.py to Rust; here you have it. Ok? Sure, none of the 42 tests may fail, x. " * 12
LONG_CHINESE = "好的，请把解析器移植到 Rust。没有别的要求，所有测试必须一直通过，不要修改配置文件。" * 12


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ("OK.", LONG),
        ("x", LONG),
        ("Sure, here you go!", LONG),
        ("### Original task: none", LONG),
        ("### Original task\nnone\n### Completed work\nNone.\n### Pending\n- [ ] none", LONG),
        ("Certainly! Happy to help.", LONG),
        ("Here is the record:", LONG),
        ("Natürlich, gern!", LONG),
        ("好的。", LONG_CHINESE),
        ("### 任务\n没有", LONG_CHINESE),
    ],
)
def test_a_summary_that_says_nothing_of_a_long_source_is_empty(summary: str, said: str) -> None:
    assert judged(summary, instruction=INSTRUCTION, source=[said]) == Judgement("", "empty")
    # In append mode the instruction is the last of the messages that the writer was shown.
    assert judged(summary, instruction=INSTRUCTION, source=[said, f"{INSTRUCTION}\n\nNow."]) == Judgement("", "empty")


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ("Port the parser.", LONG),
        ("### Original task\nRust\n### Pending\n- [ ] parsers", LONG),
        ("42 left.", LONG),
        ("Parser portieren.", LONG),
        ("移植解析器。", LONG_CHINESE),
        ("Porting it to a new language, all green.", LONG_CHINESE),
        ("OK.", "Is it done? Say OK."),
    ],
)
def test_a_short_summary_that_is_true_is_used(summary: str, said: str) -> None:
    """In the conversation's words, in other forms of them, in another language; and of a conversation that is short."""
    assert judged(summary, instruction=INSTRUCTION, source=[said]) == Judgement(summary, "")


def test_bad_lines_are_left_out_of_a_good_summary() -> None:
    """With the heading that stood over nothing else."""
    said = (
        f"{REAL}{TASK}### Pending\n- [ ] port the statements of the grammar\n- [ ] port the statements of the grammar"
    )
    assert look(said) == Judgement(f"{REAL}### Pending\n- [ ] port the statements of the grammar", "")


def test_what_follows_a_turn_of_dialogue_is_left_out_up_to_the_next_heading() -> None:
    """A model that has done its work goes on writing the conversation."""
    said = (
        f"{REAL}It uses byte offsets in all of its spans, as decided.\nUSER:\nThank you.\n### Pending\n- [ ] statements"
    )
    left = look(said)
    assert left.text == f"{REAL}It uses byte offsets in all of its spans, as decided.\n### Pending\n- [ ] statements"


@pytest.mark.parametrize("before", [1, 30, 150, 1500])
def test_a_conversation_may_change_its_script(before: int) -> None:
    """At its end, however long it was by then."""
    said = "Пользователь хочет перенести парсер, и тесты всё ещё зелёные, лексер уже готов."
    mixed = ["Please port it to Rust. " * 60] * before + ["А теперь по-русски, пожалуйста, и дальше так же. " * 9] * (
        before // 10 + 1
    )
    assert judged(said, instruction=INSTRUCTION, source=mixed).fault == ""
    assert look(said).fault == "script"


@pytest.mark.parametrize("messages", [1, 200])
def test_an_english_summary_of_any_conversation_is_used(messages: int) -> None:
    """The instruction is English, too; another script is neither asked for nor read."""
    chinese = [
        "移植解析器 src/parser.py，60 个测试中 58 个通过，所有测试必须一直通过，不要修改任何配置文件。" * 10
    ] * messages
    assert judged(REAL, instruction=INSTRUCTION, source=chinese).fault == ""
    russian = "Пользователь хочет перенести парсер, и тесты всё ещё зелёные, лексер уже готов."
    assert judged(russian, instruction=INSTRUCTION, source=chinese).fault == "script"


def test_japanese_is_written_in_two_scripts() -> None:
    """A conversation with hardly any kana may have a summary with many."""
    said = "パーサーをラストにポートしてください。テストはすべてグリーンのままになっています、よろしくおねがいします。"
    assert look(said, "移植解析器，所有测试必须一直通过，不要修改任何配置文件。").fault == ""
    assert look(said).fault == "script"


@given(st.lists(st.sampled_from([*TASK.split("\n"), *REAL.split("\n"), "USER:", "", "x", "a b c d"]), max_size=30))
def test_what_is_left_is_good(lines: list[str]) -> None:
    """Judged once more nothing changes; nothing is ever added; with a fault there is nothing."""
    summary = "\n".join(lines)
    left = look(summary)
    if left.fault:
        assert left.text == ""
        return
    assert look(left.text) == left
    assert [line for line in summary.split("\n") if line in left.text.split("\n")]


def test_summaries_of_a_real_small_model_are_not_used() -> None:
    """Twenty, as they came."""
    transcripts = os.environ.get("COMPACTION_TRANSCRIPTS")
    folder = Path(transcripts).parent if transcripts else Path(__file__).parents[3] / "shared"
    file = folder / "real-engine" / "summaries.json"
    if not file.is_file():
        pytest.skip("the summaries are not beside the checkout")
    summaries = json.loads(file.read_text(encoding="utf-8"))
    assert len(summaries) == 20
    assert sum(look(summary).fault != "" for summary in summaries) >= 19


def test_another_language_than_the_conversations_is_not_used() -> None:
    """Its own, or the instruction's English; a conversation may be held in several."""
    german = "Der Parser ist fertig und die Tests sind grün. Es wurde mit dem Lexer begonnen, der nicht von Hand ist. "
    french = (
        "Le parseur est fini et les tests sont verts. Il a été fait avec le lexeur, qui est dans une bibliothèque. "
    )
    english = "The parser is done and the tests are green. It was begun with the lexer, that is of another kind. "
    russian = "Парсер готов и тесты зелёные. Он был начат с лексера, и это на первом месте, что и для всех. "
    assert judged(french, instruction=INSTRUCTION, source=[german * 3]) == Judgement("", "language")
    assert judged(german, instruction=INSTRUCTION, source=[english * 3]) == Judgement("", "language")
    assert judged(english, instruction=INSTRUCTION, source=[german * 3]).fault == ""
    assert judged(german, instruction=INSTRUCTION, source=[german * 3]).fault == ""
    assert judged(french, instruction=INSTRUCTION, source=[german * 3, french]).fault == ""
    assert judged(german, instruction="Fasse das zusammen, und die Tests mit dem Stand.", source=[english]).fault == ""
    assert judged(russian, instruction=INSTRUCTION, source=[russian]).fault == ""


def unfolded(summary: str, size: int = 7, *, max_tokens: int = 400) -> str:
    """What a writer has written when it is ended."""
    watch = Unfolding(instruction=INSTRUCTION, max_tokens=max_tokens)
    for start in range(0, len(summary), size):
        if watch.is_enough(summary[start : start + size]):
            return summary[: start + size]
    return summary


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_no_good_summary_is_ended(size: int) -> None:
    """Not one of the forty, in whatever pieces it comes."""
    for good in GOOD:
        instruction = strategy_of(writer_of(good.strategy)).instruction(words=200, round_number=2)
        watch = Unfolding(instruction=instruction, max_tokens=400)
        pieces = [good.text[at : at + size] for at in range(0, len(good.text), size)]
        assert not any(watch.is_enough(piece) for piece in pieces)


@pytest.mark.parametrize(
    "summary",
    [
        INSTRUCTION * 3,
        REAL + "### Error message\n" * 100,
        REAL + "- [ ] port the statements\n" * 100,
        "endless " * 900,
        REAL + "很好很好" * 900,
        f"{REAL}USER:\nAnd now the rest of it, please.\nASSISTANT:\n{REAL * 40}",
    ],
)
def test_a_summary_that_says_nothing_more_is_ended_early(summary: str) -> None:
    """Long before its bound: an engine decodes each further token of it for nothing."""
    written = unfolded(summary)
    assert len(written) <= 900 < len(summary) / 2 or len(written) < len(summary) / 2
    assert look(written).fault or REAL.strip() in look(written).text


def test_a_writer_without_an_end_is_ended() -> None:
    """By a server that ignores its bound, whatever it writes; thoughts may repeat themselves until then."""
    endless = " ".join(f"word{number}" for number in range(9000))
    assert len(unfolded(endless, max_tokens=100)) <= 1700
    thoughts = "<think>\n" + "Let me see it again.\n" * 20 + "</think>\n" + REAL
    assert unfolded(thoughts) == thoughts
