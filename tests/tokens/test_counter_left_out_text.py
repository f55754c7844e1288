"""Templates that leave out what stands beside calls: a server that renders it all the same is no surprise."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.mark.parametrize("family", LEAVING_OUT, ids=lambda family: family.name)
async def test_only_what_is_new_is_in_doubt_after_an_answer(family: Any) -> None:
    """The server's number for the beginning has the text of old calls in it, or not."""
    counter = TokenCounter()
    first = await counter.count("t", family, session(20))
    counter.learn("t", first, await shown_tokens(family, session(20)))
    second = await counter.count("t", family, session(21))
    assert second.anchor is not None
    shown = await shown_tokens(family, session(21))
    assert shown <= second.tokens + second.margin_tokens
    assert upper(second) < 1.1 * shown


async def test_a_number_of_four_times_the_count_is_no_nonsense_with_text_left_out() -> None:
    """A server whose tokenizer makes twice as many may show as much text again as the template does."""
    counter, family = TokenCounter(), LEAVING_OUT[0]
    request = session(10, text=THOUGHT * 60)
    made = await counter.count("t", family, request)
    told = 2 * await shown_tokens(family, request)
    assert told > 4 * made.raw_tokens
    assert counter.take_over_exact("t", made, told)
    assert (await counter.count("t", family, request)).tokens == told


async def test_its_text_is_counted_once_however_often_it_is_sent() -> None:
    """What is left out is remembered as the rest of the prompt."""
    counter, family = TokenCounter(), LEAVING_OUT[0]
    counts = [await counter.count("t", family, session(rounds)) for rounds in (20, 20, 19)]
    assert counts[0].left_out_tokens == counts[1].left_out_tokens > counts[2].left_out_tokens


async def test_text_that_a_server_renders_all_the_same_makes_no_other_text_dear() -> None:
    """Its number says what text takes, not that the text of the next conversation takes four times as much."""
    counter, family = TokenCounter(), LEAVING_OUT[0]
    plain = session(12, text="")
    before = (await counter.count("t", family, plain)).tokens
    for rounds in (6, 9):
        request = session(rounds, text=THOUGHT * 30)
        count = await counter.count("t", family, request)
        counter.learn("t", count, round(1.2 * await shown_tokens(family, request)))
    assert 1.1 * before <= (await counter.count("t", family, plain)).tokens <= 1.3 * before


async def test_tools_that_a_server_leaves_out_make_no_text_cheap() -> None:
    """Prompts with tools take fewer tokens than text by itself, as a summary's; new messages show what text takes."""
    counter, family = TokenCounter(), RENDERING[0]
    tools = ({"type": "function", "function": {"name": "look", "description": THOUGHT * 40, "parameters": {}}},)
    for rounds in (4, 12, 24):
        request = session(rounds)
        told = round(1.7 * (await TokenCounter().count("t", family, request)).tokens)
        counter.learn("t", await counter.count("t", family, replace(request, tools=tools)), told)
    text = THOUGHT * 100
    assert await counter.count_text("t", family, text) >= 1.6 * await TokenCounter().count_text("t", family, text)
