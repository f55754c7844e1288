"""Anchors: what a server counted for a prompt is the base of every count of its conversation."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens.counter import Count, TokenCounter

UNKNOWN = family_of("", "nobody-knows")
GPT_OSS = family_of("gpt-oss", "gpt-oss-20b")
LLAMA31 = family_of("", "llama-3.1-8b")
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "
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
    before = await counted(counter, family, request(*chat(5), tools=(TOOL,)))
    counter.learn("t", before, round(before.raw_tokens) + injected_tokens)
    after = await counted(counter, family, request(*chat(7), tools=(TOOL,)))
    truth = after.raw_tokens + injected_tokens
    # A stand-in's estimate lies in the middle of what is likely; its error covers the rest.
    assert truth * (0.98 if family is UNKNOWN else 1) - 1 <= after.tokens <= truth * 1.1
    assert truth <= after.tokens * (1 + after.error_ratio) + 1
    assert after.tokens == after.overhead_tokens + after.tools_tokens + sum(after.sizes)
    counter.learn("t", after, round(truth))
    again = await counted(counter, family, request(*chat(9), tools=(TOOL,)))
    assert again.tokens == pytest.approx(again.raw_tokens + injected_tokens, rel=0.05)
    # The same request again costs what it did.
    assert (await counted(counter, family, request(*chat(7), tools=(TOOL,)))).tokens == pytest.approx(truth, abs=1)


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
