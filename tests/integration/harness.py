"""A real stock proxy as its users run it: `litellm --config config.yaml`, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from tests.chunks import Chunked
from tests.constants import written_beside
from tests.integration import preloaded
from tests.stores.servers import free_port

T = TypeVar("T")
MASTER_KEY = "sk-test-0f9d8c7b6a5e4d3c2b1a0f9e8d7c6b5a"
CHAT = "/v1/chat/completions"
# The tests' own client speaks as a person's does, so that it is told of compactions in the text; programs are tested
# with their own clients.
BROWSER = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36"
# Tests count what a server is asked, and in which order; calls in the background come when they come.
NOTHING_AHEAD = {"background": "off"}
_ROOT = Path(__file__).parents[2]
# What LiteLLM will drop soon is an error if one of our modules uses it; pytest's own filters reach no child.
_DEPRECATED_BY_US = ",".join(
    f"error::DeprecationWarning:{'.'.join(path.relative_to(_ROOT).with_suffix('').parts)}"
    for path in sorted((_ROOT / "litellm_compaction" / "proxy").rglob("*.py"))
)
# What an application in this process may have set for itself.
_OF_ANOTHER = ("LITELLM_COMPACTION_HOME", "CONFIG_FILE_PATH", "WORKER_CONFIG")
# Each only bounds a hang: on a busy machine a start has taken two minutes.
_START_LIMIT_S = 300
_LIMIT_S = 60
# Set to start every proxy as its users do, where a test may find a difference.
_EXECUTABLE_ONLY = bool(os.environ.get("TESTS_START_EXECUTABLES"))


@dataclass(frozen=True)
class Streamed(Chunked):
    """A streamed answer as it came over the wire."""

    status: int
    headers: httpx.Headers
    raw: bytes

    @property
    def lines(self) -> list[str]:
        return [line for line in self.raw.decode().splitlines() if line]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON of every data line but `[DONE]`."""
        data = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [json.loads(line) for line in data if line != "[DONE]"]

    @property
    def text(self) -> str:
        return self.raw_text


