"""One word per thing (`docs/glossary.md`): names that the code has given up do not come back."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "litellm_compaction"
# Each name that is gone, and the word for it.
GIVEN_UP = {
    "work": "measured",
    "case": "context",
    "cases": "contexts",
    "gist": "change_key",
    "basis": "counting_method",
    "lead": "prefix",
    "depth": "options",
    "flown": "built",
    "weigh": "measure",
    "is_ours": "is_synthetic",
    "prospect": "plan",
    "Prospect": "ContinuationPlan",
    "roomy": "context_with_room",
    "going_on": "known_ways",
    "GoingOn": "KnownWays",
    "carry_over": "continue_answer",
    "CarryEvent": "ContinuationEvent",
    "rung": "level",
    "is_supposed": "a plan, which has no effects until it is told",
}
# In the rooms of the request's way; elsewhere they are words like others.
GIVEN_UP_ON_THE_WAY = {"guarded": "prepared", "pending": "needed", "made": "built"}
_WAY = ("engine/", "proxy/answer/", "proxy/call.py", "proxy/intake.py")
# Fields of events and what reads them: logs, metrics and stored keys keep their names.
_WIRE = {
    (name, "rung")
    for name in ("events.py", "engine/reporting.py", "cli/compact.py", "cli/stores.py", "proxy/mcp_server.py")
}
# `made` as a verb's form beside a noun that says what; read by a person on 2026-11-27.
_JUDGED = {("engine/measure.py", "made"), ("engine/probing.py", "made"), ("proxy/answer/transport.py", "made")}


def names(text: str) -> Iterator[tuple[int, str]]:
    """The names in a module with their lines; `case` and `match` of a statement are none."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        begins = before.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
        is_statement = keyword.issoftkeyword(token.string) and begins and after.string not in ("=", ".", ",", ":", ")")
        if token.type == tokenize.NAME and not is_statement:
            yield token.start[0], token.string.lstrip("_")


def given_up(name: str, text: str) -> list[str]:
    """What of a module's names is gone, with its line and the word for it."""
    words = {**GIVEN_UP, **(GIVEN_UP_ON_THE_WAY if name.startswith(_WAY) else {})}
    return [
        f"{name}:{line}: {word} is called {words[word]}"
        for line, word in names(text)
        if word in words and (name, word) not in _WIRE | _JUDGED
    ]


def test_no_name_that_was_given_up_is_used() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    found = [each for path in paths for each in given_up(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def run(work: int) -> None: ...\n", ["work"]),
        ("self._case = 1\n", ["case"]),
        ("match value:\n    case 1:\n        pass\n", []),
        ("for guarded in found:\n    pass\n", ["guarded"]),
        ('text = "work"  # the case\n', []),
    ],
)
def test_a_name_is_noticed_and_a_word_of_a_text_is_not(text: str, found: list[str]) -> None:
    assert [each.split()[1] for each in given_up("engine/any.py", text)] == found


_QUESTION = re.compile(r"(?:What|Whether|How|Where|Who|Which|When)\b")


def test_no_docstring_opens_with_a_question() -> None:
    """A verb or a noun says what a thing is (`docs/contributing/style.md`)."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {
        (path.relative_to(PACKAGE).as_posix(), getattr(node, "name", "")): ast.get_docstring(node) or ""
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, kinds)
    }
    assert len(texts) > 1000
    assert [place for place, text in texts.items() if _QUESTION.match(text)] == []
