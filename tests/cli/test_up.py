"""`up` as a user runs it: a process of its own, a real proxy, a simulated LM Studio.

One test starts LiteLLM's executable, the others a copy of a process that has imported it.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.cli import up as up_module
from litellm_compaction.cli.config_file import read_config
from litellm_compaction.cli.running import RUNNING_FILE, running_up
from litellm_compaction.cli.up import SIMULATED_MODEL, _asked, _upstream
from litellm_compaction.errors import CompactionError
from litellm_compaction.simulator import Address
from litellm_compaction.windows.lmstudio import Listing
from tests.cli.conftest import NOWHERE, QWEN, config, deployment

_LIMIT_S = 300.0


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


@pytest.mark.parametrize(
    ("names", "model", "asked"),
    [
        (("lm_studio/*",), "qwen", "lm_studio/qwen"),
        (("mine/*", "coder"), "qwen", "mine/qwen"),
        (("mine/*", "coder"), "", "coder"),
        (("coder",), "qwen", "coder"),
        (("lm_studio/*",), "", "lm_studio/MODEL"),
    ],
)
def test_the_request_to_paste_names_a_model_of_the_config(
    write: Callable[[Any], Path], names: tuple[str, ...], model: str, asked: str
) -> None:
    """By the name that clients use; without one that is known, the place for it."""
    assert _asked(read_config(write(config(*(deployment(name=name) for name in names)))), model) == asked


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x"}', '{"pid": 0, "base_url": 1}'])
def test_a_damaged_note_of_what_runs_is_none(environ: dict[str, str], text: str) -> None:
    """Whatever an earlier version, or an editor, has left there."""
    path = Path(environ["LITELLM_COMPACTION_HOME"]) / RUNNING_FILE
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert running_up(environ) is None


_REAL, _ITS_OWN = "lm_studio/qwen/qwen3-8b", f"lm_studio/{SIMULATED_MODEL}"


@pytest.mark.parametrize(
    ("model", "lm_studio", "simulator", "variable", "outcome"),
    [
        ("lm_studio/*", None, False, "", "SIMULATOR"),
        (_ITS_OWN, None, False, "", "SIMULATOR"),
        ("lm_studio/*", None, True, "http://127.0.0.1:9/v1", "SIMULATOR"),
        (
            "lm_studio/*",
            None,
            False,
            "http://127.0.0.1:9/v1",
            "Waiting for LM Studio at http://127.0.0.1:9, .*BASE is set",
        ),
        (_REAL, None, False, "", "Waiting for LM Studio .* names qwen/qwen3-8b"),
        (_REAL, None, True, "", "has simulated-.* only"),
        ("lm_studio/*", "http://127.0.0.1:9", False, "", "No LM Studio answers"),
    ],
)
def test_a_simulator_never_stands_for_a_real_model(
    model: str,
    lm_studio: str | None,
    simulator: bool,
    variable: str,
    outcome: str,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that somebody has named, and one for a model's real name, is waited for, and used when it comes."""
    answers = iter([None, None, Listing(models=(), api="v1")])
    monkeypatch.setattr(up_module, "listing_of", lambda *_: next(answers))
    monkeypatch.setattr(up_module, "RETRY_S", 0)
    file = read_config(write(config(deployment(model))))
    said = ""
    try:
        with _upstream(file, simulator, lm_studio, {"LM_STUDIO_API_BASE": variable}) as found:
            assert found.is_simulated == (outcome == "SIMULATOR")
            if found.is_simulated:
                with httpx.Client(base_url=str(found.api_base), trust_env=False) as http:
                    names = {each["id"] for each in http.get("models").json()["data"]}
                    asked = {"model": "qwen/qwen3-8b", "messages": [{"role": "user", "content": "Hello!"}]}
                    assert (names, http.post("chat/completions", json=asked).status_code) == ({SIMULATED_MODEL}, 404)
    except CompactionError as error:
        said = str(error)
    said += capsys.readouterr().out
    assert re.search(outcome, said), said
    assert ("LM Studio: http" in said) == outcome.startswith("Waiting")


class _Started(Exception):
    """In place of a proxy."""


@pytest.mark.parametrize(
    ("model", "api_base", "said"),
    [
        (QWEN, "{}/v1", ""),
        (QWEN, "{}", "requests go below /v1: write {}/v1"),
        ("qwen/qwen-3-8b", "{}/v1", f"LM Studio has {QWEN}"),
        (QWEN, "http://127.0.0.1:9", "requests go below /v1"),
        (QWEN, NOWHERE, "start LM Studio's server"),
    ],
)
def test_what_doctor_calls_a_problem_stops_up(
    model: str,
    api_base: str,
    said: str,
    address: Address,
    write: Callable[..., Path],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless it passes by itself when a server comes, or one is to start all the same."""

    def start(*_: object, **__: object) -> None:
        raise _Started

    monkeypatch.setattr(up_module, "running", start)
    path = write(config(deployment(f"lm_studio/{model}", params={"api_base": api_base.format(address.base_url)})))

    def run(*, force: bool) -> int:
        options: dict[str, Any] = {"host": "127.0.0.1", "simulator": False, "lm_studio": None, "verbose": False}
        return up_module.up(**options, port=0, config=path, force=force, environ=environ)

    if said and api_base != NOWHERE:
        assert run(force=False) == 1
        assert "Master key" not in capsys.readouterr().out, "shown once"
    else:
        with pytest.raises(_Started):
            run(force=False)
    with pytest.raises(_Started):
        run(force=True)
    assert said.format(address.base_url) in capsys.readouterr().err
