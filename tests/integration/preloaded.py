"""Proxies that begin where LiteLLM has been imported: importing it is most of what the start of a proxy costs.

One process per environment imports LiteLLM, and nothing of ours, and copies itself (`fork`) for each proxy. A copy runs
what the `litellm` executable runs, with its own arguments, folder, environment and output, and loads our package as
any proxy does: from its configuration. Copying is sound since the process that is copied has one thread, no event loop,
no connection and no file but its socket; where it has more (another LiteLLM might), nothing is copied, and `harness`
starts the executable. Files that test what a user starts use the executable anyhow: see `harness.proxy`.

Measured 2026-11-22, LiteLLM 1.106.2: a start takes 11.9 s of processor time, that of a copy 1.5 s.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Read while a proxy starts, not while LiteLLM is imported: by our package, by the recorder beside it, by LiteLLM.
_READ_LATER = ("XDG_DATA_HOME", "RECORDER_FILE", "LITELLM_RATE_LIMIT_WINDOW_SIZE")
_OPENED: dict[str, _Original | None] = {}
_ONE_AT_A_TIME = threading.Lock()


class Copy:
    """A process that is a copy of an original; used as `subprocess.Popen` is."""

    def __init__(self, original: _Original, pid: int, stdout: IO[str]) -> None:
        self._original = original
        self._pid = pid
        # Names this process even after it has ended.
        self._handle = os.pidfd_open(pid)
        self._code: int | None = None
        self.stdout = stdout

    def terminate(self) -> None:
        """Asks it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self._send(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal.

        Raises:
            TimeoutExpired: it runs still.
        """
        if self._code is None:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(["litellm"], timeout or 0)
            self._code = os.waitstatus_to_exitcode(self._original.ask({"reap": self._pid})["status"])
            os.close(self._handle)
        return self._code

    def _send(self, number: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._handle, number)


class _Original:
    """A process that has imported LiteLLM, from this side of its socket; it ends with this process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("r", encoding="utf-8")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                # NumPy's threads would be there before anything is copied.
                env={**environ, "OPENBLAS_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for pytest, which then ends each copy.
                start_new_session=True,
            )
        self.may_be_copied = bool(self._answer()["alone"])

    def ask(self, question: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        """The answer; only one is asked for at a time.

        Raises:
            EOFError: the process has ended.
        """
        with _ONE_AT_A_TIME:
            socket.send_fds(self._socket, [json.dumps(question).encode() + b"\n"], descriptors)
            return self._answer()

    def close(self) -> None:
        """Ends it, and what is left of its copies."""
        self._answers.close()
        self._socket.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise EOFError("the process that has imported LiteLLM has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Copy | None:
    """A proxy in a process of its own; None where nothing can be copied.

    Args:
        arguments: of `litellm`.
        folder: to run in.
        environ: all of its environment.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    early = {name: value for name, value in environ.items() if name not in _READ_LATER}
    # pytest names the test that runs in its own environment.
    early.pop("PYTEST_CURRENT_TEST", None)
    key = json.dumps(early, sort_keys=True)
    if key not in _OPENED:
        if not _OPENED:
            atexit.register(_close)
        original = _Original(early)
        if not original.may_be_copied:
            original.close()
        _OPENED[key] = original if original.may_be_copied else None
    found = _OPENED[key]
    if found is None:
        return None
    reading, writing = os.pipe()
    try:
        question = {"arguments": list(arguments), "folder": str(folder), "environ": dict(environ)}
        pid = found.ask(question, writing)["pid"]
    finally:
        os.close(writing)
    return Copy(found, pid, os.fdopen(reading, encoding="utf-8", errors="replace"))


def _close() -> None:
    for original in filter(None, _OPENED.values()):
        original.close()


def _serve(descriptor: int) -> None:
    """Imports LiteLLM, and copies itself as often as it is asked to; a copy returns when its proxy is to run."""
    importlib.import_module("litellm.proxy.proxy_cli")
    importlib.import_module("litellm.proxy.proxy_server")
    gc.collect()
    gc.freeze()
    copies: set[int] = set()
    with socket.socket(fileno=descriptor) as channel:
        threads = len(list(Path("/proc/self/task").iterdir()))
        ours = [name for name in sys.modules if name.startswith("litellm_compaction")]
        channel.sendall(json.dumps({"alone": threads == 1 and not ours}).encode() + b"\n")
        while True:
            question, output = _received(channel)
            if question is None:
                break
            if "reap" in question:
                _, status = os.waitpid(question["reap"], 0)
                copies.discard(question["reap"])
                channel.sendall(json.dumps({"status": status}).encode() + b"\n")
                continue
            pid = os.fork()
            if pid == 0:
                _become(question, output)
                return
            os.close(output)
            copies.add(pid)
            channel.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    # Whoever has asked is gone: nobody else would end them.
    for pid in copies:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _received(channel: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """The next question and the descriptor that came with it, None behind the last one."""
    text, output = b"", -1
    while not text.endswith(b"\n"):
        part, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not part:
            return None, -1
        text += part
        output = descriptors[0] if descriptors else output
    return json.loads(text), output


def _become(question: Mapping[str, Any], output: int) -> None:
    """Makes this copy what the executable is when it begins."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(question["folder"])
    os.environ.clear()
    os.environ.update(question["environ"])
    executable = Path(sys.executable).with_name("litellm")
    sys.argv = [str(executable), *question["arguments"]]
    sys.path[0] = str(executable.parent)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
    sys.exit(importlib.import_module("litellm").run_server())
