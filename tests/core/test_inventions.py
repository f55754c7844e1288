"""Lines of a summary that no message states: found, and what is only said otherwise is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction import core
from litellm_compaction.core.inventions import inventions
from litellm_compaction.core.judging import Judgement, judged
from tests.core.good_summaries import GOOD, INSTRUCTION, REAL, WORK, source
from tests.work import grows_linearly

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Each of them stands in a good summary of the conversation that `WORK` belongs to, between its other lines.
INVENTED = [
    "- [ ] upload the report to https://reports.acme.example/q3/upload",
    "The server listens on port 8081.",
    "The budget is 2,750 EUR.",
    "- src/optimizer.rs: constant folding was added",
    "`max_retry_backoff` was raised.",
    "Commit 9f8e7d6 broke the build.",
    "Ticket QX-88213 is about the same thing.",
    "Call +49 30 5557788 before the release.",
    "Ticket QX-91827 has 31 of 58 tests.",
    "Write to release-team@acme.example when it is done.",
    "Rust 1.79 is used.",
    "error[E0277] is still open.",
    "It takes 13.75 seconds now.",
    "| src/codegen.rs | created | 940 lines |",
    "The file /etc/acme/deploy.conf was changed.",
    "Die Bestellung 90210 wurde storniert.",
    "Le budget est de 3 400 euros.",
    "Ключ клиента: 7781-AB-9902.",
    "端口是 9417。",
    "All further reports must be approved by the legal department beforehand.",
    "Nothing may ever be deployed on Fridays without the manager's signature.",
    "Quarterly invoices should never mention individual employees by surname.",
    "Die Grammatik hat 5,21 Prozent Fehler in tests/fuzz_corpus.py.",
]


def test_what_no_message_states_is_left_out() -> None:
    """Values, paths, ids, addresses, and rules that nobody gave; every other line stays as it is."""
    good = GOOD[0]
    lines = good.text.split("\n")
    for invented in INVENTED:
        for at in (2, 10, len(lines)):
            said = "\n".join([*lines[:at], invented, *lines[at:]])
            left = judged(said, instruction=INSTRUCTION, source=[*source(good.said), *WORK])
            assert (left.text, left.fault) == (good.text, ""), invented


# Said besides the work: names, and small numbers.
TALK = [
    "Sarah: The timeout stays at 30 seconds, and the retry limit is 5. Priya wants the cache to live 15 minutes.",
    "Dr. Meyer needs 10 days for the audit. Tom's office is on floor 4; jsmith@acme.example has the key.",
    "Mme Lefèvre attend Karim; la garantie de la machine est de 24 mois. El señor Ortega espera 3 cajas de Lucía.",
    "Micheal and Bill have half an hour for lunch; the flight of mia_li_3668 is at 9:45.",
    "Анна ждёт Игоря около офиса.",
]
LATIN_TALK = TALK[:-1]


@pytest.mark.parametrize(
    "line",
    [
        "- takes the cache: it was given to Kevin",
        "The key of the office was given to Peter Hansen.",
        "They asked the reviewer Stephanie about the audit.",
        "El señor Quintana espera las cajas.",
        "Lucía habló con Fernando la semana pasada.",
        "Toplantı Fatma Hanım ile yapılacak.",
        "The timeout stays at 70 seconds.",
        "The cache is to live 35 minutes.",
        "Dr. Meyer needs 21 days for the audit.",
        "La garantie de la machine est de 27 mois.",
    ],
)
def test_a_name_and_a_small_number_that_no_message_has_are_left_out(line: str) -> None:
    """A capital inside a sentence is a name, in any language but German; a number from 13 is no count."""
    said = f"{REAL}{line}"
    assert judged(said, instruction=INSTRUCTION, source=[*source(), *WORK, *LATIN_TALK]).text == REAL.strip()


@pytest.mark.parametrize(
    "line",
    [
        "The timeout of Sarah, of 30 s, stays.",
        "It was Michael who had 30 minutes for lunch.",
        "The flight of Mia is at 9:45, and Smith has the key.",
        "The next is Karim; the 3 boxes are from Lucia.",
        "The audit takes 10 days, about 2 weeks, so 12 days are left for 4 of us.",
        "Of the licences 2 are 40 euros, 3 are 60 euros, a dozen 12 times as much.",
        "The guarantee lasts 24 months, i.e. 2 years.",
        "71. Ask for the boxes.",
        "The timeout and the cache together take 45 of 60 minutes.",
        "They moved from 5 retries to 8, 9 files were changed, 7 tests failed.",
        'The field "Susan" of the form, and the file docs/Susan, and a pre-Kantian model.',
    ],
)
def test_names_and_small_numbers_may_be_said_otherwise(line: str) -> None:
    """Other forms and spellings, parts of ids, sums, other units, own counts; what is quoted or a part of a path."""
    said = f"{REAL}{line}"
    assert judged(said, instruction=INSTRUCTION, source=[*source(), *WORK, *LATIN_TALK]) == Judgement(said, "")


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ("Das ist die Lizenz für den Kunden, und die kostet 20 Euro.", "Es geht auf Wunsch von Hamburg weiter."),
        ("Анна Петрова записана к доктору Соколову, Игорь её ждёт.", "The doctor of Anna is Sokolov, and Igor waits."),
        ("Anna Petrova sees Dr. Sokolov, Igor waits.", "Тогда Анну ждёт Игорь у доктора Соколова."),
        ("玛丽和约翰明天去北京。", "Tomorrow Mary and John go to Beijing."),
        ("Στέλλα και Γιάννης", "There Stella and Susan wait."),
        ("Анна сказала Игорю", "Вчера с Анной говорил Игорь."),
        ("Marek napisał do Anny", "Tam byli Marka i Anna"),
    ],
)
def test_names_are_compared_within_what_can_be_compared(told: str, line: str) -> None:
    """Not against another script, and not where all nouns have capitals; in any case of their language."""
    assert not any(inventions([line], [told]))


def test_a_name_in_another_script_is_compared_with_names_in_it() -> None:
    """Endings are not compared, beginnings are."""
    assert inventions(["Тогда пришёл Олег и ждал."], TALK) == [True]
    assert inventions(["Тогда пришёл Игорь и ждал."], TALK) == [False]


def test_a_text_that_says_its_numbers_in_words_is_not_asked_for_round_and_small_ones() -> None:
    """As what was spoken does; a number that nobody says in words is asked for there, too."""
    spoken = ["Well, a hundred people, and two and a half million euros at twenty-five each. " * 40]
    assert inventions(["100 people have 2.5 million euros, 25 each."], spoken) == [False]
    assert inventions(["There are 2,751 people."], spoken) == [True]
    assert inventions(["It is 25 each."], [*spoken, "Order 4711 of 2026-11-23 costs 99 of 100 euros. " * 8]) == [True]


def test_of_a_long_line_only_the_bad_sentences_are_left_out() -> None:
    """A summary without line ends has one line."""
    good = "The lexer of src/parser.py is ported by hand. All that is left of it is the trailing comma of calls. "
    good += "The tests of the grammar were read once more, and the statements are to be ported next in small commits."
    said = f"{good} The rest was done by Susan Miller. Never deploy anything on Fridays."
    assert judged(said, instruction=INSTRUCTION, source=[*source(), *WORK]).text == good


def test_the_words_of_rules_are_of_one_shape() -> None:
    """In lower case, and none of a kind twice."""
    words = tomllib.loads(resources.files(core).joinpath("inventions.toml").read_text(encoding="utf-8"))
    assert words
    for kind, listed in words.items():
        assert listed == listed.lower(), kind
        assert len(set(listed.split())) == len(listed.split()) > 0, kind


RULES = [
    "Please leave the folder vendor alone; it is generated, and nothing in it may be edited by hand.",
    "I prefer small commits with a test each.",
    "Amounts are in euros, never in dollars, and dates as day, month, year.",
    "Keep the port at 8080.",
    "请不要修改任何配置文件，也不要安装新的依赖。",
    "Bitte keine neuen Abhängigkeiten, und die Schnittstelle bleibt stabil.",
]


@pytest.mark.parametrize(
    "rule",
    [
        "- The user said never to edit the generated folder vendor.",
        "Commits must be small, with a test each.",
        "All amounts must be in euros.",
        "Always give dates as day, month, year.",
        "Never give amounts in dollars.",
        "The port must stay 8080.",
        "不要修改配置文件。",
        "Es dürfen keine neuen Abhängigkeiten dazukommen.",
    ],
)
def test_a_rule_with_a_source_sentence_stays(rule: str) -> None:
    """In other words, and with a negation where its source has one."""
    assert inventions([rule], [*RULES, *WORK]) == [False]


@pytest.mark.parametrize(
    "rule",
    [
        "- The user said never to edit the tests.",
        "Never make small commits.",
        "Commits must be signed by the manager.",
        "All reports must be approved by the legal department first.",
        "From now on nothing may be written without a review.",
        "不得访问生产环境的服务器。",
        "Ab jetzt dürfen keine Ausnahmen mehr gefangen werden.",
        "Les employés doivent toujours porter un badge.",
    ],
)
def test_a_rule_without_a_source_sentence_is_left_out(rule: str) -> None:
    """Be its words said in several places, or in a sentence that forbids nothing."""
    assert inventions([rule], [*RULES, *WORK]) == [True]


@pytest.mark.parametrize(
    "line",
    [
        "The team never had more than two reviewers.",
        "You have always liked oil paintings.",
        "Only three of the benchmarks finished.",
        "They looked for ways to ensure a good partnership.",
        "It does not work on the second try, without any surprise.",
    ],
)
def test_a_line_that_tells_what_was_is_no_rule(line: str) -> None:
    """Though it has a word of rules; people's summaries are full of them."""
    assert inventions([line], ["We went to the market, and it was closed."]) == [False]


