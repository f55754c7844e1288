"""What is known before the first request: windows, and what counts the models that somebody has configured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from litellm_compaction.config import Settings
from litellm_compaction.errors import ModelNotLoaded, WindowUnknown
from litellm_compaction.proxy.deployments import Publisher
from litellm_compaction.proxy.routing import deployment_of, router_entries, serves
from litellm_compaction.proxy.startup import Preparing
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import TokenizerSource, bundled
from litellm_compaction.windows.windows import Target


@dataclass
class Machine:
    """Stands for compactor, windows and guards: what is loaded, and what has been prepared."""

    loaded_now: tuple[str, ...]
    is_coordinated: bool = True
    prepared: list[str] = field(default_factory=list)
    on_loaded: Any = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.windows = self
        self.gate.set()

    async def loaded(self, target: Target) -> tuple[str, ...]:
        return self.loaded_now

    async def resolve(self, target: Target) -> Any:
        if target.model == "nobody-knows":
            raise WindowUnknown(target.model)
        if target.model not in self.loaded_now:
            raise ModelNotLoaded(target.model)
        return SimpleNamespace(tokens=4096, source="api/v1", parallel=1)

    async def prepare_counting(self, target: Target) -> TokenizerSource:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        if target.model not in self.loaded_now:
            raise ModelNotLoaded(target.model)
        self.prepared.append(target.model)
        return bundled(family_of("", target.model))

    async def guarded(self, router: Any) -> AsyncIterator[Any]:
        for entry in router_entries(router):
            if "unguarded" not in entry["model_name"]:
                params, info, group = entry["litellm_params"], entry["model_info"], entry["model_name"]
                deployment = deployment_of(params, info, group=group, environ={})
                yield SimpleNamespace(deployment=deployment, settings=Settings())


def router(*models: str) -> Any:
    """With one deployment per model, of the same name."""
    entries = [
        {"model_name": name, "litellm_params": {"model": name, "api_base": "http://x/v1"}, "model_info": {"id": name}}
        for name in models
    ]
    return SimpleNamespace(get_model_list=lambda *_, **__: entries, model_list=entries, enable_pre_call_checks=False)


def preparing(machine: Any) -> Preparing:
    return Preparing(machine, machine, Publisher())


async def settled(made: Preparing) -> None:
    if made._task is not None:
        await made._task


async def test_every_window_that_is_known_at_start_is_shown() -> None:
    """One that nobody knows, or is not loaded yet, stops neither the others nor what comes after."""
    machine = Machine(("named", "qwen/one"))
    configured = router("lm_studio/nobody-knows", "lm_studio/cold", "lm_studio/qwen/*", "lm_studio/named")
    await preparing(machine).start(configured)
    shown = {entry["model_name"]: entry["model_info"].get("max_input_tokens") for entry in configured.model_list}
    assert {name: tokens for name, tokens in shown.items() if tokens} == {"lm_studio/named": 4096}
    assert machine.prepared == ["qwen/one", "named"]


async def test_loaded_models_without_a_window_are_named_behind_wildcards(caplog: pytest.LogCaptureFixture) -> None:
    """At start, as `doctor` names them: not when the first request for one is refused; the others are not touched."""
    machine = Machine(("qwen/one", "nobody-knows"))
    with caplog.at_level("INFO", logger="litellm_compaction"):
        await preparing(machine).start(router("lm_studio/*"))
    assert "window model=qwen/one tokens=4096 source=api/v1 parallel=1" in caplog.text
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    (line,) = lines
    assert line.startswith("Context limit not available for nobody-knows. Please ensure model metadata is correct.")
    assert line.endswith("`litellm-compaction doctor` says what to change.")
    caplog.clear()
    await preparing(machine).start(router("lm_studio/qwen/*"))
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_what_is_configured_and_loaded_is_prepared_once() -> None:
    """By its name or behind a wildcard that reaches it; not what nobody has configured, guards or has loaded."""
    machine = Machine(("named", "qwen/one", "other/two", "unguarded"))
    made = preparing(machine)
    configured = router("lm_studio/named", "lm_studio/qwen/*", "lm_studio/cold", "lm_studio/unguarded")
    await made.prepare(configured)
    assert machine.prepared == ["named", "qwen/one"]
    await made.prepare(configured)
    assert machine.prepared == ["named", "qwen/one"]


async def test_what_is_loaded_later_is_prepared_then() -> None:
    """When a server's list has another loaded model; those that come meanwhile are not forgotten."""
    machine = Machine(())
    made = preparing(machine)
    configured = router("lm_studio/*")
    await made.prepare(configured)
    made.watch(lambda: configured)
    machine.loaded_now = ("one",)
    machine.gate.clear()
    machine.on_loaded()
    await asyncio.sleep(0)
    machine.loaded_now = ("one", "two")
    machine.on_loaded()
    machine.on_loaded()
    machine.gate.set()
    await settled(made)
    assert machine.prepared == ["one", "two"]


async def test_trouble_is_told_and_does_not_stay(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing reaches whoever has read the list, and the next notice tries again."""
    machine = Machine(("one",), error=RuntimeError("odd"))
    made = preparing(machine)
    made.watch(lambda: router("lm_studio/*"))
    machine.on_loaded()
    await settled(made)
    assert "failed_open" in caplog.text
    machine.error = None
    machine.on_loaded()
    await settled(made)
    assert machine.prepared == ["one"]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "qwen/qwen3-8b", True),
        ("qwen/*", "qwen/qwen3-8b", True),
        ("qwen/*", "google/gemma", False),
        ("*-8b", "qwen3-8b", True),
        ("a.*", "ab", False),
        ("fixed", "fixed", True),
        ("fixed", "other", False),
    ],
)
def test_a_wildcard_reaches_what_its_pattern_says(pattern: str, name: str, expected: bool) -> None:
    """As LiteLLM fills in the name; what else a regular expression knows is text."""
    assert serves(pattern, name) is expected
