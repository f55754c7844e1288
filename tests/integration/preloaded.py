"""Proxies that begin where LiteLLM has been imported: importing it is most of what the start of a proxy costs.

One process per environment imports LiteLLM, and nothing of ours, and copies itself (`fork`) for each proxy. A copy runs
what the `litellm` executable runs, with its own arguments, folder, environment and output, and loads our package as
any proxy does: from its configuration. Copying is sound since the process that is copied has one thread, no event loop
and no file but its sockets; where it has more (another LiteLLM might), nothing is copied, and `harness` starts the
executable. Files that test what a user starts use the executable anyhow: see `harness.proxy`.

pytest's first process offers one (`offer`) to all that it starts; it begins when the first of them asks. What starts
proxies by itself, as `litellm-compaction up` does, is given a command (`command`) that stands for a copy.

Measured 2026-11-22, LiteLLM 1.106.2: a start takes 11.9 s of processor time, that of a copy 1.5 s.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Read while a proxy starts, not while LiteLLM is imported: by our package, by the recorder beside it, by LiteLLM.
# LITELLM_LOG=DEBUG is what an import without it takes, too; the levels are set by the start (1.106.2). Where a server
# is, no import asks: of 448 names that it looked up none was one of these (1.106.2, 2026-11-23). Each environment that
# differs otherwise costs an import, ten seconds of processor time.
_READ_LATER = (
    "XDG_DATA_HOME",
    "RECORDER_FILE",
    "LITELLM_RATE_LIMIT_WINDOW_SIZE",
    "LITELLM_LOG",
    "LM_STUDIO_API_BASE",
    "REDIS_HOST",
    "REDIS_PORT",
    "REDIS_PASSWORD",
    "SHARED_STORE",
)
# What pytest tells its own processes, and what LiteLLM sets in a process that has imported it.
_OF_TESTS = ("PYTEST_", "TESTS_", "TIKTOKEN_CACHE_DIR")
# Where the sockets are that are offered; where the one is that `command` asks.
_FOLDER = "TESTS_PRELOADED_FOLDER"
_SOCKET = "TESTS_PRELOADED_SOCKET"
_CONNECTED: dict[Path, _Original] = {}
_OFFERED: list[_Offer] = []
_ONE_AT_A_TIME = threading.Lock()


class Copy:
    """A process that is a copy of an original; used as `subprocess.Popen` is."""

    def __init__(self, original: _Original, pid: int, stdout: IO[str] | None) -> None:
        self._original = original
        self._pid = pid
        # Names this process even after it has ended.
        self._handle = os.pidfd_open(pid)
        self._code: int | None = None
        self.stdout = stdout

    @property
    def pid(self) -> int:
        """Its number."""
        return self._pid

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)

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

    def send_signal(self, number: int) -> None:
        """Passes a signal on; nothing happens when it has ended."""
        if self._code is None:
            signal.pidfd_send_signal(self._handle, number)


class _Original:
    """A connection to a process that has imported LiteLLM; what is copied for it ends with it."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("r", encoding="utf-8")
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
        """Ends what is left of the copies."""
        self._answers.close()
        self._socket.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise EOFError("the process that has imported LiteLLM has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Offer:
    """A socket whose first connection starts a process that imports LiteLLM; it ends with this one."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        # LiteLLM's import puts what is two folders above the current one before all other modules (1.106.2): in a
        # checkout that would be whatever somebody has beside it.
        self._folder = path.parent / f"{path.name}.in" / "here"
        self._folder.mkdir(parents=True)
        # Closed at the end, which the process sees, and the thread.
        self._mine, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the process, and what is left of its copies."""
        self._mine.close()
        self._thread.join()
        if self._process is not None:
            self._process.wait()

    def _wait(self) -> None:
        with self._listener, self._theirs:
            ready, _, _ = select.select([self._listener, self._theirs], [], [])
            if self._theirs not in ready:
                descriptors = (self._listener.fileno(), self._theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, "serve", *map(str, descriptors)],
                    # NumPy's threads would be there before anything is copied.
                    env={**self._environ, "OPENBLAS_NUM_THREADS": "1"},
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    # Ctrl-C is for pytest, which then ends each copy.
                    start_new_session=True,
                )


def offer(environ: Mapping[str, str]) -> None:
    """Lets all processes that are started from now on share one that has imported LiteLLM.

    Args:
        environ: theirs, of their proxies.
    """
    folder = tempfile.mkdtemp()
    os.environ[_FOLDER] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _offered(Path(folder), _early(environ))


