"""A request in the words of LM Studio's protocol: its `history` and `toolDefinitions`, and what these cannot say.

Shapes: lmstudio-js 6ec11db, `ChatHistoryData.ts` and `LLMToolUseSetting.ts`. LM Studio makes the same of a chat
completion; `developer` becomes `system` there, too (lmstudio-bug-tracker 1730).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, ToolCall

# Of a tool's parameters, all else is dropped.
_PARAMETERS = ("type", "properties", "required", "additionalProperties", "$defs")
_ROLES = {"developer": "system", "system": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}


class History(NamedTuple):
    """A request as the protocol says it.

    Attributes:
        messages: one for each of the request's, in order.
        tools: of the request's tools those that are functions.
        unsaid: text that neither of them holds, to be counted besides. Images and reasoning are not in it: the
            protocol has no place for reasoning, and counts no image.
    """

    messages: list[JsonObject]
    tools: list[JsonObject]
    unsaid: str


def history_of(request: Request) -> History:
    """The request in the protocol's words."""
    unsaid: list[str] = []
    messages = [_said(message, unsaid) for message in request.messages]
    tools = [said for tool in request.tools if (said := _tool(tool, unsaid)) is not None]
    return History(messages, tools, "\n".join(unsaid))


def _said(message: Message, unsaid: list[str]) -> JsonObject:
    role = _ROLES.get(message.role, "user")
    name = message.raw.get("name")
    if role != "assistant":
        unsaid += (text for call in message.calls for text in (call.name, call.arguments))
    if role == "tool":
        result: dict[str, JsonValue] = {"type": "toolCallResult", "content": message.text}
        if message.call_id:
            result["toolCallId"] = message.call_id
        if isinstance(name, str) and name:
            result["name"] = name
        return {"role": role, "content": [result]}
    if isinstance(name, str):
        unsaid.append(name)
    if isinstance(called := message.raw.get("function_call"), Mapping):
        # The form that came before `tool_calls`.
        unsaid.append(json.dumps(called, ensure_ascii=False, default=str))
    parts: list[JsonValue] = [{"type": "text", "text": text} for text in _texts(message)]
    if role == "assistant":
        parts += (_called(call, unsaid) for call in message.calls)
    return {"role": role, "content": parts}


def _texts(message: Message) -> Sequence[str]:
    """Its texts, each as the part that it is; none for calls without words."""
    content = message.raw.get("content")
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return [text for text in texts if isinstance(text, str)]
    return [] if message.calls and not message.text else [message.text]


def _called(call: ToolCall, unsaid: list[str]) -> JsonObject:
    arguments = _object(call.arguments)
    if arguments is None:
        unsaid.append(call.arguments)
    said: dict[str, JsonValue] = {"type": "function", "name": call.name, "arguments": arguments or {}}
    if call.id:
        said["id"] = call.id
    return {"type": "toolCallRequest", "toolCallRequest": said}


def _object(text: str) -> JsonObject | None:
    """The JSON object that a text is; None for everything else, such as numbers that JSON does not have."""
    try:
        parsed = json.loads(text, parse_constant=_refuse)
    except (RecursionError, ValueError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _tool(tool: JsonValue, unsaid: list[str]) -> JsonObject | None:
    """A function as the protocol takes it; other fields, which LM Studio drops there, become text."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        unsaid.append(json.dumps(tool, ensure_ascii=False, default=str))
        return None
    said: dict[str, JsonValue] = {"name": function["name"]}
    if isinstance(function.get("description"), str):
        said["description"] = function["description"]
    parameters = function.get("parameters")
    if isinstance(parameters, Mapping) and parameters.get("type", "object") == "object":
        known = {key: value for key, value in parameters.items() if key in _PARAMETERS}
        said["parameters"] = {**known, "type": "object", "properties": known.get("properties", {})}
        _leave(unsaid, parameters, _PARAMETERS)
    _leave(unsaid, function, said.keys())
    _leave(unsaid, tool, ("type", "function"))
    return {"type": "function", "function": said}


def _leave(unsaid: list[str], fields: JsonObject, said: Collection[str]) -> None:
    """Notes the fields that the protocol does not take."""
    if left := {key: value for key, value in fields.items() if key not in said and value is not None}:
        unsaid.append(json.dumps(left, ensure_ascii=False, default=str)[1:-1])
