"""Templates that leave out the system message before some ends are told from servers that cut prompts."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.calibration import Calibration
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


@pytest.mark.parametrize("family", LEAVING_OUT, ids=lambda family: family.template)
async def test_it_is_followed_from_the_second_time_on(family: Any) -> None:
    """Requests that end in a tool's result go by others like them, and those of the user by theirs."""
    counter, exact = TokenCounter(), TokenCounter()
    errors: list[float] = []
    for request in session("user", "user", "tool", "user", "tool", "tool", "tool", "user", "tool"):
        truth = (await exact.count("t", family, request)).tokens
        made = await told(counter, request, truth)
        errors.append(made.tokens / truth - 1)
        assert truth <= made.tokens + made.margin_tokens
    # The first of its kind looks like a cut, and so does the second until it is seen.
    assert errors[2] > 0.5
    assert errors[4] > 0.5
    assert max(map(abs, errors[5:])) < 0.03


@pytest.mark.parametrize("family", LEAVING_OUT, ids=lambda family: family.template)
async def test_a_short_one_is_followed_too(family: Any) -> None:
    """Where so little is missing that nobody would think of a cut, only of a number without a cached part."""
    counter, exact = TokenCounter(), TokenCounter()
    kinds = ("user",) * 5 + ("tool", "user") * 4
    errors: list[float] = []
    doubted: list[bool] = []
    for request in session(*kinds, rules=RULES[:1000]):
        truth = (await exact.count("t", family, request)).tokens
        made = await told(counter, request, truth)
        errors.append(abs(made.tokens / truth - 1))
        doubted.append(counter.is_suspicious(made, truth))
    assert not any(doubted)
    tools = errors[5::2]
    assert min(tools[:2]) > 0.08
    assert max(tools[2:]) < 0.04


async def test_a_number_after_others_of_its_role_is_another_matter() -> None:
    """A template that rendered the system message before such an end has not left it out now."""
    counter = TokenCounter()
    requests = session("user", "tool", "tool", "tool", "tool")
    for request in requests[:2]:
        await told(counter, request, round((await counter.count("t", UNKNOWN, request)).raw_tokens))
    for request in requests[2:]:
        made = await counter.count("t", UNKNOWN, request)
        assert not counter.explains("t", made, made.tokens - made.lead_tokens)


async def test_a_prompt_that_is_cut_is_not_taken_for_it() -> None:
    """A server with a smaller window leaves as much of each prompt, whatever that lacks first."""
    counter = TokenCounter()
    requests = session("user", "user", "tool", "tool", "tool", "tool", "tool")
    for request in requests[:2]:
        await told(counter, request, round((await counter.count("t", UNKNOWN, request)).raw_tokens))
    first = await counter.count("t", UNKNOWN, requests[2])
    cut_tokens = first.tokens - first.lead_tokens
    for request in requests[2:]:
        made = await told(counter, request, cut_tokens)
        assert made.tokens > first.tokens - 10
        assert counter.is_suspicious(made, cut_tokens)
        assert not counter.explains("t", made, cut_tokens)


@pytest.mark.parametrize("missing_ratio", [0.0, 0.5, 1.5, 3.0])
async def test_something_else_that_is_missing_explains_nothing(missing_ratio: float) -> None:
    """Only about as much as the system message takes."""
    calibration = Calibration()
    for prompt_tokens in (2000, 3000, 4000):
        assert not calibration.lacks(prompt_tokens, 1000.0, missing_ratio * 1000)
    assert not calibration.lacks(2000, 10.0, 10.0)
    assert not calibration.lacks(2000, 1000.0, 900.0)
    assert not calibration.lacks(2040, 1000.0, 900.0)
    assert calibration.lacks(2200, 1000.0, 1100.0)
    assert calibration.lacks(2000, 1000.0, 900.0)


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
