"""What is decided about sixteen conversations, a line a turn: where a change of any number is felt.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

from litellm_compaction.core.messages import Message, Request, ToolCall
from litellm_compaction.engine import MOST_LOOKUPS, RECALL, Attempts, PreparedRequest
from litellm_compaction.errors import DoesNotFit, SummaryFailed
from litellm_compaction.stores import Originals
from litellm_compaction.stores.sqlite import MemoryRows
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import JsonDict, parsed, tools
from tests.engine.bench import SUMMARY, Bench, FakeAsk
from tests.goldens.tellers import TELLS, Teller, read, recorded
from tests.integration.bench import edit_plan

_FILE = Path(__file__).parent / "decisions.txt"
_MODELS = ("qwen/qwen3-8b", "meta-llama-3.1-8b-instruct", "openai/gpt-oss-20b", "made-up-7b")


class _Case(NamedTuple):
    number: int
    tells: str
    window_tokens: int
    model: str
    strategy: str
    summaries: str

    def __str__(self) -> str:
        return " ".join(map(str, (f"{self.number:02d}", *self[1:])))


def _cases() -> Iterator[_Case]:
    luck, kinds = random.Random(1), ["chat", "agent", "pasted", "pictures"]
    for number in range(16):
        tells, window_tokens = kinds[(number + number // 4) % 4], (1536, 2048, 4096, 8192)[number % 4]
        strategy, summaries = luck.choice(("summary", "prune", "handoff")), luck.choice(("written", "failing"))
        yield _Case(number, tells, window_tokens, luck.choice(_MODELS), strategy, summaries)


@pytest.mark.parametrize("case", [*_cases()], ids=str)
async def test_the_decisions_are_as_recorded(case: _Case) -> None:
    """About five turns of one client, whose conversation outgrows its window several times."""
    lines = [line async for line in _lines(case)]
    assert lines == recorded(_FILE, str(case), lines)


def test_every_recorded_case_is_played() -> None:
    assert [*read(_FILE)] == [*map(str, _cases())]


async def _lines(case: _Case) -> AsyncIterator[str]:
    """A line for each turn; between them a server tells what it has counted, and work ahead comes to its end."""
    originals = Originals(MemoryRows(ttl_s=100, max_bytes=10_000_000), secret=lambda: "sk-master")
    ask = FakeAsk(_written if case.summaries == "written" else SummaryFailed("error"))
    bench, messages = Bench(ask=ask, counter=TokenCounter(), originals=originals), list[JsonDict]()
    compactor, told = bench.compactor, TELLS[case.tells](Teller(str(case)))
    context = bench.context(
        target=bench.target(case.window_tokens, model=case.model),
        strategy=case.strategy,
        keep_originals="compacted",
        carries_calls=True,
        background="idle" if case.number % 3 == 0 else "off",
        may_write_ahead=_always,
    )
    for turn, share in enumerate((1.0, 0.9, 1.5, 2.0, 3.0)):
        chars = 0
        while chars < share * case.window_tokens or messages[-1]["role"] == "assistant":
            messages.append(next(told))
            chars += len(str(messages[-1]))
        ask.prompts.clear()
        request = Request(messages=parsed(messages), tools=tuple(tools(2) if case.tells == "agent" else ()))
        try:
            prepared = await compactor.guard(request, replace(context, attempts=Attempts(summary_calls_left=4)))
        except DoesNotFit as error:
            yield f"refused: {error.needed_tokens} tokens are needed"
            continue
        asked = "".join(f", asked {len(prompt)}" for prompt in ask.prompts)
        yield f"{_told(prepared)}{asked}; {_sent(messages, prepared)}"
        call = ToolCall(id="c", name=RECALL, arguments=json.dumps({"query": str(messages[1]["content"])[:60]}))
        await compactor.recaller.look_up(prepared, "I look.", [call] if turn == 2 else [], MOST_LOOKUPS)
        messages.append(next(told))
        answer = "" if "tool_calls" in messages[-1] else str(messages[-1]["content"])
        count, used_tokens = prepared.count, prepared.count.tokens + prepared.count_text(answer)
        compactor.replies.learn(context, prepared, prompt_tokens=int(count.tokens * 0.9), completion_tokens=9)
        compactor.background.answered(request, context, prepared, answer=answer, used_tokens=used_tokens)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*others, return_exceptions=True)
    yield " ".join(bench.outcomes)


async def _always() -> bool:
    return True


def _written(prompt: str) -> str:
    return edit_plan(prompt, SUMMARY) or f"{SUMMARY}\n### Seen\n{len(prompt)} characters."


def _told(prepared: PreparedRequest) -> str:
    count, limit = prepared.count, prepared.max_output_tokens(None)
    prompt = f"prompt {count.low} to {count.high}, likely {count.tokens}"
    return f"{prepared.action} {prepared.round}: {prompt}, answer {limit}, excerpts {prepared.excerpts}"


def _sent(raw: Sequence[JsonDict], prepared: PreparedRequest) -> str:
    """How many messages go as they came, and the role and length of others."""
    came = set(map(_said, parsed(raw)))
    sent = [f"{each.role} {len(each.text)}" if _said(each) not in came else "" for each in prepared.messages or ()]
    runs = [(name, len([*group])) for name, group in groupby(sent)]
    return ", ".join(f"{count} as they came" if not name else f"{count} of {name}" for name, count in runs) or "all"


def _said(message: Message) -> tuple[object, ...]:
    return message.role, message.text, message.calls, message.call_id
