"""Rendered prompts: what is exact, what falls back, where the tokens of each message are, what is counted again."""

from __future__ import annotations

import asyncio
import math

import pytest

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.builders import JsonDict, request_of, user

LLAMA31 = family_of("llama", "llama-3.1-8b")
LLAMA2 = family_of("llama", "llama-2-7b")
MISTRAL_V1 = family_of("llama", "mistral-7b-instruct-v0.1")
NEMO = family_of("llama", "mistral-nemo")
SMALL = family_of("mistral3", "mistral-small-3.2")
QWEN3 = family_of("qwen3", "qwen3-8b")
GPT_OSS = family_of("gpt-oss", "x")
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "
TOOL: JsonValue = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def assistant(text: str, **more: JsonValue) -> dict[str, JsonValue]:
    return {"role": "assistant", "content": text, **more}


def call(call_id: str = "call00001", arguments: str = "{}") -> JsonValue:
    return [{"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}]


def count(family: Family, *messages: JsonDict, tools: tuple[JsonValue, ...] = ()) -> Estimate:
    return asyncio.run(TokenCounter().count("t", family, request_of(*messages, tools=tools)))


def test_an_exact_count_keeps_two_per_cent() -> None:
    """Twice the count may be the truth until the server has told a number; then two per cent, and its own prompt is."""
    counter = TokenCounter()
    asked, other = request_of(user(PROSE * 400)), request_of(user(PROSE * 300))
    made = asyncio.run(counter.count("t", QWEN3, asked))
    assert (made.own.exact, made.own.rendered) == (True, True)
    assert (made.likely, made.high) == (math.ceil(1.02 * made.tokens), 2 * made.tokens)
    assert counter.learn("t", made, made.tokens)
    again = asyncio.run(counter.count("t", QWEN3, asked))
    assert (again.low, again.tokens, again.high, again.is_told) == (made.tokens,) * 3 + (True,)
    made = asyncio.run(counter.count("t", QWEN3, other))
    assert made.high == made.likely <= 1.02 * made.tokens + 1


@pytest.mark.parametrize("family", [MISTRAL_V1, NEMO], ids=lambda family: family.template)
def test_a_refused_list_is_estimated_on_the_high_side(family: Family) -> None:
    """Two user messages in a row, which the template refuses, cost at least their text and are not called exact."""
    made = count(family, user(PROSE), user(PROSE))
    assert not made.own.exact
    assert not made.own.rendered
    assert made.likely >= 1.1 * made.tokens
    assert made.likely >= 2 * vocabulary(family.vocabulary).lengths([PROSE])[0] + 8


def test_tools_that_a_template_drops_are_estimated() -> None:
    """Nobody knows if the server shows them: they count as JSON, or not at all."""
    plain = count(LLAMA2, user("hi"))
    made = count(LLAMA2, user("hi"), tools=(TOOL,))
    assert made.tools_tokens > 20
    assert made.tokens == pytest.approx(plain.tokens + made.tools_tokens, abs=1)
    assert made.low <= plain.tokens
    assert not made.own.exact


def test_arguments_that_are_no_json_are_counted_as_they_are() -> None:
    """llama.cpp refuses them; the count goes on, and is not called exact."""
    made = count(QWEN3, user("x"), assistant("", tool_calls=call(arguments='{"a": ' + PROSE * 10)), user("y"))
    assert made.own.rendered
    assert not made.own.exact
    assert made.sizes[1] > 150


@pytest.mark.parametrize("family", [LLAMA31, NEMO, SMALL, QWEN3, GPT_OSS], ids=lambda family: family.template)
def test_each_message_has_its_own_tokens(family: Family) -> None:
    """Sizes are those of the messages' texts, up to a header, however the template orders and escapes them."""
    texts = [f"{index} {PROSE * (1 + index % 3)}" for index in range(6)]
    made = count(
        family,
        {"role": "system", "content": texts[0]},
        user(texts[1]),
        assistant("", tool_calls=call()),
        {"role": "tool", "tool_call_id": "call00001", "content": texts[2] + '\n"quoted"'},
        assistant(texts[3]),
        user(texts[4]),
        tools=(TOOL,),
    )
    assert made.own.exact
    assert made.tokens == made.overhead_tokens + made.tools_tokens + sum(made.sizes)
    for position, index in ((1, 1), (3, 2), (4, 3), (5, 4)):
        if family is NEMO and position == 5:
            # Its template puts the system message into the last user message.
            continue
        length = vocabulary(family.vocabulary).lengths([texts[index]])[0]
        assert 0.6 * length <= made.sizes[position] <= length + 40, (family.template, position)
    assert made.overhead_tokens < 120


def test_reasoning_that_the_template_drops_costs_nothing() -> None:
    """Qwen3 leaves out what was thought before the last user message; the count follows it."""
    with_reasoning = count(QWEN3, user("x"), assistant("y", reasoning_content=PROSE * 50), user("z"))
    without = count(QWEN3, user("x"), assistant("y"), user("z"))
    assert with_reasoning.tokens == without.tokens
    assert with_reasoning.own.exact
