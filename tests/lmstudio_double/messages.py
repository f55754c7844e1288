"""LM Studio's refusals beyond those of the simulator: its chat templates' and its windows', in every version's words.

Each names the report that shows it, or says that the wording is ours. `bt#N` is issue N of
github.com/lmstudio-ai/lmstudio-bug-tracker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from litellm_compaction.simulator.messages import ErrorShape, JsonObject, Message, Refusal, error_body

NKeepWording = Literal["number_of_tokens", "no_numbers"]
# Above every vocabulary; larger numbers fit no id.
_MOST_IDS = 2**31
POOL_EXCEEDED = "Context size has been exceeded."  # bt#1620, bt#1757, bt#2201
MODEL_UNLOADED = "Model unloaded."  # that eviction cuts a generation is bt#671; the wording is ours


def ids_of(prompt: object) -> tuple[int, ...]:
    """The token ids of a text completion's prompt, or of several, as llama.cpp takes them; empty if it is none.

    It answers several side by side in its one cache: here they are one prompt that fills as much.
    """
    pieces: list[Any] = prompt if isinstance(prompt, list) else []
    flat = [piece for each in pieces for piece in (each if isinstance(each, list) else [each])]
    return tuple(flat) if all(type(piece) is int and 0 <= piece < _MOST_IDS for piece in flat) else ()


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


def event_body(message: str) -> JsonObject:
    """The data of `event: error` inside HTTP 200, the message twice (verbatim from goose#11318, 0.4.21)."""
    return {"error": {"message": message}, "message": message}


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


def n_keep_too_long(keep_tokens: int, window_tokens: int, wording: NKeepWording) -> Refusal:
    """The 400 when even the part that must stay exceeds the window.

    The wordings are those of 0.3.x (openclaude#353), and of 0.4.25 (jmgirard/rlmstudio,
    tests/testthat/test-long-prompts.R), which names no number.
    """
    advice = "Try to load the model with a larger context length, or provide a shorter input."
    if wording == "no_numbers":
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
