"""Tokens of a request: sums, caches, promises, and what the server's numbers teach."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens.counter import Count, TokenCounter

# Counted with cl100k, whose tokens are not the model's own.
STAND_IN = replace(family_of("glm4", "glm-4"), single_digits=True)
GPT_OSS = family_of("gpt-oss", "gpt-oss-20b")
UNKNOWN = family_of("", "nobody-knows")
FAMILIES = (
    STAND_IN,
    GPT_OSS,
    UNKNOWN,
    family_of("", "llama-3.1-8b"),
    family_of("", "llama-2-7b"),
    family_of("", "mistral-7b-v0.3"),
    family_of("", "mistral-small-3.2"),
    family_of("", "devstral-small-2507"),
    family_of("", "qwen3-8b"),
    family_of("", "deepseek-v3.1"),
    family_of("", "phi-3.5"),
    family_of("", "gpt-4o"),
)
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "


def request(*raw: Mapping[str, JsonValue], tools: tuple[JsonValue, ...] = ()) -> Request:
    return Request(messages=tuple(map(parse_message, raw)), tools=tools)


def user(text: JsonValue) -> dict[str, JsonValue]:
    return {"role": "user", "content": text}


async def count(family: Family, *raw: Mapping[str, JsonValue], tools: tuple[JsonValue, ...] = ()) -> Count:
    return await TokenCounter().count("t", family, request(*raw, tools=tools))


async def test_first_requests_err_high() -> None:
    """A tokenizer that gives 20 % more than ours stays inside the promise from the first request on."""
    made = await count(STAND_IN, user(PROSE * 100))
    plain = registry.token_length("cl100k_base", PROSE * 100)
    assert made.tokens >= plain
    assert made.error_ratio >= 0.25
    assert plain * 1.2 <= made.tokens + made.margin_tokens


async def test_text_counts_as_in_the_messages() -> None:
    """Both ways to count a text give the same, in a thread or not."""
    counter = TokenCounter()
    for text in ("", "short", PROSE * 1000):
        assert await counter.count_text("t", STAND_IN, text) == counter.text_counter("t", STAND_IN)(text)
    assert counter.text_counter("t", STAND_IN)("") == 0


async def test_calibration_narrows_the_promise() -> None:
    """One confirmation gives 10 %, three like ones 3 %, and the count becomes the server's."""
    counter = TokenCounter()
    asked = request(user(PROSE * 100))
    made = await counter.count("t", STAND_IN, asked)
    truth = round(made.raw_tokens * 1.2)
    assert counter.learn("t", made, truth) is None
    # Another conversation of as many tokens: the same one would be taken from its anchor.
    like = request(user(PROSE.replace("brown", "white") * 100))
    assert (await counter.count("another", STAND_IN, like)).raw_tokens == made.raw_tokens
    once = await counter.count("t", STAND_IN, like)
    assert once.calibrated
    assert once.error_ratio == pytest.approx(0.10)
    assert truth <= once.tokens <= truth + 3
    for _ in range(2):
        counter.learn("t", made, truth)
    assert (await counter.count("t", STAND_IN, like)).error_ratio == pytest.approx(0.03)
    assert (await counter.count("another", STAND_IN, asked)) == made


@pytest.mark.parametrize("truth_ratio", [0.2, 4.5, 1000])
async def test_nonsense_is_refused_and_reported(truth_ratio: float) -> None:
    """Ratios that no vocabulary explains are not learned."""
    counter = TokenCounter()
    made = await counter.count("t", STAND_IN, request(user(PROSE * 100)))
    deviation = counter.learn("t", made, round(made.raw_tokens * truth_ratio))
    assert deviation is not None
    assert deviation.ratio == pytest.approx(truth_ratio, rel=0.01)
    assert deviation.expected == round(made.raw_tokens)
    assert await counter.count("t", STAND_IN, request(user(PROSE * 100))) == made


