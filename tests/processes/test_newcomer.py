"""A newcomer's half hour, in an empty folder with an empty HOME, nothing in the environment and no network.

As the README has it: `demo`, `up`, a first request, a client's configuration, a long chat, the page and every link on
it, `recall`, `doctor`, Ctrl-C; then the shipped config.yaml with plain `litellm`. Fails on a traceback, on a warning
that is not LiteLLM's own, and on an address that answers 404.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.builders import ONE_ROUND, talk
from tests.integration.harness import MASTER_KEY, proxy

pytestmark = [pytest.mark.proxy, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
# LiteLLM's own at the start of a proxy (1.106.2), which a plug-in cannot help: whom it trusts as a balancer.
_LITELLMS_OWN = re.compile(
    r"[\d:]{8} - LiteLLM Proxy:WARNING: login_throttle\.py:\d+ - trusted_proxy_ranges is not set .*"
)
# As Linux's headers have them: CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP.
_NETWORK, _SET_FLAGS, _UP = 0x40000000, 0x8914, 0x1
_ADDRESS = re.compile(r"https?://127\.0\.0\.1:\d+[^\s,)\"':]*")


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
def run_up(environ: dict[str, str], *arguments: str) -> Iterator[Up]:
    """`up` with a free port, ended with the block."""
    # A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "litellm_compaction.cli", "up", "--port", "0", *arguments]
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


@pytest.fixture
def is_offline() -> Iterator[bool]:
    """Cuts this thread, and all that it starts, off from every network but loopback, where it may (root on Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform != "linux" or os.geteuid() != 0:
        yield False
        return
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(_NETWORK) != 0:
            yield False
            return
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
            yield True
        finally:
            assert libc.setns(before.fileno(), _NETWORK) == 0


def _environ(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(_ROOT),
    }


def _command(environ: dict[str, str], folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "litellm_compaction.cli", *arguments]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def _alarms(text: str) -> list[str]:
    """The lines that frighten, but for LiteLLM's own at its start."""
    lines = [line for line in text.splitlines() if not _LITELLMS_OWN.fullmatch(line)]
    return [line for line in lines if re.search("Traceback|Warning:|WARNING|ERROR|CRITICAL", line)]


def _random_talk(seed: int) -> list[dict[str, str]]:
    """A conversation larger than the window, of words that no language has and of which none comes twice."""
    random = Random(seed)
    words = iter(random.sample(range(10**6, 10**7), 2400))
    said = [" ".join(f"{next(words):x}" for _ in range(300)) for _ in range(8)]
    talk = [
        each for text in said for each in ({"role": "user", "content": text}, {"role": "assistant", "content": "Ok."})
    ]
    return [*talk, {"role": "user", "content": "Go on."}]


@pytest.mark.usefixtures("is_offline")
def test_from_nothing_to_it_works(tmp_path: Path) -> None:
    """No address that is told leads nowhere, no line frightens without a reason, and Ctrl-C ends it all."""
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    environ = _environ(home)
    assert not _alarms(_command(environ, folder, "--help"))
    shown = _command(environ, folder, "demo", "--fast", "--context", "4096", "--turns", "16")
    assert re.search(r"^prompts that the server cut or refused +[1-9]\d* +0$", shown, re.MULTILINE)
    assert not _alarms(shown)
    with run_up(environ) as up:
        base_url = up.wait_until_ready()
        key = (home / ".local" / "share" / "litellm_compaction" / "master_key").read_text("utf-8").strip()
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=base_url, headers=headers, trust_env=False, timeout=120) as http:
            told = {address for address in _ADDRESS.findall(up.text) if address.startswith(base_url)}
            assert len(told) > 2
            for address in told:
                # The base URL alone is a client's to complete.
                shown = http.get(f"{address}/models" if address.endswith("/v1") else address)
                assert shown.status_code != 404, address
            models = http.get("/v1/models").json()["data"]
            assert models, "a chat client's menu would be empty"
            assert all(model["max_input_tokens"] for model in models)
            name = models[0]["id"]
            assert base_url in _command(environ, folder, "connect", "claude")
            assert base_url in _command(environ, folder, "connect", "openai-python")
            first = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
            assert http.post("/v1/chat/completions", json=first).status_code == 200
            long = http.post("/v1/chat/completions", json={"model": name, "messages": talk("my garden", ONE_ROUND)})
            assert long.headers["x-litellm-compaction"] == "compacted"
            parts = http.post("/v1/chat/completions", json={"model": name, "messages": _random_talk(1)})
            assert parts.headers["x-litellm-compaction"] == "compacted", "a summary of several parts"
            assert "<script>" in http.get("/compaction").text
            events = http.get("/compaction/events").json()["events"]
            assert {event["event"] for event in events} == {"compaction"}, "nothing was cut by the server"
            record = next(event["compaction_id"] for event in events if event["outcome"] == "compacted")
            assert http.get(f"/compaction/records/{record}").status_code == 200
            found = _command(environ, folder, "recall", "my garden")
            assert "my garden" in found
            checked = _command(environ, folder, "doctor")
            assert "my garden" not in checked
            assert not _alarms(found + checked)
        up.process.send_signal(signal.SIGINT)
        assert up.wait() in (0, 128 + signal.SIGINT)
        assert "INFO: guarding simulated-qwen3-8b (8,192 tokens); mode=guard; page: /compaction" in up.text
        assert not _alarms(up.text), up.text


def test_the_shipped_config_starts_as_it_is(tmp_path: Path) -> None:
    """Without an LM Studio the log says what to do about it, and a request is told the same."""
    config = tmp_path / "config.yaml"
    config.write_text((_ROOT / "config.yaml").read_text("utf-8"), encoding="utf-8")
    with proxy(config, LM_STUDIO_API_BASE="http://127.0.0.1:1/v1", HOME=str(tmp_path)) as running:
        body = {"model": "lm_studio/any", "messages": [{"role": "user", "content": "Hello!"}]}
        headers = {"Authorization": f"Bearer {MASTER_KEY}"}
        answer = running.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 503
        assert "lms server start" in answer.json()["error"]["message"]
        [alarm] = _alarms("\n".join(running.lines))
        assert re.search("litellm_compaction:WARNING: refused .* does not answer.*lms server start", alarm)
