"""The verbatim ledger: bounded, deterministic, the user's words first, and quick on hostile text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core import ledger as rooms
from litellm_compaction.core.ledger import _READ_CHARS, Verbatim, ledger, named, verbatim
from litellm_compaction.tokenizers.registry import token_length
from tests.builders import (
    JsonDict,
    agent_run,
    assistant,
    calls,
    count,
    parsed,
    raw_conversations,
    result,
    user,
)
from tests.work import grows_linearly

WORDS_HEAD = "The user's own words, oldest first; where two disagree the later holds:"
NAMES_HEAD = "Names and values that were in use, the latest last:"
LINES_HEAD = "Paths, ids, numbers, commands and errors, oldest first; where two disagree the later holds:"


def written(raw: list[JsonDict], *, budget: int = 600) -> str:
    return ledger(parsed(raw), budget_tokens=budget, count=count)


def real(text: str) -> int:
    return token_length("o200k_base", text)


def test_nothing_to_keep_is_an_empty_ledger() -> None:
    """No messages, no anchors or no room: no text, not even a heading."""
    assert written([]) == ""
    assert written([assistant("well then"), result("1", "fine")]) == ""
    assert written([user("port /src/app.py")], budget=0) == ""
    assert [bool(written([user("Use port 4812.")], budget=budget)) for budget in (31, 32)] == [False, True]


def test_the_users_words_come_first() -> None:
    """Every user message as a quotation, oldest first, before any line of a tool."""
    raw = [
        user("Port src/parser.py to Rust."),
        result("1", "error: src/lexer.py:42 KeyError: 'x'"),
        user("Never touch the tests."),
    ]
    text = written(raw)
    assert text.startswith(f"{WORDS_HEAD}\n- Port src/parser.py to Rust.\n- Never touch the tests.\n{LINES_HEAD}\n")
    assert "src/lexer.py:42" in text


_GIANT = 10_000
_ENOUGH = _READ_CHARS // _GIANT + 2


def test_giant_results_do_not_hide_what_the_assistant_wrote_before_them() -> None:
    """What is said and what tools print have a bound each."""
    raw = [assistant("I moved the check into `src/guard.py` for good.")]
    for number in range(_ENOUGH):
        raw += [calls(f"c{number}"), result(f"c{number}", f"row {number} " + "of the listing " * (_GIANT // 15))]
    assert "src/guard.py" in written(raw, budget=2_000)


@pytest.mark.parametrize("giant", ["results", "answers"])
def test_what_is_older_than_what_is_scanned_costs_nothing(giant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the history: a message beyond the bound of its kind is not even divided into lines."""
    divided: list[int] = []
    divide = rooms._lines

    def counted(*given: Any) -> Any:
        divided.append(1)
        return divide(*given)

    monkeypatch.setattr(rooms, "_lines", counted)
    raw: list[JsonDict] = []
    for number in range(20 * _ENOUGH):
        text = f"row {number} " + "of the listing " * (_GIANT // 15)
        raw += [assistant(text)] if giant == "answers" else [calls(f"c{number}"), result(f"c{number}", text)]
    written(raw)
    others = len(raw) // 2 if giant == "results" else 0
    assert len(divided) <= _ENOUGH + others


@pytest.mark.parametrize("name", ["_wrap_method_output", "_available_if", "__init_subclass__", "_wrap"])
def test_a_private_name_is_one(name: str) -> None:
    """Python's own, and what a module keeps to itself."""
    assert name in named(f"({name},")


@pytest.mark.parametrize("name", ["HJU-5344", "eu-north-2", "release-2026-11"])
def test_a_name_with_a_number_behind_a_dash_is_one(name: str) -> None:
    """Tickets, regions and versions say nothing in pieces."""
    assert list(named(f"({name}),")) == [name]


@pytest.mark.parametrize("last", ["", " and that is all"])
def test_a_number_of_other_things_is_another_fact(last: str) -> None:
    """By the words on both sides, at a sentence's end too: "12 months" does not make "12 eggs" known."""
    assert named(f"It takes 12 months{last}").keys() != named(f"It takes 12 eggs{last}").keys()
    assert named(f"after 12 months{last}").keys() != named(f"every 12 months{last}").keys()


def test_of_many_user_messages_those_that_stay_are_in_order() -> None:
    """Of those that say the same of another number."""
    raw = [user(f"Request {number}: " + "word " * 20) for number in range(40)]
    text = written(raw, budget=300)
    shown = [number for number in range(40) if f"Request {number}:" in text]
    assert len(shown) > 5
    assert [text.index(f"Request {number}:") for number in shown] == sorted(
        text.index(f"Request {number}:") for number in shown
    )


def test_pasted_bulk_is_shortened() -> None:
    """A page in a user message does not push the other words out."""
    raw = [user("Fix this log:\n" + "noise " * 5000), user("And keep Python 3.8.")]
    text = written(raw)
    assert "Fix this log:" in text
    assert "noise" not in text
    assert "- Fix this log: […]" in text
    assert "And keep Python 3.8." in text
    assert count(text) <= 600


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad id 7",
        "see https://example.org/a/b?c=1 for more",
        "cat /etc/nginx/nginx.conf",
        "changed src/core/plan.py:120",
        "reservation EHGLP3 is confirmed",
        "commit 1a2b3c4d5e6f",
        "call parse_message() first",
        "use the camelCase name",
        "costs $1,234.50 now",
        "took 31 ms",
        "Datei src/größe/maß.py fehlt",
        "必须先修复 src/解析.py 的问题",
        "открой файл docs/план.md",
    ],
)
def test_lines_with_anchors_survive(line: str) -> None:
    """Paths, ids, numbers, names, addresses and errors are kept with their whole line, in any language."""
    assert f"- {line}" in written([result("1", f"nothing here\n{line}\nnor there")])


