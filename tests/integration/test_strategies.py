"""The strategy matrix through a real proxy: promises P1 to P5 whatever the pruning model answers, in two windows.

One test asks all cells at once. What only one strategy promises comes behind it. A pruning model
that never answers is tried where the time limit is short, in `test_promises.py`: here none may be reached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from litellm_compaction.cli import main
from litellm_compaction.simulator import ChatCall, Fault, Reply, RequestRecord
from litellm_compaction.simulator.rendering import count
from tests.builders import prose, tool_round
from tests.integration.bench import KEY, Bench, Group, edit_plan, is_summary_call, open_bench, overrun
from tests.integration.harness import CHAT
from tests.integration.validity import problems, text_of

WINDOWS = (8192, 16384)
STRATEGIES = ("summary", "prune", "handoff")
KINDS = ("good", "fenced", "thinking", "invalid", "wrong types", "orphans", "echo", "empty", "500")
# What a larger window could change: a record's room, and what is copied without a model. How an answer is read is the
# same in both, and a cell costs twice as much there.
KINDS_OF_THE_LARGER = ("good", "500")
RECORD = "### Current state\nStep 3 was settled with everybody in the office."
REFUSAL = "I'm sorry, but I can't help with that."
_NAME = re.compile(r"cell-(\w+)-(\d+)-(\w+)")


class Cell(NamedTuple):
    """A strategy, a window, and how the pruning model answers."""

    strategy: str
    window: int
    kind: str

    @property
    def name(self) -> str:
        """Its `model_name`; it stands in its system message and in all others, too."""
        return f"cell-{self.strategy}-{self.window}-{self.kind.replace(' ', '_')}"


CELLS = [
    Cell(strategy, window, kind)
    for kind in KINDS
    for strategy in STRATEGIES
    for window in WINDOWS
    if window == WINDOWS[0] or kind in KINDS_OF_THE_LARGER
]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell; `found` is what is wrong with it."""

    calls: int
    before_tokens: int
    after_tokens: int
    found: list[str]


def expected(cell: Cell) -> tuple[str, str]:
    """The rung that has to come of it, and why it was not the strategy's own."""
    if cell.kind in ("empty", "500"):
        return "truncate", {"empty": "empty", "500": "error"}[cell.kind]
    if cell.strategy == "prune":
        # A summary may be within reach of a model that is not up to an edit plan.
        return ("summary", "invalid") if cell.kind in ("invalid", "wrong types", "echo") else ("prune", "")
    reasons = {"invalid": "refusal", "echo": "echo"}
    return ("truncate", reasons[cell.kind]) if cell.kind in reasons else (cell.strategy, "")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One proxy: a deployment for each cell, a server for each window; and one with the operator's own prompt."""
    folder = tmp_path_factory.mktemp("strategies")
    prompt = folder / "handoff.txt"
    prompt.write_text("You write the record that the OPERATOR wants, in {words} words.", encoding="utf-8")
    # No shared context and no admission: what becomes of a cell depends on no other.
    groups = [Group(str(window), window, simulator={"unified_kv": False, "chunk_tokens": 64}) for window in WINDOWS]
    own = {"window_cache_s": 600, "summary_timeout_s": 600, "admission": "off", "clear_tool_results": False}
    # On a busy machine a question of LM Studio's protocol may take longer than its second, and costs a request then.
    own["ask_server_timeout_s"] = 30
    with open_bench(
        folder,
        groups,
        {**own, "prompt_file": {"handoff": str(prompt)}},
        make_entries=lambda urls: [
            Group(cell.name, compaction={"strategy": cell.strategy}).entry(urls[str(cell.window)]) for cell in CELLS
        ],
        router_settings={"num_retries": 0, "disable_cooldowns": True},
    ) as opened:
        for name, simulator in opened.simulators.items():
            simulator.unload(simulator.instances[0].id)
            simulator.load(KEY, opened.groups[name].window, parallel=64)
            simulator.script = _model
        yield opened


