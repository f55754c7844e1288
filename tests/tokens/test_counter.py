"""Tokens of a request: sums, caches, promises, and what the server's numbers teach."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens import counter as counting
from litellm_compaction.tokens import prompt as texts
from litellm_compaction.tokens.counter import GeneratedTokens, TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.builders import JsonDict, prose, request_of, user

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


async def count(family: Family, *raw: JsonDict, tools: tuple[JsonValue, ...] = ()) -> Estimate:
    return await TokenCounter().count("t", family, request_of(*raw, tools=tools))


async def test_a_first_interval_holds_what_other_vocabularies_make() -> None:
    """A tokenizer that gives half or twice as many tokens as ours stays inside it from the first request on."""
    made = await count(STAND_IN, user(PROSE * 100))
    plain = registry.vocabulary("cl100k_base").lengths([PROSE * 100])[0]
    assert made.low <= 0.5 * plain
    assert 1.35 * plain <= made.likely < 1.4 * plain
    assert made.high >= 2 * plain


async def test_numbers_narrow_the_interval_of_other_prompts() -> None:
    """Around what was seen: 30 % beside the first two, 15 % from the third on, 8 % from the eighth."""
    counter = TokenCounter()
    ends = []
    for turn in range(9):
        made = await counter.count("t", STAND_IN, request_of(user(f"{turn} {PROSE * 100}")))
        ends.append(made.high / made.own.tokens)
        counter.learn("t", made, round(made.own.tokens * 1.2))
    assert made.tokens == pytest.approx(1.2 * made.own.tokens, rel=0.01)
    assert ends == pytest.approx([2.0, *[1.56] * 2, *[1.38] * 5, 1.296], rel=0.01)
    other = await counter.count("another", STAND_IN, request_of(user(PROSE * 100)))
    assert other.high == pytest.approx(2 * other.own.tokens, abs=2)


@pytest.mark.parametrize("numbers", [(0.4,), (2.5,), (1.0, 2.5), (1.0, 0.4)])
async def test_one_odd_number_moves_no_count_out_of_its_interval(numbers: tuple[float, ...]) -> None:
    """It widens the next one's; of two that disagree the one nearer to our own holds."""
    counter, family = TokenCounter(), family_of("", "qwen3-8b")
    for turn, ratio in enumerate(numbers):
        made = await counter.count("t", family, request_of(user(f"{turn} {PROSE * 60}")))
        counter.learn("t", made, round(ratio * made.own.tokens), is_asked=True)
    after = await counter.count("t", family, request_of(user(f"after {PROSE * 60}")))
    assert after.tokens == pytest.approx(after.own.tokens, rel=0.021)
    assert after.low <= numbers[-1] * after.own.tokens <= after.high


@pytest.mark.parametrize("truth_ratio", [-0.1, 0, 0.2, 4.5, 1000])
async def test_a_number_that_no_vocabulary_explains_teaches_nothing(truth_ratio: float) -> None:
    """Nor does a missing one: servers that report no usage cut nothing."""
    counter = TokenCounter()
    made = await counter.count("t", STAND_IN, request_of(user(PROSE * 100)))
    prompt_tokens = round(made.own.tokens * truth_ratio)
    assert not counter.learn("t", made, prompt_tokens)
    assert truth_ratio > 0 or not counter.is_suspicious(made, prompt_tokens)
    assert await counter.count("t", STAND_IN, request_of(user(PROSE * 100))) == made


async def test_a_cut_prompt_is_suspicious_and_never_learned() -> None:
    """A number far below the least that we expect means that the server cut the prompt."""
    counter, family = TokenCounter(), family_of("", "qwen3-8b")
    made = await counter.count("t", family, request_of(user(PROSE * 400)))
    assert counter.is_suspicious(made, round(made.tokens * 0.8))
    assert not counter.is_suspicious(made, round(made.tokens * 0.9))
    assert not counter.learn("t", made, round(made.tokens * 0.5))
    assert await counter.count("t", family, request_of(user(PROSE * 400))) == made


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
    assert made.low <= made.tokens <= made.likely <= made.high


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
    # Where no special token ends a message, as in Llama 2's and Mistral's templates, characters divide the tokens.
    assert family.name in ("llama2", "mistral") or abs(after.sizes[0] - before.sizes[0]) <= 2


async def test_deep_json_is_counted() -> None:
    """Nesting deeper than Python's recursion limit is no error."""
    deep: JsonValue = "x"
    for _ in range(5000):
        deep = [deep]
    made = await count(STAND_IN, user([{"type": "odd", "value": deep}]), tools=(deep,))
    assert made.tokens > 0


TEXTS = {
    "prose": prose("generated", 3000),
    "code": "\n".join(f"    if (rows[{n}] != nullptr) {{ total += rows[{n}]->size(); }}" for n in range(250)),
    "table": "\n".join(f"| {n} | row {n} | {n * 37 % 101} |" for n in range(400)),
    "emoji": "👩‍💻🇩🇪🙂 " * 400,
}


