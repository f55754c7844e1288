"""Templates that leave out the system message before some ends: no count is too low, and no cut is taken for it."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import Count, TokenCounter

UNKNOWN = family_of("", "nobody-knows")
# Their templates render the system message with the last user message, and only if that is the very last one.
LEAVING_OUT = [family_of("llama", "mistral-nemo"), family_of("llama", "mistral-7b-instruct-v0.3")]
RULES = "Be kind to travelers, look flights up before you promise any, and never refund what was not paid. " * 60


def session(*kinds: str, rules: str = RULES) -> list[Request]:
    """One request for each kind, as a stateless client sends them: what a `user` says, or a `tool` has found."""
    raw: list[dict[str, Any]] = [{"role": "system", "content": rules}]
    requests: list[Request] = []
    for index, kind in enumerate(kinds):
        if kind == "tool":
            call = {"id": f"call{index:05d}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            raw += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"Flight {index} leaves at noon. " * 40},
            ]
        else:
            answer = [{"role": "assistant", "content": "Of course. " * 9}] if index else []
            raw += [*answer, {"role": "user", "content": f"And number {index}, please? " * 12}]
        requests.append(Request(messages=tuple(map(parse_message, raw))))
    return requests


async def told(counter: TokenCounter, request: Request, prompt_tokens: int) -> Count:
    """As the engine does it with a reply's usage."""
    made = await counter.count("t", UNKNOWN, request)
    if counter.is_suspicious(made, prompt_tokens):
        counter.explains("t", made, prompt_tokens)
    else:
        counter.learn("t", made, prompt_tokens)
    return made


@pytest.mark.parametrize("rules", [RULES, RULES[:1000]], ids=["long", "short"])
@pytest.mark.parametrize("family", LEAVING_OUT, ids=lambda family: family.template)
async def test_no_count_is_too_low_whatever_comes_last(family: Any, rules: str) -> None:
    """Before such an end a count may have the system message in it; before the user's word it must."""
    counter, exact = TokenCounter(), TokenCounter()
    kinds = ("user", "user", "tool", "user", "tool", "tool", "tool", "user", "tool", "user")
    for request in session(*kinds, rules=rules):
        truth = (await exact.count("t", family, request)).tokens
        made = await told(counter, request, truth)
        assert truth <= made.tokens + made.margin_tokens
        if made.role == "user":
            assert made.tokens < 1.1 * truth or len(request.messages) == 2


async def test_a_number_after_others_of_its_role_is_another_matter() -> None:
    """A template that rendered the system message before such an end has not left it out now."""
    counter = TokenCounter()
    requests = session("user", "tool", "tool", "tool", "tool")
    for request in requests[:2]:
        await told(counter, request, round((await counter.count("t", UNKNOWN, request)).raw_tokens))
    for request in requests[2:]:
        made = await counter.count("t", UNKNOWN, request)
        assert not counter.explains("t", made, made.tokens - made.prefix_tokens)


async def test_a_prompt_that_is_cut_is_not_taken_for_it() -> None:
    """A server with a smaller window leaves as much of each prompt, whatever that lacks first."""
    counter = TokenCounter()
    requests = session("user", "user", "tool", "tool", "tool", "tool", "tool")
    for request in requests[:2]:
        await told(counter, request, round((await counter.count("t", UNKNOWN, request)).raw_tokens))
    first = await counter.count("t", UNKNOWN, requests[2])
    cut_tokens = first.tokens - first.prefix_tokens
    for request in requests[2:]:
        made = await told(counter, request, cut_tokens)
        assert made.tokens > first.tokens - 10
        assert counter.is_suspicious(made, cut_tokens)
        assert not counter.explains("t", made, cut_tokens)


@pytest.mark.parametrize("family", LEAVING_OUT, ids=lambda family: family.template)
async def test_a_number_without_it_is_no_base_for_a_prompt_with_it(family: Any) -> None:
    """A prompt that ends with the user's word has it, though all that is known of its beginning has not.

    Overflows of 34 and 155 tokens in replayed conversations (2026-11-22): a compacted one began with a tool's result.
    """
    counter, exact = TokenCounter(), TokenCounter()
    *before, last = session("user", "tool", "tool", "tool", "user", rules=RULES[:1200])
    for request in before[1:]:
        made = await counter.count("t", UNKNOWN, request)
        counter.take_over_exact("t", made, (await exact.count("t", family, request)).tokens)
    truth = (await exact.count("t", family, last)).tokens
    made = await counter.count("t", UNKNOWN, last)
    assert made.anchor is not None
    assert made.anchor.role == "tool"
    assert truth <= made.tokens + made.margin_tokens
