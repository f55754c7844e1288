"""The verbatim ledger: bounded, deterministic, the user's words first, and quick on hostile text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.ledger import ANCHORS_HEAD, NAMES_HEAD, OPERATOR_HEAD, WORDS_HEAD, ledger
from tests.builders import JsonDict, agent_run, assistant, calls, count, o200k, parsed, raw_conversations, result, user
from tests.work import grows_linearly, instructions

FILLER = "The weather on the way to the office was mild, and the train came on time as it mostly does. "
LOG = "".join(f"2026-11-22T10:00:00 INFO request {number} was served\n" for number in range(8_000))
# More than is read of all that tools print, or of all that assistants say.
GIANTS = [(number, f"row {number} " + "of the listing " * 660) for number in range(14)]
DAYS = [user(f"{FILLER}Day {number} of it.") for number in range(40)]


def written(raw: list[JsonDict], *, budget: int = 600) -> str:
    return ledger(parsed(raw), budget_tokens=budget, count=count)


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
    assert text.startswith(f"{WORDS_HEAD}\n- Port src/parser.py to Rust.\n- Never touch the tests.\n{ANCHORS_HEAD}\n")
    assert "src/lexer.py:42" in text


TASK = (
    "Port the parser to Rust.\n\nIt was the best of times, it was the worst of times. Then go on.\n"
    "Names: a, b, c and many more words of no weight at all, as they come to mind."
)


@pytest.mark.parametrize(("task_tokens", "whole"), [(100, True), (12, False)])
def test_the_task_stands_whole_before_all_else(task_tokens: int, whole: bool) -> None:
    """Up to its bound from its beginning on, though the summary has it and later words repeat it."""
    raw = [user(TASK), *(user(f"You must never touch file {n}.") for n in range(60)), user("Then go on.")]
    text = ledger(
        parsed(raw), budget_tokens=220, count=count, known="Port the parser to Rust.", task=0, task_tokens=task_tokens
    )
    first, _, rest = text.removeprefix(f"{WORDS_HEAD}\n- ").partition("\n- ")
    assert (first.split() == TASK.split()) is whole
    assert first.startswith("Port the parser to Rust.")
    assert "You must never touch" in rest
    assert count(text) <= 220


def test_rules_of_system_messages_come_before_the_users() -> None:
    """Whatever writes them in mid-conversation; long ones by the sentences that rule."""
    order, long = "Answer in French.", f"{FILLER * 5}Never call deploy_prod. {FILLER * 5}"
    raw = [
        *(user(f"You must never touch file {n}.") for n in range(60)),
        {"role": "developer", "content": order},
        {"role": "system", "content": long},
        *(assistant(f"Step {n}: I have read `src/file{n}.py`.") for n in range(60)),
    ]
    text = written(raw, budget=180)
    orders = text.partition(f"{OPERATOR_HEAD}\n")[2].partition(f"\n{ANCHORS_HEAD}")[0]
    assert orders.splitlines() == [f"- {order}", "- Never call deploy_prod."]
    assert "You must never touch" in text.partition(OPERATOR_HEAD)[0]


@given(raw_conversations(), st.integers(0, 1500))
def test_a_ledger_stays_in_its_budget(raw: list[JsonDict], budget: int) -> None:
    """Counted with a real vocabulary, whatever the messages say; and the same input gives the same bytes."""
    messages = parsed(raw)
    text = ledger(messages, budget_tokens=budget, count=o200k)
    assert o200k(text) <= budget
    assert text == ledger(messages, budget_tokens=budget, count=o200k)


_RULE = "Never restart the server on a Friday."


# What stands in a ledger of at most so many tokens, and what does not.
_KEPT: dict[str, tuple[int, list[JsonDict], list[str], list[str]]] = {
    "pasted bulk is shortened": (
        600,
        [user("Fix this log:\n" + "noise " * 5000), user("And keep Python 3.8.")],
        ["- Fix this log: […]", "And keep Python 3.8."],
        ["noise"],
    ),
    "arguments of calls are lines, too": (
        600,
        [calls("1", arguments='{"path": "/srv/app/main.py"}')],
        ["run(path: /srv/app/main.py)"],
        [],
    ),
    "giant results do not hide what the assistant wrote before them": (
        2_000,
        [assistant("I moved the check into `src/guard.py` for good."), *(result(str(n), text) for n, text in GIANTS)],
        ["src/guard.py"],
        [],
    ),
    "of a giant result both ends are read, and then what came before it": (
        400,
        [
            result("1", "OLDER_0 marker"),
            result("2", "FIRST_1 marker\n" + "filler of the log 000\n" * 50_000 + "LAST_2 marker"),
        ],
        ["OLDER_0", "FIRST_1", "LAST_2"],
        [],
    ),
    "a giant first request hides nothing newer": (
        600,
        [user(f"Read this log.\n{LOG}"), assistant("Done."), user(_RULE), *DAYS],
        [_RULE],
        [],
    ),
    "a giant message hides neither what is older nor its own rules": (
        600,
        [user(_RULE), user(f"You must not change this one:\n{LOG}You may only read it."), user("Go on, please.")],
        [_RULE, "You must not change this one:", "You may only read it."],
        [],
    ),
    "the task is read however much else was said": (
        2_000,
        [user(f"You must port the parser to Rust. {FILLER * 40}"), *(user(f"{n}: {FILLER * 12}") for n in range(180))],
        ["You must port the parser to Rust."],
        [],
    ),
    "a short message is quoted whole": (
        160,
        [user(FILLER), user("Only use Python 3.11. The sandbox has nothing else."), *DAYS[:12]],
        ["- Only use Python 3.11. The sandbox has nothing else.\n"],
        [],
    ),
    "a capital in a listing makes no name": (
        200,
        [result("1", "\n".join(f"total {n} of Something Else" for n in range(60)))],
        [],
        [NAMES_HEAD],
    ),
    # Among the names the one would order something that nobody said, and the other says nothing.
    **{
        f"{word} is no name": (
            260,
            [
                calls("0"),
                assistant(f"The headers {word} change in Lisbon before the file src/part_1.py does, as Mara found."),
                *(result(str(number), f"wrote src/part_{number}.py") for number in range(30)),
            ],
            ["Mara"],
            [f", {word}", f"{word},"],
        )
        for word in ("ALWAYS", "Only", "SHOULD", "Niemals", "e.g", "z.B")
    },
}


@pytest.mark.parametrize("row", _KEPT)
def test_what_matters_is_kept(row: str) -> None:
    """Within the budget, whatever stands around it."""
    budget, raw, kept, gone = _KEPT[row]
    text = written(raw, budget=budget)
    assert count(text) <= budget
    assert all(each in text for each in kept)
    assert not any(each in text for each in gone)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad id 7",
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
    assert f"- {line}" in written([result("1", f"nothing here\n{line}\nor there")])


def test_the_ledger_of_a_longer_conversation_is_no_harder() -> None:
    """Twice the messages are twice the work at most."""

    def write(rounds: int) -> Callable[[], str]:
        messages = parsed(agent_run(rounds))
        return lambda: ledger(messages, budget_tokens=2_000, count=count)

    assert grows_linearly(write, 40)


def test_what_is_taken_of_a_message_weighs_the_rest_of_it_no_more() -> None:
    """A message of thousands of equal lines, such as a task that stays whole: the room for it is no factor."""
    messages = parsed([user("A\nB\n" * 300)])

    def write(budget: int) -> Callable[[], object]:
        return lambda: ledger(messages, budget_tokens=budget, count=count, task=0, task_tokens=32)

    assert instructions(write(1600)) <= 2 * instructions(write(100))


def test_a_megabyte_of_arguments_is_scanned() -> None:
    """The same for calls, whose arguments may be one line."""
    arguments = '{"text": "' + "a_b/" * 250_000 + '"}'
    assert count(written([calls("1", arguments=arguments)])) <= 600
