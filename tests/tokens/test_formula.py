"""What is counted of a message without a template: all that some template may render, once."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import replace

import pytest

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens import formula
from litellm_compaction.tokens.counter import TokenCounter
from tests.tokens.test_counter import PROSE, STAND_IN, TOOLS, count, request, user


async def test_single_digits_are_counted_where_the_vocabulary_has_no_groups() -> None:
    """Tables of numbers take up to three times as many tokens in Qwen's vocabulary as in ours."""
    numbers = "123456789 " * 500
    made = await count(STAND_IN, user(numbers))
    assert made.tokens >= 9 * 500
    grouped = await count(family_of("deepseek2", "deepseek-v2"), user(numbers))
    assert grouped.tokens < made.tokens / 2


@pytest.mark.parametrize(("family", "may_be_left_out"), [(family_of("", "gpt-4o"), False), (STAND_IN, True)])
async def test_openai_renders_all_tools(family: Family, may_be_left_out: bool) -> None:
    """A template may leave them out, so that a number without them is believed; of OpenAI's none is."""
    made = await count(family, {"role": "user", "content": "Go."}, tools=TOOLS)
    assert made.tools_tokens > 0
    assert (made.doubtful_tools_tokens > 0) is may_be_left_out


async def test_a_templates_own_system_message_is_counted_where_there_is_none() -> None:
    """Mistral Small's has 500 tokens: of a small window it leaves so much less."""
    family = replace(STAND_IN, default_system_tokens=500)
    alone = await count(family, user("Go."))
    beside = await count(family, {"role": "system", "content": "Be brief."}, user("Go."))
    assert (alone.overhead_tokens - beside.overhead_tokens, beside.overhead_tokens) == (500, STAND_IN.request_tokens)


async def test_base64_is_never_text() -> None:
    """A picture costs the family's image tokens, however many bytes it has, and other parts lose their data."""
    data = base64.b64encode(bytes(range(256)) * 4000).decode()
    image: JsonValue = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    small = await count(STAND_IN, user([{"type": "text", "text": "What is this?"}, image]))
    assert STAND_IN.image_tokens <= small.sizes[0] < STAND_IN.image_tokens + 50
    assert small.allowance_tokens >= STAND_IN.image_tokens
    odd = await count(STAND_IN, user([{"type": "blob", "payload": data, "note": PROSE}]))
    assert 15 < odd.tokens < 200


async def test_unknown_parts_count_their_text() -> None:
    """Text in parts that nobody knows is text all the same."""
    made = await count(STAND_IN, user([{"type": "tool_result", "content": [{"deep": PROSE * 50}]}]))
    assert made.sizes[0] > 700


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


async def test_known_messages_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn tokenizes only what is new, and touches no thread."""
    texts: list[str] = []
    threads: set[str] = set()

    def spy(name: str, text: str) -> int:
        texts.append(text)
        threads.add(threading.current_thread().name)
        return registry.token_length(name, text)

    monkeypatch.setattr(formula, "token_length", spy)
    counter = TokenCounter()
    registry.vocabulary(STAND_IN.vocabulary)
    turns = [user(f"{index} {PROSE * 50}") for index in range(20)]
    first = await counter.count("t", STAND_IN, request(*turns, tools=TOOLS))
    assert threading.main_thread().name not in threads
    texts.clear()
    threads.clear()
    second = await counter.count("other", STAND_IN, request(*turns, user("new"), tools=TOOLS))
    assert texts == ["new"]
    assert threads == {threading.main_thread().name}
    assert second.sizes[:20] == first.sizes


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old entries go; counts stay right."""
    monkeypatch.setattr(formula, "_MAX_ENTRIES", 3)
    counter = TokenCounter()
    turns = [user(f"{index}") for index in range(10)]
    first = await counter.count("t", STAND_IN, request(*turns))
    assert len(counter._counting.texts._entries) == 3
    assert await counter.count("t", STAND_IN, request(*turns)) == first
