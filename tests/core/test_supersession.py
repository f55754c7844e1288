"""Which of several values holds: the older line says what came later, the newest says nothing more."""

from __future__ import annotations

import time

import pytest

from litellm_compaction.core.anchors import ledger
from litellm_compaction.core.supersession import latest_values, marked
from tests.core.conversations import assistant, calls, count, parsed, result, user


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


@pytest.mark.parametrize("hostile", ["a" * 100_000, "a=" * 50_000, "key : " * 20_000, "是" * 50_000, "_ is " * 20_000])
def test_hostile_text_takes_linear_time(hostile: str) -> None:
    """No pattern backs off again and again."""
    started = time.perf_counter()
    latest_values([hostile])
    assert time.perf_counter() - started < 2.0


def test_what_a_summary_says_supersedes_nothing() -> None:
    """It may be wrong; what people say behind the covered part is newer."""
    covered = parsed([user("Please use port = 8080 for the server.")])
    lied = ledger(covered, budget_tokens=300, words_tokens=200, count=count, known="port = 7171")
    assert "(later:" not in lied
    newer = parsed([user("No, port = 9090.")])
    told = ledger(covered, budget_tokens=300, words_tokens=200, count=count, known="port = 7171", newer=newer)
    assert "(later: port 9090)" in told
