"""Real conversations replayed turn by turn through a real proxy, as a stateless client resends them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litellm_compaction.core.budget import Budget, margin_tokens
from litellm_compaction.core.conversation import RECORD_TOKENS
from litellm_compaction.core.cut_points import protected_indices
from litellm_compaction.core.messages import parse_message
from litellm_compaction.simulator import ChatCall, Fault, Reply, Simulator, summary_of_facts
from tests.builders import RULES, prose, tool_round, tools
from tests.integration.bench import is_question, is_summary_call, overrun
from tests.integration.harness import Proxy
from tests.integration.validity import problems, searchable

FOLDER = Path(os.environ.get("COMPACTION_TRANSCRIPTS") or Path(__file__).parents[3] / "shared" / "transcripts")

# The least room for an answer, for models that do not think.
ANSWER_TOKENS = 256
_OVERFLOWS = ("overflow", "mid_overflow", "pool_overflow")


@dataclass
class Transcript:
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    facts: list[dict[str, Any]]


@dataclass
class Replay:
    """What came of one transcript at one context length.

    Attributes:
        truncated: requests that were cut, or whose longest answer would have no room (promise P1).
        cut: those of them that were cut, or ended by the window.
        questions: answers of one token, asked for their prompt's count; the most of them for one request.
        wrongly_refused: requests that the proxy refused and that fit by the server's own count.
        early: requests that were compacted below the trigger by the server's own count.
    """

    name: str
    requests: int = 0
    refused: int = 0
    truncated: int = 0
    compacted_requests: int = 0
    summaries: int = 0
    questions: int = 0
    most_questions: int = 0
    wrongly_refused: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kept_facts: list[float] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def facts(self) -> float:
        """Share of the facts seen so far that are still there, mean over all requests that were compacted."""
        return sum(self.kept_facts) / len(self.kept_facts) if self.kept_facts else 1.0


def mean_facts(results: list[Replay]) -> float:
    """Mean over the conversations that were compacted: one that fits whole loses nothing and proves nothing."""
    compacted = [result.facts for result in results if result.kept_facts]
    return sum(compacted) / len(compacted)


def transcripts() -> list[Transcript]:
    """Recorded conversations, which are data beside the project; where these are not there, two of our own."""
    if not FOLDER.is_dir():
        return [_agents_run(), _persons_chat()]
    loaded = [(path.stem, json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
    return [Transcript(name, d["messages"], d.get("tools") or [], d["facts"]) for name, d in loaded]


def _agents_run() -> Transcript:
    """Forty tool rounds of an agent; every fifth result has something to remember."""
    system = {"role": "system", "content": "You repair a warehouse's software. Never write to /etc/warehouse."}
    messages: list[dict[str, Any]] = [system, {"role": "user", "content": "Find out why ports are skipped."}]
    facts = []
    for number in range(40):
        fact = f"port_{number} is skipped because of ticket WH-{4000 + number * 7}"
        found = f"{prose(f'log {number}', 260)}\n{fact if number % 5 == 0 else 'nothing of note'}"
        messages += tool_round("read_log", found, f"call_{number:05}")
        if number % 5 == 0:
            facts.append({"text": f"WH-{4000 + number * 7}", "msg": len(messages) - 1})
    return Transcript("agents_run", messages, tools(3), facts)


def _persons_chat() -> Transcript:
    """Sixty turns of a person who plans a journey and says now and then what must not be forgotten."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Help me to plan a journey by train."}]
    facts = []
    for number in range(60):
        messages.append({"role": "assistant", "content": f"Day {number}: {prose(f'day {number}', 110)}."})
        wish = f"On day {number} I stay at Pension {1200 + number * 11}."
        messages.append({"role": "user", "content": wish if number % 6 == 0 else f"Go on with day {number + 1}."})
        if number % 6 == 0:
            facts.append({"text": f"Pension {1200 + number * 11}", "msg": len(messages) - 1})
    return Transcript("persons_chat", [*messages, {"role": "assistant", "content": "All is planned."}], [], facts)


def summariser(kind: str, facts: list[str]) -> Callable[[ChatCall], Reply | None]:
    """An ideal summariser keeps every fact that it is shown, a dead one answers with an error."""

    def script(call: ChatCall) -> Reply | None:
        if not is_summary_call(call.body):
            return Reply("Understood.")
        if kind == "dead":
            return Reply(fault=Fault("500", "before_first_delta"))
        return Reply(summary_of_facts(call.prompt_text, facts))

    return script


