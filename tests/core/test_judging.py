"""Summaries: good ones are used as they are, degenerate ones not at all, of others what messages state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.judging import Judgement, inventions, judged
from litellm_compaction.core.prompts import STRATEGIES
from tests.core.good_summaries import GOOD, INSTRUCTION, REAL, WORK, Good, source
from tests.work import grows_linearly

TASK = "### Original task\nThe user's first request, verbatim, and every constraint and change of mind since.\n"


def look(summary: str, said: str | None = None) -> Judgement:
    return judged(summary, instruction=INSTRUCTION, source=source() if said is None else source(said))


@pytest.mark.parametrize("good", GOOD, ids=range(len(GOOD)))
def test_a_good_summary_keeps_every_character(good: Good) -> None:
    """Whatever its language and shape: sections that are nearly empty, tables, lists with one word in each row."""
    strategy = STRATEGIES[good.strategy]
    instruction = STRATEGIES[strategy.writer or strategy.name].instruction(words=200, round_number=2)
    assert judged(good.text, instruction=instruction, source=[*source(good.said), *WORK]) == Judgement(good.text, "")


@pytest.mark.parametrize(
    ("summary", "fault"),
    [
        (TASK * 3, "echo"),
        (INSTRUCTION, "echo"),
        ("### Original task\n" + "### Error message\n" * 40, "empty"),
        ("### Original task\n\n### Pending\n- [ ]\n", "empty"),
        ("", "empty"),
        ("The king. " * 20, "loop"),
        ("很好很好" * 40, "script"),
        ("Mercury: 0.382 AU away\nVenus: 0.72 AU away\nEarth: 1 AU away\n" * 8, "loop"),
        (
            "Let me see.\nUSER:\nNow do the next one, please.\nASSISTANT:\nOf course, here it is, as you wished.",
            "dialogue",
        ),
        ("ASSISTANT CALLED read_file(a)\nTOOL RESULT:\nline one of the file\nline two of the file", "dialogue"),
        ("Лисица и ворона были добрыми друзьями и очень любили друг друга, и помогали всем.", "script"),
    ],
)
def test_a_degenerate_summary_is_not_used(summary: str, fault: str) -> None:
    """Echoes, loops, dialogue, another script than the conversation's, headings without content."""
    assert look(summary) == Judgement("", fault)


LONG = "Please port src/parser.py to Rust; here you have it. Ok? Sure, none of the 42 tests may fail, x. " * 12
LONG_CHINESE = "好的，请把解析器移植到 Rust。没有别的要求，所有测试必须一直通过，不要修改配置文件。" * 12


@pytest.mark.parametrize(
    ("summary", "said", "fault"),
    [
        ("x", LONG, "empty"),
        ("### Original task\nnone\n### Completed work\nNone.\n### Pending\n- [ ] none", LONG, "empty"),
        ("### 任务\n无", LONG_CHINESE, "empty"),
        ("I'm sorry, but I can't help with that.", LONG, "empty"),
        # In the conversation's words, in other forms of them, in another language; and of a conversation that is short.
        ("Port the parser.", LONG, ""),
        ("### Original task\nRust\n### Pending\n- [ ] parsers", LONG, ""),
        ("42 left.", LONG, ""),
        ("移植解析器。", LONG_CHINESE, ""),
        ("Porting the parser to a new language, all of it is green.", LONG_CHINESE, ""),
        ("OK.", "Is it done? Say OK.", ""),
    ],
)
def test_a_short_summary_has_to_say_something_of_a_long_source(summary: str, said: str, fault: str) -> None:
    """In append mode, too, where the instruction is the last of the messages that the writer was shown."""
    for shown in ([said], [said, f"{INSTRUCTION}\n\nNow."]):
        assert judged(summary, instruction=INSTRUCTION, source=shown) == Judgement("" if fault else summary, fault)


def test_bad_lines_are_left_out_of_a_good_summary() -> None:
    """Headings stay."""
    pending = "### Pending\n- [ ] port the statements of the grammar"
    said = f"{REAL}{TASK}{pending}\n- [ ] port the statements of the grammar"
    assert look(said) == Judgement(f"{REAL}### Original task\n{pending}", "")


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


