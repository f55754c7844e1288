"""Recognizes a request by which a client summarizes its conversation itself.

The client goes on with that summary in place of its history: what is left out of this one prompt is lost for good. The
rules are in `clients.toml`; the proxy asks once for each request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from litellm_compaction.core.messages import Message
from litellm_compaction.core.stretches import RULES, last_words

_BEGINNINGS: tuple[str, ...] = tuple(text for rule in RULES["summaries"] for text in rule["begins"])
# What LiteLLM makes of a system message in mid-conversation (mid_conversation_system.py), as a text part of its own.
_LITELLMS_NOTE = "Operator note (not from the user)"
# No client describes a turn in more.
_MAX_HEADER_CHARS = 10_000


def is_client_summary(messages: Sequence[Message], headers: Mapping[str, str]) -> bool:
    """Returns True if a client asks for a summary of its own.

    A quotation of such a request in mid-text is none, nor is one with an answer behind it.

    Args:
        messages: n, oldest first.
        headers: by their names in lower case; what a body says in their place counts as one.
    """
    if any(_says(rule, headers.get(rule["name"], "")) for rule in RULES["headers"]):
        return True
    if not messages:
        return False
    texts = [messages[0].text.lstrip()] if messages[0].is_system else []
    newest = (message for message in reversed(messages) if not _is_reminder(message))
    last = next(newest, messages[-1])
    if last.role == "user":
        texts.append(last_words(last))
    return any(text.startswith(_BEGINNINGS) for text in texts)


def _is_reminder(message: Message) -> bool:
    """Claude Code 2.1.197 sends one as a system message behind its instruction, too (on the wire, 2026-11-24)."""
    return message.is_system or message.text.startswith(_LITELLMS_NOTE)


def _says(rule: Mapping[str, object], value: str) -> bool:
    values = rule["values"]
    assert isinstance(values, list)  # noqa: S101 - of our own file
    member = rule.get("member")
    if member is None:
        return value in values
    if not value or len(value) > _MAX_HEADER_CHARS:
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, Mapping) and found.get(member) in values
