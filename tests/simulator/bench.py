"""What the simulator's tests share: a served simulator, and short ways to ask it and to read its streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.lmstudio_double import Simulator

KEY = "qwen/qwen3-8b"


class Bench:
    """A served simulator and a client for it."""

    def __init__(self, simulator: Simulator, client: httpx.Client, base_url: str) -> None:
        self.simulator = simulator
        self.client = client
        self.base_url = base_url

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self.client.get(path).json()

    def chat(self, *messages: dict[str, Any], path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        """The response to a chat request."""
        return self.client.post(path, json={"model": KEY, "messages": list(messages), **fields})

    def events(self, *messages: dict[str, Any], **fields: Any) -> list[tuple[str, Any]]:
        """The events (name, data) of a streamed chat request; `[DONE]` stays text."""
        return parse_events(self.chat(*messages, stream=True, **fields).text)

    @property
    def last(self) -> Any:
        """The newest record."""
        return self.simulator.requests[-1]


def parse_events(text: str) -> list[tuple[str, Any]]:
    """The events (name, data) in the text of a stream."""
    events = []
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        events.append((lines.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return events


def deltas(events: list[tuple[str, Any]], field: str = "content") -> str:
    """The joined text of one delta field."""
    choices = [choice for _, data in events if isinstance(data, dict) for choice in data.get("choices", [])]
    return "".join(choice["delta"].get(field) or "" for choice in choices)


def finish_reasons(events: list[tuple[str, Any]]) -> list[str]:
    """The finish reasons in a stream."""
    choices = [choice for _, data in events if isinstance(data, dict) for choice in data.get("choices", [])]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def user(text: Any) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: Any, **fields: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": text, **fields}


def system(text: Any) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def tool_round(call_id: str = "123456789", arguments: str = '{"path": "a.py"}') -> list[dict[str, Any]]:
    """An assistant message with one call, and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "print('hello')"},
    ]


def long_chat(turns: int = 12, words: int = 60) -> list[dict[str, Any]]:
    """A conversation of about `turns` x `words` x 2 words, its newest message a question."""
    messages = [system("You are terse."), user("First task: fix the parser.")]
    for turn in range(turns):
        messages += [
            assistant(f"Step {turn}. " + "alpha beta " * (words // 2)),
            user(f"Go on {turn}. " + "gamma " * words),
        ]
    return [*messages, assistant("Done."), user("What was the first task?")]


BenchFactory = Callable[..., Bench]