def replay(
    proxy: Proxy, simulator: Simulator, model: str, transcript: Transcript, *, stream: bool, every: int = 1
) -> Replay:
    """Sends every request that the conversation's client has sent, in order.

    Args:
        every: 2 sends every other one, the last in any case.
    """
    result = Replay(transcript.name)
    asked = [index for index, message in enumerate(transcript.messages) if message["role"] == "assistant" and index > 1]
    for index in sorted({*asked[::every], *asked[-1:]}):
        sent = transcript.messages[:index]
        body: dict[str, Any] = {"model": model, "messages": sent, "stream": stream}
        if transcript.tools:
            body["tools"] = transcript.tools
        seen = len(simulator.requests)
        answer = proxy.post(body)
        result.requests += 1
        records = [r for r in simulator.requests[seen:] if r.path == "/v1/chat/completions"]
        result.truncated += sum(bool(overrun(r)) for r in records)
        result.cut += [
            f"{index}: {'summary, ' if is_summary_call(r.body) else ''}{overrun(r)}"
            for r in records
            if r.truncated or r.outcome in _OVERFLOWS
        ]
        result.summaries += sum(is_summary_call(r.body) for r in records)
        questions = sum(is_question(r.body) for r in records)
        result.questions += questions
        result.most_questions = max(result.most_questions, questions)
        if answer.status_code == 400 and "cannot be compacted" in answer.text:
            result.refused += 1
            if least := least_tokens(simulator, sent, transcript.tools):
                result.wrongly_refused.append(f"{index}: {least} tokens would do; {answer.text[:400]}")
        elif answer.status_code != 200:
            result.failed.append(f"{index}: {answer.status_code} {answer.text[:200]}")
        else:
            upstream = next(
                r.body for r in reversed(records) if not is_summary_call(r.body) and not is_question(r.body)
            )
            action = answer.headers.get("x-litellm-compaction")
            if action == "compacted" and (below := _below_trigger(simulator, sent, transcript.tools)):
                result.early.append(f"{index}: {below}")
            if action in ("compacted", "reused"):
                _judge(result, transcript, sent, (upstream or {})["messages"])
    return result


def least_tokens(simulator: Simulator, sent: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int | None:
    """The tokens of the shortest prompt that a request could have become, None where it does not fit either.

    By the server's own count: the request as it came, or its protected messages, with a bare record in place of the
    others. Margin and least answer are those of promise P1 for a count that is exact.
    """
    [instance] = simulator.instances
    protected = protected_indices(tuple(map(parse_message, sent)))
    floor = simulator.count_chat(instance, [sent[index] for index in sorted(protected)], tools)
    if len(protected) < len(sent):
        floor += math.ceil(RECORD_TOKENS * instance.model.counting.factor)
    least = min(floor, simulator.count_chat(instance, sent, tools))
    return least if least + margin_tokens(least, 0.0) + ANSWER_TOKENS <= instance.context_length else None


def _below_trigger(simulator: Simulator, sent: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The tokens and the trigger of a request that need not be compacted by the server's own count, else ""."""
    [instance] = simulator.instances
    tokens = simulator.count_chat(instance, sent, tools)
    budget = Budget(rules=RULES, window_tokens=instance.context_length, floor_tokens=0, error_ratio=0.0)
    return "" if budget.triggers(tokens) else f"{tokens} tokens at a window of {instance.context_length}"


def _judge(result: Replay, transcript: Transcript, sent: list[dict[str, Any]], upstream: list[dict[str, Any]]) -> None:
    result.compacted_requests += 1
    result.invalid += [f"{len(sent)}: {problem}" for problem in problems(sent, upstream)]
    due = [fact["text"] for fact in transcript.facts if fact["msg"] < len(sent)]
    shown = searchable(upstream)
    kept = [fact for fact in due if fact in shown]
    for fact in due:
        if fact not in shown:
            result.lost[fact] = result.lost.get(fact, 0) + 1
    if due:
        result.kept_facts.append(len(kept) / len(due))


def replay_all(run: Callable[[Transcript], Replay], chosen: list[Transcript]) -> list[Replay]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(run, chosen))