@pytest.mark.parametrize("missing", [0, -1])
async def test_a_missing_number_teaches_nothing(missing: int) -> None:
    """Servers that report no usage are not a deviation."""
    counter = TokenCounter()
    made = await counter.count("t", STAND_IN, request(user("x")))
    assert counter.learn("t", made, missing) is None
    assert not counter.is_suspicious(made, missing)


async def test_a_cut_prompt_is_suspicious_and_never_learned() -> None:
    """A number far below ours means that the server cut the prompt."""
    counter = TokenCounter()
    made = await counter.count("t", STAND_IN, request(user(PROSE * 400)))
    assert counter.is_suspicious(made, round(made.tokens * 0.5))
    assert not counter.is_suspicious(made, round(made.tokens * 0.6))
    assert counter.learn("t", made, round(made.tokens * 0.5)) is not None
    assert not (await counter.count("t", STAND_IN, request(user(PROSE * 400)))).calibrated
    for _ in range(3):
        counter.learn("t", made, round(made.raw_tokens))
    sure = await counter.count("t", STAND_IN, request(user(PROSE * 400)))
    assert counter.is_suspicious(sure, round(sure.tokens * 0.84))
    assert not counter.is_suspicious(sure, round(sure.tokens * 0.86))


JSON_VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "input_audio", "odd"])}, optional={"text": JSON_VALUES}
    )
    | JSON_VALUES,
    max_size=4,
)
ODD = st.sampled_from(
    ["<|im_end|>", "</s>", "[INST]", "<|eot_id|><|start_header_id|>", "<think>a</think>b", "\x00", "\ud800", " " * 9000]
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "🤖"])},
    optional={
        "content": st.text(st.characters(codec=None), max_size=200) | PARTS | JSON_VALUES | ODD,
        "tool_calls": st.lists(JSON_VALUES, max_size=3) | JSON_VALUES,
        "function_call": JSON_VALUES,
        "tool_call_id": JSON_VALUES,
        "name": JSON_VALUES,
        "reasoning_content": JSON_VALUES,
    },
)


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(raw=st.lists(MESSAGES, max_size=5), tools=st.lists(JSON_VALUES, max_size=3), family=st.sampled_from(FAMILIES))
def test_any_request_has_a_count(raw: list[dict[str, JsonValue]], tools: list[JsonValue], family: Family) -> None:
    """Malformed calls, nested parts, odd characters: never an exception, never below zero, parts that add up."""
    made = asyncio.run(count(family, *raw, tools=tuple(tools)))
    assert made.tokens == made.overhead_tokens + made.tools_tokens + sum(made.sizes)
    assert min((made.overhead_tokens, made.tools_tokens, *made.sizes)) >= 0
    assert all(0 <= share <= 1 for share in made.mix)
    assert 0 <= made.allowance_tokens <= made.raw_tokens + 1e-6


@settings(max_examples=settings().max_examples * 8, deadline=None)
@given(
    text=st.text(st.characters(codec=None), max_size=300),
    more=st.text(st.characters(categories=["L"]), min_size=1, max_size=100),
    family=st.sampled_from(FAMILIES),
)
def test_more_text_never_costs_less(text: str, more: str, family: Family) -> None:
    """Words appended on a new line of the last message never lower the count."""
    before = asyncio.run(count(family, user("first"), user(text)))
    after = asyncio.run(count(family, user("first"), user(f"{text}\n{more}")))
    assert after.tokens >= before.tokens
    # Where no special token ends a message, as in Llama 2's template, tokens are shared out by characters.
    assert family.name == "llama2" or abs(after.sizes[0] - before.sizes[0]) <= 2


async def test_deep_json_is_counted() -> None:
    """Nesting deeper than Python's recursion limit is no error."""
    deep: JsonValue = "x"
    for _ in range(5000):
        deep = [deep]
    made = await count(STAND_IN, user([{"type": "odd", "value": deep}]), tools=(deep,))
    assert made.tokens > 0