def test_arguments_of_calls_are_lines_too() -> None:
    """What was run and where is an anchor."""
    assert "run(path: /srv/app/main.py)" in written([calls("1", arguments='{"path": "/srv/app/main.py"}')])


def test_a_long_line_is_cut_to_its_anchors() -> None:
    """Of a line of thousands of characters the stretch with the most anchors stays."""
    line = "x " * 2000 + "failed in src/deep/inside.py:7 with KeyError" + " y" * 2000
    text = written([result("1", line)])
    assert "src/deep/inside.py:7" in text
    assert max(map(len, text.splitlines())) < 260


def test_a_repeated_line_is_kept_once() -> None:
    """At its latest place."""
    raw = [result("1", "value_a = 1\nvalue_b = 2"), result("2", "value_c = 3\nvalue_a = 1")]
    assert written(raw).splitlines()[1:] == ["- value_b = 2", "- value_c = 3", "- value_a = 1"]


def test_known_words_are_not_repeated() -> None:
    """What the user's words already say needs no second line."""
    raw = [user("Port src/parser.py to Rust."), assistant("I open src/parser.py now.")]
    assert LINES_HEAD not in written(raw)


@given(raw_conversations(), st.integers(0, 1500), st.integers(0, 1500))
def test_a_ledger_stays_in_its_budget(raw: list[JsonDict], budget: int, words: int) -> None:
    """Counted with a real vocabulary, whatever the messages say; and the same input gives the same bytes."""
    messages = parsed(raw)
    text = ledger(messages, budget_tokens=budget, count=real)
    assert real(text) <= budget
    assert text == ledger(messages, budget_tokens=budget, count=real)


