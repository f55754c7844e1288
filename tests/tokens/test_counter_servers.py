"""Templates that leave out what stands beside calls: a server that renders it all the same is no surprise."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.templates.template import template
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import Count, TokenCounter

LEAVING_OUT = [
    family_of("llama", "meta-llama-3.1-8b-instruct"),
    family_of("llama", "llama-3.2-3b-instruct"),
    family_of("llama", "mistral-nemo"),
    family_of("llama", "mistral-small-3.2"),
]
RENDERING = [family_of("qwen2", "qwen2.5-7b-instruct"), family_of("qwen3", "qwen3-4b")]
THOUGHT = "The flight leaves at noon, so that the train has to be there an hour before. "


def session(rounds: int, *, text: str = THOUGHT * 12) -> Request:
    raw: list[dict[str, Any]] = [{"role": "user", "content": "Find me a way to the coast."}]
    for index in range(rounds):
        call = {"id": f"call{index:05d}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        raw += [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"Flight {index} leaves at noon. " * 10},
        ]
    return Request(messages=tuple(map(parse_message, raw)))


def upper(count: Count) -> float:
    return count.tokens * (1 + count.error_ratio)


async def shown_tokens(family: Any, request: Request) -> int:
    """Tokens of the same prompt with the text beside calls rendered."""
    counter = TokenCounter()
    texts = [message.text for message in request.messages if message.calls]
    prompt = (await counter.count("t", family, request)).tokens
    return prompt + sum([await counter.count_text("t", family, text) for text in texts])


@pytest.mark.parametrize("family", LEAVING_OUT, ids=lambda family: family.name)
async def test_text_that_a_template_leaves_out_is_a_doubt_of_the_count(family: Any) -> None:
    """The count is what the template renders, its upper bound what a server would count that renders all."""
    request = session(20)
    made = await TokenCounter().count("t", family, request)
    without = await TokenCounter().count("t", family, session(20, text=""))
    assert made.tokens == without.tokens
    assert not made.exact
    assert upper(made) >= await shown_tokens(family, request)
    assert upper(without) < 1.1 * without.tokens


@pytest.mark.parametrize("family", RENDERING, ids=lambda family: family.name)
async def test_text_that_a_template_renders_is_none(family: Any) -> None:
    """Its count is as exact as any."""
    made = await TokenCounter().count("t", family, session(20))
    assert upper(made) < 1.1 * made.tokens
    assert template(family.template).renders_text_beside_calls
