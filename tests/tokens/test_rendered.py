"""Rendered prompts: what is exact, what falls back, where the tokens of each message are, what is counted again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.tokenizers import encoders
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import token_length, vocabulary
from litellm_compaction.tokens import rendered as counting
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.tokens.prefix import fingerprints
from litellm_compaction.tokens.rendered import Counting

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


def user(text: str) -> dict[str, JsonValue]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: JsonValue) -> dict[str, JsonValue]:
    return {"role": "assistant", "content": text, **more}


def call(call_id: str = "call00001", arguments: str = "{}") -> JsonValue:
    return [{"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}]


def request(messages: Sequence[Mapping[str, JsonValue]], tools: tuple[JsonValue, ...] = ()) -> Request:
    return Request(messages=tuple(map(parse_message, messages)), tools=tools)


def count(family: Family, *messages: Mapping[str, JsonValue], tools: tuple[JsonValue, ...] = ()) -> Count:
    return asyncio.run(TokenCounter().count("t", family, request(messages, tools)))


def test_an_exact_count_keeps_two_per_cent() -> None:
    """The margin of a rendered prompt is 64 tokens or 2 %, before and after the server agreed."""
    counter = TokenCounter()
    asked = request([user(PROSE * 400)])
    made = asyncio.run(counter.count("t", QWEN3, asked))
    assert (made.exact, made.rendered, made.error_ratio) == (True, True, 0.02)
    assert made.margin_tokens == max(64, -(-made.tokens * 2 // 100))
    assert counter.learn("t", made, made.tokens) is None
    again = asyncio.run(counter.count("t", QWEN3, asked))
    assert again.tokens == made.tokens
    assert again.error_ratio == 0.02
    assert again.calibrated


def test_a_server_that_injects_more_is_believed() -> None:
    """Calibration stays on top of exact counts, and says once that the family does not explain the number."""
    counter = TokenCounter()
    asked = request([user(PROSE * 400)])
    made = asyncio.run(counter.count("t", QWEN3, asked))
    told = round(made.tokens * 1.1)
    assert counter.learn("t", made, told) is not None
    assert abs(asyncio.run(counter.count("t", QWEN3, asked)).tokens - told) <= 3


@pytest.mark.parametrize("family", [MISTRAL_V1, NEMO], ids=lambda family: family.template)
def test_a_refused_list_is_estimated_on_the_high_side(family: Family) -> None:
    """Two user messages in a row, which the template refuses, cost at least their text and are not called exact."""
    made = count(family, user(PROSE), user(PROSE))
    assert not made.exact
    assert not made.rendered
    assert made.error_ratio >= 0.15
    assert made.tokens >= 2 * token_length(family.vocabulary, PROSE) + 8


def test_tools_that_a_template_drops_are_estimated() -> None:
    """Nobody knows how the server shows them, so they count as JSON and instructions."""
    plain = count(LLAMA2, user("hi"))
    made = count(LLAMA2, user("hi"), tools=(TOOL,))
    assert made.tools_tokens > 250
    assert made.tokens > plain.tokens + 250
    assert not made.exact


def test_what_a_calibration_learned_of_the_formula_does_not_touch_the_prompt() -> None:
    """A formula that errs 30 % high must not make exact counts 30 % too low."""
    counter = TokenCounter()
    refused, rendered = request([user(PROSE * 50), user(PROSE)]), request([user(PROSE * 50)])
    before = asyncio.run(counter.count("t", MISTRAL_V1, rendered))
    high = asyncio.run(counter.count("t", MISTRAL_V1, refused))
    for _ in range(3):
        counter.learn("t", high, round(high.tokens * 0.7))
    assert asyncio.run(counter.count("t", MISTRAL_V1, rendered)).tokens == before.tokens
    assert asyncio.run(counter.count("t", MISTRAL_V1, refused)).tokens < high.tokens


def test_odd_ids_are_counted_as_nine_digits() -> None:
    """Mistral's template refuses ids as OpenAI writes them; the count goes on, and is not called exact."""
    for call_id, exact in (("call00001", True), ("call_aVeryLongIdentifier0123456789", False)):
        made = count(
            NEMO,
            user("Look."),
            assistant("", tool_calls=call(call_id)),
            {"role": "tool", "tool_call_id": call_id, "content": PROSE},
            tools=(TOOL,),
        )
        assert made.rendered
        assert made.exact is exact
        assert made.error_ratio == (0.02 if exact else 0.05)


