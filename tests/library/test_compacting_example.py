"""The example agent loop does what it shows: it goes on past its window, and its task is never lost."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from litellm_compaction import CompactionConfig, Compactor, count_tokens
from litellm_compaction.core.strategies import STRATEGIES
from tests.builders import broken_promises, chat, parsed
from tests.integration.bench import edit_plan
from tests.library.scripted import FakeCompletion

TASK = "Find the build number 7F3K9 in the logs; never touch /etc/passwd."
WINDOW_TOKENS = 8192
STEPS = 40


@pytest.fixture
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "agent_loop.py"
    spec = importlib.util.spec_from_file_location("agent_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """Calls a tool in every step until it is content; asked for a summary, it writes one, unless it is broken."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.steps: list[list[dict[str, Any]]] = []
        self.summaries = 0

    async def __call__(self, *, model: str, messages: list[dict[str, Any]], **arguments: Any) -> Any:
        if "tools" not in arguments:
            self.summaries += 1
            if self.broken:
                raise ConnectionError("no summaries today")
            wrote = "### Current state\nStill reading logs."
            return _answer(edit_plan(messages[0]["content"], wrote) or wrote)
        self.steps.append([dict(message) for message in messages])
        number = len(self.steps)
        if number > STEPS:
            return _answer("It is 7F3K9.")
        function = SimpleNamespace(name="read_log", arguments=json.dumps({"number": number}))
        return _answer(None, tool_calls=[SimpleNamespace(id=f"call_{number}", function=function)])


def _answer(content: str | None, tool_calls: Any = None) -> Any:
    message = SimpleNamespace(content=content, tool_calls=tool_calls)
    return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])


def read_log(number: int) -> str:
    return f"log {number}: " + f"line {number} of the build went well. " * 60


async def run(example: ModuleType, model: Model, strategy: str = "summary") -> str:
    config = CompactionConfig(model="qwen/qwen3-8b", context_window_tokens=WINDOW_TOKENS, strategy=strategy)
    answer: str = await example.run_agent(TASK, config, model, {"read_log": read_log}, [example.LIST_FILES])
    return answer


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_loop_goes_on_past_its_window(
    example: ModuleType, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty results of 600 tokens in 8,192: every prompt fits, is valid, and holds the task; few summaries."""
    model = Model()
    assert await run(example, model, strategy) == "It is 7F3K9."
    assert 2 <= model.summaries <= 16
    for messages in model.steps:
        assert await count_tokens(messages, model="qwen/qwen3-8b", tools=[example.LIST_FILES]) < WINDOW_TOKENS
        assert broken_promises(parsed(messages), parsed(messages)) == []
        assert messages[0] == {"role": "system", "content": example.SYSTEM}
        assert messages[1]["content"].endswith(TASK)
    said = capsys.readouterr().out
    assert said.startswith("compacted, round 1: ")
    rounds = said.count("compacted, round")
    assert f"compacted, round {rounds}: " in said
    # A pruning that does not do costs one call more.
    assert rounds == model.summaries or strategy == "prune"


async def test_the_example_of_the_documentation() -> None:
    """It runs as it is shown."""
    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)  # noqa: S102 - our own page
    completions = FakeCompletion()
    compactor = Compactor(CompactionConfig(model="qwen/qwen3-8b", context_window_tokens=WINDOW_TOKENS), completions)
    assert await names["prepare_step"](compactor, chat(3)) == chat(3)
    # System, the record, and of the ten recent messages those that the target has room for.
    sent = await names["prepare_step"](compactor, chat(40))
    assert (len(sent), sent[2:]) == (8, chat(40)[-6:])
