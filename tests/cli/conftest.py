"""A simulated LM Studio, config files, and an environment without the developer's own variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from litellm_compaction.simulator import Address, Model, Simulator, serve

QWEN = "qwen/qwen3-8b"
GPT_OSS = "openai/gpt-oss-20b"


@pytest.fixture
def simulator() -> Simulator:
    """Qwen loaded with 8,192 tokens; gpt-oss downloaded, not loaded."""
    simulator = Simulator([Model(QWEN), Model(GPT_OSS, architecture="gpt-oss")])
    simulator.load(QWEN, 8192)
    return simulator


@pytest.fixture
def address(simulator: Simulator) -> Iterator[Address]:
    """Where the simulator listens."""
    with serve(simulator) as address:
        yield address


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a command: a data folder of its own, no keys, no LM Studio."""
    own = ("LITELLM_", "LM_STUDIO_", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {
        **kept,
        "LITELLM_COMPACTION_HOME": str(tmp_path / "home"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a config file; text stays as it is."""

    def write(document: Any, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document), encoding="utf-8")
        return path

    return write


def deployment(model: str = f"lm_studio/{QWEN}", name: str = "local", **parts: Any) -> dict[str, Any]:
    """A `model_list` entry; `params` and `info` go to litellm_params and model_info."""
    entry: dict[str, Any] = {"model_name": name, "litellm_params": {"model": model, **parts.pop("params", {})}}
    if "info" in parts:
        entry["model_info"] = parts.pop("info")
    return {**entry, **parts}


def config(*entries: dict[str, Any], settings: Any = None, **sections: Any) -> dict[str, Any]:
    """A config document that has nothing wrong unless a section says otherwise."""
    document: dict[str, Any] = {
        "model_list": list(entries) or [deployment(params={"api_base": "http://127.0.0.1:1/v1"})],
        "litellm_settings": {"callbacks": ["litellm_compaction.handler"]},
        "callback_settings": {"litellm_compaction": settings or {}},
    }
    return {**document, **sections}
