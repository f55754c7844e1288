"""What a person wrote: rules before chatter, prose before what was pasted, in any language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.directives import Talk, sentences
from tests.work import grows_linearly

ANY_TALK = Talk()


def worth(sentence: str, talk: Talk = ANY_TALK) -> float:
    return talk.weight(sentence).worth


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


@pytest.mark.parametrize(
    ("said", "is_pasted"),
    [
        ("2026-11-22T10:00:00 INFO request 17 served in 3 ms", True),
        ("    return self.parse(tokens[at + 1:])", True),
        ("| name | 12 | 44 | ok |", True),
        ("2027-03-19 | 1,250.75 | 33 | ok", True),
        ("Traceback (most recent call last):", True),
        ("noise " * 30, True),
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


def test_a_fence_that_is_never_closed_encloses_nothing() -> None:
    """What follows it may be all that the user had to say."""
    found = dict(
        each[:2] for each in sentences("Port this:\n```\nx = 1\n\n\ny = 1\n```\nThen ```\n```\nNever push it.")
    )
    assert found["Never push it."] is False
    assert found["x = 1"] is True


def test_fenced_code_is_pasted_whatever_it_says() -> None:
    """A comment in it is nobody's rule."""
    code = "```\nimport a\n\nimport b\n# You must never call this.\n```"
    found = dict(each[:2] for each in sentences(f"Please port this.\n{code}\nKeep the tests green."))
    del found["import a"], found["import b"]
    assert found == {"Please port this.": False, "# You must never call this.": True, "Keep the tests green.": False}


def test_a_text_is_divided_where_its_sentences_end() -> None:
    """At marks of any script and at line ends; never inside a number or a path."""
    text = "Use v1.2.3 of src/a.py. Then stop!\nBudget is $3.50 total\n请不要修改。好的。"
    assert [each.text for each in sentences(text)] == [
        "Use v1.2.3 of src/a.py.",
        "Then stop!",
        "Budget is $3.50 total",
        "请不要修改。",
        "好的。",
    ]


def test_an_old_question_and_a_nod_say_less() -> None:
    """They were answered, or only kept the talk going."""
    assert worth("Is the table big?") < worth("The table is big.")
    assert worth("ok thanks") < worth("The table is big.")


@given(st.text(max_size=400))
def test_nothing_is_lost_and_nothing_is_made_up(text: str) -> None:
    """The sentences are pieces of the text in order; fences alone are left out."""
    at = 0
    for shown, pasted, _ in sentences(text):
        at = text.index(shown, at) + len(shown)
        assert pasted or worth(shown) > 0


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [". ", "a", "a. ", "```\n", "\n", "。", "if ", "|", "{", " "])
def test_hostile_text_is_linear_work(hostile: str) -> None:
    """Twice as much of it is twice the work."""
    assert grows_linearly(lambda times: lambda: [worth(each.text) for each in sentences(hostile * times)], 2000)


@given(st.lists(st.text(max_size=60), max_size=60), st.text(max_size=60))
def test_worth_does_not_depend_on_the_order_of_what_else_was_said(said: list[str], sentence: str) -> None:
    """Nor does it leave its bounds, whatever was said."""
    found = worth(sentence, talk=Talk(said))
    assert found == worth(sentence, talk=Talk(reversed(said)))
    assert 0 < found < 8
