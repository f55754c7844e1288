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
