"""A proxy in front of one simulator per model group, and what these simulators saw.

Every bench watches promise P1 in all its simulators; the fixture in `conftest.py` asks for the findings after each
test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from tests.integration import app
from tests.integration.harness import CHAT, Proxy, proxy, write_config
from tests.integration.validity import problems
from tests.lmstudio_double import ChatCall, Model, Reply, RequestRecord, Simulator, serve

KEY = "glm-4-9b-0414"
SUMMARY = "### Current state\nEverything that was decided so far is kept."
_INSTRUCTION = "You write the record"
# The keys that they know.
AUTH = {"custom_auth": "identities.user_api_key_auth"}
_BESIDE = Path(__file__).parent / "beside_config"

Script = Callable[[ChatCall], "Reply | None"]
OPEN: list[Bench] = []


def is_summary_call(body: Mapping[str, Any] | None) -> bool:
    """Whether the newest message asks for a record: alone, or behind the conversation itself (append mode)."""
    messages = (body or {}).get("messages") or [{}]
    return str(messages[-1].get("content", "")).startswith(_INSTRUCTION)


def is_question(body: Mapping[str, Any] | None) -> bool:
    """Whether the proxy only asks what a prompt counts: one token of answer, to more than what loads a model."""
    asked = body or {}
    loads = asked.get("messages") == [{"role": "user", "content": "."}] and not asked.get("tools")
    return asked.get("max_tokens") == 1 and not loads


def edit_plan(prompt: str, said: str) -> str:
    """An edit plan for the messages that a pruning prompt shows, "" where a prompt asks for none.

    It drops the older ones, of which it has `said` so much.
    """
    shown = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"n": ')]
    if not shown:
        return ""
    older = shown[: len(shown) * 6 // 10]
    drop = [each["n"] for each in older]
    return json.dumps({"drop": drop, "summary": said})


def answers(summary: Reply | None = None, reply: Reply | None = None) -> Script:
    """A model that gives `summary` to the summariser's prompt and `reply` to everything else."""

    def script(call: ChatCall) -> Reply:
        if is_summary_call(call.body):
            return summary or Reply(SUMMARY)
        return reply or Reply("Understood.")

    return script


@dataclass(frozen=True)
class Group:
    """A `model_name` with one deployment on its own simulator, which has the settings of that name.

    A `window` of None leaves the model unloaded; so many `slots` fill it, None for as many as LM Studio gives.
    `guarded` says whether promise P1 holds for it, `speaks` whether its server has the protocol of LM Studio's SDKs.
    """

    name: str
    window: int | None = 8192
    _: KW_ONLY
    slots: int | None = None
    factor: float = 1.0
    key: str = KEY
    provider: str = "lm_studio"
    architecture: str = "glm4"
    compaction: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    guarded: bool = True
    simulator: Mapping[str, Any] = field(default_factory=dict)
    speaks: bool = True

    def make(self) -> Simulator:
        model = Model(self.key, publisher="zai-org", architecture=self.architecture, tokens_factor=self.factor)
        made = Simulator([model], **self.simulator)
        if not self.speaks:
            made.sdk.mode = "no_upgrade"
        made.script = answers()
        if self.window is not None:
            made.load(self.key, self.window, parallel=self.slots)
        return made

    def entry(self, base_url: str) -> dict[str, Any]:
        params = {"model": f"{self.provider}/{self.key}", "api_base": f"{base_url}/v1", "api_key": "k", **self.params}
        entry: dict[str, Any] = {"model_name": self.name, "litellm_params": params}
        if self.compaction:
            entry["model_info"] = {"compaction": dict(self.compaction)}
        return entry


@dataclass
class Watch:
    """What one simulator has seen since the watch began."""

    simulator: Simulator
    since: int

    @property
    def records(self) -> list[RequestRecord]:
        return self.simulator.requests[self.since :]

    @property
    def chats(self) -> list[RequestRecord]:
        """What clients asked."""
        calls = [record for record in self.records if record.path == CHAT]
        return [record for record in calls if not is_summary_call(record.body) and not is_question(record.body)]

    def records_of(self, path: str) -> list[RequestRecord]:
        """What came on another route."""
        return [record for record in self.records if record.path == path]

    @property
    def questions(self) -> list[RequestRecord]:
        """What the proxy asked to be counted only."""
        return [record for record in self.records if record.path == CHAT and is_question(record.body)]

    @property
    def summaries(self) -> list[RequestRecord]:
        return [record for record in self.records if record.path == CHAT and is_summary_call(record.body)]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [record.body or {} for record in self.chats]

    def sent(self, index: int = -1) -> list[dict[str, Any]]:
        """The messages of one upstream request."""
        messages: list[dict[str, Any]] = self.bodies[index]["messages"]
        return messages

    def problems(self, original: Sequence[dict[str, Any]], index: int = -1) -> list[str]:
        """What is wrong with the messages of one upstream request (promise P3).

        One that makes the model go on with an answer may end in that answer: something that no client sent.
        """
        sent = self.sent(index)
        goes_on = index % len(self.chats) > 0 and sent[-1]["role"] == "assistant" and sent[-1] not in original
        return problems(original, sent[:-1] if goes_on else sent)


