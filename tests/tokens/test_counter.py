"""Tokens of a request: sums, caches, promises, and what the server's numbers teach."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.tokenizers import registry
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens import counter
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
TOOLS: tuple[JsonValue, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            "description": "Reads a file and returns its lines.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for index in range(8)
)


def request(*raw: Mapping[str, JsonValue], tools: tuple[JsonValue, ...] = ()) -> Request:
    return Request(messages=tuple(map(parse_message, raw)), tools=tools)


def user(text: JsonValue) -> dict[str, JsonValue]:
    return {"role": "user", "content": text}


async def count(family: Family, *raw: Mapping[str, JsonValue], tools: tuple[JsonValue, ...] = ()) -> Count:
    return await TokenCounter().count("t", family, request(*raw, tools=tools))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_the_parts_add_up(family: Family) -> None:
    """tokens is the sum of overhead, tools and one size per message."""
    call = {"id": "call_1", "type": "function", "function": {"name": "tool_1", "arguments": '{"path": "a"}'}}
    made = await count(
        family,
        {"role": "system", "content": "You help."},
        user("Read it."),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I should read."},
        {"role": "tool", "tool_call_id": "call_1", "content": PROSE},
        tools=TOOLS,
    )
    assert len(made.sizes) == 4
    # Tools that stand beside the system message may take a token of its share.
    assert all(size > 0 for size in made.sizes[1:])
    assert made.tokens == made.overhead_tokens + made.tools_tokens + sum(made.sizes)
    # Harmony writes schemas as TypeScript, which is shorter.
    assert made.tools_tokens > registry.token_length(family.vocabulary, json.dumps(TOOLS)) / 4


async def test_an_empty_request_costs_the_template() -> None:
    """Without messages and tools only the overhead is left."""
    made = await count(UNKNOWN)
    assert (made.sizes, made.tools_tokens) == ((), 0)
    assert made.tokens == made.overhead_tokens > 0


async def test_gpt_oss_follows_the_harmony_template() -> None:
    """The count is that of the rendered template: 63 tokens around, 4 per message, 2 more for an answer's channel."""
    header = (
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        "Current date: 2026-11-21\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    texts = [("system", header), ("developer", "# Instructions\n\nYou help.\n\n"), ("user", PROSE)]
    # Four special or role tokens around each, three more for `<|channel|>final`, two to start the answer.

    def length(text: str) -> int:
        return registry.token_length("o200k_base", text)

    truth = sum(length(text) + 4 for _, text in texts) + (length(PROSE) + 6) + 4 + length("Go on.") + 2
    made = await count(
        GPT_OSS,
        {"role": "system", "content": "You help."},
        user(PROSE),
        {"role": "assistant", "content": PROSE},
        user("Go on."),
    )
    assert made.exact
    assert made.error_ratio == 0.02
    assert made.tokens == truth


async def test_images_are_not_exact() -> None:
    """Where only an upper limit is known, the count does not claim to be exact; tools are rendered."""
    image: JsonValue = {"type": "image_url", "image_url": {"url": "https://h/x.png"}}
    assert (await count(GPT_OSS, user("x"), tools=TOOLS)).exact
    assert not (await count(family_of("", "llama-2-7b"), user("x"), tools=TOOLS)).exact
    assert not (await count(GPT_OSS, user([image]))).exact


async def test_first_requests_err_high() -> None:
    """A tokenizer that gives 20 % more than ours stays inside the promise from the first request on."""
    made = await count(STAND_IN, user(PROSE * 100))
    plain = registry.token_length("cl100k_base", PROSE * 100)
    assert made.tokens >= plain
    assert made.error_ratio >= 0.25
    assert plain * 1.2 <= made.tokens + made.margin_tokens


async def test_ids_count_where_templates_render_them() -> None:
    """Mistral's template writes the ids of calls and results."""
    result: JsonValue = {"role": "tool", "content": "ok", "tool_call_id": "call_aVeryLongIdentifier0123456789"}
    mistral = family_of("llama", "mistral-7b")
    short = {**result, "tool_call_id": "1"}
    assert (await count(mistral, result)).tokens > (await count(mistral, short)).tokens
    assert (await count(STAND_IN, result)).tokens == (await count(STAND_IN, short)).tokens


async def test_text_counts_as_in_the_messages() -> None:
    """Both ways to count a text give the same, in a thread or not."""
    counter = TokenCounter()
    for text in ("", "short", PROSE * 1000):
        assert await counter.count_text("t", STAND_IN, text) == counter.text_counter("t", STAND_IN)(text)
    assert counter.text_counter("t", STAND_IN)("") == 0


@pytest.mark.slow
async def test_very_long_requests_leave_the_event_loop_alone() -> None:
    """While megabytes are counted, the loop goes on."""
    counter = TokenCounter()
    await counter.count_text("t", STAND_IN, "load")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await counter.count("t", STAND_IN, request(user(PROSE * 20_000)))
    ticking.cancel()
    assert ticks > 5


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


async def test_a_spread_widens_the_promise() -> None:
    """Ratios that disagree make the count the highest of them and the promise twice their spread."""
    counter = TokenCounter()
    asked = request(user(PROSE * 100))
    made = await counter.count("t", STAND_IN, asked)
    for ratio in (0.9, 1.0, 0.95):
        counter.learn("t", made, round(made.raw_tokens * ratio))
    after = await counter.count("t", STAND_IN, request(user(PROSE.replace("brown", "white") * 100)))
    assert after.tokens == pytest.approx(made.raw_tokens, rel=0.01)
    assert after.error_ratio == pytest.approx(0.2, rel=0.02)


async def test_what_was_never_confirmed_keeps_the_wide_promise() -> None:
    """A request ten times as long as any confirmed one may hold other text: its promise is nearly the first one."""
    counter = TokenCounter()
    short = await counter.count("t", STAND_IN, request(user(PROSE * 30)))
    for _ in range(3):
        counter.learn("t", short, round(short.raw_tokens * 0.8))
    long = await counter.count("t", STAND_IN, request(user(PROSE * 300)))
    assert long.tokens * (1 + long.error_ratio) >= long.raw_tokens * 1.15


@pytest.mark.parametrize("ratio", [0.6, 0.7, 0.8, 0.95])
async def test_a_factor_below_one_lets_no_other_text_through(ratio: float) -> None:
    """However often it was seen: the next prompt may be of a kind that the stand-in counts right."""
    counter = TokenCounter()
    for number in range(6):
        made = await counter.count("t", STAND_IN, request(user(f"{number} " + PROSE * (80 + number))))
        counter.learn("t", made, round(made.raw_tokens * ratio))
    other = await counter.count("t", STAND_IN, request(user(PROSE.replace("brown", "white") * 70)))
    assert other.tokens < 1.1 * ratio * other.raw_tokens
    assert other.tokens + other.margin_tokens >= other.raw_tokens


async def test_another_script_does_not_make_english_cheap() -> None:
    """Stand-ins count Chinese up to twice too high; that must not halve the count of English text."""
    counter = TokenCounter()
    chinese = await counter.count("t", STAND_IN, request(user("今天天气很好，我们一起去公园散步吧。" * 200)))
    for _ in range(3):
        assert counter.learn("t", chinese, round(chinese.raw_tokens * 0.5)) is None
    english = await counter.count("t", STAND_IN, request(user(PROSE * 200)))
    assert english.tokens >= english.raw_tokens
    assert english.error_ratio >= 0.25
    again = await counter.count("t", STAND_IN, request(user("今天天气很好，我们一起去公园散步吧。" * 200)))
    assert again.tokens == pytest.approx(chinese.raw_tokens * 0.5, rel=0.02)
    assert not counter.is_suspicious(english, english.tokens)


async def test_a_tiny_prompt_does_not_dominate() -> None:
    """A template's constant on a tiny prompt is added once, not multiplied into long prompts."""
    counter = TokenCounter()
    tiny = await counter.count("t", STAND_IN, request(user("hi")))
    counter.learn("t", tiny, round(tiny.raw_tokens * 3))
    asked = request(user(PROSE * 500))
    long = await counter.count("t", STAND_IN, asked)
    assert long.raw_tokens < long.tokens < long.raw_tokens + 3 * tiny.raw_tokens + 3
    assert long.error_ratio >= 0.25
    counter.learn("t", long, round(long.raw_tokens * 0.9))
    assert (await counter.count("t", STAND_IN, asked)).tokens == pytest.approx(long.raw_tokens * 0.9, rel=0.01)


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


async def test_an_exact_family_that_is_off_is_reported_once() -> None:
    """More than 5 % off from a known template: one deviation per deployment."""
    counter = TokenCounter()
    made = await counter.count("t", GPT_OSS, request(user(PROSE * 100)))
    assert counter.learn("t", made, round(made.raw_tokens * 1.04)) is None
    assert counter.learn("t", made, round(made.raw_tokens * 1.08)) is not None
    assert counter.learn("t", made, round(made.raw_tokens * 1.08)) is None
    assert counter.learn("u", made, round(made.raw_tokens * 0.93)) is not None


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


async def test_upper_limits_raise_no_alarm() -> None:
    """Pictures that cost less than the limit, dropped reasoning, and Chinese text are no sign of a cut prompt."""
    counter = TokenCounter()
    image: JsonValue = {"type": "image_url", "image_url": {"url": "https://h/x.png"}}
    pictures = await counter.count("t", STAND_IN, request(user([image, {"type": "text", "text": PROSE * 100}])))
    assert not counter.is_suspicious(pictures, round(pictures.tokens - STAND_IN.image_tokens))
    thoughts = await counter.count(
        "t", STAND_IN, request(user(PROSE * 100), {"role": "assistant", "content": "x", "reasoning": PROSE * 300})
    )
    assert not counter.is_suspicious(thoughts, round(thoughts.tokens * 0.25))
    chinese = await counter.count("t", STAND_IN, request(user("今天天气很好，我们一起去公园散步吧。" * 200)))
    assert not counter.is_suspicious(chinese, round(chinese.tokens * 0.4))


async def test_tools_that_a_template_leaves_out_raise_no_alarm() -> None:
    """Where tools are only estimated they may take nothing; of the text as much must be there as ever."""
    family = family_of("", "llama-2-7b")
    asked = request(user(PROSE * 100), tools=TOOLS * 8)
    counter = TokenCounter()
    made = await counter.count("t", family, asked)
    assert made.doubtful_tools_tokens > 0.3 * made.raw_tokens
    text = round(made.raw_tokens - made.doubtful_tools_tokens)
    assert not counter.is_suspicious(made, text)
    assert counter.is_suspicious(made, round(text * 0.4))


async def test_reasoning_that_the_template_drops_does_not_make_text_cheap() -> None:
    """A prompt without its old reasoning does not teach that text costs half."""
    counter = TokenCounter()
    thinking = request(user(PROSE * 100), {"role": "assistant", "content": "x", "reasoning": PROSE * 100})
    plain = request(user(PROSE * 100))
    made = await counter.count("t", STAND_IN, thinking)
    truth = round((await counter.count("u", STAND_IN, plain)).raw_tokens)
    assert counter.learn("t", made, truth) is None
    assert (await counter.count("t", STAND_IN, plain)).tokens >= truth * 0.97


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
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "🤖"])},
    optional={
        "content": st.text(st.characters(codec=None), max_size=200) | PARTS | JSON_VALUES,
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


TRANSCRIPTS = Path(os.environ.get("COMPACTION_TRANSCRIPTS") or Path(__file__).parents[3] / "shared" / "transcripts")


@pytest.mark.skipif(not TRANSCRIPTS.is_dir(), reason="the transcripts are not there")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_real_conversations_cost_at_least_their_text(family: Family) -> None:
    """A count lies above the text that all templates render and below twice of all; a second look is the same."""
    for path in sorted(TRANSCRIPTS.glob("*.json")):
        loaded = json.loads(path.read_text())
        counter = TokenCounter()
        asked = request(*loaded["messages"], tools=tuple(loaded["tools"] or ()))
        made = await counter.count("t", family, asked)
        sizes = [registry.token_length(family.vocabulary, message.text) for message in asked.messages]
        # Many templates leave out what an assistant says beside its calls.
        certain = sum(size for size, message in zip(sizes, asked.messages, strict=True) if not message.calls)
        assert certain < made.tokens < 2 * sum(sizes)
        assert await counter.count("t", family, asked) == made


@pytest.mark.parametrize(("chars", "holds_up"), [(1_000_000, True), (1_000_001, False)])
async def test_a_long_prompt_is_hashed_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, chars: int, holds_up: bool
) -> None:
    """A million characters take some ms; what is short is not worth a thread."""
    threads: list[int] = []

    def noting(*_: object) -> tuple[int, ...]:
        threads.append(threading.get_ident())
        return ()

    monkeypatch.setattr(counter, "fingerprints", noting)
    await counter._fingerprints(request(user("x" * chars)), "")
    assert (threads == [threading.get_ident()]) is holds_up