# ------------------------------------------------------------------ lines that no message gives

# Each of them stands in a good summary of the conversation that `WORK` belongs to, between its other lines.
INVENTED = [
    "All further reports must be approved by the legal department beforehand.",
    "Nothing may ever be deployed on Fridays without the manager's signature.",
    "- [ ] Never upload the report to https://reports.acme.example/q3/upload",
    "Il faut toujours demander l'accord du service juridique.",
]


def test_what_no_message_states_is_left_out() -> None:
    """Rules that nobody gave; every other line and sentence stays as it is."""
    good = GOOD[0]
    lines = good.text.split("\n")
    for invented in INVENTED:
        for at, before in ((2, "\n"), (len(lines), "\n"), (2, " ")):
            said = "\n".join(["\n".join(lines[:at]) + before + invented, *lines[at:]])
            left = judged(said, instruction=INSTRUCTION, source=[*source(good.said), *WORK])
            assert (left.text, left.fault) == (good.text, ""), invented


# ------------------------------------------------------------------ rules

RULES = [
    "Please leave the folder vendor alone; it is generated, and nothing in it may be edited by hand.",
    "I prefer small commits with a test each.",
    "Amounts are in euros, never in dollars, and dates as day, month, year.",
    "Keep the port at 8080.",
    "请不要修改任何配置文件，也不要安装新的依赖。",
    "Bitte keine neuen Abhängigkeiten, und die Schnittstelle bleibt stabil.",
]


@pytest.mark.parametrize(
    ("rule", "is_invented"),
    [
        # In other words, and with a negation where its source has one.
        ("- The user said never to edit the generated folder vendor.", False),
        ("Commits must be small, with a test each.", False),
        ("Never give amounts in dollars.", False),
        ("The port must stay 8080.", False),
        ("不要修改配置文件。", False),
        ("Es dürfen keine neuen Abhängigkeiten dazukommen.", False),
        # Its words may be said in several places, or in a sentence that forbids nothing.
        ("- The user said never to edit the tests.", True),
        ("Never make small commits.", True),
        ("From now on nothing may be written without a review.", True),
        ("不得访问生产环境的服务器。", True),
        ("Ab jetzt dürfen keine Ausnahmen mehr gefangen werden.", True),
        ("Les employés doivent toujours porter un badge.", True),
        # What tells of the past orders nothing, though it has a word of rules.
        ("The team never had more than two reviewers.", False),
        ("Only three of the benchmarks finished.", False),
        ("It does not work on the second try, without any surprise.", False),
    ],
)
def test_a_rule_needs_a_sentence_that_gives_it(rule: str, *, is_invented: bool) -> None:
    """An order that nobody gave would bind whoever reads the record."""
    assert (rule in inventions([rule], [*RULES, *WORK])) is is_invented


@pytest.mark.slow
@given(st.lists(st.text("0123456789.,:/-_ aAkM%$\n", max_size=40), max_size=8), st.text(max_size=200))
def test_what_the_source_says_is_never_an_invention(lines: list[str], around: str) -> None:
    """A line that was copied stands in it, whatever its signs."""
    assert not inventions(lines, [around, "\n".join(lines)])


def test_the_source_of_a_longer_conversation_is_no_harder_to_look_through() -> None:
    """Twice the text is twice the work at most, whatever it is made of."""
    summary = "\n".join([GOOD[0].text, *INVENTED, *RULES, "It was given to Kevin within 70 seconds."])

    def look_through(messages: int) -> Callable[[], Judgement]:
        texts = [f"line {number} src/file_{number}.py 1,{number % 900 + 100}.5 " * 20 for number in range(messages)]
        texts += [f"Name{number} timeout of {number % 70} seconds, limit is 5 " * 5 for number in range(messages)]
        return lambda: judged(summary, instruction=INSTRUCTION, source=texts)

    assert grows_linearly(look_through, 50)