@dataclass
class Bench:
    """A proxy and its simulators; `folder` is the one that its data is in."""

    proxy: Proxy
    groups: dict[str, Group]
    simulators: dict[str, Simulator]
    folder: Path = field(default_factory=Path)
    _checked: dict[str, int] = field(default_factory=dict)

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """What Hypothesis shows of it: all that simulators have seen is too long."""
        printer.text(type(self).__name__)

    def watch(self, name: str, script: Script | None = None) -> Watch:
        """Begins to look at a group's simulator, which answers by `script` from now on."""
        simulator = self.simulators[name]
        simulator.script = script or answers()
        return Watch(simulator, len(simulator.requests))

    def window_of(self, name: str) -> int:
        """The context length that the proxy goes by, as its header says."""
        headers = self.proxy.chat(name, [{"role": "user", "content": "Hi."}], max_tokens=16).headers
        return int(headers["x-litellm-compaction-window"])

    def load(self, name: str, window: int) -> None:
        """Loads a group's model anew, with another window, behind the proxy's back."""
        simulator = self.simulators[name]
        for instance in list(simulator.instances):
            simulator.unload(instance.id)
        simulator.load(self.groups[name].key, window)

    def forgive(self, name: str) -> None:
        """Takes an overflow that a test has provoked out of the findings."""
        self._checked[name] = len(self.simulators[name].requests)

    def findings(self) -> list[str]:
        """Every upstream request of a guarded group since the last look that broke promise P1."""
        found: list[str] = []
        for name, simulator in self.simulators.items():
            new = simulator.requests[self._checked.get(name, 0) :]
            self._checked[name] = len(simulator.requests)
            if self.groups[name].guarded:
                found += [f"{name}: {problem}" for record in new if (problem := overrun(record))]
        return found


def overrun(record: RequestRecord) -> str:
    """How a chat request broke promise P1; "" if it did not."""
    if record.path != CHAT or record.body is None or not record.context_length:
        return ""
    if record.truncated or record.outcome in ("overflow", "mid_overflow", "pool_overflow"):
        return f"{record.outcome}, truncated {record.truncated}: {record.prompt_tokens} of {record.context_length}"
    limit = record.body.get("max_tokens")
    if not isinstance(limit, int):
        return f"the answer is not bounded: max_tokens {limit!r}"
    if limit < 0 or record.prompt_tokens + limit > record.context_length:
        return f"{record.prompt_tokens} + {limit} > {record.context_length}"
    return ""


def write_beside(folder: Path) -> None:
    """Puts the callbacks of tests beside a configuration."""
    for path in _BESIDE.glob("*.py"):
        shutil.copy(path, folder)


@contextmanager
def open_bench(
    folder: Path,
    groups: Sequence[Group],
    settings: Mapping[str, Any] | None,
    *,
    entries: Sequence[dict[str, Any]] = (),
    make_entries: Callable[[Mapping[str, str]], Sequence[dict[str, Any]]] | None = None,
    environ: Mapping[str, str] | None = None,
    process: bool = False,
    **sections: Any,
) -> Iterator[Bench]:
    """A bench for `groups` in this process, or with a proxy in a `process` of its own and simulators behind sockets.

    `entries` are further ones of the `model_list`, `make_entries` those that need the simulators' addresses, by group.
    `sections` are config.yaml's: LiteLLM's router tries each request once, if they do not say otherwise.
    """
    sections.setdefault("router_settings", {"num_retries": 0, "disable_cooldowns": True})
    write_beside(folder)
    served = serve if process else app.serve
    with ExitStack() as stack:
        simulators = {group.name: group.make() for group in groups}
        urls = {name: stack.enter_context(served(simulator)).base_url for name, simulator in simulators.items()}
        models = [group.entry(urls[group.name]) for group in groups]
        models += [*entries, *(make_entries(urls) if make_entries else ())]
        config = write_config(folder, models, settings, **sections)
        if process:
            running = stack.enter_context(proxy(config, **(environ or {})))
        else:
            running = stack.enter_context(app.proxy(config, **(environ or {})))
        bench = Bench(running, {group.name: group for group in groups}, simulators, folder)
        OPEN.append(bench)
        try:
            yield bench
        finally:
            OPEN.remove(bench)