@dataclass
class Proxy:
    """A running proxy: its address, its key, and every line it has logged."""

    base_url: str
    process: subprocess.Popen[str] | preloaded.Copy | None
    client: httpx.Client
    lines: list[str] = field(default_factory=list)
    key: str = MASTER_KEY
    said: threading.Condition = field(default_factory=threading.Condition)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def by(self, key: str) -> Proxy:
        """The same proxy, asked with another key."""
        return replace(self, key=key)

    def post(self, body: Mapping[str, Any], path: str = CHAT, **options: Any) -> httpx.Response:
        headers = {**self.headers, **options.pop("headers", {})}
        return self.client.post(path, json=body, headers=headers, **options)

    def post_bytes(self, body: bytes, path: str = CHAT) -> httpx.Response:
        """For bodies that no JSON encoder writes."""
        return self.client.post(path, content=body, headers={**self.headers, "content-type": "application/json"})

    def chat(self, model: str, messages: Any, **body: Any) -> httpx.Response:
        return self.post({"model": model, "messages": messages, **body})

    def stream(self, model: str, messages: Any, **body: Any) -> Streamed:
        return self.stream_body({"model": model, "messages": messages, "stream": True, **body})

    def stream_body(self, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> Streamed:
        with self.client.stream("POST", path, json=body, headers={**self.headers, **headers}) as answer:
            return Streamed(answer.status_code, answer.headers, answer.read())

    def logged(self, pattern: str) -> list[str]:
        """The log lines so far that contain `pattern`."""
        return [line for line in list(self.lines) if re.search(pattern, line)]

    def expect_logged(self, pattern: str, least: int = 1) -> list[str]:
        """The same, as soon as there are so many: a line may come after the answer."""
        with self.said:
            assert self.said.wait_for(lambda: len(self.logged(pattern)) >= least, _LIMIT_S), f"nobody logged {pattern}"
        return self.logged(pattern)


def environment(**extra: str) -> dict[str, str]:
    """A child's environment: offline, quiet, with this checkout importable and no proxy variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and name not in _OF_ANOTHER
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONWARNINGS": _DEPRECATED_BY_US,
        "LITELLM_MASTER_KEY": MASTER_KEY,
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        **extra,
    }


def write_config(
    folder: Path, models: list[dict[str, Any]], settings: Mapping[str, Any] | None, **sections: Any
) -> Path:
    """A config.yaml; `settings` None leaves the callback out; constants among them stand beside it.

    Nothing is written ahead where a test does not ask for it.
    As in the shipped one LiteLLM asks no server for tokenizers: where there is none, it tries for 48 s for each stream
    of a Llama model, and nobody is served meanwhile.
    """
    general = {"master_key": "os.environ/LITELLM_MASTER_KEY", **sections.pop("general_settings", {})}
    config: dict[str, Any] = {"model_list": models, "general_settings": general}
    litellm_settings = {"disable_hf_tokenizer_download": True, **sections.pop("litellm_settings", {})}
    if settings is not None:
        litellm_settings["callbacks"] = ["litellm_compaction.handler", *litellm_settings.pop("callbacks", [])]
        config["callback_settings"] = {"litellm_compaction": {**NOTHING_AHEAD, **written_beside(folder, settings)}}
    config["litellm_settings"] = litellm_settings
    config.update(sections)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def proxy(config: Path, **environ: str) -> Iterator[Proxy]:
    """A proxy that answers, with the config's folder for its data, and `environ` beside `environment`.

    It is ended by its own handle; a RuntimeError has the last lines of one that ended instead of starting.
    """
    port = free_port()
    arguments = ["--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    whole = environment(**{"XDG_DATA_HOME": str(config.parent), **environ})
    process: subprocess.Popen[str] | preloaded.Copy | None = None
    if not _EXECUTABLE_ONLY:
        process = preloaded.start(arguments, config.parent, whole)
    if process is None:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("litellm")), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=config.parent,
            env=whole,
        )
    base_url = f"http://127.0.0.1:{port}"
    client = httpx.Client(
        base_url=base_url,
        headers={"user-agent": BROWSER},
        timeout=300,
        trust_env=False,
        limits=httpx.Limits(max_keepalive_connections=0),
    )
    running = Proxy(base_url=base_url, process=process, client=client)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with running.said:
                running.lines.append(line.rstrip("\n"))
                running.said.notify_all()
            if "Uvicorn running on" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(_START_LIMIT_S), "the proxy did not start in time"
        if not any("Uvicorn running on" in line for line in running.lines):
            raise RuntimeError("the proxy ended:\n" + "\n".join(running.lines[-40:]))
        yield running
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_LIMIT_S)
        reader.join(_LIMIT_S)
        if process.stdout is not None:
            process.stdout.close()
    # A request that went on in spite of an error of ours looks well from outside; tests that bring one about say so.
    assert [line for line in running.lines if "failed_open" in line and "sabotage" not in line] == []


def until(found: Callable[[], T]) -> T:
    """What is found, as soon as it is there: another process or thread brings it, so all that helps is another look."""
    deadline_s = time.monotonic() + 2 * _LIMIT_S
    while not (value := found()):
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)
    return value


def entry(group: str, model: str, base_url: str, **model_info: Any) -> dict[str, Any]:
    """A `model_list` entry."""
    params = {"model": model, "api_base": base_url, "api_key": "k"}
    return {"model_name": group, "litellm_params": params, **({"model_info": model_info} if model_info else {})}


def lm_studio(group: str, key: str, base_url: str, **model_info: Any) -> dict[str, Any]:
    """One for an LM Studio model."""
    return entry(group, f"lm_studio/{key}", f"{base_url}/v1", **model_info)
