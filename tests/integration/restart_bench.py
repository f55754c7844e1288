"""Proxies in front of models that talk past their windows, and such models.

The `test_restart_*` files share these proxies: one for each carrier of the restart, and one where another callback's
iterator hook comes before ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE
from tests.builders import prose
from tests.constants import written_beside
from tests.integration.bench import AUTH, SUMMARY, Bench, Group, is_question, is_summary_call, open_bench
from tests.integration.harness import NOTHING_AHEAD, Streamed
from tests.integration.rows import Rows
from tests.integration.validity import text_of
from tests.lmstudio_double import ChatCall, Gate, Reply, Simulator

RESTARTED = f"\n\n{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
WINDOW = 2048
_KEY = "glm-4-9b-0414"
_GO_ON = "cut off by the length limit"
_THINK_ON = "while you were thinking"
# Part of an answer that the model looks for to find where it stopped.
_SEAM_CHARS = 48

Carrier = Literal["auto", "hooks"]
CARRIERS: tuple[Carrier, ...] = ("auto", "hooks")
# For the scenarios that are shown with both.
both_carriers = pytest.mark.parametrize("carrier", CARRIERS, indirect=True, scope="module")


def group(name: str, window: int = WINDOW, **options: Any) -> Group:
    """A model group whose answers come in chunks of some tokens, as fast as they can be read.

    Every chunk costs processor time. Where its size matters, a test asks for another.
    """
    simulator = {"chunk_tokens": 48, **options.pop("simulator", {})}
    return Group(name, window, key=_KEY, architecture="glm4", simulator=simulator, **options)


_HOW = ("stream", "whole")
CROWDED = (
    *(
        f"crowded-{place}-{how}"
        for place in ("first", "text", "reasoning", "call", "summary", "stream-2", "stream-4")
        for how in _HOW
    ),
    *(f"hanging-{how}" for how in _HOW),
)
_GROUPS = [
    group("local"),
    group("middle", 4096),
    group("wide", 8192),
    *(
        group(f"overflowing-{overflow}-{stream}", factor=3.3, simulator={"overflow": overflow})
        for overflow in ("error_event", "error_400_object", "empty")
        for stream in (True, False)
    ),
    # Many cells at once at each.
    *(
        group(name, slots=64, simulator={"unified_kv": False}, params={"timeout": 1} if "hanging" in name else {})
        for name in CROWDED
    ),
]


_OPENED = pytest.StashKey[dict[str, "Restarting"]]()


@dataclass
class Restarting(Bench):
    """A bench with the carrier that its answers are carried by, and the rows that were billed."""

    carrier: Carrier = "auto"
    rows: Rows = field(default_factory=lambda: Rows(Path()))


def shared(
    request: pytest.FixtureRequest, carrier: Carrier, *, behind_another: bool = False, process: bool = False
) -> Restarting:
    """The session's proxy with this carrier, started when it is first asked for by a fixture.

    `behind_another` lists another callback with an iterator hook before ours; `process` is that of `open_bench`.
    """
    name = f"{carrier}{' behind another' if behind_another else ''}{' process' if process else ''}"
    opened = request.config.stash.setdefault(_OPENED, {})
    if name not in opened:
        stack = ExitStack()
        request.session.addfinalizer(stack.close)
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        opened[name] = stack.enter_context(_open(factory.mktemp("restart"), carrier, behind_another, process))
    return opened[name]


@contextmanager
def _open(folder: Path, carrier: Carrier, behind_another: bool, process: bool) -> Iterator[Restarting]:
    rows = Rows(folder / "rows.jsonl")
    callbacks = ["bystander.handler"] if behind_another else []
    settings = {"carrier": carrier, "summary_timeout_s": 120, "window_cache_s": 600, "heartbeat_s": 0.2}
    # Servers that count differently have to be found out by their answers here. LM Studio's own protocol, which tells
    # it before, has test_ask_server.py.
    settings |= NOTHING_AHEAD | {"ask_server": False}
    with open_bench(
        folder,
        _GROUPS,
        None,
        process=process,
        # A key's tokens count for an hour, so that no slow answer outlives its minute.
        environ={**rows.environ, "LITELLM_RATE_LIMIT_WINDOW_SIZE": "3600"},
        litellm_settings={"callbacks": [*callbacks, "litellm_compaction.handler", "recorder.handler"]},
        callback_settings={"litellm_compaction": written_beside(folder, settings)},
        general_settings={**AUTH, "cancel_on_disconnect": True},
    ) as bench:
        # The check of promise P1 after each test looks at `bench`: what is forgiven has to be forgiven there.
        yield Restarting(**vars(bench), carrier=carrier, rows=rows)


@contextmanager
def changed(simulator: Simulator, **values: Any) -> Iterator[None]:
    """Settings of a simulator while the block lasts."""
    before = {name: getattr(simulator, name) for name in values}
    for name, value in values.items():
        setattr(simulator, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(simulator, name, value)


@dataclass
class Teller:
    """A model that gives one long answer, and goes on with it when it is told to.

    The answer's text is one in which no stretch of 48 characters comes twice, so that the place is found. In place of
    going on with the `first` answer it gives one of the `later` ones to each further stream.
    """

    first: Reply
    second_thoughts: str = ""
    later: tuple[Reply, ...] = ()
    summary: Reply = field(default_factory=lambda: Reply(SUMMARY))
    streams: int = 0

    def __call__(self, call: ChatCall) -> Reply:
        if is_summary_call(call.body):
            return self.summary
        if is_question(call.body):
            return Reply("I")
        self.streams += 1
        asked = text_of(call.messages[-1])
        if self.streams > 1 and self.later:
            return self.later[min(self.streams - 2, len(self.later) - 1)]
        if _THINK_ON in asked:
            return replace(self.first, reasoning="Enough of that.", gate=None)
        is_prefilled = call.messages[-1]["role"] == "assistant"
        if not is_prefilled and _GO_ON not in asked:
            return self.first
        shown = asked if is_prefilled else text_of(call.messages[-2])
        return Reply(self._continued(shown), reasoning=self.second_thoughts, tool_calls=self.first.tool_calls)

    def _continued(self, shown: str) -> str:
        text = self.first.content
        seam = shown[-_SEAM_CHARS:]
        assert text.count(seam) == 1, f"shown a text that is not the answer's: {seam!r}"
        return text.partition(seam)[2]


def texts() -> dict[str, str]:
    """Answers longer than a window of 2,048 tokens as the family counts them, and shorter than four streams."""
    rows = [f"| {n} | item{n} | {n * 37 % 101} EUR | {prose(f'row {n}', 4)} |" for n in range(1, 131)]
    sentences = [f"{prose(f'sentence {n}', 14).capitalize()} {n}." for n in range(160)]
    items = {f"item{n}": {"id": n, "note": prose(f"item {n}", 5)} for n in range(110)}
    return {
        "prose": "\n\n".join(" ".join(sentences[start : start + 5]) for start in range(0, 160, 5)),
        "table": "| n | name | price | note |\n|---|---|---|---|\n" + "\n".join(rows),
        "json": json.dumps(items, indent=1),
    }


TEXTS = texts()
# Longer than 4,096 tokens: with a window of that size there is room for a summary beside the end of the answer.
LONG = "\n".join(f"{n}. {prose(f'long {n}', 16)}" for n in range(1, 260))


def asked(topic: str, tokens: int = 60) -> list[dict[str, Any]]:
    """A request of two messages."""
    return [
        {"role": "system", "content": "You write what you are asked for."},
        {"role": "user", "content": f"Write about {topic}. {prose(topic, tokens)}"},
    ]


def stream_problems(answer: Streamed) -> list[str]:
    """How a streamed answer is not one message; empty when it is (promise P6)."""
    found: list[str] = []
    choices = [choice for chunk in answer.chunks for choice in chunk.get("choices") or ()]
    if answer.status != 200 or not choices:
        return [f"status {answer.status}: {answer.raw[:300]!r}"]
    for name, values in (
        ("ids", {chunk.get("id") for chunk in answer.chunks}),
        ("models", {chunk.get("model") for chunk in answer.chunks}),
    ):
        if len(values) != 1:
            found.append(f"{name} {values}")
    roles = [index for index, delta in enumerate(answer.deltas) if delta.get("role")]
    if roles != [0]:
        found.append(f"roles at {roles}")
    finished = [index for index, choice in enumerate(choices) if choice.get("finish_reason")]
    if len(finished) != 1 or any(any(choice["delta"].values()) for choice in choices[finished[0] + 1 :]):
        found.append(f"finish reasons {answer.finish_reasons}")
    if [line for line in answer.lines if line == "data: [DONE]"] != answer.lines[-1:]:
        found.append("not one [DONE] at the end")
    if any("error" in chunk for chunk in answer.chunks):
        found.append("an error event")
    return found


def without_restarts(text: str) -> str:
    """The answer as the model gave it."""
    return text.replace(RESTARTED, "")


def calls(*names: str, words: int) -> list[tuple[str, str]]:
    """Tool calls with arguments of about `words` tokens each."""
    return [(name, json.dumps({"path": f"{name}.txt", "text": prose(f"call {name}", words)})) for name in names]


def shut() -> Gate:
    """A gate that stays shut: the stream waits there until it is closed."""
    return Gate()
