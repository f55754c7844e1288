"""A summariser that answers from a script, and says what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litellm_compaction import CompactionConfig

SUMMARY = "### Original task\nPort the parser.\n### Current state\nHalf of it is done."


@dataclass
class FakeCompletion:
    """Gives the answers one after the other, the last one for ever.

    An exception is raised, a function is given the prompt.
    """

    answers: list[Any] = field(default_factory=lambda: [SUMMARY])
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, **arguments: Any) -> Any:
        self.asked.append(arguments)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            answer = answer(self.prompts[-1])
        return completion(answer) if isinstance(answer, str) else answer

    @property
    def prompts(self) -> list[str]:
        return [arguments["messages"][0]["content"] for arguments in self.asked]


def completion(text: Any, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}]}


def config(**fields: Any) -> CompactionConfig:
    return CompactionConfig(**{"model": "qwen/qwen3-8b", "context_window_tokens": 16_384, **fields})
