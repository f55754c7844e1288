"""Reads a request, and words LM Studio's refusals: each status, body shape, and wording.

A refusal names the report that shows it, or says that the wording is ours. It is raised as `Refusal` anywhere in the
simulator and turned into a response in one place. `bt#N` is issue N of github.com/lmstudio-ai/lmstudio-bug-tracker.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

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


JsonObject = dict[str, Any]
ErrorShape = Literal["string", "object"]
RefusalOutcome = Literal["ok", "error", "overflow", "pool_overflow", "fault"]
NKeepWording = Literal["number_of_tokens", "trying_to_keep", "cannot_truncate", "no_numbers"]

POOL_EXCEEDED = "Context size has been exceeded."  # bt#1620, bt#1757, bt#2201
CRASHED = (  # bt#932, bt#1057
    "The model has crashed without additional information. (Exit code: 18446744072635812000). "
    "Error Data: n/a, Additional Data: n/a"
)
MODEL_UNLOADED = "Model unloaded."  # that eviction cuts a generation is bt#671; the wording is ours


class Refusal(Exception):
    """An answer that replaces a generation: an HTTP status and a body (JSON; text and bytes as they are)."""

    def __init__(self, status: int, body: object, *, outcome: RefusalOutcome = "error") -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body: Any = body
        self.outcome: RefusalOutcome = outcome


def error_body(message: str, shape: ErrorShape, *, code: str | None = None) -> JsonObject:
    """The JSON of an error: a bare string until early 0.4 (openclaude#353), an object later (bt#1730)."""
    if shape == "string":
        return {"error": message}
    return {"error": {"message": message, "type": "invalid_request_error", "param": "model", "code": code}}


def event_body(message: str) -> JsonObject:
    """The data of `event: error` inside HTTP 200, the message twice (verbatim from goose#11318, 0.4.21)."""
    return {"error": {"message": message}, "message": message}


def unknown_path(method: str, path: str) -> JsonObject:
    """The error body for an unknown path; hermes-agent saw it with HTTP 200, the wording is ours."""
    return {"error": f"Unexpected endpoint or method. ({method} {path})"}


def bad_payload(reason: str) -> Refusal:
    """The 400 for a request body of the wrong form; shape as LM Studio's, wording ours."""
    return Refusal(400, {"error": f"Invalid 'messages' in payload: {reason}"})


def bad_field(message: str) -> Refusal:
    return Refusal(400, {"error": message})


def template_failed(reason: str, shape: ErrorShape) -> Refusal:
    """The 400 around an exception of the chat template (bt#1054, bt#1586, bt#2219)."""
    message = (
        f'Error rendering prompt with jinja template: "{reason}". '
        "This is usually an issue with the model's prompt template."
    )
    return Refusal(400, error_body(message, shape))


def unauthorized() -> Refusal:
    """The 401 for a missing or wrong API token; LM Studio's own body is not documented, this one is ours."""
    message = "Malformed LM Studio API token provided. Send it as 'Authorization: Bearer <token>'."
    body = {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    return Refusal(401, body)


def no_models_loaded() -> Refusal:
    """The 404 when nothing is loaded and nothing can be loaded (verbatim from Orpheus-TTS#229)."""
    message = "No models loaded. Please load a model in the developer page or use the `lms load` command."
    return Refusal(404, error_body(message, "object", code="model_not_found"))


def model_not_found(name: str) -> Refusal:
    """The 404 for a model that is not downloaded or may not be loaded; the wording is ours."""
    return Refusal(404, error_body(f"Model '{name}' not found", "object", code="model_not_found"))


def n_keep_too_long(keep_tokens: int, window_tokens: int, wording: NKeepWording) -> Refusal:
    """The 400 when even the part that must stay exceeds the window.

    The wordings are those of 0.3.x late (openclaude#353), 0.3.x early (bt#237), 0.4.0 (opencode#11141), and 0.4.25
    (jmgirard/rlmstudio, tests/testthat/test-long-prompts.R), which names no number.
    """
    advice = "Try to load the model with a larger context length, or provide a shorter input."
    if wording == "trying_to_keep":
        message = (
            f"Trying to keep the first {keep_tokens} tokens when context the overflows. However, the model "
            f"is loaded with context length of only {window_tokens} tokens, which is not enough. {advice}"
        )
    elif wording == "cannot_truncate":
        message = f"Cannot truncate prompt with n_keep ({keep_tokens}) >= n_ctx ({window_tokens})"
    elif wording == "no_numbers":
        message = (
            "The number of tokens to keep from the initial prompt is greater than the context length. "
            f"{advice.rstrip('.')}"
        )
    else:
        message = (
            "The number of tokens to keep from the initial prompt is greater than the context length "
            f"(n_keep: {keep_tokens}>= n_ctx: {window_tokens}). {advice}"
        )
    return Refusal(400, {"error": message}, outcome="overflow")


def does_not_fit(prompt_tokens: int, window_tokens: int) -> str:
    """The overflow message of 0.4.20 and later (verbatim from goose#11318)."""
    return (
        f"Input does not fit in context length. The input has {prompt_tokens} tokens, "
        f"but the context length only supports {window_tokens} tokens."
    )
