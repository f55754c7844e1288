"""The strategy matrix: whatever the pruning model answers, promises P1 to P5."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.continuation.request import Partial
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.plan import Level
from litellm_compaction.core.prompts import NO_RESPONSE, UNDERSTOOD
from litellm_compaction.engine import compactor
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.engine.sharing.reservation import SUMMARY_EXTRA_TOKENS
from litellm_compaction.errors import DoesNotFit, SummaryFailed
from litellm_compaction.summarizer import SummaryAnswer
from tests.builders import (
    JsonDict,
    as_bytes,
    assistant,
    broken_promises,
    calls,
    parsed,
    raw_conversations,
    result,
    system,
    user,
)
from tests.core.test_pruning import answers
from tests.engine.bench import SUMMARY, Bench, FakeAsk, sent

STRATEGIES = ["summary", "prune", "handoff"]
KINDS = ["good", "fenced", "thinking", "invalid", "wrong types", "orphans", "echo", "empty", "slow", "500"]
HANDOFF = "### 1. Primary goals and intent\nPort the parser.\n### 7. Immediate next step\nRun the tests."
REFUSAL = "I'm sorry, but I can't help with that."
# Which rung has to come of it, and why it was not the strategy's own.
OWN = ("", "")
EXPECTED: dict[tuple[str, str], tuple[str, str]] = {
    **{("prune", kind): ("summary", "invalid") for kind in ("invalid", "wrong types", "echo")},
    **{(strategy, "invalid"): ("truncate", "refusal") for strategy in ("summary", "handoff")},
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


def plan_for(prompt: str, *, orphans: bool = False) -> str:
    """Drops the older half, shortens the longest of the rest; of calls without their results if told."""
    shown = numbers(prompt)
    older = shown[: len(shown) * 6 // 10]
    drop = [each["n"] for each in older if not (orphans and each["role"] == "tool")]
    long = max(shown[len(older) :], key=lambda each: len(each["content"]))
    shorten = [{"n": long["n"], "text": long["content"][:40]}]
    return json.dumps(
        {"drop": drop, "shorten": shorten, "summary": "The first steps are done; src/parser.py:42 was fixed."}
    )


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
            "invalid": "The older ones may go." if plan else REFUSAL,
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
    """P1 to P3 by `sent`; P4: the next turn sends the same bytes without a call; P5: it shrinks, in few calls.

    Through a real proxy, and in a larger window too, it is shown in `integration/test_strategies.py`.
    """
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
    _looks_right(strategy, event.rung, raw, messages)
    again = await bench.guard(later(raw), window, **limits)
    assert again.action == "reused"
    assert as_bytes(sent(later(raw), again))[: len(messages)] == as_bytes(messages)
    assert bench.last.summary_calls == 0


def _looks_right(strategy: str, level: str, raw: Sequence[JsonDict], messages: Sequence[Message]) -> None:
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


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_long_conversation_is_compacted_again_and_again(strategy: str) -> None:
    """Every turn fits, rounds go on from each other, and turns between them cost no call."""
    bench = Bench(ask=Model(strategy, "good"))
    raw = talk(6000)
    rungs: list[str] = []
    before: list[str] = []
    for turn in range(120):
        raw = [
            *raw,
            calls(f"t{turn}"),
            result(f"t{turn}", f"r{turn} " * 70),
            assistant("ok " * 30),
            user(f"Step {turn}."),
        ]
        prepared = await bench.guard(raw, 8192, strategy=strategy, clear_tool_results=False)
        messages = as_bytes(sent(raw, prepared))
        if prepared.action == "compacted":
            rungs.append(bench.last.rung)
        elif prepared.action == "reused":
            assert messages[: len(before)] == before
        before = messages
    assert rungs.count(strategy) >= len(rungs) * 0.4
    assert 4 <= len(rungs) <= 40
    assert bench.last.round >= len(rungs)
    assert len(bench.ask.prompts) <= 2 * len(rungs)


async def test_edits_come_before_a_pruning() -> None:
    """Rung 1 alone where it does, no matter which strategy."""
    bench = Bench(ask=Model("prune", "good"))
    raw = [system(), user("Read it all.")]
    for number in range(22):
        raw += [calls(f"c{number}", arguments=f'{{"n": {number}}}'), result(f"c{number}", "output " * 180)]
    await bench.guard(raw, strategy="prune")
    assert (bench.last.rung, bench.ask.prompts) == ("edit", [])


async def test_a_pruning_that_gains_too_little_is_not_used() -> None:
    """P5: under 10 % less, the next rung."""

    class Timid(Model):
        def _text(self, prompt: str) -> str:
            return '{"shorten": [{"n": 3, "text": "file 0"}]}' if is_plan_asked(prompt) else SUMMARY

    bench = Bench(ask=Timid("prune", "good"))
    await bench.guard(talk(8192), strategy="prune", clear_tool_results=False)
    assert (bench.last.rung, bench.last.reason, bench.last.summary_calls) == ("summary", "no_gain", 2)
    assert [compaction.level for _, compaction in bench.store.kept] == ["summary"]


async def test_the_pruning_model_is_told_sizes_and_priorities() -> None:
    """Numbered JSON with sizes, the window, what to keep and what may go; the newest messages are not offered."""
    bench = Bench(ask=Model("prune", "good"))
    raw = talk(8192)
    await bench.guard(raw, strategy="prune", clear_tool_results=False)
    prompt = bench.ask.prompts[0]
    shown = numbers(prompt)
    assert [each["n"] for each in shown] == list(range(1, len(shown) + 1))
    assert len(shown) == len(raw) - 1 - 5
    assert all(each["tokens"] > 0 for each in shown)
    assert re.search(r"fills 7\d\d\d of at most 8192 tokens", prompt)
    assert raw[0]["content"] not in prompt
    # In a shared context no more than this is reserved for a summary.
    assert len(prompt) // 4 + bench.ask.max_tokens[0] <= bench.last.tokens_before + SUMMARY_EXTRA_TOKENS
    assert len(bench.ask.messages[0]) == 1
    assert bench.ask.tools == [()]


async def test_an_answer_that_is_carried_over_is_not_pruned() -> None:
    """Its client waits: the summary is asked for at once."""
    bench = Bench(ask=Model("prune", "good"))
    request = Request(messages=parsed(talk(7200)))
    context = bench.context(8192, strategy="prune", clear_tool_results=False)
    prepared = await bench.compactor.continuing.continue_answer(
        request, Partial(text="The answer so far. " * 80), context
    )
    assert prepared.action == "compacted"
    assert bench.last.rung == "summary"
    assert not any(map(is_plan_asked, bench.ask.prompts))


async def test_the_summariser_of_a_handoff_gets_a_whole_history() -> None:
    """A missing result is filled in, and behind results the assistant has understood, in both modes."""
    raw = talk(8192)
    del raw[3]
    raw[-1:] = []
    raw += [user("And?"), calls("open"), result("open", "r"), calls("last"), result("last", "s")]
    for model in (None, 16_384):
        bench = Bench(ask=Model("handoff", "good"))
        models = [bench.pruning_model(bench.ask, window=model)]
        tools = [{"type": "function", "function": {"name": "run"}}]
        await bench.guard(raw, strategy="handoff", clear_tool_results=False, pruning_models=models, tools=tools)
        text = "\n".join(bench.ask.prompts)
        assert NO_RESPONSE in text
        assert UNDERSTOOD in text


def without_results() -> list[JsonDict]:
    """A run in which the client has lost every ninth result, one of them near the end."""
    raw = talk(9000)
    lost = [at for at, message in enumerate(raw) if message["role"] == "tool"]
    for at in reversed([*lost[4::9], lost[-2]]):
        del raw[at]
    return raw


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_lost_result_is_filled_in_for_the_model_that_answers(strategy: str, clear: bool) -> None:
    """Of what is sent every call has a result, as strict templates want it, by every rung; the next turn reuses it."""
    raw = without_results()
    assert any("calls without results" in each for each in broken_promises(parsed(raw), parsed(raw)))
    bench = Bench(ask=Model(strategy, "good"))
    prepared = await bench.guard(raw, strategy=strategy, clear_tool_results=clear)
    messages = sent(raw, prepared)
    assert prepared.action == "compacted"
    assert broken_promises(parsed(raw), messages) == []
    if strategy != "handoff":
        assert any(message.role == "tool" and message.text == NO_RESPONSE for message in messages)
    later = [*raw, assistant("Noted."), user("And?")]
    again = await bench.guard(later, strategy=strategy, clear_tool_results=clear)
    assert again.action == "reused"
    assert sent(later, again)[: len(messages)] == messages


async def test_a_call_that_waits_at_the_very_end_is_the_clients_business() -> None:
    """A result that the model must not take for one is never added where the client has not gone on."""
    for tail, filled in (([calls("x", "y"), result("x", "X")], ["y"]), ([calls("x")], [])):
        raw = [*talk(9000), *tail]
        prepared = await Bench().guard(raw, clear_tool_results=False)
        assert prepared.messages is not None
        assert [each.call_id for each in prepared.messages if each.text == NO_RESPONSE] == filled


async def test_a_pruning_model_is_shown_what_is_missing() -> None:
    """In the line of the call: a line of its own could be chosen."""
    bench = Bench(ask=Model("prune", "good"))
    raw = without_results()
    await bench.guard(raw, strategy="prune", clear_tool_results=False)
    lines = numbers(bench.ask.prompts[0])
    waiting = [line for line in lines if "results" in line]
    assert len(waiting) >= 2
    assert all(line["results"] == {"run": NO_RESPONSE} and line["role"] == "assistant" for line in waiting)
    assert [line["n"] for line in lines] == list(range(1, len(lines) + 1))


async def test_a_failed_handoff_keeps_the_recent_messages() -> None:
    """Nothing was handed over, so the fallback is the ladder's."""
    bench = Bench(ask=Model("handoff", "500"))
    raw = talk(8192)
    prepared = await bench.guard(raw, strategy="handoff", clear_tool_results=False)
    messages = sent(raw, prepared)
    assert [message.raw for message in messages[-5:]] == raw[-5:]
    assert "Last request" not in messages[1].text


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_own_prompt_takes_the_place_of_ours(strategy: str, tmp_path: Path) -> None:
    """With its numbers filled in."""
    file = tmp_path / "prompt.txt"
    file.write_text('In {words} words.{target_tokens} {"drop": []}' if strategy == "prune" else "In {words} words.")
    bench = Bench(ask=Model(strategy, "good"))
    prompt_file = {strategy: str(file)}
    await bench.guard(talk(8192), strategy=strategy, clear_tool_results=False, prompt_file=prompt_file)
    assert bench.last.rung == strategy
    assert re.search(r"In \d+ words\.", bench.ask.prompts[0])
    assert "You write the record" not in bench.ask.prompts[0]


