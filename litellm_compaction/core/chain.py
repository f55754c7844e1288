"""When a later request continues an earlier conversation: the normal form of its messages, and the hash chain over it.

A compaction is stored under the entry of exactly the messages that it covers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from litellm_compaction.core.messages import JsonValue, Message, is_text_part, lead_length, without_notices

# Reading and writing more at once would hold up other threads, and with them the event loop.
_SLICE_CHARS, _MOST_PARSED_CHARS = 262_144, 1_000_000
_THINK, _THINK_END = "<think>", "</think>"


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
        hashed = hashlib.blake2b(key=digest, digest_size=16)
        for piece in _normal_form(message):
            hashed.update(piece)
        digest = hashed.digest()
        entries.append(digest.hex())
    return tuple(entries)


def normal_text(message: Message) -> str:
    """A message's text as the hash chain sees it: without notices, leading reasoning and outer white space."""
    text = message.text
    if message.role == "assistant":
        text = without_notices(text).lstrip()
        end = text.find(_THINK_END) if text.startswith(_THINK) else -1
        text = text[end + len(_THINK_END) :] if end >= 0 else text
    return text.strip()


def _normal_form(message: Message) -> Iterator[bytes]:
    """A message as a list in JSON, in pieces."""
    content = message.raw.get("content")
    others = [part for part in content if not is_text_part(part)] if isinstance(content, list) else []
    text = normal_text(message)
    calls = [[call.id, call.name, canonical_arguments(call.arguments)] for call in message.calls]
    behind = [calls, message.call_id, [_without_cache_marker(part) for part in others]]
    if len(text) <= _SLICE_CHARS:
        yield _json([message.role, text, *behind])
        return
    yield _json([message.role, ""])[:-2]
    for start in range(0, len(text), _SLICE_CHARS):
        # As ASCII each character is written by itself.
        yield _json(text[start : start + _SLICE_CHARS])[1:-1]
    yield b'",' + _json(behind)[1:]


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), default=str).encode()


def canonical_arguments(arguments: str) -> str:
    """Tool arguments in normal form: without the accidents of how their JSON was written, where they are not huge."""
    if len(arguments) > _MOST_PARSED_CHARS:
        return arguments
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def _without_cache_marker(part: JsonValue) -> JsonValue:
    if isinstance(part, Mapping):
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part
