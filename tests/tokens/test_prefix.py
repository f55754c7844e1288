"""Anchors: what a server counted for a prompt is the base of every count of its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens import prefix
from litellm_compaction.tokens.calibration import PLAIN, Mix
from litellm_compaction.tokens.count import Anchor, most_tokens
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.tokens.prefix import Anchors, fingerprints

UNKNOWN = family_of("", "nobody-knows")
GPT_OSS = family_of("gpt-oss", "gpt-oss-20b")
LLAMA31 = family_of("", "llama-3.1-8b")
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "
CHINESE = "今天天气很好，我们一起去公园散步吧。"
TOOL: JsonValue = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}


def request(*raw: Mapping[str, JsonValue], tools: tuple[JsonValue, ...] = (), choice: JsonValue = None) -> Request:
    return Request(messages=tuple(map(parse_message, raw)), tools=tools, tool_choice=choice)


def chat(turns: int, *, words: int = 20) -> list[dict[str, JsonValue]]:
    return [
        {"role": ("user", "assistant")[index % 2], "content": f"{index}: {PROSE * words}"} for index in range(turns)
    ]


async def counted(counter: TokenCounter, family: Family, asked: Request) -> Count:
    return await counter.count("t", family, asked)


@pytest.mark.parametrize("family", [UNKNOWN, GPT_OSS, LLAMA31], ids=lambda family: family.name)
@pytest.mark.parametrize("injected_tokens", [0, 700])
async def test_the_next_turn_is_the_servers_number_and_the_new_part(family: Family, injected_tokens: int) -> None:
    """What the server adds to every prompt is in the anchor: only the new messages are an estimate."""
    counter = TokenCounter()
    before = await counted(counter, family, request(*chat(5)))
    counter.learn("t", before, round(before.raw_tokens) + injected_tokens)
    after = await counted(counter, family, request(*chat(7)))
    truth = after.raw_tokens + injected_tokens
    # A stand-in's estimate lies in the middle of what is likely; its error covers the rest.
    assert truth * (0.98 if family is UNKNOWN else 1) - 1 <= after.tokens <= truth * 1.1
    assert truth <= after.tokens * (1 + after.error_ratio) + 1
    assert after.tokens == after.overhead_tokens + after.tools_tokens + sum(after.sizes)
    counter.learn("t", after, round(truth))
    again = await counted(counter, family, request(*chat(9)))
    assert again.tokens == pytest.approx(again.raw_tokens + injected_tokens, rel=0.05)
    # The same request again costs what it did.
    assert (await counted(counter, family, request(*chat(7)))).tokens == pytest.approx(truth, abs=1)


async def test_the_first_digits_of_a_conversation_may_each_be_a_token() -> None:
    """In a vocabulary that we do not have, a table may take three times what ours makes of it: there is room."""
    counter, family, talk = TokenCounter(), family_of("", "deepseek-v2"), chat(1)
    before = await counted(counter, family, request(*talk))
    counter.learn("t", before, round(before.raw_tokens))
    digits = "4711081516234299 " * 200
    table: dict[str, JsonValue] = {"role": "user", "content": digits}
    after = await counted(counter, family, request(*talk, {"role": "assistant", "content": "Yes?"}, table))
    assert after.anchor is not None
    assert after.tokens + after.margin_tokens >= before.raw_tokens + len(digits)


@pytest.mark.parametrize(("model", "is_exact"), [("qwen3-8b", True), ("gpt-oss-20b", False)])
async def test_thoughts_of_old_turns_are_counted_until_it_is_known_that_they_go(model: str, is_exact: bool) -> None:
    """A template drops them behind the person's next word; only a prompt as it is rendered shows how much that is."""
    counter, family, look = TokenCounter(), family_of("", model), {"name": "look", "arguments": "{}"}
    call: JsonValue = [{"id": "1", "type": "function", "function": look}]  # type: ignore[dict-item]
    talk: list[dict[str, JsonValue]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "reasoning_content": PROSE * 100, "tool_calls": call},
        {"role": "tool", "tool_call_id": "1", "content": "A fox."},
    ]
    before = await counted(counter, family, request(*talk, tools=(TOOL,)))
    counter.learn("t", before, round(before.raw_tokens))
    talk += [{"role": "assistant", "content": "A fox."}, {"role": "user", "content": "And now?"}]
    after = await counted(counter, family, request(*talk, tools=(TOOL,)))
    assert after.raw_tokens < 200 < 1900 < before.raw_tokens
    assert after.tokens == pytest.approx(after.raw_tokens if is_exact else before.raw_tokens, abs=1)