def test_arguments_that_are_no_json_are_counted_as_they_are() -> None:
    """llama.cpp refuses them; the count goes on, and is not called exact."""
    made = count(QWEN3, user("x"), assistant("", tool_calls=call(arguments='{"a": ' + PROSE * 10)), user("y"))
    assert made.rendered
    assert not made.exact
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
    assert made.exact
    assert made.tokens == made.overhead_tokens + made.tools_tokens + sum(made.sizes)
    for position, index in ((1, 1), (3, 2), (4, 3), (5, 4)):
        if family is NEMO and position == 5:
            # Its template puts the system message into the last user message.
            continue
        length = token_length(family.vocabulary, texts[index])
        assert 0.6 * length <= made.sizes[position] <= length + 40, (family.template, position)
    assert made.overhead_tokens < 120


def test_a_default_system_prompt_is_nobodys() -> None:
    """What the template adds of its own is overhead, not the first message's."""
    made = count(SMALL, user("hello there, how are you?"))
    assert made.overhead_tokens > 400
    assert made.sizes[0] < 20


def test_reasoning_that_the_template_drops_costs_nothing() -> None:
    """Qwen3 leaves out what was thought before the last user message; the count follows it."""
    with_reasoning = count(QWEN3, user("x"), assistant("y", reasoning_content=PROSE * 50), user("z"))
    without = count(QWEN3, user("x"), assistant("y"), user("z"))
    assert with_reasoning.tokens == without.tokens
    assert with_reasoning.exact


