"""What a person wrote: rules before chatter, prose before what was pasted, in any language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.directives import _WORD, Talk, is_bulk, replaced, sentences, worth
from tests.work import grows_linearly

CHATTER = "The walk along the river was lovely this morning."
RULES = {
    "english": "Never push to the remote before the review.",
    "german": "Bitte ändere keine Datei unter legacy.",
    "french": "Il ne faut jamais supprimer les commentaires.",
    "spanish": "No cambies nunca los nombres públicos.",
    "portuguese": "Você não deve apagar os arquivos.",
    "italian": "Non devi mai toccare la configurazione.",
    "dutch": "Je mag de tabel niet verwijderen.",
    "swedish": "Du får inte röra tabellen.",
    "polish": "Nie wolno usuwać tabeli.",
    "czech": "Tabulku nikdy nemaž.",
    "russian": "Никогда не удаляй таблицу.",
    "ukrainian": "Не видаляй таблицю без дозволу.",
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


def test_chatter_is_worth_more_than_what_was_pasted() -> None:
    """A log, code, a table, and the same word again and again can be read again, or need not be."""
    for line in (
        "2026-11-22T10:00:00 INFO request 17 served in 3 ms",
        "    return self.parse(tokens[at + 1:])",
        "| name | 12 | 44 | ok |",
        "Traceback (most recent call last):",
        "noise " * 30,
        "x9_" * 300,
    ):
        [(text, pasted, _)] = sentences(line)
        assert pasted, line
        assert worth(text, pasted=pasted) < worth(CHATTER) / 2


@pytest.mark.parametrize(
    "said",
    [
        "import the data first, then clean it up",
        "return the book before Friday",
        "class trips are booked by the school, def not by us",
        "$ 500 is the most that we can spend",
        "2026-12-01 is the day on which we fly home",
        "<task>Never touch the tests of this project",
        "from now on, import nothing without asking me",
    ],
)
def test_what_people_begin_with_a_word_of_code_is_theirs(said: str) -> None:
    """None of these was pasted."""
    [(_, pasted, _)] = sentences(said)
    assert not pasted


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


def test_a_fenced_command_is_the_users_own() -> None:
    """Of a line or two: it is what they want to have run."""
    [asked, command] = sentences("Issue exactly this:\n```bash\ngit add -A && git diff --cached\n```")
    assert not asked.pasted
    assert command[:2] == ("git add -A && git diff --cached", False)


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
        assert worth(shown, pasted=pasted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [". ", "a", "a. ", "```\n", "\n", "。", "if ", "|", "{", " "])
def test_hostile_text_is_linear_work(hostile: str) -> None:
    """Twice as much of it is twice the work."""
    assert grows_linearly(
        lambda times: lambda: [worth(*each[:1], pasted=each[1]) for each in sentences(hostile * times)], 2000
    )


@pytest.mark.parametrize("said", ["The handover is on 2027-03-19.", "Note: the total may reach $1,250.75."])
def test_a_sentence_with_a_figure_is_no_paste(said: str) -> None:
    """Dates and sums have no letters, and people name them."""
    assert not is_bulk(said)
    assert is_bulk("2027-03-19 | 1,250.75 | 33 | ok")


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("The handover goes out on 2027-03-19.", "Update: the handover has moved to March 29."),
        ("Der Stichtag für die Abnahme ist der 3. März.", "Die Abnahme ist jetzt am 12. April."),
        ("We planned the workshop with $800.", "The workshop may now cost seven hundred dollars."),
        ("The workshop's limit is $800.", "From now on, stay under six hundred dollars for the workshop."),
        ("Support is with Mara Lindqvist this week.", "Jonas Albrecht now does support."),
        ("We work on branch feature/login-form.", "We switched to feature/search."),
        ("We call the crawler HERON-11.", "The crawler is MAGPIE-72 now."),
        ("Answer all mails in English.", "From now on, answer all mails in French."),
        (
            "Never tell anybody the door code oak-41.",
            "The door code was changed: never tell anybody the new one, elm-77.",
        ),
    ],
)
def test_a_change_in_other_words_takes_the_place_of_what_it_changes(older: str, newer: str) -> None:
    """Whatever was said in between; and what was said first takes nothing's place."""
    assert replaced([older, CHATTER, newer]) == {0: 2}
    assert replaced([newer, CHATTER, older]) == {}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("The launch is on 2027-03-19.", "The handbook is now due on March 29."),
        ("Answer the mails in English.", "Now answer the mails in French."),
        ("The crash is in src/parser.py.", "There is now a crash in src/lexer.py."),
        ("ABC-12 is about the login.", "The login is now in ABC-14."),
        ("Never ship orders to region eu-north-2.", "The orders are now in us-west-3."),
        ("Is the release on 2027-03-19?", "The release is now on March 29."),
        ("The release is on 2027-03-19.", "Should the release now be on March 29?"),
        ("The workshop costs $800.", "The workshop costs $900."),
        ("Never push to feature/login.", "From now on never push to feature/search."),
        ("Never deploy to eu-north-2.", "From now on never deploy to us-west-1 either."),
        ("Always copy Mara Lindqvist on mails.", "From now on always copy Jonas Albrecht on mails."),
        ("Do not touch src/auth/login.", "Please do not touch src/auth/session anymore."),
        ("Invoices of Acme must not exceed $500.", "The new invoices of Globex must not exceed $900."),
        ("Never mail customers before 2027-01-01.", "We must now never call customers before 2027-02-01."),
        ("Always validate all of the inputs.", "From now on always validate all of the outputs."),
        ("Support is with Mara Lindqvist.", "Jonas Albrecht now does support, too."),
    ],
)
def test_what_tells_no_change_of_the_same_takes_no_place(older: str, newer: str) -> None:
    """Another subject, what is next, files and tickets side by side, a rule, a question; and no word of a change.

    Nor do rules that may hold side by side, and what says that it is more.
    """
    assert replaced([older, CHATTER, newer]) == {}


