"""The meaning of a server's chunk: fields of another shape are read as what they say.

Servers differ in the shapes of tool calls and of text; whoever reads a chunk after this finds OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from litellm_compaction.proxy.answer.protocol import Chunk

REASONING_FIELDS = ("reasoning_content", "reasoning")
_TEXT = (str, type(None))
_TEXT_FIELDS = ("content", *REASONING_FIELDS)
_FUNCTION = ("name", "arguments")


def as_chunk(event: Chunk) -> Chunk | None:
    """Returns `event` itself if it has a chunk's shape, else a copy that says the same in it; None if it says nothing.

    `type` and not `isinstance`, since it is asked for each chunk of each answer.
    """
    choices = event.get("choices")
    if choices is None or (type(choices) is list and all(map(_is_choice, choices))):
        return event
    listed = choices if isinstance(choices, list) else [choices]
    read = [_as_choice(choice) for choice in listed if isinstance(choice, dict)]
    return {**event, "choices": read} if read else None


def is_right_answer(choices: object) -> bool:
    """Returns True if the messages of a whole answer have OpenAI's shape, so that it can go on as it came."""
    return type(choices) is list and all(type(choice) is dict and _is_message(choice) for choice in choices)


def _is_message(choice: Mapping[str, Any]) -> bool:
    message = choice.get("message")
    return type(message) is dict and _is_choice({"delta": message, "finish_reason": choice.get("finish_reason")})


def _is_choice(choice: object) -> bool:
    if type(choice) is not dict or type(choice.get("finish_reason")) not in _TEXT:
        return False
    delta = choice.get("delta")
    if delta is None:
        return "message" not in choice and "text" not in choice
    if type(delta) is not dict or not _is_function(delta.get("function_call")):
        return False
    if not all(type(delta.get(field)) in _TEXT for field in _TEXT_FIELDS):
        return False
    calls = delta.get("tool_calls")
    return calls is None or (type(calls) is list and all(map(_is_call, calls)))


def _is_call(call: object) -> bool:
    if type(call) is not dict or type(call.get("index", 0)) is not int:
        return False
    return type(call.get("id")) in _TEXT and _is_function(call.get("function")) and "function" in call


def _is_function(function: object) -> bool:
    if function is None:
        return True
    if type(function) is not dict:
        return False
    return type(function.get("name")) in _TEXT and type(function.get("arguments")) in _TEXT


def _as_choice(choice: Mapping[str, Any]) -> Chunk:
    """A choice of a chat or a text completion, in pieces or whole, as one of a stream."""
    said: Any = next((choice[key] for key in ("delta", "message", "text") if choice.get(key) is not None), {})
    delta = dict(said) if isinstance(said, dict) else {"content": said}
    for field in _TEXT_FIELDS:
        if field in delta:
            delta[field] = _as_text(delta[field])
    calls = delta.pop("tool_calls", None)
    listed = calls if isinstance(calls, list) else [calls]
    if read := [_as_call(call) for call in listed if isinstance(call, dict)]:
        delta["tool_calls"] = read
    if "function_call" in delta:
        delta["function_call"] = _as_function(delta["function_call"])
    shown = {key: value for key, value in choice.items() if key not in ("message", "text")}
    reason = choice.get("finish_reason")
    return {**shown, "delta": delta, "finish_reason": str(reason) if reason else None}


def _as_text(value: Any) -> Any:
    """The text of a field; one that holds none stays as it came."""
    if type(value) in _TEXT:
        return value
    parts = [_text_of(part) for part in (value if isinstance(value, list) else [value])]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts or not parts else value


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, (int, float)):
        return json.dumps(text)
    return text if isinstance(text, str) else None


def _as_call(call: Mapping[str, Any]) -> Chunk:
    read, index = dict(call), call.get("index")
    if type(index) is not int:
        read.pop("index", None)
        if isinstance(index, str) and index.isdecimal():
            read["index"] = int(index)
    if type(call.get("id")) not in _TEXT:
        read["id"] = json.dumps(call["id"])
    # Some write the function's fields beside the id.
    read["function"] = _as_function(call.get("function", {key: call[key] for key in _FUNCTION if key in call}))
    return read


def _as_function(function: Any) -> Any:
    if not isinstance(function, dict):
        return None
    changed = {key: function[key] for key in _FUNCTION if type(function.get(key)) not in _TEXT}
    return {**function, **{key: json.dumps(value) for key, value in changed.items()}}
