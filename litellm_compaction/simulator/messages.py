"""What a request asks for: the body of a chat completion, checked and typed, and what strict chat templates refuse."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from litellm_compaction.simulator.refusals import JsonObject, bad_field, bad_payload

# Above every vocabulary; larger numbers fit no id.
_MOST_IDS = 2**31
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
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked request; `max_tokens` is None when the answer is unlimited (absent or -1).

    `ids` are a text completion's prompt in place of its text.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ttl_s: float | None
    ids: tuple[int, ...] = ()


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


def parse_completion(body: JsonObject, *, takes_ids: bool) -> ChatRequest:
    """The checked text-completion request in `body`, its prompt as one user message without a template.

    With `takes_ids` also one of token ids, or several of them, as llama.cpp takes them (tools/server/README.md,
    "prompt"). It answers several side by side in its one cache: here they are one prompt that fills as much.
    """
    prompt = body.get("prompt")
    if takes_ids and isinstance(prompt, list) and (ids := _ids(prompt)):
        return replace(_request(body, (Message(role="user", parts=()),)), ids=ids)
    if not isinstance(prompt, str):
        raise bad_field("'prompt' field is required and must be a string")
    return _request(body, (Message(role="user", parts=(prompt,)),))


def _ids(prompt: list[Any]) -> tuple[int, ...]:
    flat = [piece for each in prompt for piece in (each if isinstance(each, list) else [each])]
    return tuple(flat) if all(type(piece) is int and 0 <= piece < _MOST_IDS for piece in flat) else ()


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


TemplateRule = Literal["lenient", "mistral", "gemma", "qwen3.5"]

_ALTERNATE = "onversation roles must alternate user/assistant/user/assistant/..."
_MISTRAL_ALTERNATE = "After the optional system message, c" + _ALTERNATE
_MISTRAL_ROLES = (
    "Only user and assistant roles are supported, with the exception of an initial optional system message!"
)
_GEMMA_ALTERNATE = "C" + _ALTERNATE
_MISTRAL_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


def template_error(messages: Sequence[Message], rule: TemplateRule) -> str | None:
    """The exception text of the template for `messages`, or None when it renders them."""
    if rule == "mistral":
        return _mistral_error(messages)
    if rule == "gemma":
        return _gemma_error(messages)
    if rule == "qwen3.5":
        return _qwen35_error(messages)
    return None


def _mistral_error(messages: Sequence[Message]) -> str | None:
    rest = _after_system(messages)
    if any(message.role == "system" for message in rest):
        return _MISTRAL_ROLES
    turns = [message.role for message in rest if message.role == "user" or _is_plain_answer(message)]
    if not turns or not _alternates(turns):
        return _MISTRAL_ALTERNATE
    ids = [call.id for message in rest for call in message.tool_calls]
    ids += [message.tool_call_id for message in rest if message.role == "tool"]
    if not all(_MISTRAL_CALL_ID.fullmatch(call_id) for call_id in ids):
        return "Tool call IDs should be alphanumeric strings with length 9!"
    return None


def _gemma_error(messages: Sequence[Message]) -> str | None:
    # Assumed, not measured: without tools in the template LM Studio shows results as user text, a user turn.
    turns: list[str] = []
    previous = ""
    for message in _after_system(messages):
        if message.role == "tool" and previous == "tool":
            continue
        turns.append("user" if message.role == "tool" else message.role)
        previous = message.role
    return None if turns and _alternates(turns) else _GEMMA_ALTERNATE


def _qwen35_error(messages: Sequence[Message]) -> str | None:
    if any(message.role == "system" for message in messages[1:]):
        return "System message must be at the beginning."
    if not any(message.role == "user" and not _is_tool_response(message.text) for message in messages):
        return "No user query found in messages."
    return None


def _after_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages[0].role == "system" else messages


def _is_plain_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def _is_tool_response(text: str) -> bool:
    stripped = text.strip()
    return stripped.startswith("<tool_response>") and stripped.endswith("</tool_response>")


def _alternates(roles: Sequence[str]) -> bool:
    return all(role == ("user" if index % 2 == 0 else "assistant") for index, role in enumerate(roles))
