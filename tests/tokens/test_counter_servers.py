"""Servers that count otherwise than the template says: what it leaves out, what they cut, what their protocol told."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.tokens.known import Protocol
from tests.builders import assistant, request_of, user
from tests.virtual_time import Clock

UNKNOWN = family_of("", "nobody-knows")
# Their templates render the system message with the last user message, and only if that is the very last one.
WITHOUT_SYSTEM = [family_of("llama", "mistral-nemo"), family_of("llama", "mistral-7b-instruct-v0.3")]
RULES = "Be kind to travelers, look flights up before you promise any, and never refund what was not paid. " * 60


def requests(*kinds: str, rules: str = RULES) -> list[Request]:
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
        requests.append(request_of(*raw))
    return requests


async def told(counter: TokenCounter, request: Request, prompt_tokens: int) -> Estimate:
    """As the engine does it with a reply's usage."""
    made = await counter.count("t", UNKNOWN, request)
    counter.learn("t", made, prompt_tokens)
    return made


@pytest.mark.parametrize("rules", [RULES, RULES[:1000]], ids=["long", "short"])
@pytest.mark.parametrize("family", WITHOUT_SYSTEM, ids=lambda family: family.template)
async def test_no_count_is_too_low_whatever_comes_last(family: Any, rules: str) -> None:
    """Before such an end a count may have the system message in it; before the user's word it must."""
    counter, exact = TokenCounter(), TokenCounter()
    kinds = ("user", "user", "tool", "user", "tool", "tool", "tool", "user", "tool", "user")
    for request in requests(*kinds, rules=rules):
        truth = (await exact.count("t", family, request)).tokens
        made = await told(counter, request, truth)
        assert truth <= max(made.likely, made.tokens + 64)


@pytest.mark.parametrize("kinds", [("user", "user"), ("user", "tool")])
async def test_an_answer_that_goes_on_begins_with_what_was_counted(kinds: tuple[str, ...]) -> None:
    """Whoever spoke before it."""
    counter, request = TokenCounter(), requests(*kinds)[-1]
    made = await told(counter, request, prompt_tokens=3000)
    begun = parse_message({"role": "assistant", "content": "It leaves at noon. " * 9})
    again = await counter.count("t", UNKNOWN, Request(messages=(*request.messages, begun)))
    assert made.told is None
    assert again.told is not None
    assert again.told.tokens == 3000


LLAMA31 = family_of("", "llama-3.1-8b")
PROSE = "The quick brown fox jumps over the lazy dog while the others are watching from the hill. "


def chat(turns: int, *, words: int) -> Request:
    return request_of(*((user, assistant)[index % 2](f"{index}: {PROSE * words}") for index in range(turns)))


async def counted(counter: TokenCounter, asked: Request) -> Estimate:
    return await counter.count("t", LLAMA31, asked)


@pytest.mark.parametrize(
    "cut",
    [
        lambda tokens: 8192.0,
        lambda tokens: 8192 - tokens % 700,
        lambda tokens: tokens - 3000,
        lambda tokens: 4096 + tokens % 1000,
        lambda tokens: tokens / 2 - 100 * (tokens % 7),
    ],
    ids=["window", "whole messages", "a fixed piece", "half a window", "by half"],
)
async def test_a_cut_prompt_stays_one(cut: object) -> None:
    """Prompts of growing size that a server cuts never become the measure of others."""
    assert callable(cut)
    counter = TokenCounter()
    for turns in range(11, 41, 2):
        asked = chat(turns, words=50)
        made = await counted(counter, asked)
        prompt_tokens = round(cut(made.own.tokens))
        if prompt_tokens < 0.83 * made.own.tokens:
            assert counter.is_suspicious(made, prompt_tokens)
            counter.learn("t", made, prompt_tokens)
    made = await counted(counter, chat(21, words=50))
    assert made.tokens == pytest.approx(made.own.tokens)


async def test_counts_that_answers_contradict_are_doubted_for_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    """For this deployment only; said once, with both numbers."""
    clock = Clock()
    protocol = Protocol(clock=clock)
    with caplog.at_level(logging.WARNING, "litellm_compaction"):
        for _ in range(2):
            protocol.take("t", 1, 2000)
            assert not protocol.compare("t", "m", 1, 2600)
    assert ["2000" in each.getMessage() and "2600" in each.getMessage() for each in caplog.records] == [True]
    assert (protocol.is_believed("t"), protocol.is_believed("other")) == (False, True)
    clock.now_s += 3599
    assert not protocol.is_believed("t")
    clock.now_s += 1
    assert protocol.is_believed("t")


async def test_an_answer_that_contradicts_a_protocol_ends_what_it_has_told() -> None:
    """Of other prompts of this deployment, too; what answers have told of them stays."""
    counter, asked = TokenCounter(), [chat(turns, words=20) for turns in (3, 5, 7)]
    for each in asked[:2]:
        count = await counted(counter, each)
        counter.take_protocols("t", count, each, round(count.own.tokens))
    for each, ratio in ((asked[2], 1.0), (asked[0], 1.5)):
        count = await counted(counter, each)
        assert counter.learn("t", count, round(ratio * count.own.tokens), is_asked=True)
    assert [(await counted(counter, each)).is_counted for each in asked] == [True, False, True]


async def test_of_another_load_of_a_model_nothing_is_known() -> None:
    """It may be another one of its name. Its first answer tells the ratio, although a protocol has told the number."""
    counter, asked = TokenCounter(), chat(5, words=20)
    for load in (0, 1):
        family = replace(LLAMA31, load=load)
        for is_told in (False, True):
            count = await counter.count("t", family, asked)
            assert count.is_counted is is_told
            counter.take_protocols("t", count, asked, round(count.own.tokens))
        counter.learn("t", count, round(count.own.tokens))
        assert (await counter.count("t", family, chat(9, words=20))).text.is_confirmed
