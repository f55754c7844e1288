"""Tokens of a request: sums, caches, promises, and what the server's numbers teach."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.counter import GeneratedTokens, TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.builders import JsonDict, prose, request_of, user

# Counted with cl100k, whose tokens are not the model's own.
STAND_IN = replace(family_of("glm4", "glm-4"), single_digits=True)
GPT_OSS = family_of("gpt-oss", "gpt-oss-20b")
UNKNOWN = family_of("", "nobody-knows")
MODELS = (
    *("llama-3.1-8b", "llama-2-7b", "mistral-7b-v0.3", "mistral-small-3.2", "devstral-small-2507"),
    *("qwen3-8b", "deepseek-v3.1", "phi-3.5", "gpt-4o"),
)
FAMILIES = (STAND_IN, GPT_OSS, UNKNOWN, *(family_of("", model) for model in MODELS))
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "


async def count(family: Family, *raw: JsonDict, tools: tuple[JsonValue, ...] = ()) -> Estimate:
    return await TokenCounter().count("t", family, request_of(*raw, tools=tools))


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
    counter, tokens = TokenCounter(), []
    for text in ("x", PROSE * 9):
        deep: JsonValue = text
        for _ in range(5000):
            deep = [deep]
        asked = request_of(user([{"type": "odd", "value": deep}]), tools=(deep,))
        tokens.append((await counter.count("t", STAND_IN, asked)).tokens)
    assert 0 < tokens[0] < tokens[1] - 100


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-2-7b", "mistral-nemo", "qwen3-8b", "gpt-oss-20b"])
def test_a_running_answer_costs_what_all_of_it_does(model: str) -> None:
    """Within half a per cent, however it is cut."""
    family, text = family_of("", model), prose("generated", 3000)
    running = GeneratedTokens(TokenCounter().text_counter("t", family))
    for at in range(0, len(text), 7):
        running.add(text[at : at + 7])
    assert running.exact() == pytest.approx(vocabulary(family.vocabulary).lengths([text])[0], rel=0.005)


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


async def test_pictures_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six photos held it up for most of a second."""
    read_in: list[object] = []
    name, ident = "litellm_compaction.tokens.counter.fingerprints", threading.get_ident
    monkeypatch.setattr(name, lambda *_: read_in.append(ident()) or ())
    await count(UNKNOWN, user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 200_000}"}}]))
    assert read_in != [ident()]


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