async def test_what_an_exact_prompt_has_more_is_no_fixed_cost() -> None:
    """A server that counts 1.2 times what the family's vocabulary does: what stays of a prompt takes its own part."""
    counter = TokenCounter()
    before = await counted(counter, LLAMA31, request(*chat(41)))
    counter.learn("t", before, round(before.raw_tokens * 1.2))
    after = await counted(counter, LLAMA31, request(*chat(41)))
    assert after.tokens == pytest.approx(before.raw_tokens * 1.2, abs=1)
    assert after.overhead_tokens <= 1.2 * before.overhead_tokens + len(after.sizes)
    assert after.sizes[0] == pytest.approx(1.2 * before.sizes[0], rel=0.02)


async def test_one_script_says_nothing_of_another() -> None:
    """A server whose Chinese is dear is believed of Chinese only, however well the family's vocabulary is known."""
    counter = TokenCounter()
    chinese = [{"role": "user", "content": "我们明天去港口看船，然后写一份报告。" * 60}]
    first = await counted(counter, LLAMA31, request(*chinese))
    counter.learn("t", first, round(first.raw_tokens * 1.75))
    english = await counted(counter, LLAMA31, request(*chat(5)))
    assert english.tokens == pytest.approx(english.raw_tokens, abs=len(english.sizes))
    assert english.text_ratio == 1.0
    assert not english.calibrated
    again = await counted(counter, LLAMA31, request(*chinese, *chinese))
    assert most_tokens(again) >= 1.7 * again.raw_tokens


async def test_an_anchor_narrows_the_promise_for_its_own_conversation() -> None:
    """One reply makes the next turn nearly certain; another conversation keeps the calibration's 10 %."""
    counter = TokenCounter()
    first = await counted(counter, UNKNOWN, request(*chat(21)))
    assert first.error_ratio >= 0.25
    counter.learn("t", first, round(first.raw_tokens * 0.9))
    assert (await counted(counter, UNKNOWN, request(*chat(23)))).error_ratio < 0.06
    other = [{**turn, "content": f"Other {turn['content']}"} for turn in chat(21)]
    assert (await counted(counter, UNKNOWN, request(*other))).error_ratio >= 0.1


@pytest.mark.parametrize(
    "other",
    [
        request(*chat(7), tools=(TOOL,)),
        request(*chat(7), choice="none"),
        request({"role": "system", "content": "Other."}, *chat(7)),
        request({**chat(1)[0], "name": "Bob"}, *chat(7)[1:]),
    ],
    ids=["tools", "tool_choice", "system", "name"],
)
async def test_another_prompt_has_no_part_in_it(other: Request) -> None:
    """Tools, system message and every field of every message must be the same."""
    counter = TokenCounter()
    first = await counted(counter, LLAMA31, request(*chat(5)))
    counter.learn("t", first, round(first.raw_tokens))
    assert (await counted(counter, LLAMA31, request(*chat(7)))).anchor is not None
    assert (await counted(counter, LLAMA31, other)).anchor is None
    assert (await counter.count("another", LLAMA31, request(*chat(7)))).anchor is None


async def test_a_number_without_the_cached_part_is_no_anchor() -> None:
    """Servers that report only what was not in their cache: far too low is suspicious, less so is kept out."""
    counter = TokenCounter()
    first = await counted(counter, LLAMA31, request(*chat(5)))
    counter.learn("t", first, round(first.raw_tokens))
    # Little new: nearly nothing is reported.
    second = await counted(counter, LLAMA31, request(*chat(7)))
    told = round(second.raw_tokens - first.raw_tokens)
    assert counter.is_suspicious(second, told)
    assert counter.learn("t", second, told) is not None
    assert (await counted(counter, LLAMA31, request(*chat(9)))).tokens >= second.raw_tokens
    # Nearly all is new: the number is 7 % too low.
    longer = request(*chat(5), {"role": "assistant", "content": "x"}, {"role": "user", "content": PROSE * 1500})
    third = await counted(counter, LLAMA31, longer)
    told = round(third.raw_tokens * 0.93)
    assert not counter.is_suspicious(third, told)
    counter.learn("t", third, told)
    assert (await counted(counter, LLAMA31, longer)).tokens == third.tokens
    # The same prompt again, when all of it is cached: the higher number stands.
    counter.learn("t", third, round(third.raw_tokens))
    counter.learn("t", third, round(third.raw_tokens * 0.97))
    assert (await counted(counter, LLAMA31, longer)).tokens == third.tokens


