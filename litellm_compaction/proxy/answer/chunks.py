"""The meaning of a server's chunk: fields of another shape are read as what they say, and calls are told apart.

Servers differ in the shapes of tool calls and of text; whoever reads a chunk after this finds OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from litellm_compaction.proxy.answer.protocol import Chunk

REASONING_FIELDS = ("reasoning_content", "reasoning")
_TEXT = (str, type(None))
_TEXT_FIELDS = ("content", *REASONING_FIELDS)
_FUNCTION = ("name", "arguments")
# As many as Mistral's templates ask for.
_ID_CHARS = 9


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


@dataclass(slots=True)
class _Known:
    """A call as far as it has come; its server numbers it `index`, and the client's `place` is its own."""

    id: str | None
    index: int | None
    name: str | None
    arguments: list[str]
    place: int = 0

    def is_whole(self) -> bool:
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False


class Numbers:
    """The places of the calls of one stream: fragments belong together by their id, then by the server's index."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def numbered(self, calls: Sequence[Any]) -> list[Chunk]:
        """Fragments with the place of their call as index, and an id where one begins; else the same objects."""
        return [self._numbered(call) for call in calls if isinstance(call, dict)]

    @property
    def are_whole(self) -> bool:
        """Returns True if no call was cut: its arguments are JSON, or there are none."""
        return all(known.is_whole() or not any(known.arguments) for known in self._known)

    def _numbered(self, call: Chunk) -> Chunk:
        before = len(self._known)
        known = self._place(call)
        right = {"index": known.place, **({"id": known.id} if len(self._known) > before else {})}
        return call if right.items() <= call.items() else {**call, **right}

    def _place(self, call: Mapping[str, Any]) -> _Known:
        function = call.get("function") or {}
        index, name, arguments = call.get("index"), function.get("name"), function.get("arguments") or ""
        found = _Known(call.get("id"), index if isinstance(index, int) else None, name, [arguments])
        newest = self._known[::-1]
        same = [each for each in newest if _has_id(each, found)] or [each for each in newest if _is_there(each, found)]
        # Of a call whose arguments are whole nothing is left to say.
        if not same or (name and same[0].name and arguments and same[0].is_whole()):
            taken = {each.place for each in self._known}
            found.place = max(taken, default=-1) + 1
            if found.index is not None and found.index not in taken:
                found.place = found.index
            if name and not found.id:
                found.id = uuid4().hex[:_ID_CHARS]
            self._known.append(found)
            return found
        known = same[0]
        known.id, known.name = known.id or found.id, known.name or name
        known.arguments.append(arguments)
        return known


def _has_id(known: _Known, found: _Known) -> bool:
    # Two calls may have one id.
    return bool(found.id) and known.id == found.id and (_has_index(known, found) or not found.name)


def _is_there(known: _Known, found: _Known) -> bool:
    # Each fragment of a call may have an id of its own: a name begins another one.
    is_other = known.id and found.id and (known.id == found.id or found.name)
    return not is_other and _has_index(known, found)


def _has_index(known: _Known, found: _Known) -> bool:
    return found.index is None or known.index is None or found.index == known.index


def append_calls(held: list[dict[str, Any]], calls: Sequence[Any]) -> None:
    """Joins the fragments of numbered tool calls: one complete delta a call."""
    for call in calls:
        index, function = call["index"], dict(call.get("function") or {})
        known = next((each for each in held if each.get("index") == index), None)
        if known is None:
            held.append({**call, "function": {**function, "arguments": function.get("arguments") or ""}})
            continue
        known["function"]["arguments"] += function.get("arguments") or ""
        for key in ("id", "type"):
            if call.get(key) and not known.get(key):
                known[key] = call[key]
        if function.get("name") and not known["function"].get("name"):
            known["function"]["name"] = function["name"]
