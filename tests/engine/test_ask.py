"""In which mode a summary is asked for, and what is sent: the server's cache decides, and both modes fit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings

from litellm_compaction.core.messages import Message
from litellm_compaction.engine.context import SummaryAnswer
from tests.builders import JsonDict, assistant, broken_promises, count, raw_conversations, system, user
from tests.engine.bench import Bench, FakeAsk
from tests.virtual_time import in_virtual_time

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def talk(turns: int) -> list[JsonDict]:
    raw = [system(), user("Port src/parser.py.")]
    for turn in range(turns):
        raw += [assistant(f"answer {turn} " + "word " * 150), user(f"question {turn} " + "w " * 40)]
    return raw


def is_appended(asked: tuple[Message, ...]) -> bool:
    return len(asked) > 1 and asked[-1].text.startswith("You write the record")


async def asked_of(bench: Bench, **context: Any) -> tuple[Message, ...]:
    """What the first summary call of a growing conversation sends."""
    for turn in range(60):
        await bench.guard(talk(turn), tools=TOOLS, **context)
        if bench.ask.messages:
            return bench.ask.messages[0]
    raise AssertionError("nothing was asked")


@in_virtual_time
async def test_both_modes_share_one_time_limit() -> None:
    """What the first one used up the second one has not: whoever waits, waits `summary_timeout_s` at most."""
    bench = Bench()
    asked_s: list[float] = []

    class Slow(FakeAsk):
        async def __call__(self, *given: Any, **options: Any) -> SummaryAnswer:
            asked_s.append(asyncio.get_running_loop().time())
            # Within the limit the first time; longer than what is left of it the second.
            await asyncio.sleep(20)
            return await super().__call__(*given, **options)

    bench.ask = Slow()
    bench.ask.calls_tool = True

    await asked_of(bench, summary_timeout_s=30)
    assert asyncio.get_running_loop().time() - asked_s[0] == pytest.approx(30, abs=1)
    assert len(asked_s) == 2
    assert (bench.last.outcome, bench.last.reason) == ("fallback", "timeout")


@settings(max_examples=settings().max_examples * 2 // 3)
@given(raw=raw_conversations(max_turns=10, repeats=60))
async def test_whatever_is_asked_is_valid_and_fits(raw: list[JsonDict]) -> None:
    """P1 and P3 hold for our own calls, too."""
    bench = Bench()
    for end in range(2, len(raw) + 1):
        if raw[end - 1]["role"] == "user":
            await bench.guard(raw[:end], 4096, oversized_user_message="excerpt", clear_tool_results=False)
    for asked, limit in zip(bench.ask.messages, bench.ask.max_tokens, strict=True):
        assert sum(count(message.text) for message in asked) + limit <= 4096
        if is_appended(asked):
            # A client's `null` is sent again as it was sent before.
            assert set(broken_promises(asked, asked)) <= {"null content"}
