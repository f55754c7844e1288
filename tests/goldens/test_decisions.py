"""What is decided about sixteen conversations, a line a turn: where a change of any number is felt.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
from tests.builders import JsonDict, assistant, image, parsed, result, system, tools, user
from tests.engine.bench import SUMMARY, Bench, FakeAsk
from tests.integration.bench import edit_plan

_FILE = Path(__file__).parent / "decisions.txt"
_MODELS = ("qwen/qwen3-8b", "meta-llama-3.1-8b-instruct", "openai/gpt-oss-20b", "made-up-7b")
_SYLLABLES = ("ka", "ro", "mi", "ten", "sol", "dur", "ve", "lin", "ga", "po")
_THINGS = ("invoice", "parser", "cache", "ticket", "schema", "Rechnung", "отчёт", "会議", "ログ", "données")
_RULES = (
    "Never touch the folder legacy/.",
    "Always answer in one sentence, please.",
    "Bitte niemals auf prod schreiben.",
    "不要修改配置文件。",
    "From now on the limit is 250 EUR, not 200.",
)


class _Teller:
    """Says things by chance, the same in each run."""

    def __init__(self, seed: str) -> None:
        self.luck = random.Random(seed)

    def word(self) -> str:
        return "".join(self.luck.choices(_SYLLABLES, k=self.luck.randint(1, 4)))

    def sentence(self) -> str:
        value = self.luck.choice([str(self.luck.randint(10, 9999)), f"src/{self.word()}/{self.word()}.py", self.word()])
        words = " ".join(self.word() for _ in range(self.luck.randint(4, 14)))
        return f"{self.luck.choice(_THINGS)} {value} {words}{self.luck.choice('..?!')}"

    def prose(self, sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

    def log(self, lines: int) -> str:
        numbered = (f"{at:04d} ERROR {self.word()}={self.luck.randint(0, 10**6)}" for at in range(lines))
        return "\n".join(numbered)

    def data(self, lines: int) -> str:
        return "".join(self.luck.choices("ABCDEFghijkl0123456789+/", k=60 * lines))

    def rows(self, count: int) -> str:
        return json.dumps([{"id": self.luck.randint(1, 999), self.word(): self.sentence()} for _ in range(count)])

    def code(self, lines: int) -> str:
        body = (f"def {self.word()}(): return {self.luck.random():.3f}" for _ in range(lines))
        return "\n".join(["```python", *body, "```"])

    def anything(self, size: int) -> str:
        return self.luck.choice([self.prose, self.log, self.data, self.rows, self.code])(size)


def _chat(teller: _Teller) -> Iterator[JsonDict]:
    """Rules and questions of a person, some about what was said long before."""
    answers = [teller.prose(2)]
    yield system(f"You help with billing. {_RULES[0]}")
    for turn in range(1_000):
        question = f"What was that about {answers[len(answers) // 3][:60]}?" if turn % 5 == 4 else teller.prose(3)
        answers.append(teller.prose(teller.luck.randint(2, 9)))
        yield user(f"{question} {teller.luck.choice(_RULES)}" if turn % 4 == 1 else question)
        yield assistant(answers[-1])


def _agent(teller: _Teller) -> Iterator[JsonDict]:
    """Tasks and many rounds of tools, some in parallel; results of every kind."""
    yield system(teller.prose(6))
    yield user(f"{teller.prose(4)} {_RULES[2]} {_RULES[3]}")
    for turn in range(1_000):
        ids = [f"call_{turn}_{at}" for at in range(teller.luck.randint(1, 3))]
        functions = [
            {"name": f"tool_{at % 2}", "arguments": json.dumps({"path": teller.word()})} for at in range(len(ids))
        ]
        calls = [{"id": id_, "type": "function", "function": each} for id_, each in zip(ids, functions, strict=True)]
        yield {"role": "assistant", "content": teller.sentence() if turn % 2 else None, "tool_calls": calls}
        yield from (result(id_, teller.anything(teller.luck.randint(1, 16))) for id_ in ids)
        if turn % 6 == 5:
            yield assistant(teller.prose(2))
            yield user(teller.prose(1))


def _pasted(teller: _Teller) -> Iterator[JsonDict]:
    """A person who pastes, and a client that says the same behind every message."""
    reminder = f"<system-reminder>{teller.prose(2)}</system-reminder>"
    for turn in range(1_000):
        rule = _RULES[turn % 5] if turn % 3 == 0 else ""
        yield user(f"{teller.sentence()}\n\n{teller.anything(12)}\n\n{rule}{reminder}")
        yield assistant(f"{teller.prose(2)}\n{teller.code(3)}")


def _pictures(teller: _Teller) -> Iterator[JsonDict]:
    yield system(teller.prose(1))
    for turn in range(1_000):
        shown = [image()] if turn % 3 == 0 else []
        yield {"role": "user", "content": [{"type": "text", "text": teller.prose(2)}, *shown]}
        yield assistant(teller.prose(4))


_TELLS: Mapping[str, Callable[[_Teller], Iterator[JsonDict]]] = {
    "chat": _chat,
    "agent": _agent,
    "pasted": _pasted,
    "pictures": _pictures,
}


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
    luck, kinds = random.Random(1), [*_TELLS]
    for number in range(16):
        tells, window_tokens = kinds[(number + number // 4) % 4], (1536, 2048, 4096, 8192)[number % 4]
        strategy, summaries = luck.choice(("summary", "prune", "handoff")), luck.choice(("written", "failing"))
        yield _Case(number, tells, window_tokens, luck.choice(_MODELS), strategy, summaries)


@pytest.mark.parametrize("case", [*_cases()], ids=str)
async def test_the_decisions_are_as_recorded(case: _Case) -> None:
    """About five turns of one client, whose conversation outgrows its window several times."""
    recorded, lines = _recorded(), [line async for line in _lines(case)]
    if os.environ.get("GOLDENS") == "write":
        recorded = {**recorded, str(case): lines}
        text = "\n".join(line for name in sorted(recorded) for line in [f"== {name}", *recorded[name]])
        _FILE.write_text(f"{text}\n", encoding="utf-8")
    assert lines == recorded[str(case)]


def test_every_recorded_case_is_played() -> None:
    assert [*_recorded()] == [*map(str, _cases())]


def _recorded() -> dict[str, list[str]]:
    text = _FILE.read_text(encoding="utf-8") if _FILE.exists() else ""
    return {name: lines for name, *lines in (part.splitlines() for part in text.split("== ")[1:])}


async def _lines(case: _Case) -> AsyncIterator[str]:
    """A line for each turn; between them a server tells what it has counted, and work ahead comes to its end."""
    originals = Originals(MemoryRows(ttl_s=100, max_bytes=10_000_000), ttl_s=100, secret=lambda: "sk-master")
    ask = FakeAsk(_written if case.summaries == "written" else SummaryFailed("error"))
    bench, messages = Bench(ask=ask, counter=TokenCounter(), originals=originals), list[JsonDict]()
    compactor, told = bench.compactor, _TELLS[case.tells](_Teller(str(case)))
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
