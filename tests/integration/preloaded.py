"""Copies of a process that has imported LiteLLM, which takes ten seconds of processor time: each runs a proxy.

Such a process is Python's own fork server, one for each process of pytest that starts proxies; it ends with it. Before
it copies itself it has one thread, no event loop and no file but its sockets. What a user starts is tried with
`TESTS_START_EXECUTABLES=1`, and by `tests/processes/test_newcomer.py`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO
from unittest.mock import patch

_PRELOADED = ["litellm.proxy.proxy_cli", "litellm.proxy.proxy_server"]


class Copy:
    """A process that is a copy; used as `subprocess.Popen` is."""

    def __init__(self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        reading, writing = os.pipe()
        with Connection(writing, readable=False) as output:
            self._process = context.Process(
                target=_become, args=(list(arguments), str(folder), dict(environ), output), daemon=True
            )
            self._process.start()
        self.pid = self._process.pid or 0
        self.stdout: IO[str] = os.fdopen(reading, encoding="utf-8", errors="replace")
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; a TimeoutExpired while it runs still."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(["litellm"], timeout or 0)
        return self._process.exitcode


def start(arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Copy | None:
    """A proxy in a process of its own, with `environ` as all of its environment; None where nothing can be copied."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return None
    _run_server(environ)
    return Copy(arguments, folder, environ)


def _run_server(environ: Mapping[str, str]) -> None:
    """Starts the fork server, where there is none yet."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    here = Path.cwd()
    os.chdir(_empty_folder())
    try:
        # NumPy's threads would be there before anything is copied.
        with patch.dict(os.environ, {**environ, "OPENBLAS_NUM_THREADS": "1"}, clear=True):
            # Not on every system.
            importlib.import_module("multiprocessing.forkserver").ensure_running()
    finally:
        os.chdir(here)


@cache
def _empty_folder() -> Path:
    """Where LiteLLM is imported: it puts what is two folders above the current one before all other modules (1.106.2).

    In a checkout that would be whatever somebody has beside it.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    inner = Path(folder, "in", "here")
    inner.mkdir(parents=True)
    return inner


def _become(arguments: Sequence[str], folder: str, environ: Mapping[str, str], output: Connection) -> None:
    """Makes this copy what the executable is when it begins, and runs it."""
    # What was imported is no garbage.
    gc.freeze()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    executable = Path(sys.executable).with_name("litellm")
    sys.argv = [str(executable), *arguments]
    sys.path[0] = str(executable.parent)
    if Path("constants.json").exists():
        importlib.import_module("tests.constants").read_beside(Path.cwd())
    importlib.import_module("litellm").run_server()
