"""A simulated LM Studio, config files, an environment without the developer's variables, and commands that are run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from litellm_compaction.cli.app import main
from litellm_compaction.simulator import Address, Model, Simulator, serve
from tests.integration.plain_server import PlainServer, serve_plain

QWEN = "qwen/qwen3-8b"
GPT_OSS = "openai/gpt-oss-20b"
NOWHERE = "http://127.0.0.1:9/v1"
Run = Callable[..., tuple[int, str, str]]
Check = Callable[..., tuple[int, str]]


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
def plain() -> Iterator[PlainServer]:
    """A local server that is not LM Studio."""
    with serve_plain() as server:
        yield server


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


@pytest.fixture
def without_lm_studio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No LM Studio, no key and no models of the developer's."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("LM_STUDIO_API_BASE", "LM_STUDIO_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with a standard input: exit code, output, errors."""

    def run(*arguments: str, stdin: bytes | str = b"") -> tuple[int, str, str]:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        code = main(arguments)
        output, errors = capsys.readouterr()
        return code, output, errors

    return run


@pytest.fixture
def check(
    write: Callable[..., Path],
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Check:
    """Runs doctor on a document, or on none: exit code and report, a line for each problem (✗) and note (·)."""

    def run(document: Any, *options: str, **variables: str) -> tuple[int, str]:
        with monkeypatch.context() as patched:
            for name, value in {**environ, **variables}.items():
                patched.setenv(name, value)
            code = main(["doctor", *options, *(["--config", str(write(document))] if document else [])])
        return code, capsys.readouterr().out

    return run


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


def at(address: Address, **params: Any) -> dict[str, Any]:
    """litellm_params of a deployment at the simulator."""
    return {"api_base": f"{address.base_url}/v1", **params}
