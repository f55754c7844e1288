"""The judge of the matrix sees each fault that a cell is red for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from litellm_compaction.simulator import RequestRecord, Simulator
from tests.clients.cells import Ended, Matrix, judge, pairing_problems
from tests.clients.model import CONTENT, DONE, Model, Name
from tests.clients.table import CLIENTS, PLAIN, driver_of
from tests.integration import browser
from tests.integration.bench import Bench, Watch
from tests.integration.harness import CHAT, Proxy

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


def test_a_run_as_on_an_endless_window_is_green() -> None:
    assert _found("task", _model(), _watch(), _WELL) == ""


@pytest.mark.parametrize(
    ("watch", "ended", "content", "told"),
    [
        (_watch(truncated=True), _WELL, CONTENT, "truncated True"),
        (_watch(prompt_tokens=8150), _WELL, CONTENT, "8150 + 100 > 8192"),
        (_watch(), dataclasses.replace(_WELL, code=1), CONTENT, "exit 1"),
        (_watch(), dataclasses.replace(_WELL, code=None), CONTENT, "did not end"),
        (_watch(), dataclasses.replace(_WELL, out="…"), CONTENT, "the last answer is not shown"),
        (_watch(), _WELL, None, "the file is not there"),
        (_watch(), _WELL, CONTENT.replace("\t", "    "), "not byte for byte"),
    ],
)
def test_a_task_is_red_for_each_fault(watch: Watch, ended: Ended, content: str | None, told: str) -> None:
    """One fault in an otherwise green run is found and named."""
    assert told in _found("task", _model(), watch, ended, content)


def test_what_the_model_missed_is_red() -> None:
    """Lines of a result that nobody had read yet."""
    model = _model(missed=["3 of 9 lines of part01a.txt did not reach the server"])
    assert "3 of 9 lines" in _found("results", model, _watch(), _WELL)


@pytest.mark.parametrize("out", ["word1 word2", "word1 word3 word2", "word1 word2 word2 word3", ""])
def test_a_long_answer_is_red_unless_each_word_comes_once(out: str) -> None:
    """A word that is lost, repeated or out of order."""
    assert "words of 3" in _found("long", _model("long", said="word1 word2 word3"), _watch(), Ended(0, out, ""))


def test_a_refusal_that_its_user_cannot_read_is_red() -> None:
    """The client has to pass on that the context is too small, and the model is never asked."""
    told = Ended(1, "", "400: the context window is too small")
    assert _found("unfit", _model("unfit"), _watch(), told) == ""
    assert "not told why" in _found("unfit", _model("unfit"), _watch(), Ended(1, "", "Something went wrong."))
    assert "cannot fit" in _found("unfit", _model("unfit", steps=1), _watch(), told)


def test_a_cancel_that_does_not_reach_the_server_is_red() -> None:
    """The server has to stop, and the answer has to have begun."""
    model = _model("cancel")
    assert "never began" in _found("cancel", model, _watch(), Ended(-2, "", ""))
    model.gate.reached.set()
    assert _found("cancel", model, _watch(outcome="disconnected"), Ended(-2, "", "")) == ""
    assert "went on" in _found("cancel", model, _watch(outcome="running"), Ended(-2, "", ""))


def test_an_own_compaction_that_never_came_is_red() -> None:
    """Asked for, and read again."""
    assert "never asked" in _found("own", _model("own"), _watch(), _WELL)
    assert "never came back" in _found("own", _model("own", own_summaries=1), _watch(), _WELL)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([_CALLED, *_BOTH], []),
        ([_CALLED, _BOTH[0]], ["1 calls without their results at the end"]),
        ([_CALLED, _BOTH[0], {"role": "user"}], ["1 calls without their results"]),
        ([{"role": "user"}, _BOTH[0]], ["a result without its call"]),
        ([_CALLED, *_BOTH, _BOTH[0]], ["a result without its call"]),
        ([{"role": "developer"}], ["the role 'developer'"]),
    ],
)
def test_orphans_are_seen(messages: list[dict[str, Any]], told: list[str]) -> None:
    """Each call has one result, right after it, and each result a call."""
    assert [*pairing_problems(messages)] == told


def test_each_library_has_its_driver() -> None:
    """A row names a program that is there."""
    assert [client.name for client in CLIENTS if client.is_sdk and not driver_of(client).is_file()] == []


def test_a_page_without_a_browser_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is fetched for it, and its cell is not red."""
    monkeypatch.setattr(browser, "chromium", lambda: None)
    bench = Bench(cast("Proxy", None), {}, {})
    for client in CLIENTS:
        if client.needs_browser:
            assert Matrix(bench, tmp_path).cell(client, "task").state == "not installed"
    assert list(tmp_path.iterdir()) == []
