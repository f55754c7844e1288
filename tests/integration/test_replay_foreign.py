"""Real conversations at servers that count otherwise than their model's name promises.

Each cell is a tokenizer (by a factor, by script, by constants, with a template that adds or leaves out), a context
length and a model's name: one whose vocabulary the proxy knows, or one that nobody knows. In a shared cell all
conversations meet one server, a Chinese one first, so that what one teaches meets the others; otherwise each has a
server of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import pytest

from litellm_compaction.simulator import Model, Simulator, Tokenizer
from tests.integration.app import proxy, serve
from tests.integration.harness import Proxy, lm_studio, write_config
from tests.integration.replay import FOLDER, Replay, Transcript, replay, replay_all, summariser, transcripts

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the transcripts are data beside the project: {FOLDER} is absent"),
]

# The others teach nothing else.
_EVERY = 3
# By name: publisher and architecture. None of them thinks, so that 256 tokens are the least answer.
_MODELS = {
    "qwen2.5-7b-instruct": ("qwen", "qwen2"),
    "glm-4-9b-0414": ("zai-org", "glm4"),
    "meta-llama-3.1-8b-instruct": ("meta", "llama"),
    "harbor-7b": ("nobody", "harbor"),
}
_ADDED = "You are a helpful assistant of the harbor. Today is Tuesday, the third of November. " * 10
_TOKENIZERS = {
    "x1.2": Tokenizer(factor=1.2),
    "x1.3": Tokenizer(factor=1.3),
    "x2.0": Tokenizer(factor=2.0),
    "han-1.75": Tokenizer(wide_factor=1.75),
    "system": Tokenizer(added_system=_ADDED),
    "no-tools": Tokenizer(ignores_tools=True),
}
# A question is an answer of one token, which costs the prompt that it asks about: as many for one request as
# docs/limits.md promises, and on the average one for each at most.
_MOST_QUESTIONS = 8
_MOST_QUESTIONS_A_REQUEST = 1.0


def mixed(seed: int) -> Tokenizer:
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
    """One tokenizer behind one name at one context length.

    Attributes:
        is_shared: all conversations meet one server.
        speaks: the server has the protocol of LM Studio's SDKs, by which it counts exactly.
    """

    counted: str
    tokenizer: Tokenizer
    key: str
    window: int
    _: KW_ONLY
    is_shared: bool
    speaks: bool = False

    @property
    def name(self) -> str:
        """For its test and its deployments."""
        servers = f"{'shared' if self.is_shared else 'own'}{'-speaks' if self.speaks else ''}"
        return f"{self.counted}-{self.key.split('-')[0]}-{self.window}-{servers}"

    def simulator(self) -> Simulator:
        """A server that counts so."""
        publisher, architecture = _MODELS[self.key]
        model = Model(self.key, publisher=publisher, architecture=architecture, tokenizer=self.tokenizer)
        # LiteLLM takes 3 ms of processor time for a chunk: a summary in some chunks proves as much.
        made = Simulator([model], chunk_tokens=64)
        made.load(self.key, self.window)
        made.sdk.mode = "fine" if self.speaks else "no_upgrade"
        return made


# One of each way to be wrong that the whole matrix has shown. Llama 3.1's template leaves out text beside calls, which
# this server renders; mixed-6 leaves tools out besides, so that its text takes more than its prompts show.
_CELLS = [
    Cell("x1.2", _TOKENIZERS["x1.2"], "qwen2.5-7b-instruct", 8192, is_shared=False),
    Cell("x1.3", _TOKENIZERS["x1.3"], "harbor-7b", 4096, is_shared=False),
    Cell("x2.0", _TOKENIZERS["x2.0"], "meta-llama-3.1-8b-instruct", 8192, is_shared=True),
    Cell("x2.0", _TOKENIZERS["x2.0"], "qwen2.5-7b-instruct", 8192, is_shared=True),
    Cell("han-1.75", _TOKENIZERS["han-1.75"], "meta-llama-3.1-8b-instruct", 4096, is_shared=False),
    Cell("system", _TOKENIZERS["system"], "harbor-7b", 4096, is_shared=True),
    Cell("no-tools", _TOKENIZERS["no-tools"], "qwen2.5-7b-instruct", 8192, is_shared=True),
    Cell("mixed-0", mixed(0), "meta-llama-3.1-8b-instruct", 16_384, is_shared=True, speaks=True),
    Cell("mixed-6", mixed(6), "meta-llama-3.1-8b-instruct", 4096, is_shared=True),
]


@dataclass
class Stage:
    proxy: Proxy
    chosen: list[Transcript]
    simulators: dict[str, Simulator]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One proxy in front of the servers of all cells."""
    chosen = transcripts()
    folder: Path = tmp_path_factory.mktemp("foreign")
    simulators: dict[str, Simulator] = {}
    models = []
    with ExitStack() as stack:
        for cell in _CELLS:
            for group in dict.fromkeys(_group(cell, each) for each in chosen):
                simulators[group] = cell.simulator()
                base_url = stack.enter_context(serve(simulators[group])).base_url
                models.append(lm_studio(group, cell.key, base_url))
        yield Stage(
            stack.enter_context(proxy(write_config(folder, models, {"ask_server_timeout_s": 30}))), chosen, simulators
        )


