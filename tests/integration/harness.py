"""A real stock proxy as its users start it: `litellm --config config.yaml`, in a process of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

MASTER_KEY = "sk-test-0f9d8c7b6a5e4d3c2b1a0f9e8d7c6b5a"
_START_LIMIT_S = 120


@dataclass
class Proxy:
    """A running proxy: its address, its key, and every line it has logged."""

    base_url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    key: str = MASTER_KEY

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def post(self, body: Mapping[str, Any], path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        headers = {**self.headers, **options.pop("headers", {})}
        return httpx.post(self.base_url + path, json=body, headers=headers, timeout=120, **options)

    def chat(self, model: str, messages: Any, **body: Any) -> httpx.Response:
        return self.post({"model": model, "messages": messages, **body})

    def stream(self, model: str, messages: Any, **body: Any) -> list[str]:
        """The data lines of a streamed answer, as they came over the wire."""
        body = {"model": model, "messages": messages, "stream": True, **body}
        url = self.base_url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=self.headers, timeout=120) as answer:
            return [line for line in answer.iter_lines() if line]

    def logged(self, pattern: str) -> list[str]:
        """The log lines that contain `pattern`."""
        return [line for line in list(self.lines) if re.search(pattern, line)]


def environment(**extra: str) -> dict[str, str]:
    """A child's environment: offline, quiet, with this checkout importable and no proxy variables."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    root = str(Path(__file__).parents[2])
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([root, kept.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": MASTER_KEY,
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        **extra,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_config(
    folder: Path, models: list[dict[str, Any]], settings: Mapping[str, Any] | None, **sections: Any
) -> Path:
    """A config.yaml; `settings` None leaves the callback out."""
    config: dict[str, Any] = {"model_list": models, "general_settings": {"master_key": "os.environ/LITELLM_MASTER_KEY"}}
    litellm_settings = dict(sections.pop("litellm_settings", {}))
    if settings is not None:
        litellm_settings["callbacks"] = ["litellm_compaction.handler", *litellm_settings.pop("callbacks", [])]
        config["callback_settings"] = {"litellm_compaction": dict(settings)}
    config["litellm_settings"] = litellm_settings
    config.update(sections)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def proxy(config: Path, **environ: str) -> Iterator[Proxy]:
    """A proxy that answers; ended by its own handle."""
    port = free_port()
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("litellm")),
            "--config",
            str(config),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=config.parent,
        env=environment(**environ),
    )
    running = Proxy(base_url=f"http://127.0.0.1:{port}", process=process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            running.lines.append(line.rstrip("\n"))
            if "Application startup complete" in line or "Uvicorn running on" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(_START_LIMIT_S), "the proxy did not start in time"
        if process.poll() is not None:
            raise RuntimeError("the proxy ended:\n" + "\n".join(running.lines[-40:]))
        yield running
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        reader.join(10)
        if process.stdout is not None:
            process.stdout.close()


def lm_studio(group: str, key: str, base_url: str, **model_info: Any) -> dict[str, Any]:
    """A `model_list` entry for an LM Studio model."""
    return {
        "model_name": group,
        "litellm_params": {"model": f"lm_studio/{key}", "api_base": f"{base_url}/v1"},
        **({"model_info": model_info} if model_info else {}),
    }
