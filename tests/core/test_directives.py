"""What a person wrote: rules before chatter, prose before what was pasted, in any language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.directives import news, sentences, worth
from tests.work import grows_linearly

CHATTER = "The walk along the river was lovely this morning."
RULES = {
    "english": "Never push to the remote before the review.",
    "german": "Bitte ändere keine Datei unter legacy.",
    "french": "Il ne faut jamais supprimer les commentaires.",
    "spanish": "No cambies nunca los nombres públicos.",
    "italian": "Non devi mai toccare la configurazione.",
    "polish": "Nie wolno usuwać tabeli.",
    "russian": "Никогда не удаляй таблицу.",
    "turkish": "Tabloyu asla silme.",
    "arabic": "لا تحذف الجدول أبدا.",
    "hindi": "तालिका कभी मत हटाओ।",
    "chinese": "请不要修改任何配置文件。",
    "japanese": "設定ファイルを変更しないでください。",
    "korean": "설정 파일은 절대 바꾸지 마세요.",
    "thai": "ห้ามแก้ไขไฟล์",
}


@pytest.mark.parametrize("language", RULES)
def test_a_rule_is_worth_more_than_chatter(language: str) -> None:
    """In each language of the table; twice as much at least."""
    assert worth(RULES[language]) >= 2 * worth(CHATTER)


def test_what_a_person_says_once_is_news() -> None:
    """Words of every sentence are worth least, words of one sentence most; in a talk of one sentence they are news."""
    once = "My colleague reads this afterwards and she is blind."
    often = [f"Now do the next one, please {'go ' * (at % 3)}on" for at in range(60)]
    factor = news([*often, once])
    assert factor(often[0]) < 0.5 < 1.6 < factor(once) <= 1.7
    assert news([once])(once) == factor(once)


@pytest.mark.parametrize(
    ("said", "is_pasted"),
    [
        ("2026-11-22T10:00:00 INFO request 17 served in 3 ms", True),
        ("| name | 12 | 44 | ok |", True),
        ("2027-03-19 | 1,250.75 | 33 | ok", True),
        (">>> parse(tokens)", True),
        ("x9_" * 300, True),
        # People begin with words of code, and name dates and sums.
        ("import the data first, then clean it up", False),
        ("return the book before Friday", False),
        ("class trips are booked by the school, def not by us", False),
        ("$ 500 is the most that we can spend", False),
        ("2026-12-01 is the day on which we fly home", False),
        ("The handover is on 2027-03-19.", False),
        ("Note: the total may reach $1,250.75.", False),
        ("<task>Never touch the tests of this project", False),
        ("from now on, import nothing without asking me", False),
    ],
)
def test_what_was_pasted_is_told_from_what_people_say(said: str, *, is_pasted: bool) -> None:
    """A log, code, a table, and the same word again and again can be read again, or need not be."""
    [(_, pasted, _)] = sentences(said)
    assert pasted is is_pasted


@pytest.mark.parametrize(
    ("text", "said", "pasted"),
    [
        # At marks of any script and at line ends; never inside a number or a path.
        (
            "Use v1.2.3 of the module src/a.py now. Then stop!\nIt is $3.50\n请不要修改。好的。\n```sh\npytest -x\n```",
            [
                "Use v1.2.3 of the module src/a.py now.",
                "Then stop!",
                "It is $3.50",
                "请不要修改。",
                "好的。",
                "pytest -x",
            ],
            [],
        ),
        # What follows a fence that is never closed may be all that the user had to say.
        (
            "Port this:\n```\nx = 1\n\n\ny = 1\n```\nThen ```\n```\nNever push it.",
            ["Port this:", "Then ```", "Never push it."],
            ["x = 1", "y = 1"],
        ),
        # A comment in fenced code is nobody's rule.
        (
            "Please port this.\n```\nimport a\n\n\n# You must never call this.\n```\nKeep the tests green.",
            ["Please port this.", "Keep the tests green."],
            ["import a", "# You must never call this."],
        ),
    ],
)
def test_a_text_is_divided_where_its_sentences_end(text: str, said: list[str], pasted: list[str]) -> None:
    """Each in its order; fenced code is pasted, whatever it says."""
    assert [each.text for each in sentences(text) if not each.pasted] == said
    assert [each.text for each in sentences(text) if each.pasted] == pasted


@given(st.text(max_size=400))
def test_nothing_is_lost_and_nothing_is_made_up(text: str) -> None:
    """The sentences are pieces of the text in order; fences alone are left out."""
    at = 0
    for shown, pasted, _ in sentences(text):
        at = text.index(shown, at) + len(shown)
        assert pasted or 0 < worth(shown) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [". ", "a", "a. ", "```\n", "\n", "。", "if ", "|", "{", " "])
def test_hostile_text_is_linear_work(hostile: str) -> None:
    """Twice as much of it is twice the work."""
    assert grows_linearly(lambda times: lambda: [worth(each.text) for each in sentences(hostile * times)], 2000)
