"""Estimates a conversation, and divides it: pure, at once, no model is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from litellm_compaction.core.messages import JsonObject, Message, parse_message, system_prefix_length
from litellm_compaction.core.record import read_record
from litellm_compaction.core.view import legal_cuts
from litellm_compaction.library.types import CompactionConfig, CompactionSelection

_ROLE_TOKENS = 2
# An image, a sound, a file: what OpenAI's vision models take for a large picture, rounded up.
_PART_TOKENS = 1200


def estimate_tokens(text: object) -> int:
    """ceil(characters / 4), 0 for anything that is no text; about 30 % too low for code and numbers."""
    return -(-len(text) // 4) if isinstance(text, str) else 0


def estimate_messages_tokens(messages: Sequence[JsonObject]) -> int:
    """For each message 2 for its role, its text, its calls and results (as JSON); 1,200 for any other part."""
    return sum(map(_message_tokens, parsed(messages)))


def should_compact(messages: Sequence[JsonObject], config: CompactionConfig) -> bool:
    """Returns True from `config.threshold_tokens` on; False for no more than `recent_messages_to_keep + 1` messages."""
    is_short = len(messages) <= config.recent_messages_to_keep + 1
    return not is_short and estimate_messages_tokens(messages) >= config.threshold_tokens


def select_messages_to_compact(messages: Sequence[JsonObject], keep_last: int = 10) -> CompactionSelection:
    """Divides a conversation before its last `keep_last` messages, or further back: never between call and result.

    Leading system messages stay, and so does a previous summary, which is not compacted again.
    """
    conversation = parsed(messages)
    record, start = read_record(conversation), system_prefix_length(conversation)
    if record is not None and record.at == start and record.rest is None:
        start += 1
    newest = len(conversation) - keep_last
    cut = max((each for each in legal_cuts(conversation) if start < each <= newest), default=start)
    kept = [*messages[:start], *messages[cut:]]
    return CompactionSelection([*messages[start:cut]], kept, record.base.summary if record else "")


def parsed(messages: Sequence[JsonObject]) -> tuple[Message, ...]:
    """The messages as the core knows them; a ValueError says which entry is none."""
    for index, raw in enumerate(messages):
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise ValueError(f"messages[{index}]: expected an object with a role")  # noqa: TRY004 - as all bad shapes
    return tuple(map(parse_message, messages))


def _message_tokens(message: Message) -> int:
    content = message.raw.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    said = [part for part in parts if part.get("type") in ("tool-call", "tool-result")]
    said += [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    texts = [message.text, message.reasoning, *(json.dumps(each, ensure_ascii=False, default=str) for each in said)]
    others = sum(kind not in ("tool-call", "tool-result") for kind in message.other_parts)
    return _ROLE_TOKENS + sum(map(estimate_tokens, texts)) + _PART_TOKENS * others
