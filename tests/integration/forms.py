"""The routes that take a conversation: how a client asks on each, and what it reads of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.bench import Bench

ROUTES = ("chat", "messages", "responses", "completions", "generateContent")
# Where a conversation is one of messages; a text is one message, of which nothing can go.
TALKS = tuple(route for route in ROUTES if route != "completions")
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
# How an answer ends by itself.
END = {
    "chat": "stop",
    "messages": "end_turn",
    "responses": "completed",
    "completions": "stop",
    "generateContent": "STOP",
}


streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dataclass
class Said:
    """What stands in an answer, whole or streamed."""

    status: int
    headers: Mapping[str, str]
    events: list[dict[str, Any]]
    text: str = ""
    thoughts: str = ""
    ends: list[str] = field(default_factory=list)
    # Name and arguments by their place in the answer.
    calls: dict[Any, list[str]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether it has an end of its own, and no error."""
        kinds = {event.get("type") for event in self.events}
        is_over = "message_stop" in kinds if "message_start" in kinds else bool(self.ends)
        return is_over and "error" not in kinds and not any(event.get("error") for event in self.events)


def form(
    route: str, model: str, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, limit: int | None = None
) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request; `limit` bounds the answer, which Anthropic's route has to be told."""
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    others = [dict(each) for each in messages if each["role"] != "system"]
    if route == "generateContent":
        asked: dict[str, Any] = {
            "contents": [
                {"role": "model" if each["role"] == "assistant" else "user", "parts": [{"text": each["content"]}]}
                for each in others
            ]
        }
        if system:
            asked["systemInstruction"] = {"parts": [{"text": system}]}
        if limit:
            asked["generationConfig"] = {"maxOutputTokens": limit}
        return f"/v1beta/models/{model}:{'streamGenerateContent?alt=sse' if stream else route}", asked
    body: dict[str, Any] = {"model": model, "stream": stream}
    if route == "messages":
        body |= {"messages": others, "max_tokens": limit or 400, **({"system": system} if system else {})}
    elif route == "responses":
        body |= {"input": others, **({"instructions": system} if system else {})}
    elif route == "completions":
        body["prompt"] = "\n\n".join(each["content"] for each in messages)
    else:
        body["messages"] = [dict(each) for each in messages]
    if limit and route != "messages":
        body["max_output_tokens" if route == "responses" else "max_tokens"] = limit
    return PATHS[route], body


def ask(
    bench: Bench,
    route: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    stream: bool = False,
    limit: int | None = None,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> Said:
    """Asks, and reads what comes; `extra` are more fields of the body."""
    path, body = form(route, model, messages, stream=stream, limit=limit)
    answer = bench.proxy.stream_body({**body, **extra}, path, **(headers or {}))
    return read(route, answer.raw.decode(), answer.status, answer.headers)


def read(route: str, raw: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Said:
    """What an answer, or the lines of a stream, say."""
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in data] if data else [json.loads(raw)]
    said = Said(status, headers or {}, events)
    for event in events:
        for kind, value in _PARTS[route](event):
            if kind == "end":
                said.ends.append(value)
            elif kind == "text":
                said.text += value
            elif kind == "thoughts":
                said.thoughts += value
            else:
                place, name, arguments = value
                call = said.calls.setdefault(place, ["", ""])
                call[0] = call[0] or name or ""
                call[1] += arguments if isinstance(arguments, str) else json.dumps(arguments)
    return said


def _of_a_chat(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for choice in event.get("choices") or ():
        told = choice.get("delta") or choice.get("message") or choice
        yield "text", told.get("content") or told.get("text") or ""
        yield "thoughts", told.get("reasoning_content") or ""
        for number, call in enumerate(told.get("tool_calls") or ()):
            function = call["function"]
            yield "call", (call.get("index", number), function.get("name"), function.get("arguments") or "")
        if choice.get("finish_reason"):
            yield "end", choice["finish_reason"]


def _of_messages(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    delta = event.get("delta") or {}
    for told in (delta, *(event.get("content") or ())):
        yield "text", told.get("text") or ""
        yield "thoughts", told.get("thinking") or ""
        if "partial_json" in told:
            yield "call", (event["index"], "", told["partial_json"])
        elif told.get("type") == "tool_use":
            yield "call", (told["id"], told["name"], told["input"])
    block = event.get("content_block") or {}
    if block.get("type") == "tool_use":
        yield "call", (event["index"], block["name"], "")
    if end := delta.get("stop_reason") or event.get("stop_reason"):
        yield "end", end


def _of_responses(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = event.get("type", "")
    if kind.endswith(".delta"):
        yield "text" if kind == "response.output_text.delta" else "thoughts", event["delta"]
    items = [event["item"]] if kind == "response.output_item.done" else event.get("output") or ()
    for item in items:
        if item["type"] == "function_call":
            yield "call", (object(), item["name"], item["arguments"])
    for item in event.get("output") or ():
        for part in item.get("content") or ():
            yield "text" if item["type"] == "message" else "thoughts", part.get("text") or ""
    if kind in ("response.completed", "response.incomplete"):
        yield "end", event["response"]["status"]
    elif "output" in event:
        yield "end", event["status"]


def _of_gemini(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for candidate in event.get("candidates") or ():
        for part in candidate["content"]["parts"]:
            yield "thoughts" if part.get("thought") else "text", part.get("text") or ""
        if candidate.get("finishReason"):
            yield "end", candidate["finishReason"]


_PARTS = {
    "chat": _of_a_chat,
    "completions": _of_a_chat,
    "messages": _of_messages,
    "responses": _of_responses,
    "generateContent": _of_gemini,
}