def test_of_many_changes_looking_for_what_they_change_is_linear_work() -> None:
    """Each says that the same thing changed."""
    changes = [f"The port of unit {number} is now HERON-{number}." for number in range(4_000)]
    assert grows_linearly(lambda times: lambda: replaced(changes[: 10 * times]), 100)


@pytest.mark.parametrize(
    "said",
    [
        "Every answer has to end with a number.",
        "From now on metric units.",
        "Make sure the port is open.",
        "一律用繁体字。",
    ],
)
def test_some_rules_are_known_by_several_words(said: str) -> None:
    """By all of them in their order."""
    assert worth(said) >= 2 * worth(CHATTER)
    assert worth("To have is to hold, now and from here.") < 2 * worth(CHATTER)


def test_where_everybody_says_not_it_forbids_little() -> None:
    """A talk in which a third of the sentences have a "not" has other words for its rules."""
    chats = [f"It is not the {chr(97 + at % 26)} of it." if at % 3 == 0 else f"Number {at} it is." for at in range(300)]
    talk = Talk([*chats, "Never go there."])
    often, seldom = "That is not quite the thing.", "Never go there."
    assert worth(often, talk=talk) < worth(often)
    assert worth(often, talk=talk) < worth(seldom, talk=talk) / 2
    assert worth(seldom, talk=Talk(["Never go there."])) == worth(seldom, talk=Talk([*["Ah."] * 30, "Never go there."]))


def test_prose_with_words_of_its_own_is_worth_more() -> None:
    """What nobody else says is news, in any language; what all say is none."""
    talk = Talk([*["Yes, that is good."] * 50, *["That is quite good, yes."] * 50, "A daughter allergic to nuts."])
    assert worth("A daughter allergic to nuts.", talk=talk) > 2 * worth("Yes, that is quite good.", talk=talk)


@given(st.lists(st.text(max_size=60), max_size=60), st.text(max_size=60))
def test_worth_does_not_depend_on_the_order_of_what_else_was_said(said: list[str], sentence: str) -> None:
    """Nor does it leave its bounds, whatever was said."""
    found = worth(sentence, talk=Talk(said))
    assert found == worth(sentence, talk=Talk(reversed(said)))
    assert 0 < found < 8


@given(st.text(alphabet="aZ'’ -_1.éß密ŉ") | st.text())
def test_words_are_letters_with_one_apostrophe_at_most(sentence: str) -> None:
    """Those of plain letters are found in another way than by the pattern, which takes five times as long."""
    found = {word.casefold().replace("’", "'") for word in _WORD.findall(sentence)}
    assert Talk().words(sentence) == found
