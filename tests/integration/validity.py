"""What a message list must look like upstream: promises P2 and P3, checked against the client's own list."""

from __future__ import annotations

import json
from collections.abc import Sequence

from litellm_compaction.core.messages import Message
from tests.builders import JsonDict, broken_promises, parsed


def problems(original: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> list[str]:
    """What is wrong with `upstream` as a compacted form of `original`, and not with that; empty when nothing is."""
    came, sent = _comparable(original), _comparable(upstream)
    was_broken = broken_promises(came, came)
    found = [each for each in broken_promises(came, sent) if each not in was_broken]
    is_turned = sent[-1].role == "assistant" and came[-1].role != "assistant"
    return [*found, "ends in assistant"] if is_turned else found


def _comparable(messages: Sequence[JsonDict]) -> tuple[Message, ...]:
    """As LiteLLM may change them: for LM Studio a `developer` is a `system`, and a text one of several parts."""
    read = []
    for each in messages:
        parts = each.get("content")
        is_text = isinstance(parts, list) and all(part.get("type") == "text" for part in parts)
        role = "system" if each["role"] == "developer" else each["role"]
        read.append({**each, "role": role, "content": text_of(each) if is_text else parts})
    return parsed(read)


def text_of(message: JsonDict) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def searchable(messages: Sequence[JsonDict]) -> str:
    """All that a model can read in a list: contents, and tool arguments as written and as they read."""
    found: list[str] = []
    for message in messages:
        found.append(text_of(message))
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            found.append(f"{call['function']['name']} {arguments}")
            try:
                values = json.loads(arguments)
            except ValueError:
                continue
            if isinstance(values, dict):
                found += [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
    return "\n".join(found)
