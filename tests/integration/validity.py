"""What a message list must look like upstream: promises P2 and P3, checked against the client's own list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

JsonDict = dict[str, Any]


def problems(original: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> list[str]:
    """What is wrong with `upstream` as a compacted form of `original`; empty when nothing is."""
    return [*_shape(upstream), *_protected(original, upstream)]


def text_of(message: JsonDict) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def searchable(messages: Sequence[JsonDict]) -> str:
    """All that a model can read in a list: contents, and tool arguments as written and as they read."""
    found: list[str] = []
    for message in messages:
        found.append(text_of(message))
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            found.append(f"{call['function']['name']} {arguments}")
            try:
                parsed = json.loads(arguments)
            except ValueError:
                continue
            if isinstance(parsed, dict):
                found += [value if isinstance(value, str) else json.dumps(value) for value in parsed.values()]
    return "\n".join(found)


def _shape(upstream: Sequence[JsonDict]) -> list[str]:
    found: list[str] = []
    rest = [message for message in upstream if not _is_system(message)]
    lead = len(upstream) - len(rest)
    if any(_is_system(message) for message in upstream[lead:]):
        found.append("a system message that is not first")
    if not rest or rest[0]["role"] != "user":
        found.append("the first other message is not from the user")
    open_ids: list[str] = []
    previous = ""
    for message in rest:
        role = message["role"]
        if message.get("content") is None:
            found.append("null content")
        if role == "tool":
            if message["tool_call_id"] not in open_ids:
                found.append("an orphan tool result")
            else:
                open_ids.remove(message["tool_call_id"])
        else:
            if open_ids:
                found.append("a tool call without its result")
            open_ids = [call["id"] for call in message.get("tool_calls") or ()]
            expected = "assistant" if previous in ("user", "tool") else "user"
            if previous and role != expected and not (role == "user" and previous == "tool"):
                found.append(f"{role} after {previous}")
        previous = role
    if open_ids:
        found.append("a tool call without its result at the end")
    if rest and rest[-1]["role"] == "assistant":
        found.append("ends in assistant")
    return found


def _protected(original: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> list[str]:
    found: list[str] = []
    # LiteLLM itself makes `developer` a `system` message for LM Studio, so the role is not compared.
    if _system_texts(upstream) != _system_texts(original):
        found.append("the system messages changed")
    newest = [message for message in original if message["role"] == "user"][-1]
    if not any(message["role"] == "user" and text_of(message).endswith(text_of(newest)) for message in upstream):
        found.append("the newest user message is not verbatim")
    tail = _open_round(original)
    if tail and [_plain(message) for message in upstream[-len(tail) :]] != [_plain(message) for message in tail]:
        found.append("the newest tool round is not verbatim")
    return found


def _is_system(message: JsonDict) -> bool:
    return message["role"] in ("system", "developer")


def _system_texts(messages: Sequence[JsonDict]) -> list[str]:
    return [text_of(message) for message in messages if _is_system(message)]


def _open_round(messages: Sequence[JsonDict]) -> Sequence[JsonDict]:
    index = len(messages)
    while index and messages[index - 1]["role"] == "tool":
        index -= 1
    return messages[index - 1 :] if index < len(messages) else []


def _plain(message: JsonDict) -> JsonDict:
    return {**message, "content": message.get("content") or ""}
