"""Reads a request of a simulated LM Studio, and words its refusals: each status, body shape, and wording.

A refusal names the report that shows it, or says that the wording is ours. `bt#N` is issue N of
github.com/lmstudio-ai/lmstudio-bug-tracker.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
    reasoning: str = ""

    @property
    def text(self) -> str:
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


def parse_chat(body: JsonObject) -> ChatRequest:
    """The checked chat request in `body`; a `Refusal` is HTTP 400 as LM Studio answers to a malformed one."""
    if "messages" not in body:
        raise bad_field("'messages' field is required")
    raw = body["messages"]
    if not isinstance(raw, list) or not raw:
        raise bad_payload("expected a non-empty array")
    return _request(body, tuple(_message(index, item) for index, item in enumerate(raw)))


def parse_completion(body: JsonObject) -> ChatRequest:
    """As `parse_chat` for a text completion, its prompt as one user message without a template."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise bad_field("'prompt' field is required and must be a string")
    return _request(body, (Message(role="user", parts=(prompt,)),))


def _request(body: JsonObject, messages: tuple[Message, ...]) -> ChatRequest:
    model, options = body.get("model"), body.get("stream_options")
    return ChatRequest(
        model=model if isinstance(model, str) else "",
        messages=messages,
        tools=_tools(body),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _message(index: int, item: object) -> Message:
    if not isinstance(item, dict) or item.get("role") not in _ROLES:
        raise bad_payload(f"messages[{index}] must be an object whose role is one of {', '.join(_ROLES)}")
    role, tool_call_id = item["role"], item.get("tool_call_id", "")
    raw_calls = (item.get("tool_calls") or ()) if role == "assistant" else ()
    if not isinstance(raw_calls, (list, tuple)):
        raise bad_payload(f"messages[{index}].tool_calls must be an array")
    if role == "tool" and not (isinstance(tool_call_id, str) and tool_call_id):
        raise bad_payload(f"messages[{index}].tool_call_id must be a string")
    reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
    return Message(
        role="system" if role == "developer" else role,
        parts=_parts(index, item.get("content"), optional=bool(raw_calls)),
        tool_calls=tuple(_tool_call(index, call) for call in raw_calls),
        reasoning=reasoning if isinstance(reasoning, str) else "",
    )


def _parts(index: int, content: object, *, optional: bool) -> tuple[str | Image, ...]:
    if isinstance(content, str) or (content is None and optional):
        return (content,) if content else ()
    if not isinstance(content, list):
        raise bad_payload(f"messages[{index}].content must be a string or an array of parts")
    return tuple(_part(index, part) for part in content)


def _part(index: int, part: object) -> str | Image:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    source = part.get("image_url") if isinstance(part, dict) and kind == "image_url" else None
    url = source.get("url") if isinstance(source, dict) else source
    if isinstance(url, str):
        return Image(hashlib.sha256(url.encode("utf-8", errors="replace")).hexdigest())
    raise bad_payload(f"messages[{index}].content parts must be of type 'text' or 'image_url'")


def _tool_call(index: int, call: Any) -> ToolCall:
    try:
        made = ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        # LM Studio and llama.cpp parse the arguments before rendering them.
        is_good = all(isinstance(each, str) for each in made) and isinstance(json.loads(made.arguments or "{}"), dict)
    except (TypeError, KeyError, ValueError):
        is_good = False
    if not is_good:
        wanted = "the strings 'id', 'function.name', and 'function.arguments', which is a JSON object"
        raise bad_payload(f"messages[{index}].tool_calls need {wanted}")
    return made._replace(arguments=made.arguments or "{}")


def _tools(body: JsonObject) -> tuple[JsonObject, ...]:
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if choice is not None and choice not in ("none", "auto", "required"):
        kind = "object" if isinstance(choice, dict) else str(choice)
        # Verbatim from bt#670 (0.3.15, still so in 2026: oh-my-pi#6925).
        raise bad_field(f"Invalid tool_choice type: '{kind}'. Supported string values: none, auto, required")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_field("Invalid 'tools': expected an array of objects")
    return tuple(tools)


def _max_tokens(body: JsonObject) -> int | None:
    named = ((name, body[name]) for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None)
    name, value = next(named, ("", -1))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0:
        raise bad_field(f"Invalid '{name}': expected a whole number")
    return int(value) if value >= 0 else None


def _stop(raw: object) -> tuple[str, ...]:
    stops = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(isinstance(stop, str) for stop in stops):
        raise bad_field("Invalid 'stop': expected a string or an array of strings")
    return tuple(filter(None, stops))


JsonObject = dict[str, Any]
RefusalOutcome = Literal["ok", "error", "overflow", "pool_overflow", "fault"]


class Refusal(Exception):
    """An answer that replaces a generation: an HTTP status and a body (JSON; text and bytes as they are)."""

    def __init__(self, status: int, body: Any, *, outcome: RefusalOutcome = "error") -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status, self.body, self.outcome = status, body, outcome


def error_body(message: str, code: str | None = None) -> JsonObject:
    """The JSON of an error since early 0.4 (bt#1730)."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": "model", "code": code}}


def unknown_path(method: str, path: str) -> JsonObject:
    """The error body for an unknown path; hermes-agent saw it with HTTP 200, the wording is ours."""
    return {"error": f"Unexpected endpoint or method. ({method} {path})"}


def bad_payload(reason: str) -> Refusal:
    """The 400 for a request body of the wrong form; shape as LM Studio's, wording ours."""
    return Refusal(400, {"error": f"Invalid 'messages' in payload: {reason}"})


def bad_field(message: str) -> Refusal:
    return Refusal(400, {"error": message})


def no_models_loaded() -> Refusal:
    """The 404 when nothing is loaded and nothing can be loaded (verbatim from Orpheus-TTS#229)."""
    message = "No models loaded. Please load a model in the developer page or use the `lms load` command."
    return Refusal(404, error_body(message, "model_not_found"))


def model_not_found(name: str) -> Refusal:
    """The 404 for a model that is not downloaded or may not be loaded; the wording is ours."""
    return Refusal(404, error_body(f"Model '{name}' not found", "model_not_found"))
