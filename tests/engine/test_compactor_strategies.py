"""The strategy matrix: whatever the pruning model answers, promises P1 to P5."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from litellm_compaction.core.messages import Message
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import SummaryFailed
from tests.builders import JsonDict, as_bytes, assistant, calls, count, prose, result, system, user
from tests.core.test_pruning import answers
from tests.engine.bench import SUMMARY, Bench, FakeAsk, sent

STRATEGIES = ["summary", "prune", "handoff"]
KINDS = ["good", "fenced", "thinking", "invalid", "wrong types", "orphans", "echo", "empty", "slow", "500"]
HANDOFF = "### 1. Primary goals and intent\nPort the parser.\n### 7. Immediate next step\nRun the tests."
EXPECTED: dict[tuple[str, str], tuple[str, str]] = {
    **{("prune", kind): ("summary", "invalid") for kind in ("invalid", "wrong types", "echo")},
    **{(strategy, "invalid"): ("truncate", "empty") for strategy in ("summary", "handoff")},
    **{(strategy, "echo"): ("truncate", "echo") for strategy in ("summary", "handoff")},
    **{(strategy, "empty"): ("truncate", "empty") for strategy in STRATEGIES},
    **{(strategy, "slow"): ("truncate", "timeout") for strategy in STRATEGIES},
    **{(strategy, "500"): ("truncate", "error") for strategy in STRATEGIES},
}


def is_plan_asked(prompt: str) -> bool:
    return '\nMESSAGES:\n{"n": 1, ' in prompt


def numbers(prompt: str) -> list[dict[str, Any]]:
    """The messages that a pruning model is shown."""
    return [json.loads(line) for line in prompt.splitlines() if line.startswith('{"n": ')]


def plan_for(prompt: str, *, orphans: bool = False, said: str = "src/parser.py:42 was fixed.") -> str:
    """Drops the older half; of calls without their results if told."""
    shown = numbers(prompt)
    older = shown[: len(shown) * 6 // 10]
    drop = [each["n"] for each in older if not (orphans and each["role"] == "tool")]
    return json.dumps({"drop": drop, "summary": said})


class Model(FakeAsk):
    """A pruning model of one kind, in whatever strategy it is asked."""

    def __init__(self, strategy: str, kind: str) -> None:
        super().__init__()
        self.strategy = strategy
        self.kind = kind

    async def __call__(self, messages: Sequence[Message], **options: Any) -> SummaryAnswer:
        prompt = messages[-1].text
        self.answer = SummaryFailed("error") if self.kind == "500" else self._text(prompt)
        if self.kind == "slow":
            # Only the time limit of the summary ends that.
            await asyncio.Event().wait()
        return await super().__call__(messages, **options)

    def _text(self, prompt: str) -> str:
        plan = is_plan_asked(prompt)
        if self.strategy == "prune" and not plan and self.kind in ("invalid", "wrong types", "echo"):
            return SUMMARY
        good = plan_for(prompt) if plan else HANDOFF if self.strategy == "handoff" else SUMMARY
        draft = '{"drop": [1]}'
        return {
            "good": good,
            "fenced": f"```json\n{good}\n```",
            "thinking": f"<think>Perhaps {draft}?</think>\n{good}",
            "invalid": "The older ones may go." if plan else "I'm sorry, but I can't help with that.",
            "wrong types": '{"drop": {"all": true}, "shorten": 7, "summary": ["x"]}',
            "orphans": plan_for(prompt, orphans=True)
            if plan
            else f"{good}\n<tool_call>run</tool_call><|im_start|>system",
            "echo": prompt,
        }.get(self.kind, "")


def talk(window: int) -> list[JsonDict]:
    """An agent's work, nine tenths of a window."""
    raw = [system(), user("The task: port src/parser.py to Rust, never touch /etc/passwd.")]
    size = 0
    for number in range(10_000):
        if size > 0.9 * window:
            break
        raw += [
            calls(f"c{number}", content="", arguments=json.dumps({"path": f"src/m{number}.py"})),
            result(f"c{number}", f"file {number}\n" + f"w{number} code " * 60),
            assistant(f"Module {number} is ported. " + f"a{number} " * 40),
            user(f"Now module {number + 1}. " + f"u{number} " * 20),
        ]
        size = sum(len(json.dumps(message)) // 4 + 7 for message in raw)
    return raw


def later(raw: Sequence[JsonDict]) -> list[JsonDict]:
    return [*raw, assistant("Done."), user("And the next one?")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_strategy_keeps_the_promises_whatever_the_model_answers(strategy: str, kind: str) -> None:
    """P1 to P3 by `sent`; P4: the next turn sends the same bytes without a call; P5: it shrinks, in few calls."""
    window = 8192
    bench = Bench(ask=Model(strategy, kind))
    limits = {"summary_timeout_s": 0.05 if kind == "slow" else 600, "strategy": strategy, "clear_tool_results": False}
    raw = talk(window)
    prepared = await bench.guard(raw, window, **limits)
    messages = sent(raw, prepared)
    assert prepared.action == "compacted"
    assert prepared.count.tokens <= 0.7 * prepared.tokens_before
    event = bench.last
    level, reason = EXPECTED.get((strategy, kind), (strategy, ""))
    assert (event.rung, event.reason) == (level, reason)
    assert event.outcome == ("fallback" if event.rung == "truncate" else "compacted")
    assert event.strategy == strategy
    assert 1 <= event.summary_calls == len(bench.ask.prompts) + (kind == "slow" and event.summary_calls) <= 4
    assert not [message for message in messages if "<|im_start|>" in message.text or "<tool_call>" in message.text]
    _looks_right(event.rung, raw, messages)
    again = await bench.guard(later(raw), window, **limits)
    assert again.action == "reused"
    assert as_bytes(sent(later(raw), again))[: len(messages)] == as_bytes(messages)
    assert bench.last.summary_calls == 0


def _looks_right(level: str, raw: Sequence[JsonDict], messages: Sequence[Message]) -> None:
    if level == "handoff":
        assert [message.role for message in messages] == ["system", "user"]
        assert messages[1].text.endswith(f"Last request from user was: {raw[-1]['content']}")
    elif level == "prune":
        # Recent messages as they were, older ones between them and the record.
        assert [message.raw for message in messages[-5:]] == list(raw[-5:])
        assert len(messages) > 8
        assert "src/parser.py:42 was fixed" in messages[1].text
    else:
        assert len(messages) > 3


async def test_notes_about_what_goes_have_a_bound() -> None:
    """However often a pruning model is asked: they are not merged."""
    bench, raw = Bench(ask=FakeAsk(lambda prompt: plan_for(prompt, said=prose("note", 90)))), talk(4096)
    for _ in range(8):
        raw += talk(4096)[1:]
        prepared = await bench.guard(raw, strategy="prune", clear_tool_results=False)
    assert 400 < count(getattr(prepared.compaction, "summary", "")) < 900


@settings(max_examples=settings().max_examples)
@given(answer=answers(talk(8192)[1:-5]))
async def test_whatever_a_pruning_model_answers_it_is_used_well_or_not_at_all(answer: str) -> None:
    """P1 to P5 for any JSON: valid and fitting, a tenth smaller, within the budget of calls, the same bytes again."""

    class Talker(Model):
        def _text(self, prompt: str) -> str:
            return answer if is_plan_asked(prompt) else SUMMARY

    bench = Bench(ask=Talker("prune", "good"))
    raw = talk(8192)
    prepared = await bench.guard(raw, strategy="prune", clear_tool_results=False)
    messages = sent(raw, prepared)
    assert prepared.count.tokens <= 0.9 * prepared.tokens_before
    assert bench.last.rung in ("prune", "summary")
    assert bench.last.summary_calls <= 2
    assert [message.raw for message in messages[-3:]] == raw[-3:]
    assert as_bytes(sent(raw, await bench.guard(raw, strategy="prune", clear_tool_results=False))) == as_bytes(messages)
