"""`up` as a user runs it: a process of its own, a real proxy, a simulated LM Studio.

One test starts LiteLLM's executable, the others a copy of a process that has imported it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.cli.up import RUNNING_FILE, Running, running_up
from litellm_compaction.simulator import Address, Simulator
from tests.cli import copied
from tests.cli.conftest import QWEN, config, deployment

_LIMIT_S = 300.0
_BODY = {"model": f"lm_studio/{QWEN}", "messages": [{"role": "user", "content": "Hello!"}]}


class Up:
    """A running `up` and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self.lines)

    def wait_until_ready(self) -> str:
        """The base URL that it announces."""
        assert self._ready.wait(_LIMIT_S), self.text
        found = re.search(r"^Ready at (\S+)/v1", self.text, re.MULTILINE)
        assert found is not None, self.text
        return found[1]

    def wait(self) -> int:
        """The exit code, after all output has been read."""
        code = self.process.wait(_LIMIT_S)
        self._reader.join(_LIMIT_S)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            # The request to paste ends with its body.
            if line.startswith("  -d "):
                self._ready.set()
        self._ready.set()


@contextlib.contextmanager
def run_up(environ: dict[str, str], *arguments: str, program: str = "litellm_compaction.cli") -> Iterator[Up]:
    """`up` with a free port, ended with the block."""
    command = [sys.executable, "-m", program, "up", "--port", "0", *arguments]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        up = Up(process)
        try:
            yield up
        finally:
            if process.poll() is None:
                process.terminate()
            up.wait()


def failed(environ: dict[str, str], *arguments: str, code: int = 1, **options: str) -> str:
    """What `up` says when it ends by itself without success."""
    with run_up(environ, *arguments, **options) as up:
        assert up.wait() == code
        return up.text


@pytest.mark.proxy
def test_up_serves_the_simulator_where_no_lm_studio_answers(environ: dict[str, str]) -> None:
    """It says so, makes a key, prints a request that works, and SIGTERM ends both children."""
    environ = {**environ, "LM_STUDIO_API_BASE": "http://127.0.0.1:1/v1"}
    with run_up(environ) as up:
        base_url = up.wait_until_ready()
        simulated = re.search(r"SIMULATOR, not LM Studio, because no LM Studio answers at \S+: (\S+),", up.text)
        assert simulated is not None
        assert f"{QWEN} loaded with 8,192 tokens" in up.text
        path = Path(environ["LITELLM_COMPACTION_HOME"]) / "master_key"
        key = path.read_text(encoding="utf-8").strip()
        assert up.text.count(key) == 1
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f'"Authorization: Bearer $(cat {path})"' in up.text
        assert f"Ready at {base_url}/v1 (the base URL for clients)" in up.text
        assert f"Settings and history: {base_url}/compaction," in up.text
        assert "It serves a SIMULATOR, not LM Studio" in up.text
        assert len(up.lines) < 20, "LiteLLM's own lines"
        live = running_up(environ)
        assert live == Running(base_url, f"{simulated[1]}/v1", is_simulated=True)
        with httpx.Client(base_url=base_url, trust_env=False, timeout=60) as http:
            answer = http.post("/v1/chat/completions", json=_BODY, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-litellm-compaction-window"] == "8192"
            assert http.post("/v1/chat/completions", json=_BODY).status_code >= 400
            page = http.get("/compaction", headers={"Authorization": f"Bearer {key}"})
            assert page.headers["content-type"].startswith("text/html")
            up.process.send_signal(signal.SIGTERM)
            assert up.wait() in (0, 128 + signal.SIGTERM)
            for url in (base_url, simulated[1]):
                with pytest.raises(httpx.ConnectError):
                    http.get(url)
        assert running_up(environ) is None


@pytest.mark.proxy
@pytest.mark.skipif(os.name != "posix", reason="SIGINT to one process is POSIX")
def test_up_serves_lm_studio_where_it_answers(
    environ: dict[str, str], address: Address, simulator: Simulator, write: Callable[[Any], Path]
) -> None:
    """The address may lack /v1; a key in the config counts, is never shown and none is made; Ctrl-C is a clean end."""
    key = "sk-a-key-that-stands-in-the-file"
    document = config(deployment("lm_studio/*", "lm_studio/*"), general_settings={"master_key": key})
    arguments = ("--lm-studio", address.base_url, "--config", str(write(document)))
    with run_up(copied.environment(environ), *arguments, program=copied.__name__) as up:
        base_url = up.wait_until_ready()
        assert f"LM Studio: {address.base_url} (API v1), loaded: {QWEN} with 8,192 tokens." in up.text
        assert "Bearer YOUR-MASTER-KEY" in up.text
        assert key not in up.text
        assert not (Path(environ["LITELLM_COMPACTION_HOME"]) / "master_key").exists()
        with httpx.Client(base_url=base_url, trust_env=False, timeout=60) as http:
            headers = {"Authorization": f"Bearer {key}"}
            assert http.post("/v1/chat/completions", json=_BODY, headers=headers).status_code == 200
        assert [record.model for record in simulator.inference_requests()] == [QWEN]
        up.process.send_signal(signal.SIGINT)
        assert up.wait() in (0, 128 + signal.SIGINT)
        assert "Traceback" not in up.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"litellm_settings": {"callbacks": []}}, "the plug-in is not listed, so nothing is guarded"),
        ({"general_settings": {"master_key": "os.environ/NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
    ],
)
def test_a_config_with_a_problem_starts_nothing(
    environ: dict[str, str], write: Callable[[Any], Path], changed: dict[str, Any], said: str
) -> None:
    """A line says what `doctor` would say, another one how to go on."""
    text = failed(environ, "--config", str(write(config(deployment("lm_studio/*", "lm_studio/*"), **changed))))
    assert said in text
    assert text.endswith("Nothing was started; --force starts it all the same.\n")
    assert "Starting" not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x"}', '{"pid": 0, "base_url": 1}'])
def test_a_damaged_note_of_what_runs_is_none(environ: dict[str, str], text: str) -> None:
    """Whatever an earlier version, or an editor, has left there."""
    path = Path(environ["LITELLM_COMPACTION_HOME"]) / RUNNING_FILE
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert running_up(environ) is None


def test_an_lm_studio_that_was_asked_for_must_answer(environ: dict[str, str]) -> None:
    """The simulator never takes its place silently."""
    text = failed(environ, "--lm-studio", "http://127.0.0.1:1")
    assert "No LM Studio answers at http://127.0.0.1:1" in text
    # A key that is shown once must not be made by a start that never shows it.
    assert not (Path(environ["LITELLM_COMPACTION_HOME"]) / "master_key").exists()


def test_a_server_that_wants_a_key_is_not_replaced_by_the_simulator(
    environ: dict[str, str], address: Address, simulator: Simulator
) -> None:
    """It is there, so canned answers are not what its user expects."""
    simulator.api_token = "sk-lm-token"
    text = failed({**environ, "LM_STUDIO_API_BASE": f"{address.base_url}/v1"})
    assert "the API key was refused" in text
    assert "Set LM_STUDIO_API_KEY" in text


def test_the_simulator_needs_a_config_that_follows_the_environment(
    environ: dict[str, str], write: Callable[[Any], Path]
) -> None:
    """Otherwise the option would have no effect."""
    path = write(config(deployment(params={"api_base": "http://127.0.0.1:1/v1"})))
    assert "--simulator and --lm-studio would have no effect" in failed(environ, "--simulator", "--config", str(path))
