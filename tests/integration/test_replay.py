"""Real conversations through a proxy, turn by turn: nothing cut, nothing invalid, and what matters still there.

Each cell is a server: how it counts (a tokenizer by a factor, by script, with a template that adds or leaves out), its
context length, and its model's name: one whose vocabulary the proxy knows, or one that nobody knows. In a shared cell
all conversations meet one server, a Chinese one first, so that what one teaches meets the others; otherwise each has a
server of its own. Servers that count otherwise than their model's name promises are tried by `.ci/full` only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pytest

from litellm_compaction.simulator import Model, Simulator, Tokenizer
from tests.integration.app import proxy, serve
from tests.integration.harness import Proxy, lm_studio, write_config
from tests.integration.replay import Replay, Transcript, mean_facts, replay, replay_all, summariser, transcripts

# By name: publisher and architecture. None of them thinks, so that 256 tokens are the least answer.
_MODELS = {
    "glm-4-9b-0414": ("zai-org", "glm4"),
    "qwen2.5-7b-instruct": ("qwen", "qwen2"),
    "meta-llama-3.1-8b-instruct": ("meta", "llama"),
    "harbor-7b": ("nobody", "harbor"),
}
_GLM, _QWEN, _LLAMA, _HARBOR = _MODELS
_ADDED = "You are a helpful assistant of the harbor. Today is Tuesday, the third of November. " * 10
# A question is an answer of one token, which costs the prompt that it asks about: as many for one request as
# docs/limits.md promises, and on the average one for each at most.
_MOST_QUESTIONS = 8
_MOST_QUESTIONS_A_REQUEST = 1.0


def _mixed(seed: int) -> Tokenizer:
    """A tokenizer that is off in several ways at once."""
    chance = random.Random(seed)
    return Tokenizer(
        factor=round(chance.uniform(0.7, 2.0), 2),
        wide_factor=round(chance.uniform(0.6, 1.75), 2),
        message_tokens=chance.randint(0, 12),
        prompt_tokens=chance.choice([0, 0, 50, 400]),
        added_system=chance.choice(["", "", _ADDED]),
        ignores_tools=chance.random() < 0.2,
    )


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
    tokenizer: Tokenizer
    key: str = _GLM
    _: KW_ONLY
    kind: str = "ideal"
    least_facts: float = 0.0
    stream: bool = False
    is_shared: bool = False
    speaks: bool = True
    is_foreign: bool = False
    every: int = 2

    def simulator(self) -> Simulator:
        """A server that counts so."""
        publisher, architecture = _MODELS[self.key]
        model = Model(self.key, publisher=publisher, architecture=architecture, tokenizer=self.tokenizer)
        # LiteLLM takes 3 ms of processor time for a chunk: a summary in some chunks proves as much.
        made = Simulator([model], chunk_tokens=64)
        made.load(self.key, self.window)
        made.sdk.mode = "fine" if self.speaks else "no_upgrade"
        return made

    def group(self, each: Transcript) -> str:
        """The `model_name` of a conversation."""
        return self.name if self.is_shared else f"{self.name}-{each.name}"


def _foreign(name: str, window: int, tokenizer: Tokenizer, key: str, *, is_shared: bool, speaks: bool = False) -> Any:
    cell = Cell(name, window, tokenizer, key, is_shared=is_shared, speaks=speaks, is_foreign=True, every=3)
    return pytest.param(cell, id=name, marks=pytest.mark.full)


_CELLS = [
    Cell("4k", 4096, Tokenizer(), every=3),
    Cell("16k", 16_384, Tokenizer(), least_facts=0.95),
    Cell("x1.2", 8192, Tokenizer(factor=1.2), stream=True, least_facts=0.95),
    Cell("x0.8", 8192, Tokenizer(factor=0.8), least_facts=0.95),
    Cell("dead", 8192, Tokenizer(), stream=True, kind="dead", least_facts=0.50),
    # One of each way to be wrong. Llama 3.1's template leaves out text beside calls, which this server renders;
    # mixed-6 leaves tools out besides, so that its text takes more than its prompts show.
    _foreign("qwen-x1.2", 8192, Tokenizer(factor=1.2), _QWEN, is_shared=False),
    _foreign("harbor-x1.3", 4096, Tokenizer(factor=1.3), _HARBOR, is_shared=False),
    _foreign("llama-x2.0", 8192, Tokenizer(factor=2.0), _LLAMA, is_shared=True),
    _foreign("han", 4096, Tokenizer(wide_factor=1.75), _LLAMA, is_shared=False),
    _foreign("system", 4096, Tokenizer(added_system=_ADDED), _HARBOR, is_shared=True),
    _foreign("no-tools", 8192, Tokenizer(ignores_tools=True), _QWEN, is_shared=True),
    _foreign("mixed-0", 16_384, _mixed(0), _LLAMA, is_shared=True, speaks=True),
    _foreign("mixed-6", 4096, _mixed(6), _LLAMA, is_shared=True),
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

    order = sorted(stage.chosen, key=lambda each: not each.name.startswith("chat_zh"))
    results = [run(each) for each in order] if cell.is_shared else replay_all(run, order)
    print("\n".join(map(str, results)))
    assert [f"{result.name} {cut}" for result in results for cut in result.cut] == []
    assert [problem for result in results for problem in result.invalid] == []
    assert [failure for result in results for failure in result.failed] == []
    assert sum(result.compacted_requests for result in results) > 0
    assert mean_facts(results) >= cell.least_facts
    if not cell.is_foreign:
        assert sum(result.truncated for result in results) == 0
        return
    assert [f"{result.name} {refusal}" for result in results for refusal in result.wrongly_refused] == []
    questions = sum(result.questions for result in results)
    if cell.speaks:
        assert [f"{result.name} {early}" for result in results for early in result.early] == []
        # One short answer confirms a server's first number that would refuse a request; nothing else is asked.
        assert questions <= (1 if cell.is_shared else len(results))
    assert max(result.most_questions for result in results) <= _MOST_QUESTIONS
    assert questions <= _MOST_QUESTIONS_A_REQUEST * sum(result.requests for result in results)