async def test_a_template_that_renders_less_of_old_turns_is_followed_in_the_end() -> None:
    """The first number that is lower than its prefix explains is kept out, the second one in a row stands."""
    counter = TokenCounter()
    asked = request(*chat(9))
    for _ in range(3):
        made = await counted(counter, UNKNOWN, request(*chat(5)))
        counter.learn("t", made, round(made.raw_tokens))
    made = await counted(counter, UNKNOWN, asked)
    told = round(made.tokens * 0.75)
    counter.learn("t", made, told)
    assert (await counted(counter, UNKNOWN, asked)).tokens >= made.tokens - 1
    counter.learn("t", made, told)
    assert (await counted(counter, UNKNOWN, asked)).tokens == told


async def test_an_anchor_far_below_the_calibrated_count_is_not_believed() -> None:
    """Where both differ by more than templates do, the higher one counts."""
    counter = TokenCounter()
    first = await counted(counter, UNKNOWN, request(*chat(2)))
    assert first.tokens < 1024
    counter.learn("t", first, round(first.raw_tokens * 0.5))
    for _ in range(3):
        other = await counted(counter, UNKNOWN, request(*[{**turn, "name": "x"} for turn in chat(40)]))
        counter.learn("t", other, round(other.raw_tokens))
    made = await counted(counter, UNKNOWN, request(*chat(3)))
    assert made.tokens >= made.raw_tokens


async def test_new_text_of_another_script_keeps_the_margin() -> None:
    """English behind a Chinese conversation is not as cheap as Chinese was."""
    counter = TokenCounter()
    chinese = request({"role": "user", "content": CHINESE * 100})
    first = await counted(counter, UNKNOWN, chinese)
    counter.learn("t", first, round(first.raw_tokens * 0.4))
    more = request(
        {"role": "user", "content": CHINESE * 100},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": PROSE * 50},
    )
    made = await counted(counter, UNKNOWN, more)
    truth = first.raw_tokens * 0.4 + (made.raw_tokens - first.raw_tokens)
    assert truth * 0.85 <= made.tokens <= truth * 1.3
    assert truth <= made.tokens + made.margin_tokens


async def test_a_change_of_family_begins_anew() -> None:
    """What was learned with another vocabulary says nothing, as when LM Studio tells the architecture later."""
    counter = TokenCounter()
    first = await counted(counter, UNKNOWN, request(*chat(5)))
    counter.learn("t", first, round(first.raw_tokens * 1.5))
    made = await counted(counter, LLAMA31, request(*chat(5)))
    assert made.tokens == made.raw_tokens


async def test_requests_that_are_no_json_have_no_anchor() -> None:
    """They are counted all the same."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    odd = request({"role": "user", "content": "x"})
    odd = replace(odd, tools=({"odd": {1, 2}},))  # type: ignore[dict-item]
    assert fingerprints(odd) == ()
    assert fingerprints(replace(odd, tools=(deep,))) == ()  # type: ignore[arg-type]
    assert (await counted(TokenCounter(), UNKNOWN, odd)).fingerprint == 0


def test_fingerprints_grow_with_the_conversation() -> None:
    """One entry per message and one for none; a longer conversation begins with the entries of a shorter one."""
    short, long = fingerprints(request(*chat(3))), fingerprints(request(*chat(6)))
    assert (len(short), len(long)) == (4, 7)
    assert long[:4] == short
    assert len(set(long)) == 7


def test_anchors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one goes."""
    monkeypatch.setattr(prefix, "_MAX_ANCHORS", 2)
    anchors = Anchors()
    for number in (1, 2):
        anchors.note("t", "b", number, Anchor(number, 1.0, PLAIN))
    assert anchors.find("t", "b", (0, 1)) is not None
    anchors.note("t", "b", 3, Anchor(3, 1.0, PLAIN))
    assert anchors.find("t", "b", (0, 2)) is None
    assert anchors.find("t", "b", (0, 1, 2)) == Anchor(1, 1.0, PLAIN)


