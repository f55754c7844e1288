"""Real conversations through a proxy, turn by turn: nothing cut, nothing invalid, and what matters still there.

Each cell is a server: how it counts, its context length, and its model's name, which the proxy knows or not. That any
foreign tokenizer keeps the promises: `test_properties.py`. Each conversation has a server of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.builders import prose, tool_round, tools
from tests.integration.app import proxy, serve
from tests.integration.bench import is_question, is_summary_call, overrun
from tests.integration.harness import Proxy, lm_studio, write_config
from tests.integration.validity import problems, searchable, text_of
from tests.lmstudio_double import ChatCall, Fault, Model, Reply, Simulator, summary_of_facts

FOLDER = Path(os.environ.get("COMPACTION_TRANSCRIPTS") or Path(__file__).parents[3] / "shared" / "transcripts")

_CLEARED = "Call the tool again if it is needed."
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
        questions: answers of one token, asked for their prompt's count; the most of them for one request.
        cut: those of them that were cut, or ended by the window.
    """

    name: str
    requests: int = 0
    truncated: int = 0
    compacted_requests: int = 0
    questions: int = 0
    most_questions: int = 0
    cut: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kept_facts: list[float] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def facts(self) -> float:
        """Share of the facts seen so far that are still there, mean over all requests that were compacted.

        Those in results that were cleared are left out: which results that are depends on how a server counts.
        """
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
        questions = sum(is_question(r.body) for r in records)
        result.questions += questions
        result.most_questions = max(result.most_questions, questions)
        if answer.status_code == 400 and "cannot be compacted" in answer.text:
            continue
        if answer.status_code != 200:
            result.failed.append(f"{index}: {answer.status_code} {answer.text[:200]}")
        else:
            upstream = next(
                r.body for r in reversed(records) if not is_summary_call(r.body) and not is_question(r.body)
            )
            if answer.headers.get("x-litellm-compaction") in ("compacted", "reused"):
                _judge(result, transcript, sent, (upstream or {})["messages"])
    return result


def _judge(result: Replay, transcript: Transcript, sent: list[dict[str, Any]], upstream: list[dict[str, Any]]) -> None:
    result.compacted_requests += 1
    result.invalid += [f"{len(sent)}: {problem}" for problem in problems(sent, upstream)]
    # A result that gave way to a line can be read again by its own call, as the line says.
    cleared = {each["tool_call_id"] for each in upstream if each["role"] == "tool" and _CLEARED in text_of(each)}
    due = [
        fact["text"]
        for fact in transcript.facts
        if fact["msg"] < len(sent) and sent[fact["msg"]].get("tool_call_id") not in cleared
    ]
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


# By name: publisher and architecture. None of them thinks, so that 256 tokens are the least answer.
_MODELS = {
    "glm-4-9b-0414": ("zai-org", "glm4"),
    "harbor-7b": ("nobody", "harbor"),
}
_GLM, _HARBOR = _MODELS
# A question is an answer of one token, which costs the prompt that it asks about: as many for one request as
# docs/limits.md promises, and on the average one for each at most.
_MOST_QUESTIONS = 8
_MOST_QUESTIONS_A_REQUEST = 1.0


@dataclass(frozen=True)
class Cell:
    """One kind of server.

    Attributes:
        kind: of the summariser.
        least_facts: the mean share of facts that has to survive.
        every: 2 leaves out every other request, as a client does that asks for two tool calls at a time.
        speaks: the server has the protocol of LM Studio's SDKs, by which it counts exactly.
    """

    name: str
    window: int
    factor: float
    key: str = _GLM
    _: KW_ONLY
    kind: str = "ideal"
    least_facts: float = 0.0
    stream: bool = False
    speaks: bool = True
    every: int = 2

    def simulator(self) -> Simulator:
        """A server that counts so."""
        publisher, architecture = _MODELS[self.key]
        model = Model(self.key, publisher=publisher, architecture=architecture, tokens_factor=self.factor)
        # LiteLLM takes 3 ms of processor time for a chunk: a summary in some chunks proves as much.
        made = Simulator([model], chunk_tokens=64)
        made.load(self.key, self.window)
        made.sdk.mode = "fine" if self.speaks else "no_upgrade"
        return made

    def group(self, each: Transcript) -> str:
        """The `model_name` of a conversation."""
        return f"{self.name}-{each.name}"


_CELLS = [
    Cell("4k", 4096, 1.0, every=3),
    Cell("16k", 16_384, 1.0, least_facts=0.95),
    Cell("x1.2", 8192, 1.2, stream=True, least_facts=0.95),
    Cell("x0.8", 8192, 0.8, least_facts=0.95),
    Cell("dead", 8192, 1.0, stream=True, kind="dead", least_facts=0.50),
    pytest.param(Cell("foreign", 4096, 1.3, _HARBOR, speaks=False, every=3), marks=pytest.mark.full),
]


@dataclass
class Stage:
    proxy: Proxy
    chosen: list[Transcript]
    simulators: dict[str, Simulator]


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One proxy in front of the servers of all cells that are asked."""
    items = [item for item in request.session.items if item.path == request.path]
    cells: list[Cell] = [item.callspec.params["cell"] for item in items if isinstance(item, pytest.Function)]
    chosen = transcripts()
    simulators: dict[str, Simulator] = {}
    models = []
    with ExitStack() as stack:
        for cell in cells:
            for group in dict.fromkeys(map(cell.group, chosen)):
                simulators[group] = cell.simulator()
                models.append(lm_studio(group, cell.key, stack.enter_context(serve(simulators[group])).base_url))
        config = write_config(tmp_path_factory.mktemp("replay"), models, {"ask_server_timeout_s": 30})
        yield Stage(stack.enter_context(proxy(config)), chosen, simulators)


@pytest.mark.parametrize("cell", _CELLS, ids=lambda cell: cell.name)
def test_replay(stage: Stage, cell: Cell) -> None:
    """Every request is answered inside the window, with a valid list that still holds the facts, and few questions."""

    def run(each: Transcript) -> Replay:
        simulator = stage.simulators[cell.group(each)]
        simulator.script = summariser(cell.kind, [fact["text"] for fact in each.facts])
        return replay(stage.proxy, simulator, cell.group(each), each, stream=cell.stream, every=cell.every)

    results = replay_all(run, stage.chosen)
    print("\n".join(map(str, results)))
    assert [f"{result.name} {cut}" for result in results for cut in result.cut] == []
    assert [problem for result in results for problem in result.invalid] == []
    assert [failure for result in results for failure in result.failed] == []
    assert sum(result.compacted_requests for result in results) > 0
    assert mean_facts(results) >= cell.least_facts
    if not cell.speaks:
        assert max(result.most_questions for result in results) <= _MOST_QUESTIONS
        questions = sum(result.questions for result in results)
        assert questions <= _MOST_QUESTIONS_A_REQUEST * sum(result.requests for result in results)
        return
    assert sum(result.truncated for result in results) == 0
