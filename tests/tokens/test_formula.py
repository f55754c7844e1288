"""What is counted of a message without a template: all that some template may render, once."""

from __future__ import annotations

import base64
import json

import pytest

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokens import formula
from litellm_compaction.tokens.counter import TokenCounter
from tests.tokens.test_counter import PROSE, STAND_IN, count, request, user


async def test_base64_is_never_text() -> None:
    """A picture costs the family's image tokens, however many bytes it has, and other parts lose their data."""
    data = base64.b64encode(bytes(range(256)) * 4000).decode()
    image: JsonValue = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    small = await count(STAND_IN, user([{"type": "text", "text": "What is this?"}, image]))
    assert STAND_IN.image_tokens <= small.sizes[0] < STAND_IN.image_tokens + 50
    assert small.allowance_tokens >= STAND_IN.image_tokens
    odd = await count(STAND_IN, user([{"type": "blob", "payload": data, "note": PROSE}]))
    assert 15 < odd.tokens < 200


async def test_reasoning_calls_and_legacy_calls_count() -> None:
    """Everything that a template may render is counted."""
    plain = (await count(STAND_IN, {"role": "assistant", "content": "x"})).tokens
    for field, value in (
        ("reasoning_content", PROSE),
        ("tool_calls", [{"id": "1", "function": {"name": "f", "arguments": json.dumps({"text": PROSE})}}]),
        ("function_call", {"name": "f", "arguments": PROSE}),
        ("name", PROSE),
    ):
        assert (await count(STAND_IN, {"role": "assistant", "content": "x", field: value})).tokens > plain + 15


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old entries go; counts stay right."""
    monkeypatch.setattr(formula, "_MAX_ENTRIES", 3)
    counter = TokenCounter()
    turns = [user(f"{index}") for index in range(10)]
    first = await counter.count("t", STAND_IN, request(*turns))
    assert len(counter._counting.texts._entries) == 3
    assert await counter.count("t", STAND_IN, request(*turns)) == first