def _model(call: ChatCall) -> Reply | None:
    """A model that does its work, and writes records and plans as its cell says."""
    found = _NAME.search(call.sent_text)
    if not is_summary_call(call.body) or found is None:
        return Reply("Understood.")
    strategy, kind = found[1], found[3].replace("_", " ")
    prompt = text_of(call.messages[-1])
    plan = edit_plan(prompt, RECORD, orphans=kind == "orphans")
    if strategy == "prune" and not plan and kind in ("invalid", "wrong types", "echo"):
        return Reply(RECORD)
    good = plan or RECORD
    if kind == "500":
        return Reply(fault=Fault("500"))
    if kind == "thinking":
        return Reply(f'<think>Perhaps {{"drop": [1]}}?</think>\n{good}', reasoning="Let me see.")
    return Reply(
        {
            "fenced": f"```json\n{good}\n```",
            "invalid": "The older ones may go." if plan else REFUSAL,
            "wrong types": '{"drop": {"all": true}, "shorten": 7, "summary": ["x"]}',
            "orphans": plan or f"{good}\n<tool_call>run</tool_call><|im_start|>system",
            "echo": prompt,
            "empty": "",
        }.get(kind, good)
    )


def work(name: str, tokens: int) -> list[dict[str, Any]]:
    """An agent's work of so many tokens; every message names it."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are the agent of {name}."},
        {"role": "user", "content": f"The task of {name}: port src/parser.py, never touch /etc/passwd."},
    ]
    number = 0
    while sum(count(json.dumps(message)) for message in messages) < tokens:
        call_id = f"{number:09d}"
        messages += [
            *tool_round("read_file", f"{name}, file {number}\n{prose(f'{name} file {number}', 120)}", call_id),
            {"role": "assistant", "content": f"{name}: module {number} is ported. {prose(f'{name} {number}', 30)}"},
            {"role": "user", "content": f"{name}: now module {number + 1}. {prose(f'{name} ask {number}', 15)}"},
        ]
        number += 1
    return messages


def _checked(bench: Bench, cell: Cell) -> Outcome:
    """Asks twice for a cell, and holds what the server got against the promises."""
    messages = work(cell.name, cell.window)
    first = bench.proxy.chat(cell.name, messages)
    later = [*messages, {"role": "assistant", "content": "Understood."}, {"role": "user", "content": "Go on then."}]
    calls = len(_records(bench, cell, asks_for_record=True))
    second = bench.proxy.chat(cell.name, later)
    records = _records(bench, cell, asks_for_record=False)
    done = [(answer.status_code, answer.headers.get("x-litellm-compaction")) for answer in (first, second)]
    if done != [(200, "compacted"), (200, "reused")] or len(records) != 2:
        return Outcome(calls, 0, 0, [f"answers {done}, {len(records)} requests"])
    sent: list[dict[str, Any]] = (records[0].body or {})["messages"]
    again: list[dict[str, Any]] = (records[1].body or {})["messages"]
    every = _records(bench, cell, asks_for_record=True) + records
    found = [f"P1 {problem}" for record in every if (problem := overrun(record))]
    found += [f"P2, P3 {each}" for each in (*problems(messages, sent), *problems(later, again))]
    if again[: len(sent)] != sent or len(_records(bench, cell, asks_for_record=True)) != calls:
        found.append("P4 not the same bytes, or another call")
    before_tokens = int(first.headers["x-litellm-compaction-tokens-before"])
    after_tokens = records[0].prompt_tokens
    if after_tokens > 0.7 * before_tokens or not 1 <= calls <= 4:
        found.append(f"P5 {before_tokens} → {after_tokens} in {calls} calls")
    found += [f"{mark} in what is sent" for mark in ("<|im_start|>", "<tool_call>") if mark in json.dumps(sent)]
    found += _of_the_rung(cell, messages, sent)
    return Outcome(calls, before_tokens, after_tokens, found)


def _of_the_rung(cell: Cell, messages: Sequence[dict[str, Any]], sent: Sequence[dict[str, Any]]) -> list[str]:
    """What the result of the expected rung must look like, besides the promises."""
    level, said = expected(cell)[0], text_of(sent[1])
    # Wrong types for a plan are text like any other for a record.
    wrote = RECORD.splitlines()[1] if cell.strategy == "prune" or cell.kind != "wrong types" else '"drop"'
    if level != "truncate" and wrote not in said:
        return ["what the model wrote is not in the record"]
    if level == "handoff":
        ends = said.endswith(f"Last request from user was: {text_of(messages[-1])}")
        return [] if ends and [message["role"] for message in sent] == ["system", "user"] else ["not a hand-off"]
    if sent[-5:] != messages[-5:]:
        return ["the recent messages are not there"]
    if level == "prune" and len(sent) <= 7:
        return ["no older message is left"]
    return []


def _records(bench: Bench, cell: Cell, *, asks_for_record: bool) -> list[RequestRecord]:
    """What a cell's server got for it."""
    return [
        record
        for record in bench.simulators[str(cell.window)].requests
        if record.path == CHAT and is_summary_call(record.body) is asks_for_record and _name(record) == cell.name
    ]


