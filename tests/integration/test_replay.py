"""Real conversations through a real proxy, turn by turn: nothing cut, nothing invalid, and what matters still there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from litellm_compaction.simulator import Model, Simulator
from tests.integration.app import proxy, serve
from tests.integration.harness import Proxy, lm_studio, write_config
from tests.integration.replay import FOLDER, Replay, Transcript, mean_facts, replay, replay_all, summariser, transcripts

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the transcripts are data beside the project: {FOLDER} is absent"),
]

_MODEL = "glm-4-9b-0414"
_EVERY, _SELDOM = 2, 3


@dataclass(frozen=True)
class Setup:
    """One way to replay everything.

    Attributes:
        least_facts: the mean share of facts that has to survive.
        every: 2 leaves out every other request, as a client does that asks for two tool calls at a time, 3 two of
            three; the smallest window has the most compactions, and the dearest.
    """

    window: int
    factor: float
    stream: bool
    kind: str
    least_facts: float
    every: int = 1

    @property
    def name(self) -> str:
        return f"{self.window}-x{self.factor}-{'stream' if self.stream else 'plain'}-{self.kind}"


_SETUPS = [
    Setup(4096, 1.0, stream=False, kind="ideal", least_facts=0.0, every=_SELDOM),
    Setup(16384, 1.0, stream=False, kind="ideal", least_facts=0.95, every=_EVERY),
    Setup(8192, 1.2, stream=True, kind="ideal", least_facts=0.95, every=_EVERY),
    Setup(8192, 0.8, stream=False, kind="ideal", least_facts=0.95, every=_EVERY),
    Setup(8192, 1.0, stream=True, kind="dead", least_facts=0.50, every=_EVERY),
]


@dataclass
class Stage:
    proxy: Proxy
    simulators: dict[str, Simulator]
    chosen: list[Transcript]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One proxy with a model of its own, on a simulator of its own, for every transcript and setup."""
    chosen = transcripts()
    simulators: dict[str, Simulator] = {}
    models = []
    with ExitStack() as stack:
        for setup in _SETUPS:
            for each in chosen:
                # LiteLLM takes 3 ms of processor time for a chunk: a summary in some chunks proves as much.
                simulator = Simulator(
                    [Model(_MODEL, publisher="zai-org", architecture="glm4", tokens_factor=setup.factor)],
                    chunk_tokens=64,
                )
                simulator.load(_MODEL, setup.window)
                simulator.script = summariser(setup.kind, [fact["text"] for fact in each.facts])
                group = _group(each, setup)
                simulators[group] = simulator
                models.append(lm_studio(group, _MODEL, stack.enter_context(serve(simulator)).base_url))
        running = stack.enter_context(proxy(write_config(tmp_path_factory.mktemp("replay"), models, {})))
        yield Stage(running, simulators, chosen)


@pytest.mark.parametrize("setup", _SETUPS, ids=[setup.name for setup in _SETUPS])
def test_replay(stage: Stage, setup: Setup) -> None:
    """Every request of every client is answered inside the window, with a valid list that still holds the facts."""

    def run(each: Transcript) -> Replay:
        group = _group(each, setup)
        return replay(stage.proxy, stage.simulators[group], group, each, stream=setup.stream, every=setup.every)

    results = replay_all(run, stage.chosen)
    print(_table(setup, results))
    assert sum(result.truncated for result in results) == 0
    assert [problem for result in results for problem in result.invalid] == []
    assert [failure for result in results for failure in result.failed] == []
    assert sum(result.compacted_requests for result in results) > 0
    assert mean_facts(results) >= setup.least_facts


def _group(each: Transcript, setup: Setup) -> str:
    return f"{each.name}-{setup.name}"


def _table(setup: Setup, results: list[Replay]) -> str:
    rows = [f"{'':34} requests refused truncated compacted summaries facts"]
    rows += [
        f"{result.name:34} {result.requests:8} {result.refused:7} {result.truncated:9} "
        f"{result.compacted_requests:9} {result.summaries:9} {result.facts:.3f}"
        for result in results
    ]
    return "\n".join([f"\n{setup.name}: mean facts {mean_facts(results):.3f}", *rows])
