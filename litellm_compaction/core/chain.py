"""When a later request continues an earlier conversation: the normal form of its messages, and the hash chain over it.

A compaction is stored under the entry of exactly the messages that it covers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from litellm_compaction.core.messages import JsonValue, Message, is_text_part, lead_length, without_notices

_BLOCK_REASONING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


def chain(messages: Sequence[Message]) -> tuple[str, ...]:
    """The hash chain of a conversation: entry i stands for exactly the first i messages after the leading system ones.

    Equal entries mean equal normal forms (design §3): leading system messages, notices, reasoning and cache
    markers do not count, null equals "", text is trimmed, tool arguments are compared as parsed JSON.

    Returns:
        n + 1 hexadecimal digests for n messages after the lead; entry 0 stands for the empty conversation.
    """
    digest = hashlib.blake2b(b"litellm_compaction:1", digest_size=16).digest()
    entries = [digest.hex()]
    for message in messages[lead_length(messages) :]:
        digest = hashlib.blake2b(_normal_form(message), key=digest, digest_size=16).digest()
        entries.append(digest.hex())
    return tuple(entries)


def normal_text(message: Message) -> str:
    """A message's text as the hash chain sees it: without notices, leading reasoning and outer white space."""
    text = message.text
    if message.role == "assistant":
        text = _BLOCK_REASONING.sub("", without_notices(text))
    return text.strip()


def _normal_form(message: Message) -> bytes:
    content = message.raw.get("content")
    others = [part for part in content if not is_text_part(part)] if isinstance(content, list) else []
    form = [
        message.role,
        normal_text(message),
        [[call.id, call.name, canonical_arguments(call.arguments)] for call in message.calls],
        message.call_id,
        [_without_cache_marker(part) for part in others],
    ]
    return json.dumps(form, ensure_ascii=True, sort_keys=True, separators=(",", ":"), default=str).encode()


def canonical_arguments(arguments: str) -> str:
    """Tool arguments in normal form: without the accidents of how their JSON was written."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def _without_cache_marker(part: JsonValue) -> JsonValue:
    if isinstance(part, Mapping):
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part