async def test_the_next_turn_counts_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known pieces come from the cache; the new ones are counted at once, in this thread."""
    seen: list[str] = []
    threads: set[str] = set()
    lengths = encoders.TiktokenEncoder.lengths

    def spy(self: encoders.TiktokenEncoder, pieces: Sequence[str]) -> list[int]:
        seen.extend(pieces)
        threads.add(threading.current_thread().name)
        return lengths(self, pieces)

    vocabulary(LLAMA31.vocabulary)
    monkeypatch.setattr(encoders.TiktokenEncoder, "lengths", spy)
    counter = TokenCounter()
    turns = [user(f"{index} {PROSE * 50}") for index in range(20)]
    await counter.count("t", LLAMA31, request(turns))
    assert threading.main_thread().name not in threads
    seen.clear()
    threads.clear()
    second = await counter.count("other", LLAMA31, request([*turns, user("brand new")]))
    assert seen == ["\n\nbrand new"]
    assert threads == {threading.main_thread().name}
    assert second.exact


@pytest.mark.parametrize("step", ["rendering", "counting"])
async def test_a_megabyte_does_not_hold_the_event_loop(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a message of 1 MB is rendered and counted in a thread, other tasks get their turn."""
    counter = TokenCounter()
    await counter.count("t", LLAMA31, request([user("load")]))
    released = threading.Event()
    waited: list[bool] = []

    def held(run: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_run(*arguments: Any) -> Any:
            # Only a loop that runs can release it.
            waited.append(threading.current_thread() is not threading.main_thread() and released.wait(60))
            return run(*arguments)

        return wait_and_run

    if step == "rendering":
        monkeypatch.setattr(counting, "render", held(counting.render))
    else:
        monkeypatch.setattr(encoders.TiktokenEncoder, "lengths", held(encoders.TiktokenEncoder.lengths))
    counted = asyncio.ensure_future(counter.count("t", LLAMA31, request([user(PROSE * 12_000)])))
    asyncio.get_running_loop().call_later(0, released.set)
    assert (await counted).tokens > 200_000
    assert waited == [True]


BIG = {
    "prose": PROSE * 4_000,
    "chinese": "我们在山上看着那只敏捷的棕色狐狸跳过懒狗。" * 8_000,
    "spaces": "x" + " " * 100_000 + "x",
    "base64": "Qk1GAABhc2RmZ2hqa2w7" * 16_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BIG)
@pytest.mark.parametrize("family", [LLAMA31, LLAMA2], ids=lambda family: family.template)
def test_large_texts_are_counted_in_pieces(family: Family, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code gives way after 5 ms; one call of C code does not, so none gets more than takes less.

    How long the longest call is, `benchmarks/tokens/speed.py` tells.
    """
    asked = request([user(BIG[kind])])
    known = vocabulary(family.vocabulary)
    kind_of_encoder = type(known._encoder)
    pieces: list[int] = []
    stretches: list[int] = []

    def spy(self: Any, texts: Sequence[str], run: Any = kind_of_encoder.lengths) -> list[int]:
        pieces.extend(map(len, texts))
        found: list[int] = run(self, texts)
        return found

    class Specials:
        def finditer(self, text: str, first: int, last: int, found: Any = known._specials) -> Any:
            stretches.append(min(last, len(text)) - first)
            return found.finditer(text, first, last)

    monkeypatch.setattr(kind_of_encoder, "lengths", spy)
    monkeypatch.setattr(known, "_specials", Specials())
    made = Counting()._by_prompt_now(family, asked, fingerprints(asked))
    assert made is not None
    assert len(BIG[kind]) <= sum(pieces) < len(BIG[kind]) + 1000
    assert len(BIG[kind]) <= sum(stretches)
    assert max(pieces) <= 4096
    assert max(stretches) < 140_000


FAMILIES = (LLAMA31, LLAMA2, MISTRAL_V1, NEMO, SMALL, QWEN3, GPT_OSS, family_of("phi3", "phi-3.5"))
ODD = st.text(st.characters(codec=None), max_size=60) | st.sampled_from(
    ["<|im_end|>", "</s>", "[INST]", "<|eot_id|><|start_header_id|>", "<think>a</think>b", "\x00", "\ud800", " " * 9000]
)
TURNS = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, ODD),
        st.builds(lambda text, thought: assistant(text, reasoning_content=thought), ODD, ODD),
        st.builds(lambda text: {"role": "system", "content": text}, ODD),
        st.builds(lambda text: assistant("", tool_calls=call(arguments=json.dumps({"a": text}))), ODD),
        st.builds(lambda text: {"role": "tool", "tool_call_id": "call00001", "content": text}, ODD),
    ),
    max_size=6,
)


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(turns=TURNS, family=st.sampled_from(FAMILIES), has_tools=st.booleans())
def test_any_conversation_has_a_count(turns: list[dict[str, Any]], family: Family, has_tools: bool) -> None:
    """Special tokens in texts, surrogates, any order of roles: no exception, nothing negative, parts that add up."""
    made = count(family, *turns, tools=(TOOL,) if has_tools else ())
    assert made.tokens == made.overhead_tokens + made.tools_tokens + sum(made.sizes)
    assert len(made.sizes) == len(turns)
    assert min((made.overhead_tokens, made.tools_tokens, *made.sizes)) >= 0
    assert 0 <= made.allowance_tokens <= made.raw_tokens


@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(
    text=ODD,
    more=st.text(st.characters(categories=["L"]), min_size=1, max_size=50),
    family=st.sampled_from(FAMILIES),
)
def test_words_on_a_new_line_never_lower_the_count(text: str, more: str, family: Family) -> None:
    """Text appended to the last message costs something or nothing."""
    assert count(family, user(f"{text}\n{more}")).tokens >= count(family, user(text)).tokens
