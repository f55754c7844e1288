"""The demo's client: one streamed chat completion over plain HTTP, as any OpenAI client sends it."""

from __future__ import annotations

import json
from typing import NamedTuple

import httpx

from litellm_compaction.cli.demo_conversation import TOOLS, JsonObject
from litellm_compaction.errors import CompactionError, ServerUnavailable


class Answer(NamedTuple):
    """One streamed answer; the proxy tells programs of a compaction in `thoughts`, before the answer begins."""

    text: str
    calls: list[JsonObject]
    thoughts: str


def ask(http: httpx.Client, key: str, model: str, messages: list[JsonObject]) -> Answer:
    """One streamed answer.

    Raises:
        CompactionError: the proxy refused, or the stream ended with an error.
    """
    body = {"model": model, "messages": messages, "tools": list(TOOLS), "stream": True}
    content: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, JsonObject] = {}
    headers = {"Authorization": f"Bearer {key}"}
    try:
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise CompactionError(f"HTTP {response.status_code}: {response.read().decode('utf-8', 'replace')}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    _read_chunk(json.loads(line.removeprefix("data: ")), content, thoughts, calls)
    except httpx.HTTPError as exc:
        raise ServerUnavailable(f"The proxy did not answer ({type(exc).__name__}: {exc}).") from exc
    return Answer("".join(content), [calls[index] for index in sorted(calls)], "".join(thoughts))


def _read_chunk(chunk: JsonObject, content: list[str], thoughts: list[str], calls: dict[int, JsonObject]) -> None:
    if "error" in chunk:
        raise CompactionError(f"The stream ended with an error: {chunk['error']}")
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        content.append(delta.get("content") or "")
        thoughts.append(delta.get("reasoning_content") or "")
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(
                piece.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = call["id"] or piece.get("id") or ""
            function = piece.get("function") or {}
            for name in ("name", "arguments"):
                call["function"][name] += function.get(name) or ""
