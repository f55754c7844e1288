"""The judge of the matrix sees each fault that a cell is red for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.simulator import RequestRecord, Simulator
from tests.clients.cells import Ended, judge, pairing_problems
from tests.clients.model import CONTENT, DONE, Model, Name
from tests.clients.table import CLIENTS, PLAIN, driver_of
from tests.integration.bench import Watch
from tests.integration.harness import CHAT

_WELL = Ended(0, f"{DONE}\n", "")
_CALLED = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
_BOTH = [{"role": "tool", "tool_call_id": name} for name in ("a", "b")]


def _model(scenario: Name = "task", **more: Any) -> Model:
    return Model(scenario, PLAIN, Path(), lambda: 0, **more)


def _watch(**changed: Any) -> Watch:
    simulator = Simulator([])
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 100}
    record = RequestRecord(path=CHAT, method="POST", headers={}, started_s=0.0, body=body, context_length=8192)
    simulator.requests.append(dataclasses.replace(record, **{"prompt_tokens": 50, "outcome": "ok", **changed}))
    return Watch(simulator, 0)


def _found(scenario: Name, model: Model, watch: Watch, ended: Ended, content: str | None = CONTENT) -> str:
    return "; ".join(judge(scenario, model, watch, ended, content if content is None else content.encode()))


_TOLD = Ended(1, "", "400: the context window is too small")
_LONG = {"said": "word1 word2 word3"}
# Scenario, what of the model is otherwise, what reached the server, how the client ended, the file, and the fault.
_RUNS: list[tuple[Name, dict[str, Any], dict[str, Any], Ended, str | None, str]] = [
    ("task", {}, {}, _WELL, CONTENT, ""),
    ("task", {}, {"truncated": True}, _WELL, CONTENT, "truncated True"),
    ("task", {}, {"prompt_tokens": 8150}, _WELL, CONTENT, "8150 + 100 > 8192"),
    ("task", {}, {}, dataclasses.replace(_WELL, code=1), CONTENT, "exit 1"),
    ("task", {}, {}, dataclasses.replace(_WELL, code=None), CONTENT, "did not end"),
    ("task", {}, {}, dataclasses.replace(_WELL, out="…"), CONTENT, "the last answer is not shown"),
    ("task", {}, {}, _WELL, None, "the file is not there"),
    ("task", {}, {}, _WELL, CONTENT.replace("\t", "    "), "not byte for byte"),
    ("results", {"missed": ["3 of 9 lines did not reach the server"]}, {}, _WELL, CONTENT, "3 of 9 lines"),
    ("long", _LONG, {}, Ended(0, "word1 word2", ""), None, "2 words of 3"),
    ("long", _LONG, {}, Ended(0, "word1 word3 word2", ""), None, "words of 3"),
    ("long", _LONG, {}, Ended(0, "word1 word2 word2 word3", ""), None, "words of 3"),
    ("unfit", {}, {}, _TOLD, None, ""),
    ("unfit", {}, {}, Ended(1, "", "Something went wrong."), None, "not told why"),
    ("unfit", {"steps": 1}, {}, _TOLD, None, "cannot fit"),
    ("cancel", {}, {}, Ended(-2, "", ""), None, "never began"),
    ("own", {}, {}, _WELL, CONTENT, "never asked"),
    ("own", {"own_summaries": 1}, {}, _WELL, CONTENT, "never came back"),
]


@pytest.mark.parametrize("run", _RUNS, ids=[f"{run[0]}: {run[-1] or 'well'}" for run in _RUNS])
def test_a_run_is_red_for_each_fault(run: tuple[Name, dict[str, Any], dict[str, Any], Ended, str | None, str]) -> None:
    """One fault in an otherwise green run is found and named; a green run has none."""
    scenario, model, record, ended, content, told = run
    found = _found(scenario, _model(scenario, **model), _watch(**record), ended, content)
    assert told in found
    assert bool(found) == bool(told)


def test_a_cancel_that_does_not_reach_the_server_is_red() -> None:
    """The server has to stop."""
    model = _model("cancel")
    model.gate.reached.set()
    assert _found("cancel", model, _watch(outcome="disconnected"), Ended(-2, "", "")) == ""
    assert "went on" in _found("cancel", model, _watch(outcome="running"), Ended(-2, "", ""))


def test_orphans_are_seen() -> None:
    """Each call has one result, right after it, and each result a call."""
    assert [*pairing_problems([_CALLED, *_BOTH])] == []
    assert [*pairing_problems([_CALLED, _BOTH[0], {"role": "user"}])] == ["1 calls without their results"]
    assert [*pairing_problems([_CALLED, *_BOTH, _BOTH[0]])] == ["a result without its call"]


def test_each_library_has_its_driver() -> None:
    """A row names a program that is there."""
    assert [client.name for client in CLIENTS if client.is_sdk and not driver_of(client).is_file()] == []
