"""The example agent loop does what it shows: it goes on past its window, and its task is never lost."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from litellm_compaction import CompactionConfig, Model
from litellm_compaction.core.prompts import STRATEGIES
from tests.builders import broken_promises, chat, parsed
from tests.integration.bench import edit_plan
from tests.library.scripted import FakeCompletion, counted

TASK = "Find the build number 7F3K9 in the logs; never touch /etc/passwd."
WINDOW_TOKENS = 8192
STEPS = 40


def example() -> dict[str, Any]:
    """What the example defines."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "agent_loop.py"))


class Script:
    """Calls a tool in every step until it is content; asked for a summary, it writes one."""

    def __init__(self) -> None:
        self.steps: list[list[dict[str, Any]]] = []
        self.summaries = 0

    async def __call__(self, *, model: str, messages: list[dict[str, Any]], **arguments: Any) -> ChatCompletion:
        if "tools" not in arguments:
            self.summaries += 1
            wrote = "### Current state\nStill reading logs."
            return answer(content=edit_plan(messages[0]["content"], wrote) or wrote)
        self.steps.append([dict(message) for message in messages])
        number = len(self.steps)
        if number > STEPS:
            return answer(content="It is 7F3K9.")
        function = {"name": "read_log", "arguments": json.dumps({"number": number})}
        return answer(content=None, tool_calls=[{"id": f"call_{number}", "type": "function", "function": function}])


def answer(**message: Any) -> ChatCompletion:
    """An object as OpenAI's client gives it."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    frame = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    return ChatCompletion.model_validate({**frame, "choices": [choice]})


def read_log(number: int) -> str:
    return f"log {number}: " + f"line {number} of the build went well. " * 60


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_loop_goes_on_past_its_window(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Forty results of 600 tokens in 8,192: every prompt fits, is valid, and holds the task; few summaries."""
    script, shown = Script(), example()
    config = CompactionConfig(model_context_limit=WINDOW_TOKENS, strategy=strategy)
    asked = (TASK, Model("qwen/qwen3-8b", script), config, {"read_log": read_log}, [shown["LIST_FILES"]])
    assert await shown["run_agent"](*asked) == "It is 7F3K9."
    assert 2 <= script.summaries <= 16
    for messages in script.steps:
        assert await counted(messages, tools=[shown["LIST_FILES"]]) < WINDOW_TOKENS
        assert broken_promises(parsed(messages), parsed(messages)) == []
        assert messages[0] == {"role": "system", "content": shown["SYSTEM"]}
        assert messages[1]["content"].endswith(TASK)
    said = capsys.readouterr().out
    assert said.startswith("compacted, round 1: ")
    rounds = said.count("compacted, round")
    assert f"compacted, round {rounds}: " in said
    # A pruning that does not do costs one call more.
    assert rounds == script.summaries or strategy == "prune"


async def test_the_example_of_the_documentation() -> None:
    """It runs as it is shown."""
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)  # noqa: S102 - our own page
    compactor = names["compactor_for"]("qwen/qwen3-8b", FakeCompletion(), WINDOW_TOKENS)
    assert await names["prepare_step"](compactor, chat(3)) == chat(3)
    # System, the record, and of the ten recent messages those that leave room for the next steps.
    sent = await names["prepare_step"](compactor, chat(40))
    assert 3 < len(sent) < 12
    assert sent[2:] == chat(40)[2 - len(sent) :]
