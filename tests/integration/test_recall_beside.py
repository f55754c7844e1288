"""A lost fact stands beside the person's question, through a real proxy: in that turn, framed, for its owner alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.recall import BEGIN, END
from tests.integration.bench import AUTH, Bench, Group, open_bench
from tests.integration.page_forms import ANNA, BERT
from tests.integration.test_recall_tool import NAMES, TOOL, conversation, question, script


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Bench]:
    with open_bench(tmp_path, [Group("small")], {"keep_originals": "compacted"}, general_settings=AUTH) as bench:
        yield bench


def _ask(running: Bench, said: list[dict[str, Any]], key: str = ANNA, **body: Any) -> tuple[httpx.Response, list[Any]]:
    """The answer, and the messages that reached the server for it; its summaries hold nothing of the conversation."""
    watch = running.watch("small", script)
    return running.proxy.by(key).chat("small", said, **body).raise_for_status(), watch.sent()


def test_a_lost_fact_stands_beside_the_question(running: Bench) -> None:
    """Once, and the bytes before it are those of the turn before; in the next turn it is gone again."""
    said = conversation()
    _, first = _ask(running, said)
    animal = next(each for each, name in NAMES.items() if name not in json.dumps(first))
    turn = list(NAMES).index(animal) + 1
    said += [{"role": "assistant", "content": "Understood."}, {"role": "user", "content": question(animal)}]
    answer, second = _ask(running, said)
    assert answer.json()["choices"][0]["message"]["content"] == f"It is {NAMES[animal]}."
    assert second[: len(first)] == first, "the server reads nothing again"
    assert [message["role"] for message in second[len(first) :]] == ["assistant", "user"]
    before, _, after = second[-1]["content"].partition(BEGIN)
    quoted, _, asked = after.partition(END)
    assert (before, asked) == ("", f"\n\n{question(animal)}")
    assert json.dumps(second).count(NAMES[animal]) == quoted.count(NAMES[animal]) == 1
    assert f"assistant, turn {turn}\n" in quoted
    assert int(answer.headers["x-litellm-compaction-excerpts"]) == quoted.count("\n[")
    tokens = int(answer.headers["x-litellm-compaction-excerpt-tokens"])
    assert 0 < tokens <= 8192 // 16
    said += [{"role": "assistant", "content": f"It is {NAMES[animal]}."}, {"role": "user", "content": "Thanks, bye."}]
    answer, third = _ask(running, said)
    assert "x-litellm-compaction-excerpts" not in answer.headers
    assert third[: len(second) - 1] == second[:-1]
    assert third[len(second) - 1] == {"role": "user", "content": question(animal)}
    assert not running.proxy.logged(f"{NAMES[animal]}|{animal}|failed_open|excerpts_failed")

    # Another tenant, to whom nobody said it.
    others = [{**each, "content": each["content"].replace(NAMES[animal], "nothing")} for each in said[:-2]]
    _ask(running, others[:-2], BERT)
    _, fourth = _ask(running, others, BERT)
    assert BEGIN in fourth[-1]["content"]
    assert NAMES[animal] not in json.dumps(fourth)
    # A request with tools can look it up itself.
    _, fifth = _ask(running, said[:-2], tools=[TOOL], tool_choice="none")
    assert BEGIN not in json.dumps(fifth)
