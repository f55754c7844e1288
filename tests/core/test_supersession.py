"""Which of several values holds: the older line says what came later, the newest says nothing more."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from litellm_compaction.core import anchors
from litellm_compaction.core.anchors import latest_values, marked
from litellm_compaction.core.ledger import ledger
from tests.builders import assistant, calls, count, parsed, result, user
from tests.work import grows_linearly

if sys.version_info >= (3, 11):
    from re._constants import MAX_REPEAT, MAXREPEAT, MIN_REPEAT
    from re._parser import SubPattern, parse
else:
    from sre_constants import MAX_REPEAT, MAXREPEAT, MIN_REPEAT
    from sre_parse import SubPattern, parse


@pytest.mark.parametrize(
    ("older", "newer", "mark"),
    [
        ("The port is 8080.", "No: the port is now 9090.", "(later: port 9090)"),
        ("I set `timeout_s`: 30", "timeout_s = 45", "(later: timeout_s 45)"),
        (
            "base_url = https://a.example/v1",
            "base_url = https://b.example/v1",
            "(later: base_url https://b.example/v1)",
        ),
        ("Der Port ist 8080", "Der Port ist jetzt 9090", "(later: port 9090)"),
        ("端口是8080", "端口改为9090", "(later: 端口 9090)"),
    ],
)
def test_an_older_value_is_marked(older: str, newer: str, mark: str) -> None:
    """The words stay, the value that holds now stands behind them."""
    latest = latest_values([older, newer])
    assert marked(older, latest) == f"{older} {mark}"
    assert marked(newer, latest) == newer


def test_the_ledger_marks_what_was_superseded() -> None:
    """In the user's words and in an assistant's statements; rows of a result replace nothing."""
    rows = '{"amount": 100}\n{"amount": 200}'
    covered = parsed(
        [
            user("Please use port = 8080 for the server."),
            assistant("I start srv/run.py, the workers_max is 4 and the port is 8080."),
            calls("c1"),
            result("c1", rows),
            user("Change of plan, port = 9090."),
            assistant("Done; the workers_max is 8."),
        ]
    )
    text = ledger(covered, budget_tokens=500, words_tokens=200, count=count)
    assert "- Please use port = 8080 for the server. (later: port 9090)" in text
    assert "(later: workers_max 8, port 9090)" in text
    assert "- Change of plan, port = 9090.\n" in text
    assert "amount" not in text.split("later:")[-1].split(")")[0]
    assert "where two disagree the later holds" in text


@pytest.mark.parametrize("pattern", [anchors._VALUE, anchors._STATEMENT_CJK, anchors._NAME])
def test_no_pattern_backs_off_again_and_again(pattern: re.Pattern[str]) -> None:
    """Inside a pattern only blanks repeat without bound, and nothing repeats what repeats."""
    found = list(_repeats(parse(pattern.pattern)))
    assert found
    assert {str(what) for times, what in found if times == MAXREPEAT} <= {str(parse(r"[ \t]*")[0][1][2])}
    assert [what for times, what in found if times != 1 and list(_repeats(what))] == []


def _repeats(part: Any) -> Iterator[tuple[int, Any]]:
    """The repeats in a parsed pattern: how many times at most, and what."""
    if isinstance(part, SubPattern):
        for operation, value in part:
            if operation in (MAX_REPEAT, MIN_REPEAT):
                yield value[1], value[2]
            yield from _repeats(value)
    elif isinstance(part, (tuple, list)):
        for each in part:
            yield from _repeats(each)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", ["a", "a=", "key : ", "是", "_ is ", "= ", "\t"])
def test_hostile_text_is_linear_work(hostile: str) -> None:
    """Twice as much of it is twice the work; 100,000 characters of it state nothing."""
    assert grows_linearly(lambda times: lambda: latest_values([hostile * times]), 2000)
    assert latest_values([hostile * (100_000 // len(hostile))]) == {}


def test_what_a_summary_says_supersedes_nothing() -> None:
    """It may be wrong; what people say behind the covered part is newer."""
    covered = parsed([user("Please use port = 8080 for the server.")])
    lied = ledger(covered, budget_tokens=300, words_tokens=200, count=count, known="port = 7171")
    assert "(later:" not in lied
    newer = parsed([user("No, port = 9090.")])
    told = ledger(covered, budget_tokens=300, words_tokens=200, count=count, known="port = 7171", newer=newer)
    assert "(later: port 9090)" in told