@pytest.mark.parametrize("cell", _CELLS, ids=[cell.name for cell in _CELLS])
def test_replay_at_a_foreign_tokenizer(stage: Stage, cell: Cell) -> None:
    """Nothing is cut, nothing refused that fits by the server's own count, and the server is seldom asked."""
    order = sorted(stage.chosen, key=lambda each: not each.name.startswith("chat_zh"))

    def run(each: Transcript) -> Replay:
        group = _group(cell, each)
        simulator = stage.simulators[group]
        simulator.script = summariser("ideal", [fact["text"] for fact in each.facts])
        return replay(stage.proxy, simulator, group, each, stream=False, every=_EVERY)

    results = [run(each) for each in order] if cell.is_shared else replay_all(run, order)
    print(_table(cell, results))
    requests = sum(result.requests for result in results)
    assert [f"{result.name} {cut}" for result in results for cut in result.cut] == []
    assert [problem for result in results for problem in result.invalid] == []
    assert [failure for result in results for failure in result.failed] == []
    assert [f"{result.name} {refusal}" for result in results for refusal in result.wrongly_refused] == []
    if cell.speaks:
        assert [f"{result.name} {early}" for result in results for early in result.early] == []
        # One short answer confirms a server's first number that would refuse a request; nothing else is asked.
        servers = 1 if cell.is_shared else len(results)
        assert sum(result.questions for result in results) <= servers
    assert max(result.most_questions for result in results) <= _MOST_QUESTIONS
    assert sum(result.questions for result in results) <= _MOST_QUESTIONS_A_REQUEST * requests
    assert requests > 0


def _group(cell: Cell, each: Transcript) -> str:
    return cell.name if cell.is_shared else f"{cell.name}-{each.name}"


def _table(cell: Cell, results: list[Replay]) -> str:
    rows = [f"{'':34} requests refused wrongly  cut no room compacted early summaries questions most facts"]
    for each in results:
        refused, cut = f"{each.refused:7} {len(each.wrongly_refused):7}", f"{len(each.cut):4} {each.truncated:7}"
        compacted = f"{each.compacted_requests:9} {len(each.early):5}"
        asked = f"{each.summaries:9} {each.questions:9} {each.most_questions:4}"
        rows.append(f"{each.name:34} {each.requests:8} {refused} {cut} {compacted} {asked} {each.facts:.3f}")
    return "\n".join([f"\n{cell.name}: {cell.tokenizer}"[:300], *rows])
