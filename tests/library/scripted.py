"""A summariser that answers from a script, and says what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litellm_compaction import CompactionConfig, Model
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import request_of
from tests.integration.bench import edit_plan

COUNTER = TokenCounter()
SUMMARY = "### Original task\nPort the parser.\n### Current state\nHalf of it is done."


@dataclass
class FakeCompletion:
    """Gives the same answer for ever; an exception is raised, a function is given the prompt."""

    answer: Any = SUMMARY
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, **arguments: Any) -> Any:
        self.asked.append(arguments)
        if isinstance(self.answer, BaseException):
            raise self.answer
        text = self.answer(self.prompts[-1]) if callable(self.answer) else self.answer
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    @property
    def prompts(self) -> list[str]:
        return [arguments["messages"][0]["content"] for arguments in self.asked]

    @property
    def model(self) -> Model:
        return Model("qwen/qwen3-8b", self)


def plan_or_summary(prompt: str) -> str:
    """What a good model answers, whichever it is asked for."""
    return edit_plan(prompt, SUMMARY) or SUMMARY


async def counted(messages: Any, tools: Any = ()) -> int:
    """As Qwen's own template renders them."""
    return (await COUNTER.count("", family_of("", "qwen/qwen3-8b"), request_of(*messages, tools=tools))).tokens


def config(window_tokens: int = 16_384, **fields: Any) -> CompactionConfig:
    return CompactionConfig(model_context_limit=window_tokens, **fields)