def test_lines_of_a_result_stand_in_its_stub() -> None:
    """Those that were chosen first, in their order, until the stub is full; nothing is said twice, the rest as ever."""
    first, second = "host alpha_1 has port 8081", "host beta_2 has port 8082"
    messages = parsed([user("Look."), result("1", f"{first}\nwell\n{second}"), result("2", "path src/c.py:3")])
    bounds = {1: count(first) + count(second) + 6}
    found = verbatim(messages, budget_tokens=300, count=count, stub_tokens=bounds)
    assert found.stub_lines == {1: f"- {first}\n- {second}"}
    assert "- path src/c.py:3" in found.ledger
    assert "8081" not in found.ledger
    whole = verbatim(messages, budget_tokens=300, count=count)
    assert whole == (ledger(messages, budget_tokens=300, count=count), {})
    assert f"- {first}\n- {second}" in whole.ledger
    small = verbatim(messages, budget_tokens=300, count=count, stub_tokens={1: count(first) + 3})
    assert len(small.stub_lines[1].splitlines()) == 1
    assert ("8081" in small.ledger) != ("8082" in small.ledger)


@pytest.mark.parametrize("budget", range(32, 400, 11))
@pytest.mark.parametrize("repeats", [1, 3])
def test_stubs_and_ledger_share_one_budget(budget: int, repeats: int) -> None:
    """However many results there are: the words before the lines of each stub are paid for, too."""
    raw = [result(str(number), f"host alpha_{number} has port {8000 + number}\n" * repeats) for number in range(40)]
    bounds = dict.fromkeys(range(40), 40)
    for messages, first in ((parsed(raw), 0), (parsed([user("Keep src/app.py as it is, whatever happens."), *raw]), 1)):
        stub_tokens = {at + first: bound for at, bound in bounds.items()}
        found = verbatim(messages, budget_tokens=budget, count=real, stub_tokens=stub_tokens)
        in_stubs = sum(real(text) + 4 for text in found.stub_lines.values())
        assert in_stubs or budget < 100
        assert real(found.ledger) + in_stubs <= budget


def test_a_stub_without_room_has_no_lines() -> None:
    """Neither a bound of nothing nor a ledger without room leaves any."""
    messages = parsed([result("1", "host alpha_1 has port 8081")])
    assert verbatim(messages, budget_tokens=300, count=count, stub_tokens={0: 5}).stub_lines == {}
    assert verbatim(messages, budget_tokens=5, count=count, stub_tokens={0: 100}) == Verbatim()
    assert verbatim(parsed([result("1", "")]), budget_tokens=300, count=count, stub_tokens={0: 48}) == Verbatim()


_SECRET = "DB_PASSWORD=hunter2"


@given(raw_conversations(repeats=5), st.integers(0, 1500), st.integers(0, 60), st.data())
def test_lines_in_stubs_stay_in_their_bounds(raw: list[JsonDict], budget: int, bound: int, data: st.DataObject) -> None:
    """Each in its own, all with the ledger in the budget; the same input gives the same; no secret is in any of it."""
    raw = [{**each, "content": f"{each['content']}\n{_SECRET}"} if each["role"] == "tool" else each for each in raw]
    messages = parsed(raw)
    results = [at for at, message in enumerate(messages) if message.role == "tool"]
    bounds = dict.fromkeys(data.draw(st.sets(st.sampled_from(results))) if results else (), bound)
    found = verbatim(messages, budget_tokens=budget, count=real, stub_tokens=bounds)
    assert all(real(text) <= bounds[at] for at, text in found.stub_lines.items())
    assert real(found.ledger) + sum(map(real, found.stub_lines.values())) <= budget
    assert found == verbatim(messages, budget_tokens=budget, count=real, stub_tokens=bounds)
    assert "hunter2" not in repr(found)
    assert all(line.startswith("- ") for text in found.stub_lines.values() for line in text.splitlines())