def streamed(count_text: Callable[[str], int], text: str, steps: Sequence[int]) -> GeneratedTokens:
    """A text that has come in deltas of these sizes."""
    generated, source, position = GeneratedTokens(count_text), random.Random(1), 0
    while position < len(text):
        step = source.choice(steps)
        generated.add(text[position : position + step])
        position += step
    return generated


def test_every_character_is_counted_once() -> None:
    """The counter sees each character exactly once, in pieces of bounded number, whatever the deltas are."""
    seen: list[str] = []

    def counted(text: str) -> int:
        seen.append(text)
        return len(text)

    text = prose("once", 2000)
    generated = streamed(counted, text, [0, 1, 2, 5, 40, 700])
    assert generated.exact() == len(text)
    assert "".join(seen) == text
    # A piece is 256 characters, less the word that it leaves for the next one.
    assert len(seen) <= len(text) / 128 + 1
    assert generated.exact() == len(text)
    assert len("".join(seen)) == len(text)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-2-7b", "mistral-nemo", "qwen3-8b", "gpt-oss-20b"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_family_counts_with_its_own_vocabulary(model: str, text: str) -> None:
    """Text with words costs within half a per cent of what the vocabulary makes of all of it, however it is cut."""
    family = family_of("", model)
    generated = streamed(TokenCounter().text_counter("t", family), text, [1, 2, 5, 9, 40])
    assert generated.exact() == pytest.approx(vocabulary(family.vocabulary).lengths([text])[0], rel=0.005)


async def test_base64_is_never_text() -> None:
    """A picture costs the family's image tokens, however many bytes it has, and other parts lose their data."""
    data = base64.b64encode(bytes(range(256)) * 4000).decode()
    image: JsonValue = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    small = await count(STAND_IN, user([{"type": "text", "text": "What is this?"}, image]))
    assert STAND_IN.image_tokens <= small.sizes[0] < STAND_IN.image_tokens + 50
    assert small.low < 20
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


async def test_a_part_stands_for_all_of_what_no_window_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each text as much in proportion; such a count is not exact."""
    monkeypatch.setattr(counting, "_ALWAYS_COUNTED_CHARS", 10_000)
    family = family_of("", "qwen3-8b")
    asked = request_of({"role": "system", "content": PROSE}, user(PROSE * 2000))
    whole = await TokenCounter().count("t", family, asked)
    made = await TokenCounter().count("t", family, asked, window_tokens=16)
    assert made.sizes == pytest.approx(whole.sizes, rel=0.05, abs=5)
    assert (whole.own.exact, made.own.exact) == (True, False)


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old entries go; counts stay right."""
    monkeypatch.setattr(texts, "_MAX_ENTRIES", 3)
    counter = TokenCounter()
    turns = [user(f"{index}") for index in range(10)]
    first = await counter.count("t", STAND_IN, request_of(*turns))
    assert len(counter._texts._entries) == 3
    assert await counter.count("t", STAND_IN, request_of(*turns)) == first


@pytest.mark.parametrize(("family", "paste"), [(STAND_IN, 150), (family_of("", "llama-3.1-8b"), 900)])
@pytest.mark.parametrize("said", [lambda new: new, lambda _: 1], ids=["what is new", "one"])
async def test_a_server_that_leaves_out_what_it_has_cached_teaches_nothing(
    family: Family, paste: int, said: Callable[[int], int]
) -> None:
    """Its numbers are of the last turn alone; by them a conversation would outgrow its window unseen."""
    counter, messages, before = TokenCounter(), [user(PROSE * 20)], 0
    for turn in range(12):
        count = await counter.count("t", family, request_of(*messages))
        fresh = await TokenCounter().count("t", family, request_of(*messages))
        assert count.high >= fresh.tokens * 0.97
        # As of a server whose window still holds it (`ReplyReader`).
        counter.learn("t", count, said(fresh.tokens - before) if turn else fresh.tokens, is_asked=turn > 0)
        before = fresh.tokens
        messages += [{"role": "assistant", "content": PROSE * 3}, user(f"{turn} {PROSE * (paste if turn == 7 else 9)}")]


async def test_one_number_far_too_high_is_forgotten_with_the_next() -> None:
    """Both cannot be true, and our own count explains the second."""
    counter, family = TokenCounter(), family_of("", "llama-3.1-8b")
    first = [user(PROSE * 40)]
    begun = await counter.count("t", family, request_of(*first))
    counter.learn("t", begun, int(3.5 * begun.tokens))
    second = request_of(*first, {"role": "assistant", "content": PROSE}, user(PROSE))
    own = await TokenCounter().count("t", family, second)
    count = await counter.count("t", family, second)
    assert count.tokens > 2 * own.tokens
    assert not counter.learn("t", count, own.tokens)
    assert (await counter.count("t", family, second)).low <= own.tokens