def start(arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Copy | None:
    """A proxy in a process of its own; None where nothing can be copied.

    Args:
        arguments: of `litellm`.
        folder: to run in.
        environ: all of its environment.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    original = _connected(_path(environ))
    if not original.may_be_copied:
        return None
    reading, writing = os.pipe()
    try:
        pid = _copied(original, arguments, folder, environ, writing)
    finally:
        os.close(writing)
    return Copy(original, pid, os.fdopen(reading, encoding="utf-8", errors="replace"))


def command(environ: Mapping[str, str]) -> list[str] | None:
    """What to run in the place of the `litellm` executable, with its arguments; None where nothing can be copied.

    Args:
        environ: of a proxy of these tests; the copy gets that of its command.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    path = _path(environ)
    if not _connected(path).may_be_copied:
        return None
    return ["/usr/bin/env", f"{_SOCKET}={path}", sys.executable, "-m", __name__, "run"]


def _copied(
    original: _Original, arguments: Sequence[str], folder: Path, environ: Mapping[str, str], output: int
) -> int:
    question = {"arguments": list(arguments), "folder": str(folder), "environ": dict(environ)}
    pid: int = original.ask(question, output)["pid"]
    return pid


def _connected(path: Path) -> _Original:
    if path not in _CONNECTED:
        _close_at_exit()
        _CONNECTED[path] = _Original(path)
    return _CONNECTED[path]


def _path(environ: Mapping[str, str]) -> Path:
    """The socket that is offered for an environment; where there is none, it is offered here."""
    early = _early(environ)
    if _FOLDER not in os.environ:
        offer(environ)
    folder = Path(os.environ[_FOLDER])
    shared, own = folder / _name(early), folder / f"{_name(early)}-{os.getpid()}"
    if shared.exists():
        return shared
    return own if own.exists() else _offered(folder, early, f"-{os.getpid()}")


def _offered(folder: Path, early: Mapping[str, str], suffix: str = "") -> Path:
    path = folder / f"{_name(early)}{suffix}"
    _close_at_exit()
    _OFFERED.append(_Offer(path, early))
    return path


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    """What LiteLLM's import may look at."""
    return {
        name: value for name, value in environ.items() if name not in _READ_LATER and not name.startswith(_OF_TESTS)
    }


def _name(early: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(early, sort_keys=True).encode()).hexdigest()[:16]


def _close_at_exit() -> None:
    if not (_CONNECTED or _OFFERED):
        atexit.register(_close)


def _close() -> None:
    for each in (*_CONNECTED.values(), *_OFFERED):
        each.close()


def _run(arguments: Sequence[str]) -> int:
    """Stands for a copy: it writes to this one's output, gets this one's signals, and ends with or before it."""
    original = _connected(Path(os.environ.pop(_SOCKET)))
    copy = Copy(original, _copied(original, arguments, Path.cwd(), os.environ, 1), None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: copy.send_signal(received))
    code = copy.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


class _Copies:
    """Copies this process as often as it is asked to, for each of its connections.

    Args:
        listener: where connections come from.
        life: ends this process when it closes.
    """

    def __init__(self, listener: socket.socket, life: socket.socket) -> None:
        self._listener = listener
        self._life = life
        self._of: dict[socket.socket, set[int]] = {}
        threads = len(list(Path("/proc/self/task").iterdir()))
        ours = [name for name in sys.modules if name.startswith("litellm_compaction")]
        self._alone = threads == 1 and not ours

    def serve(self) -> bool:
        """Whether this is a copy, which is to run a proxy now; it returns in the process itself at its end."""
        while True:
            ready, _, _ = select.select([self._life, self._listener, *self._of], [], [])
            if self._life in ready:
                for channel in list(self._of):
                    self._left(channel)
                return False
            for channel in ready:
                if channel is self._listener:
                    self._greet(channel.accept()[0])
                elif self._answer(channel):
                    return True

    def _greet(self, channel: socket.socket) -> None:
        self._of[channel] = set()
        _say(channel, {"alone": self._alone})

    def _answer(self, channel: socket.socket) -> bool:
        question, output = _received(channel)
        if question is None:
            self._left(channel)
        elif "reap" in question:
            _, status = os.waitpid(question["reap"], 0)
            self._of[channel].discard(question["reap"])
            _say(channel, {"status": status})
        else:
            pid = os.fork()
            if pid == 0:
                for each in (self._life, self._listener, *self._of):
                    each.close()
                _become(question, output)
                return True
            os.close(output)
            self._of[channel].add(pid)
            _say(channel, {"pid": pid})
        return False

    def _left(self, channel: socket.socket) -> None:
        """Ends what was copied for a connection that is gone: nobody else would."""
        for pid in self._of.pop(channel):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        channel.close()


def _serve(listener: int, life: int) -> bool:
    """Imports LiteLLM, and copies itself; whether this is a copy."""
    importlib.import_module("litellm.proxy.proxy_cli")
    importlib.import_module("litellm.proxy.proxy_server")
    gc.collect()
    gc.freeze()
    return _Copies(socket.socket(fileno=listener), socket.socket(fileno=life)).serve()


def _say(channel: socket.socket, answer: Mapping[str, Any]) -> None:
    # Whoever has asked may be gone: its connection says so next.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendall(json.dumps(answer).encode() + b"\n")


def _received(channel: socket.socket) -> tuple[dict[str, Any] | None, int]:
    """The next question and the descriptor that came with it, None behind the last one."""
    text, output = b"", -1
    while not text.endswith(b"\n"):
        try:
            part, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        except ConnectionResetError:
            return None, -1
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
    if Path("constants.json").exists():
        importlib.import_module("tests.constants").read_beside(Path.cwd())


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(_run(sys.argv[2:]))
    if not _serve(*map(int, sys.argv[2:])):
        # Past what LiteLLM does at an exit.
        os._exit(0)
    sys.exit(importlib.import_module("litellm").run_server())