def test_the_lines_of_longer_results_are_no_harder_to_choose() -> None:
    """Of a result of a megabyte the two ends are read; twice as many stubs are twice the work at most."""
    giant = "".join(f"row {number} of src/table_{number}.py\n" for number in range(40_000))
    assert len(giant) > 1_000_000
    found = verbatim(parsed([result("1", giant)]), budget_tokens=400, count=count, stub_tokens={0: 48})
    assert 0 < count(found.stub_lines[0]) <= 48

    def write(rounds: int) -> Callable[[], Verbatim]:
        messages = parsed(agent_run(rounds))
        bounds = {at: 48 for at, message in enumerate(messages) if message.role == "tool"}
        return lambda: verbatim(messages, budget_tokens=2_000, count=count, stub_tokens=bounds)

    assert grows_linearly(write, 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    ["a", "/", "a.", "7", "_a", "a/", "A7", "aB", "f0", "Error", "http://", "$1,", "\n", "a\n", "~@", "é", "ERROR: "],
)
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_a_megabyte_of_anything_is_scanned(hostile: str, role: str) -> None:
    """No repetition makes a pattern backtrack: this test only has to end."""
    # No two stretches are alike, so that none is skipped as a repetition.
    text = "".join(hostile * (990 // len(hostile)) + str(number) for number in range(1000))
    budget = 400
    assert count(written([{"role": role, "content": text}], budget=budget)) <= budget


def test_a_megabyte_of_arguments_is_scanned() -> None:
    """The same for calls, whose arguments may be one line."""
    arguments = '{"text": "' + "a_b/" * 250_000 + '"}'
    assert count(written([calls("1", arguments=arguments)])) <= 600


def test_what_stays_visible_is_not_repeated() -> None:
    """Anchors that a summary or a kept message shows leave their room to others."""
    covered = parsed([assistant("The port is in src/config.py:12."), assistant("The host is in src/hosts.py:34.")])
    text = ledger(covered, budget_tokens=200, count=count, known="see src/config.py:12")
    assert "src/hosts.py:34" in text
    assert "src/config.py:12" not in text


def test_a_sentence_that_stays_visible_is_not_repeated() -> None:
    """Neither one of the user's that is said again behind the covered part, nor a line without any anchor."""
    again = "We pinned a dependency for compatibility with the imaging stack."
    other = "Never pin anything else, and that is how it stays for now."
    raw = parsed([user(again), user(other)])
    lines = ledger(raw, known=f"{other}\n{again}", budget_tokens=200, count=count)
    assert again not in lines
    assert again in ledger(raw, known=other, budget_tokens=200, count=count)


def test_one_giant_result_does_not_hide_older_ones() -> None:
    """Its two ends are read, and then what came before it."""
    giant = "FIRST_1 marker\n" + "filler of the log 000\n" * 50_000 + "LAST_2 marker"
    covered = parsed([result("1", "OLDER_0 marker"), result("2", giant)])
    text = ledger(covered, budget_tokens=400, count=count)
    assert all(marker in text for marker in ("OLDER_0", "FIRST_1", "LAST_2"))


def test_a_long_task_leaves_room_for_what_was_said_in_a_line() -> None:
    """A hundred sentences of the first message do not take the place of a line that follows; nor do they all go."""
    task = " ".join(f"You must look at module {at} and write its tests, because nobody ever did." for at in range(100))
    said = "My daughter, who comes along on Sundays, is allergic to nuts, and so are two children from next door."
    text = written([user(task), assistant("I begin."), user(said), assistant("Noted.")], budget=400)
    assert said in text.partition(LINES_HEAD)[0]
    assert text.count("You must look at module") > 5


def test_how_a_step_came_out_comes_before_a_listing() -> None:
    """A short result, and the first words behind a result, say more than the names in a page of source code."""
    page = "\n".join(f"    def method_{n}(self, argument_{n}): return self.helper_{n}()" for n in range(120))
    raw = [
        calls("1", arguments='{"cmd": "cat app.py"}'),
        result("1", page),
        calls("2", arguments='{"cmd": "run it"}'),
        result("2", "the column came out as float, a category was wanted"),
        assistant("So nothing is kept of the order in which they were given. Next I look at the caller."),
    ]
    text = written(raw, budget=200)
    assert "a category was wanted" in text
    assert "So nothing is kept of the order in which they were given." in text


def test_rows_of_one_pattern_give_way_to_other_lines() -> None:
    """Of many rows that differ only in their digits some stay, and not at the cost of everything else."""
    rows = "\n".join(f"laddr=('172.17.0.{n}', {55000 + n}), raddr=('3.95.50.61', 80)" for n in range(10, 99))
    reads = [result(f"r{n}", f"opened docs/{chr(97 + n)}/notes.txt for reading") for n in range(20)]
    text = written([*reads, result("rows", rows)], budget=340)
    assert text.count("docs/") == len(reads)
    assert text.count("laddr=") >= 2


def test_what_a_person_counts_out_is_no_row_of_an_output() -> None:
    """Alike but for its digits, each sentence is a fact of its own; the assistant's give way."""
    raw = [user("Draw a plan.")]
    for at in range(30):
        raw += [assistant(f"The kitchen {at} lies at lane Elm{at}."), user(f"Room {at} has {at + 2} windows.")]
    text = written(raw, budget=300)
    assert all(f"Room {at} has {at + 2} windows." in text for at in range(30))


def test_an_error_says_more_than_the_code_that_raises_it() -> None:
    """`raise ValueError(` is source code; `ValueError: bad id` is what happened."""
    code = "\n".join(f"        raise ValueError(message_{n})" for n in range(60))
    raw = [result("1", f"{code}\nValueError: the id 77 is taken\n{code.replace('message', 'text')}")]
    assert "- ValueError: the id 77 is taken" in written(raw, budget=80)


def test_the_ledger_of_a_longer_conversation_is_no_harder() -> None:
    """Twice the messages are twice the work at most. What it takes in milliseconds: `benchmarks/cost/rungs.py`."""

    def write(rounds: int) -> Callable[[], str]:
        messages = parsed(agent_run(rounds))
        return lambda: ledger(messages, budget_tokens=2_000, count=count)

    assert grows_linearly(write, 40)


@pytest.mark.slow
def test_thousands_of_tiny_messages_cost_little_each() -> None:
    """40,000 messages of a word took 4 s: each was counted twice, and looked for among all that were quoted."""
    counted = 0

    def counting(text: str) -> int:
        nonlocal counted
        counted += 1
        return count(text)

    def write(messages: int) -> Callable[[], str]:
        tiny = parsed([user(f"m{number}") for number in range(messages)])
        return lambda: ledger(tiny, budget_tokens=messages, count=counting)

    assert grows_linearly(write, 500)
    counted = 0
    assert write(4_000)().count("- m") > 400
    assert counted < 4_000


FILLER = "The weather on the way to the office was mild, and the train came on time as it mostly does. "


def test_of_a_long_first_request_every_rule_stays() -> None:
    """Each as a whole sentence, with a marker where something is left out; chatter and pasted logs give way."""
    rules = [f"Never touch the table named {name} without my consent." for name in ("orders", "users", "prices")]
    log = "\n".join(f"2026-11-22T10:00:{second:02d} INFO request {second} served" for second in range(60))
    task = f"{FILLER * 6}{rules[0]} {FILLER * 6}\n\n{log}\n\n{rules[1]} {FILLER * 6}{rules[2]}"
    text = written([user(task), user(FILLER * 8)], budget=300)
    assert all(rule in text for rule in rules)
    assert "[…]" in text
    assert "left out" not in text
    assert text.index(rules[0]) < text.index(rules[1]) < text.index(rules[2])


def test_a_sentence_is_kept_whole_or_not_at_all() -> None:
    """What stands between the markers is made of sentences that somebody wrote."""
    said = [f"Topic {number} is one that we talked about at length on the {number}th day." for number in range(40)]
    text = written([user(" ".join(said[:20])), user(" ".join(said[20:]))], budget=260)
    quoted = [line.removeprefix("- ") for line in text.partition(NAMES_HEAD)[0].splitlines()[1:] if line != LINES_HEAD]
    pieces = [piece.strip() for line in quoted for piece in line.split("[…]")]
    assert pieces
    left = " ".join(pieces)
    for sentence in said:
        left = left.replace(sentence, "")
    assert not left.strip()


def test_what_is_said_again_is_quoted_once() -> None:
    """At its newest place; so chatter that comes back does not push rules out."""
    rules = [f"The key of room {number} must stay with {name}." for number, name in ((7, "Ann"), (8, "Bob"))]
    talk = [user(FILLER), assistant("Noted."), user(FILLER), assistant("Noted.")] * 20
    text = written([*talk, user(rules[0]), *talk, user(rules[1]), *talk], budget=200)
    assert all(rule in text for rule in rules)
    assert text.count(FILLER.strip()) <= 1


def test_words_that_somebody_repeats_stay_the_users() -> None:
    """An assistant's or a tool's echo takes no sentence out of the user's words."""
    rule = "Never push anything to the release branch."
    for echo in (assistant(f"Understood:\n{rule}"), result("1", rule)):
        text = written([user(rule), echo])
        assert rule in text.partition(LINES_HEAD)[0]
        assert text.count(rule) == 1


def test_a_long_task_is_read_whatever_else_was_said() -> None:
    """Of a user who has said more than is read, the first message is the task."""
    task = f"You must port the parser to Rust. {FILLER * 40}"
    said = [user(f"Note {number}: {FILLER * 12}") for number in range(2 * _READ_CHARS // (12 * len(FILLER)))]
    assert "You must port the parser to Rust." in written([user(task), *said], budget=2_000)


def test_of_two_values_the_later_stands_below() -> None:
    """Both sides stay, in order, under a head that says which one holds."""
    older, newer = "The budget cap is $300 in total.", "The budget cap is $900 in total."
    talk = [user(f"{FILLER}Day {number} of it.") for number in range(30)]
    tight = written([user("Plan the trip."), user(older), *talk, user(newer), *talk], budget=120)
    assert tight.index(older) < tight.index(newer)


def test_names_that_were_in_use_stand_behind_the_lines() -> None:
    """Where there is no room for their lines: what the assistant wrote comes before what only a tool did."""
    used = [f"module_{name}.py" for name in ("alpha", "beta", "gamma", "delta")]
    talk = [assistant(f"I looked at {name} for a while, and at what {FILLER}") for name in used]
    listing = result(
        "1", "\n".join(f"other_{number}.py of no interest to anybody at all today" for number in range(80))
    )
    text = written([calls("0"), *talk, listing], budget=120)
    assert all(name in text for name in used)
    *_, names = text.split(f"{NAMES_HEAD}\n- ")
    assert "\n" not in names
    assert text.count("other_") < 20


def test_a_name_that_a_line_shows_is_not_named_again() -> None:
    """Nor a figure that no one took up."""
    text = written([assistant("I changed src/parser.py now."), result("1", "12 13 14 15")])
    assert text.count("src/parser.py") == 1
    assert NAMES_HEAD not in text


def test_a_line_that_found_no_room_comes_up_again() -> None:
    """When the names turn out to need less than their share."""
    lines = [
        f"error: the table {name} has no column called total, so that the import of {name}.csv stopped at once, and "
        "nothing of it was kept"
        for name in ("orders_a", "users_b", "prices_c")
    ]
    raw = [result(str(number), line) for number, line in enumerate(lines)]
    texts = [written(raw, budget=budget) for budget in range(80, 190, 4)]
    shown = [sum(line in text for line in lines) for text in texts]
    assert shown[0] == 1
    assert shown[-1] == 3


def test_a_giant_first_request_hides_nothing_newer() -> None:
    """A log of 400,000 characters behind the task; what was said after it is quoted all the same."""
    log = "".join(f"2026-11-22T10:00:00 INFO request {number} was served\n" for number in range(8_000))
    raw = [user(f"Read this log.\n{log}"), assistant("Done."), user("Never restart the server on a Friday.")]
    text = written([*raw, *[user(f"{FILLER}Day {number} of it.") for number in range(40)]])
    assert "Never restart the server on a Friday." in text


def test_a_giant_message_in_the_middle_hides_nothing_older() -> None:
    """Its own rules, in front of what was pasted or behind it, are quoted as well."""
    log = "".join(f"2026-11-22T10:00:00 INFO request {number} was served\n" for number in range(8_000))
    raw = [
        user("Plan the move."),
        user("Never restart the server on a Friday."),
        user(f"You must not change this one:\n{log}You may only read it."),
        user("Go on, please."),
    ]
    text = written(raw)
    assert "Never restart the server on a Friday." in text
    assert "You must not change this one:" in text
    assert "You may only read it." in text


def test_an_abbreviation_is_no_name() -> None:
    """`e.g` was listed among the names in use."""
    said = [
        f"We met, e.g. in town, i.e. z.B. near {name} and talked at length about all of it, as we do each week."
        for name in ("the_lake", "the_park", "the_mill")
    ]
    texts = [written([calls("0"), assistant("\n".join(said))], budget=budget) for budget in range(40, 130, 6)]
    named = [text.partition(NAMES_HEAD)[2] for text in texts]
    assert any("the_park" in names for names in named)
    assert not any("e.g" in names or "z.B" in names for names in named)


def test_a_name_inside_a_longer_one_is_named() -> None:
    """`run_all` is not shown by a line that shows `run_all_tests`."""
    raw = [
        calls("0"),
        assistant(f"Then run_all was called, and then once more. {FILLER}"),
        assistant("I changed run_all_tests."),
    ]
    assert "run_all," in written(raw, budget=70).replace("\n", ",") + ","


def test_what_announces_something_stands_with_it() -> None:
    """ "Issue exactly the following command:" came back without the command."""
    task = "When all is done, issue exactly the following command:\n\n```bash\necho FINISHED && git add -A\n```\n"
    raw = [user(f"{FILLER * 6}\n{task}{FILLER * 6}"), *[user(f"{FILLER}Day {number} of it.") for number in range(30)]]
    text = written(raw, budget=200)
    assert "issue exactly the following command:\n  echo FINISHED && git add -A" in text


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Wir haben gestern lange mit Annegret gesprochen, und es ging um den Umzug.", "Annegret"),
        ("So I think the talk that Brunelleschi gave was the best one of them all.", "Brunelleschi"),
        ("それで昨日はブルネレスキの話をしたのですが、とても良かったです。", "ブルネレスキ"),
        ("Потом мы долго говорили с Аннушкой о том, что было вчера.", "Аннушкой"),
    ],
)
def test_names_of_people_and_places_are_kept(said: str, name: str) -> None:
    """Known by a capital inside a sentence, or by their script; chatter around them gives way."""
    talk = [
        each
        for n in range(30)
        for each in (user("ok"), assistant(f"the weather is as it was, said {chr(97 + n % 26) * (n + 1)}"))
    ]
    assert name in written([assistant(said), *talk], budget=120)


@pytest.mark.parametrize("word", ["ALWAYS", "Only", "SHOULD", "Niemals"])
def test_a_word_that_orders_is_no_name(word: str) -> None:
    """Among the names it would order something that nobody said."""
    others = [result(str(number), f"wrote src/part_{number}.py") for number in range(30)]
    said = assistant(f"The headers {word} change in Lisbon before the file src/part_1.py does, as Mara found.")
    names = [
        written([calls("0"), said, *others], budget=budget).partition(NAMES_HEAD)[2] for budget in range(60, 400, 7)
    ]
    assert any("Lisbon" in each or "Mara" in each for each in names)
    assert not any(word in each for each in names)


def test_a_capital_in_a_tools_output_makes_no_name() -> None:
    """Listings have them in every line."""
    text = written([result("1", "\n".join(f"total {n} of Something Else" for n in range(60)))], budget=200)
    assert NAMES_HEAD not in text


def test_a_short_message_is_quoted_whole() -> None:
    """Who says little says one thing: the second sentence stands with the first."""
    talk = [user(f"{FILLER}Part {number}.") for number in range(12)]
    text = written([user(FILLER), user("Only use Python 3.11. The sandbox has nothing else."), *talk], budget=160)
    assert "- Only use Python 3.11. The sandbox has nothing else.\n" in text
