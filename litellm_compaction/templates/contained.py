"""A process for work with strangers' files, which the system ends if it takes too much time or memory.

Chat templates that are none of this package's are rendered there (`template.py`), and each tokenizer.json is read there
first (`tokenizers/files.py`): an abort of the library's Rust side is no exception. Of 222 hostile templates 25 passed
limits inside the interpreter, by seven ways that each look harmless (2026-11-21), so that the system has to bound them.

Linux bounds all of it. macOS does not bound memory, Windows neither memory nor processor time: there the clock decides.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple

# A loaded machine may give a process little of its processor, so the clock decides late.
_CPU_S, _WALL_S = 5.0, 30.0
# An interpreter with jinja2 took 27 MB of addresses (Linux, Python 3.11, 2026-11-22).
_MEMORY_BYTES = 1 << 30
_MOST_FILES = 16
_MAX_ANSWER_BYTES = 256 * 2**20
_HEADER = struct.Struct("!Q")
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from litellm_compaction.templates.contained import serve; serve()",
    "litellm_compaction contained",
)
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class Died(Exception):
    """The process ended, by its limits, ours, or another cause."""


class Contained:
    """A process, started when it is needed; may be used from several threads, which wait for each other.

    Args:
        cpu_s: of processor time, for each piece of work.
        wall_s: seconds after which the process is ended, for each piece of work.
    """

    def __init__(self, *, cpu_s: float = _CPU_S, wall_s: float = _WALL_S) -> None:
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def run(self, job: str, payload: bytes) -> bytes:
        """Returns the result of a function there for some bytes; waits, so it belongs into a thread.

        Args:
            job: `module:function`, never out of a stranger's file.
            payload: its argument.

        Raises:
            Died: it took more than `cpu_s`, 1 GiB of memory or `wall_s`, or it failed; the next call starts anew.
            OSError: no process can be started.
        """
        with self._lock:
            process = self._running()
            clock = threading.Timer(self._wall_s, process.popen.kill)
            clock.daemon = True
            clock.start()
            try:
                _write(process.asks, f"{job} {self._cpu_s}\n".encode() + payload)
                return _read(process.answers)
            except OSError as error:
                self._end()
                raise Died from error
            except BaseException:
                # Half an answer may still come.
                self._end()
                raise
            finally:
                clock.cancel()

    def end(self) -> None:
        """Ends the process, once it is not at work."""
        with self._lock:
            self._end()

    def _running(self) -> _Process:
        process = self._process
        # A process that was forked from this one must not share its pipes.
        if process is None or process.owner != os.getpid() or process.popen.poll() is not None:
            process = self._process = _spawned()
            weakref.finalize(self, _end, process)
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)


class _Process(NamedTuple):
    popen: subprocess.Popen[bytes]
    asks: IO[bytes]
    answers: IO[bytes]
    owner: int


def _spawned() -> _Process:
    paths = [path for path in sys.path if path] or [str(Path(__file__).resolve().parents[2])]
    # Nothing of the environment: keys are in it. One thread: each has a stack and an arena of its own, which count as
    # memory on a machine of many cores.
    popen = subprocess.Popen(  # noqa: S603 - fixed words
        [sys.executable, "-I", "-S", "-c", *_START, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ONE_THREAD | {key: os.environ[key] for key in ("SYSTEMROOT", "PATH") if key in os.environ},
    )
    if popen.stdin is None or popen.stdout is None:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
    return _Process(popen, popen.stdin, popen.stdout, os.getpid())


def _end(process: _Process) -> None:
    if process.owner != os.getpid():
        return
    process.popen.kill()
    # What was not written yet cannot be written any more.
    with contextlib.suppress(OSError):
        process.asks.close()
    process.answers.close()
    process.popen.wait()


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEADER.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise Died
    (size,) = _HEADER.unpack(header)
    if size > _MAX_ANSWER_BYTES:
        raise Died
    data = pipe.read(size)
    if len(data) < size:
        raise Died
    return data


def serve() -> None:
    """Serves `Contained.run` in the process, until its pipe is closed."""
    asks, answers = sys.stdin.buffer, sys.stdout.buffer
    _limit_all()
    try:
        while True:
            head, _, payload = _read(asks).partition(b"\n")
            job, cpu_s = head.decode().split()
            module, _, name = job.partition(":")
            function = getattr(import_module(module), name)
            _limit_cpu(float(cpu_s))
            _write(answers, function(payload))
    except Died:
        return
    except MemoryError:
        os._exit(1)


def _limit_all() -> None:
    try:
        import resource
    except ImportError:
        return
    for name, limit in (("AS", _MEMORY_BYTES), ("CORE", 0), ("NOFILE", _MOST_FILES), ("FSIZE", 0)):
        _limit(getattr(resource, f"RLIMIT_{name}"), limit)


def _limit_cpu(cpu_s: float) -> None:
    """Allows so much more than was used so far: then the system ends the process, whatever it is doing."""
    try:
        import resource
    except ImportError:
        return
    # Finer than seconds; no interrupted call can miss the limit after it.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + cpu_s))


def _limit(kind: int, limit: int) -> None:
    import resource

    try:
        _, hardest = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hardest == resource.RLIM_INFINITY else min(limit, hardest), hardest))
    except (ValueError, OSError):
        # This system knows no such limit.
        return
