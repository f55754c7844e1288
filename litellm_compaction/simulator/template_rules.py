"""Which conversations a strict chat template refuses, by family.

Asked once per request, before rendering. The rules are those of the published templates, found by rendering
28 shapes through 31 templates with jinja2 (2026-11); the wordings are the templates' own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from .messages import Message

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
