"""What a request asks for: the body of a chat completion, checked and typed.

Called once per request. Everything LM Studio would reject becomes a `Refusal` with HTTP 400 here, so that
later stages see only well-formed values; nothing of the body is changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

from .refusals import JsonObject, bad_field, bad_payload

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Image(NamedTuple):
    """An image part; the digest stands for its content, which is never tokenized as text."""

    digest: str


class ToolCall(NamedTuple):
    """A call in an assistant message; `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message; `developer` has already become `system`, as LM Studio does (bt#1730)."""

    role: str
    parts: tuple[str | Image, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    @property
    def text(self) -> str:
        """The text parts, joined; images are left out."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked request; `max_tokens` is None when the answer is unlimited (absent or -1)."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ttl_s: float | None


def parse_chat(body: JsonObject) -> ChatRequest:
    """The checked chat request in `body`.

    Raises:
        Refusal: HTTP 400 as LM Studio answers to a malformed body.
    """
    if "messages" not in body:
        raise bad_field("'messages' field is required")
    raw = body["messages"]
    if not isinstance(raw, list) or not raw:
        raise bad_payload("expected a non-empty array")
    return _request(body, tuple(_message(index, item) for index, item in enumerate(raw)))


def parse_completion(body: JsonObject) -> ChatRequest:
    """The checked text-completion request in `body`, its prompt as one user message without a template."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise bad_field("'prompt' field is required and must be a string")
    return _request(body, (Message(role="user", parts=(prompt,)),))


def _request(body: JsonObject, messages: tuple[Message, ...]) -> ChatRequest:
    model = body.get("model")
    options = body.get("stream_options")
    ttl_s = body.get("ttl")
    return ChatRequest(
        model=model if isinstance(model, str) else "",
        messages=messages,
        tools=_tools(body),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        ttl_s=float(ttl_s) if isinstance(ttl_s, (int, float)) else None,
    )


def _message(index: int, item: object) -> Message:
    if not isinstance(item, dict):
        raise bad_payload(f"messages[{index}] must be an object")
    role = item.get("role")
    if role not in _ROLES:
        raise bad_payload(f"messages[{index}].role must be one of {', '.join(_ROLES)}")
    calls = _tool_calls(index, item.get("tool_calls")) if role == "assistant" else ()
    tool_call_id = item.get("tool_call_id", "")
    if role == "tool" and not (isinstance(tool_call_id, str) and tool_call_id):
        raise bad_payload(f"messages[{index}].tool_call_id must be a string")
    reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
    return Message(
        role="system" if role == "developer" else role,
        parts=_parts(index, item.get("content"), optional=bool(calls)),
        tool_calls=calls,
        tool_call_id=tool_call_id if role == "tool" else "",
        reasoning=reasoning if isinstance(reasoning, str) else "",
    )


def _parts(index: int, content: object, *, optional: bool) -> tuple[str | Image, ...]:
    if isinstance(content, str):
        return (content,) if content else ()
    if content is None and optional:
        return ()
    if not isinstance(content, list):
        raise bad_payload(f"messages[{index}].content must be a string or an array of parts")
    return tuple(_part(index, part) for part in content)


def _part(index: int, part: object) -> str | Image:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and kind == "image_url":
        source = part.get("image_url")
        url = source.get("url") if isinstance(source, dict) else source
        if isinstance(url, str):
            return Image(hashlib.sha256(url.encode("utf-8", errors="replace")).hexdigest())
    raise bad_payload(f"messages[{index}].content parts must be of type 'text' or 'image_url'")


def _tool_calls(index: int, raw: object) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise bad_payload(f"messages[{index}].tool_calls must be an array")
    return tuple(_tool_call(index, call) for call in raw)


def _tool_call(index: int, call: object) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise bad_payload(f"messages[{index}].tool_calls must hold objects with a 'function'")
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise bad_payload(f"messages[{index}].tool_calls need the strings 'id', 'name', and 'arguments'")
    try:
        # LM Studio and llama.cpp parse the arguments before rendering them.
        parsed = json.loads(arguments or "{}")
    except ValueError as error:
        raise bad_payload(f"messages[{index}].tool_calls arguments are not valid JSON") from error
    if not isinstance(parsed, dict):
        raise bad_payload(f"messages[{index}].tool_calls arguments must be a JSON object")
    return ToolCall(call_id, name, arguments or "{}")


def _tools(body: JsonObject) -> tuple[JsonObject, ...]:
    choice = body.get("tool_choice")
    if choice is not None and choice not in ("none", "auto", "required"):
        kind = "object" if isinstance(choice, dict) else str(choice)
        # Verbatim from bt#670 (0.3.15, still so in 2026: oh-my-pi#6925).
        raise bad_field(f"Invalid tool_choice type: '{kind}'. Supported string values: none, auto, required")
    tools = body.get("tools")
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_field("Invalid 'tools': expected an array of objects")
    return tuple(tools)


def _max_tokens(body: JsonObject) -> int | None:
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0:
            raise bad_field(f"Invalid '{name}': expected a whole number")
        return int(value) if value >= 0 else None
    return None


def _stop(raw: object) -> tuple[str, ...]:
    if raw is None:
        return ()
    stops = raw if isinstance(raw, list) else [raw]
    texts = [stop for stop in stops if isinstance(stop, str)]
    if len(texts) != len(stops):
        raise bad_field("Invalid 'stop': expected a string or an array of strings")
    return tuple(text for text in texts if text)