@settings(max_examples=40)
@pytest.mark.parametrize("strategy", ["prune", "handoff"])
@given(raw=raw_conversations(max_turns=10, repeats=60))
async def test_whatever_the_conversation_what_is_sent_is_valid_and_fits(strategy: str, raw: list[JsonDict]) -> None:
    """P1 to P3 over a growing conversation of any shape."""
    bench = Bench(ask=Model(strategy, "good"))
    for end in range(2, len(raw) + 1):
        if raw[end - 1]["role"] == "user" or end == len(raw):
            with contextlib.suppress(DoesNotFit):
                sent(raw[:end], await bench.guard(raw[:end], 4096, strategy=strategy, clear_tool_results=False))


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


async def test_a_pruning_that_does_not_do_is_not_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not sent is not stored: the same request gets the bytes of the summary that came after it again."""

    def is_enough(_work: MeasuredRequest, _level: Level, compaction: Compaction, _guarded: PreparedRequest) -> bool:
        return compaction.level != "prune"

    monkeypatch.setattr(compactor, "is_enough", is_enough)
    bench = Bench(ask=Model("prune", "good"))
    raw = talk(8192)
    first = await bench.guard(raw, strategy="prune", clear_tool_results=False)
    assert [is_plan_asked(prompt) for prompt in bench.ask.prompts] == [True, False]
    assert [kept.level for _, kept in bench.store.kept] == ["summary"]
    again = await bench.guard(raw, strategy="prune", clear_tool_results=False)
    assert as_bytes(sent(raw, again)) == as_bytes(sent(raw, first))
    assert len(bench.ask.prompts) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("model", "has_switch"), [("qwen/qwen3-8b", True), ("qwen/qwen3.5-9b", False)])
async def test_a_model_with_a_word_for_it_is_told_not_to_think(strategy: str, model: str, has_switch: bool) -> None:
    """Behind every prompt for a record, whatever the strategy."""
    bench = Bench(ask=Model(strategy, "good"))
    models = [bench.pruning_model(bench.ask, label=model)]
    await bench.guard(talk(8192), strategy=strategy, clear_tool_results=False, pruning_models=models)
    assert bench.ask.prompts
    assert all(prompt.endswith(" /no_think") is has_switch for prompt in bench.ask.prompts)


@pytest.mark.parametrize("window", [8192, 32_768])
async def test_a_whole_conversation_once_more_is_an_answer_where_it_fits(window: int) -> None:
    """A pruning model with room is given it, and inside its window; where there is none it keeps to a plan."""
    raw = talk(8192)
    kept = {"prunedConversation": [raw[1], *raw[-9:-5]], "summary": "The rest was read."}
    bench = Bench(ask=FakeAsk(json.dumps(kept)))
    models = [bench.pruning_model(bench.ask, window=window)]
    await bench.guard(raw, strategy="prune", clear_tool_results=False, pruning_models=models)
    prompt_tokens, answer_tokens = len(bench.ask.prompts[0]) // 4, bench.ask.max_tokens[0]
    assert prompt_tokens + answer_tokens <= window
    if window > 8192:
        assert answer_tokens > 4000
        assert prompt_tokens + 2 * answer_tokens <= window
        assert bench.last.rung == "prune"
