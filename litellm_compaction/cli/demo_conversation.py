"""The demo's script: a coding agent that reads files, runs tests and answers a user, as long as one likes.

Both sides come from here: what the client adds (`Conversation`) and what the simulated model says
(`scripted_reply`). Everything depends only on the number of the turn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

JsonObject: TypeAlias = dict[str, Any]

SYSTEM = (
    "You are a coding agent in the repository `ledger`. Work in small steps: read what you need, change it, run the "
    "tests, and report. Never edit files under migrations/. Amounts are integers in cents. Answer in English."
)
TASK = (
    "Find out why monthly statements are one cent off for accounts with more than 1,000 bookings, and fix it. "
    "The reference value for account DE-4471 is 128,903.17. Do not change the public API of ledger/totals.py."
)
TOOLS: tuple[JsonObject, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, description, argument in (
        ("read_file", "Read a text file of the repository.", "path"),
        ("run_tests", "Run the tests that match an expression; returns pytest's output.", "expression"),
        ("search", "Search the repository with a regular expression.", "pattern"),
    )
)
_REMARKS = (
    "Good. Go on with the next module, and keep an eye on how it rounds.",
    "Please also check whether the import job uses the same rounding.",
    "That fits what I saw: the report of 2026-03 was off by exactly 0.01. Continue.",
    "Do not touch the exporter yet; first make sure that the totals are right.",
    "Looks right. What about bookings with a negative amount?",
    "Thanks. Add that to the list of findings and look at the next file.",
)
_MODULES = ("totals", "rounding", "statement", "imports", "export", "booking", "account", "currency", "report", "audit")
_NOUNS = ("amount", "balance", "booking", "entry", "total", "cents", "rate", "period", "account", "delta", "carry")
_TEST_RESULTS = "tests/test_{module}.py::test_{noun}_{number} PASSED"
_PATH = re.compile(r"ledger/\w+\.py")
_STEPS = 4
REPORT_REQUEST = "Now write the whole report: one line for each check that you made, in order."
# A line of the report takes about 25 tokens: all of it is a little longer than the window.
_WINDOW_TOKENS_PER_REPORT_LINE = 22
# More than a line: it holds a number, so it stands only once in the report.
_SEAM_CHARS = 160
_BASE_WINDOW_TOKENS = 8192


class Step(NamedTuple):
    """What the model says in one turn: text, or a call (name, arguments) with a few words before it."""

    text: str
    call: tuple[str, JsonObject] | None


def step_of(turn: int) -> Step:
    module = _module(turn)
    path = f"ledger/{module}.py"
    kind = turn % _STEPS
    if kind == 0:
        return Step(f"I read `{path}` first.", ("read_file", {"path": path}))
    if kind == 1:
        return Step("", ("search", {"pattern": f"def .*{_noun(turn)}"}))
    if kind == 2:
        return Step("Now the tests that cover it.", ("run_tests", {"expression": module}))
    return Step(
        f"`{path}` adds {_noun(turn)} values as floats in line {37 + turn} and rounds once at the end; with more than "
        f"1,000 bookings the error reaches a cent. I changed it to integer cents, round half to even, and kept the "
        f"signature. The tests of {module} pass ({11 + turn % 7} passed). Account DE-4471 now gives 128,903.17. "
        "Next I look at the callers.",
        None,
    )


class Conversation:
    """The client's side: the whole history, resent with every request, as clients do.

    Args:
        context_tokens: window of the demo; tool results grow with it.
    """

    def __init__(self, context_tokens: int) -> None:
        self.messages: list[JsonObject] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": TASK},
        ]
        self._lines = max(12, round(34 * context_tokens / _BASE_WINDOW_TOKENS))

    def add_answer(self, turn: int, content: str, calls: Sequence[JsonObject]) -> None:
        """Append what the model said in `turn`, and what follows: tool results, or the user's next remark."""
        answer: JsonObject = {"role": "assistant", "content": content}
        if calls:
            answer["tool_calls"] = list(calls)
        self.messages.append(answer)
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": self._tool_result(turn)} for call in calls
        ]
        if not calls:
            self.messages.append({"role": "user", "content": _REMARKS[turn // _STEPS % len(_REMARKS)]})

    def ask(self, text: str) -> None:
        if self.messages[-1]["role"] == "user":
            self.messages += [{"role": "assistant", "content": "Noted."}]
        elif self.messages[-1]["role"] == "tool":
            self.messages += [{"role": "assistant", "content": "I have seen enough."}]
        self.messages.append({"role": "user", "content": text})

    def _tool_result(self, turn: int) -> str:
        chooser = random.Random(turn)  # noqa: S311 - the same text in every run
        module, kind = _module(turn), turn % _STEPS
        if kind == 0:
            return "\n".join(_code_line(chooser, number) for number in range(1, 2 * self._lines))
        if kind == 1:
            return "\n".join(
                f"ledger/{chooser.choice(_MODULES)}.py:{chooser.randrange(10, 400)}: def "
                f"{chooser.choice(_NOUNS)}_of_{chooser.choice(_NOUNS)}(self, {chooser.choice(_NOUNS)}: int) -> int:"
                for _ in range(self._lines // 2)
            )
        passed = [
            _TEST_RESULTS.format(module=module, noun=chooser.choice(_NOUNS), number=number)
            for number in range(1, self._lines // 2)
        ]
        return "\n".join([*passed, f"{len(passed)} passed in {chooser.randrange(20, 400) / 100:.2f}s"])


def report_of(context_tokens: int) -> str:
    """An answer that is longer than the window: numbered lines, so that a lost or doubled one shows."""
    return "\n".join(
        f"{number}. ledger/{_MODULES[number % len(_MODULES)]}.py, line {37 + number}: {_noun(number)} is kept in "
        "integer cents and agrees with the reference."
        for number in range(1, context_tokens // _WINDOW_TOKENS_PER_REPORT_LINE)
    )


def rest_of(report: str, shown: str) -> str:
    """What is left to write, for a model that sees the end of what it has written."""
    end = shown[-_SEAM_CHARS:]
    _, found, rest = report.partition(end)
    return rest if end and found else report


def scripted_summary(prompt_text: str) -> str:
    """What the simulated model writes when it is asked for a summary: what it finds in what it was shown."""
    paths = list(dict.fromkeys(_PATH.findall(prompt_text)))[:12]
    rows = "\n".join(f"| {path} | read, integer cents | tests pass |" for path in paths) or "| - | - | - |"
    return (
        "### Original task\nMonthly statements are one cent off for accounts with more than 1,000 bookings; "
        "reference DE-4471 = 128,903.17; the public API of ledger/totals.py must not change.\n"
        f"### Completed work\n| File or component | Action | Result |\n|---|---|---|\n{rows}\n"
        "### Key decisions\nInteger cents, round half to even, because float sums drift.\n"
        "### Current state\nThe files above are done.\n### Pending\n- [ ] check the remaining callers"
    )


def _module(turn: int) -> str:
    return _MODULES[turn // _STEPS % len(_MODULES)]


def _noun(turn: int) -> str:
    return _NOUNS[turn * 7 % len(_NOUNS)]


def _code_line(chooser: random.Random, number: int) -> str:
    left, right, name = (chooser.choice(_NOUNS) for _ in range(3))
    if number % 9 == 1:
        return f"\ndef {name}_{number}({left}: int, {right}: int) -> int:"
    return f"    {name} = {left} + {right} * {chooser.randrange(2, 99)}  # {chooser.choice(_NOUNS)} {number}"