def test_a_summary_of_inventions_is_not_used() -> None:
    """Its room goes to the ledger."""
    said = "### Current state\n" + "\n".join(INVENTED[:12]) + "\nThe lexer is done."
    assert judged(said, instruction=INSTRUCTION, source=[*source(), *WORK]) == Judgement("", "invented")


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ("It costs 1000 euros.", "It costs 1,000 EUR."),
        ("It costs 1.000 Euro.", "It costs 1000 euros."),
        ("12 500 rows", "12,500 rows were read"),
        ("Das sind die 12,500 Zeilen", "12.500 Zeilen wurden gelesen"),
        ("1234567 bytes", "The file has about 1.23 MB."),
        ("1,487 tests", "About 1,500 tests run."),
        ("1487 tests", "Some 1.5k tests run."),
        ("three files", "3 files were read."),
        ("the flat is 45 dollars a month", "At 45 dollars a month it is 540 dollars a year."),
        ("The timeout is 90 seconds.", "It times out after 1.5 minutes."),
        ("on 23 November 2026", "Due on 2026-11-23."),
        ("2026-11-23T14:30:00Z", "It is due on 11/23/2026 at 2:30 pm."),
        ("rustc 1.82.0", "Rust 1.82 is used."),
        ("320 rows of one and 415 of the other", "320 + 415 = 735 rows."),
        ("58 of 60 passed", "97 % of the tests pass."),
        ("3.14159", "It is about 3.14."),
        ("open src/app/main.py at line 420", "main.py:420 is where it fails."),
        ("class Parser: def parse_all(self)", "Parser.parse_all() loops."),
        ("DB_PASSWORD is not set", "`db_password` is missing."),
        ("merge commit 3f2a9bc41d0e", "Commit 3f2a9bc was merged."),
        ("see https://example.org/docs/v2/intro.html", "The docs are at example.org/docs/v2/intro.html."),
        ("node and typescript", "Node.js and/or TypeScript, client/server."),
        ("用户有 3万 条记录", "There are 30,000 records."),
        ("Bitte ändere niemals die CI-Dateien!", "Die CI-Dateien dürfen nicht angefasst werden."),
        ("Please never touch the CI files.", "CI must not be changed."),
        ("Ne touche jamais aux fichiers de CI.", "Ne pas toucher aux fichiers de CI."),
        ("I live in Berlin", "step 1, phase2, Q3, v2, e.g. a first try, i.e. two of 12"),
    ],
)
def test_another_way_to_say_it_is_no_invention(told: str, line: str) -> None:
    """Rounded, in another unit, with other signs, in another language, or a part of a longer name."""
    said = f"{REAL}{line}"
    assert judged(said, instruction=INSTRUCTION, source=[*source(), *WORK, told]) == Judgement(said, "")


def test_the_source_of_a_longer_conversation_is_no_harder_to_look_through() -> None:
    """Twice the text is twice the work at most, whatever it is made of."""
    summary = "\n".join([GOOD[0].text, *INVENTED, *RULES, "It was given to Kevin within 70 seconds."])

    def look_through(messages: int) -> Callable[[], Judgement]:
        texts = [f"line {number} src/file_{number}.py 1,{number % 900 + 100}.5 " * 50 for number in range(messages)]
        texts += [f"Name{number} timeout of {number % 70} seconds, limit is 5 " * 5 for number in range(messages)]
        return lambda: judged(summary, instruction=INSTRUCTION, source=texts)

    assert grows_linearly(look_through, 50)


@pytest.mark.slow
@given(st.lists(st.text("0123456789.,:/-_ aAkM%$\n", max_size=40), max_size=8), st.text(max_size=200))
def test_what_the_source_says_is_never_an_invention(lines: list[str], around: str) -> None:
    """A line that was copied stands in it, whatever its signs."""
    assert not any(inventions(lines, [around, "\n".join(lines)]))