def test_the_rest_has_a_mix_of_its_own() -> None:
    """Ten per cent of the whole and none of the first half are twenty per cent of the rest."""
    anchor = Anchor(100, 100.0, PLAIN)
    assert anchor.new_mix(200.0, Mix(0.1, 0.0)) == Mix(0.2, 0.0)
    assert anchor.new_mix(100.0, Mix(0.1, 0.0)) == Mix(0.1, 0.0)


async def test_a_request_that_is_counted_twice_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hooks look at the same request: the second count is the first one, with what was learned in between."""
    counter = TokenCounter()
    first = await counted(counter, LLAMA31, request(*chat(5)))
    monkeypatch.setattr(counter._counting, "count", None)
    assert await counted(counter, LLAMA31, request(*chat(5))) == first
    counter.learn("t", first, first.tokens + 50)
    assert (await counted(counter, LLAMA31, request(*chat(5)))).tokens == first.tokens + 50
    with pytest.raises(TypeError):
        await counted(counter, LLAMA31, request(*chat(6)))


async def test_what_is_made_of_a_prompt_is_not_promised_by_its_anchor() -> None:
    """A server that counts this conversation low says nothing of another prompt with the same messages in it."""
    counter = TokenCounter()
    other = [{**turn, "content": f"Other {turn['content']}"} for turn in chat(21)]
    for asked, ratio in ((other, 1.0), (chat(21), 0.8)):
        count = await counted(counter, UNKNOWN, request(*asked))
        counter.learn("t", count, round(count.raw_tokens * ratio))
    whole = await counted(counter, UNKNOWN, request(*chat(23)))
    rewritten = await counted(counter, UNKNOWN, request(*chat(23)[2:]))
    assert whole.error_ratio < rewritten.error_ratio <= whole.text_error_ratio
    assert sum(whole.sizes[2:]) < sum(rewritten.sizes) <= whole.text_ratio * sum(whole.sizes[2:]) + len(whole.sizes)


async def test_a_prompt_that_lacks_its_system_message_is_not_gone_on_with() -> None:
    """Mistral Nemo's template leaves the system message out where a tool's result is the last; then it comes back."""
    counter = TokenCounter()
    system = {"role": "system", "content": PROSE * 12}
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, object]] = [system, {"role": "user", "content": PROSE * 60}]
    dropped_tokens = (await counted(TokenCounter(), UNKNOWN, request(system))).raw_tokens - 48

    async def turn(*, lacks_system: bool) -> tuple[Count, int]:
        made = await counted(counter, UNKNOWN, request(*messages))
        truth = round(made.raw_tokens - (dropped_tokens if lacks_system else 0))
        counter.learn("t", made, truth)
        return made, truth

    await turn(lacks_system=False)
    for _ in range(4):
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "call00001", "content": PROSE * 4}]
        made, truth = await turn(lacks_system=True)
    assert made.tokens == pytest.approx(truth, rel=0.1)
    messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": PROSE}]
    made, truth = await turn(lacks_system=False)
    assert made.tokens == pytest.approx(truth, rel=0.05)
    assert truth <= made.tokens + made.margin_tokens


async def test_words_beside_a_call_are_doubted_no_more_than_before_anything_was_known() -> None:
    """Some templates leave them out, which makes a prompt smaller: no reason to keep a second one's room free."""
    counter = TokenCounter()
    begun = await counted(counter, UNKNOWN, request(*chat(5)))
    counter.learn("t", begun, round(begun.raw_tokens))
    call: JsonValue = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": PROSE * 200, "tool_calls": [call]}
    after = await counted(counter, UNKNOWN, request(*chat(5), said))
    new_tokens = after.raw_tokens - begun.raw_tokens
    most_tokens = begun.raw_tokens + new_tokens * (1 + UNKNOWN.error_ratio)
    assert after.raw_tokens <= after.tokens * (1 + after.error_ratio) <= 1.02 * most_tokens