def _name(record: RequestRecord) -> str:
    """The cell that a request is about: its system message says so, else all that a prompt consists of."""
    found = _NAME.search(text_of((record.body or {})["messages"][0]))
    return found[0] if found else ""


def test_every_strategy_keeps_the_promises_whatever_the_model_answers(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """P1 to P5 in every cell, by the rung that is documented, in the number of calls that it shows."""
    with ThreadPoolExecutor(12) as pool:
        outcomes = dict(zip(CELLS, pool.map(lambda cell: _checked(bench, cell), CELLS), strict=True))
    events = _events(bench, capsys)
    rungs = {cell: (events[cell.name]["rung"], events[cell.name]["reason"]) for cell in CELLS}
    assert {cell.name: outcome.found for cell, outcome in outcomes.items() if outcome.found} == {}
    assert {cell.name: rungs[cell] for cell in CELLS if rungs[cell] != expected(cell)} == {}
    calls = {cell.name: (outcomes[cell].calls, events[cell.name]["summary_calls"]) for cell in CELLS}
    assert {name: pair for name, pair in calls.items() if pair[0] != pair[1]} == {}


def _events(bench: Bench, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Each cell's compaction, as the command line tells it."""
    store = f"sqlite:///{bench.folder / 'litellm_compaction' / 'store.sqlite3'}"
    capsys.readouterr()
    assert main(["events", "--json", "--last", "1000", "--store", store]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {event["model"]: event for event in told if event.get("outcome") in ("compacted", "fallback")}


def test_the_operators_own_prompt_is_what_the_model_gets(bench: Bench) -> None:
    """With its placeholders filled in, in place of ours; the other strategies keep theirs."""
    asked = {
        strategy: [
            str(record.body)
            for cell in CELLS
            if cell.strategy == strategy
            for record in _records(bench, cell, asks_for_record=True)
        ]
        for strategy in STRATEGIES
    }
    assert all(re.search(r"the OPERATOR wants, in \d+ words\.", body) for body in asked["handoff"])
    assert not [body for strategy in ("summary", "prune") for body in asked[strategy] if "OPERATOR" in body]
    assert all(asked.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_open_tool_round_stays_verbatim(bench: Bench, strategy: str) -> None:
    """Calls and results that nobody has answered yet are behind whatever the strategy makes."""
    cell = Cell(strategy, 8192, "good")
    watch = bench.watch("8192", _model)
    messages = [*work(f"{cell.name}-tools", 8192), *tool_round("open", "the result " * 20)]
    answer = bench.proxy.chat(cell.name, messages)
    assert (answer.status_code, answer.headers["x-litellm-compaction"]) == (200, "compacted")
    assert watch.problems(messages) == []
    kept = b"".join(each.read_bytes() for each in (bench.folder / "litellm_compaction").glob("store.sqlite3*"))
    assert b"scope" in kept
    assert b'"ledger"' not in kept, "records are encrypted where there is a master key"
    if strategy == "handoff":
        assert [message["role"] for message in watch.sent()] == ["system", "user", "assistant", "tool"]
