"""Strangers' files in a process of its own, which the system ends where they take too much time or memory.

`Containment` renders a stranger's chat template. `answer_of` is for work that is done once: `tokenizers/files.py` has
each tokenizer.json read there first, since an abort of the library's Rust side is no exception.

`templates.add_template` makes a containment for every template that is none of this package's own. A static check was
weighed against it: of 222 hostile templates 25 passed the sandbox's limits by seven ways that each look harmless
(products of integers, lists in lists, filters over ranges), and whatever such a check forgets freezes the proxy from
the first look at the file, after every restart again. A process costs 0.3 s and 20 MB once for each such template. Of a
conversation that goes on only what is new is sent, either way, so that the next turn takes about a millisecond, in a
thread. All of it took 1.6 times as long at 450 messages: 85 ms in place of 53 (2026-11-23).

Linux bounds all of it. macOS does not bound memory, Windows neither memory nor processor time: there the clock decides.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import JsonObject, JsonValue
from litellm_compaction.templates.filters import TemplateRefusal

logger = logging.getLogger("litellm_compaction")

# The sandbox's own limit is 4 s. Of a loaded machine a process may get little: the clock decides late.
_CPU_S, _FIRST_CPU_S, _WALL_S = 5, 2, 30.0
# An interpreter with jinja2 took 27 MB of addresses (Linux, Python 3.11, 2026-11-22).
_MEMORY_BYTES = 1 << 30
_MOST_FILES = 16
# Larger requests are counted by the formula: nothing that clients send may end a template for everybody.
_MAX_REQUEST_BYTES, _MAX_ANSWER_BYTES = 16 * 2**20, 256 * 2**20
# Conversations of which both sides remember what was sent and written.
_MAX_TALKS = 4
_MAX_PROCESSES = 4
# So often a template may take too long by the clock, which can be the machine's fault.
_STRIKES = 3
_MAX_BURIED = 4096
_HEADER = struct.Struct("!Q")
# What a process does. It is told by whoever knows how a template is compiled, which is not here.
_START = "from litellm_compaction.templates.template import serve; serve()"
_PATHS = "import sys; sys.path[:] = sys.argv[2:]; "
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
# Those whose process runs, the least recently used first.
_alive: OrderedDict[int, weakref.ref[Containment]] = OrderedDict()
_alive_lock = threading.Lock()
_buried: Bounded[str, None] = Bounded(_MAX_BURIED)
_graveyard: list[Path] = []


class Died(Exception):
    """The process ended, by its limits, ours, or whatever."""


class Containment:
    """Renders one template; may be used from several threads, which wait for each other.

    Args:
        source: of the template.
        wall_s: seconds after which the process is ended.
        first_cpu_s: of processor time, for the first rendering, which is our own tiny conversation.
    """

    def __init__(self, source: str, *, wall_s: float = _WALL_S, first_cpu_s: float = _FIRST_CPU_S) -> None:
        self._source = source
        self._first_cpu_s = first_cpu_s
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._strikes = 0

    def parts(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue], *, bos: str, eos: str, now: datetime | None
    ) -> list[str]:
        """The prompt, as `Template.parts` gives it; waits, so it belongs into a thread.

        Raises:
            TemplateRefusal: for any reason; a template that has ended its process is never tried again.
        """
        if is_buried(self._source):
            raise TemplateRefusal("it has taken too much time or memory before")
        with self._lock:
            # First of all: a new process remembers nothing.
            process = self._running()
            talk, same = _best(process.talks, messages)
            rest = [same, list(messages[same:]), list(tools), bos, eos, now and now.isoformat()]
            try:
                request = json.dumps([talk, *rest]).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise TemplateRefusal(f"{type(error).__name__}: it cannot be written as JSON") from error
            if len(request) > _MAX_REQUEST_BYTES:
                raise TemplateRefusal(f"more than {_MAX_REQUEST_BYTES} bytes of messages")
            answer = self._ask(process, request)
            before = process.talks.pop(talk, _Talk((), []))
            match answer:
                case {"same": int(known), "parts": [*new]} if all(isinstance(part, str) for part in new):
                    parts = [*before.parts[:known], *new]
                case {"refusal": str(words)}:
                    raise TemplateRefusal(words[:500])
                case _:
                    raise TemplateRefusal("it said nothing that can be read")
            process.talks[talk] = _Talk(tuple(messages), parts)
            return list(parts)

    def _ask(self, process: _Process, request: bytes) -> object:
        ended = threading.Event()

        def end() -> None:
            ended.set()
            process.popen.kill()

        clock = threading.Timer(self._wall_s, end)
        clock.daemon = True
        clock.start()
        try:
            _write(process.asks, request)
            answer: object = json.loads(_read(process.answers))
        except (Died, OSError, ValueError, RecursionError) as error:
            self._end()
            self._note_death(by_clock=ended.is_set())
            raise TemplateRefusal("it has taken too much time or memory") from error
        except BaseException:
            # Half an answer may still come.
            self._end()
            raise
        finally:
            clock.cancel()
        return answer

    def _note_death(self, *, by_clock: bool) -> None:
        self._strikes += 1
        is_bounded = sys.platform == "linux"
        if by_clock and is_bounded and self._strikes < _STRIKES:
            return
        bury(self._source)

    def _running(self) -> _Process:
        process = self._process
        # A process that was forked from this one must not share its pipes.
        if process is None or process.owner != os.getpid() or process.popen.poll() is not None:
            process = self._process = _started(self._source, self._first_cpu_s)
            weakref.finalize(self, _end, process)
        _note_use(self)
        return process

    def rest(self) -> None:
        """Ends the process, unless it is at work; the next use makes a new one."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)


class _Talk(NamedTuple):
    """What was sent of a conversation, and what the template made of it."""

    messages: tuple[JsonObject, ...]
    parts: list[str]


class _Process(NamedTuple):
    """A running process; `talks` by number, the least recently used first, is what it remembers too."""

    popen: subprocess.Popen[bytes]
    asks: IO[bytes]
    answers: IO[bytes]
    owner: int
    talks: dict[int, _Talk]


def _best(talks: dict[int, _Talk], messages: Sequence[JsonObject]) -> tuple[int, int]:
    """The conversation that `messages` go on with, or a free or the oldest place; and how many of them it has."""
    best, most = -1, 0
    for number, talk in talks.items():
        same = _same(talk.messages, messages)
        if same > most:
            best, most = number, same
    if best < 0:
        best = len(talks) if len(talks) < _MAX_TALKS else next(iter(talks))
    return best, most


def _same(before: Sequence[Any], now: Sequence[Any]) -> int:
    """How many of the first are equal."""
    position = 0
    # What nests too deep to be compared is sent again.
    with contextlib.suppress(RecursionError):
        for one, other in zip(before, now, strict=False):
            if one is not other and one != other:
                break
            position += 1
    return position


def _started(source: str, first_cpu_s: float) -> _Process:
    try:
        process = _spawned(_START)
    except OSError as error:
        raise TemplateRefusal(f"no process can be started: {error.strerror}") from error
    try:
        _write(process.asks, json.dumps([source, first_cpu_s]).encode())
    except OSError as error:
        _end(process)
        raise TemplateRefusal("the process cannot be spoken to") from error
    return process


def _spawned(start: str) -> _Process:
    """A process that runs a line of Python; raises OSError."""
    paths = [path for path in sys.path if path] or [str(Path(__file__).resolve().parents[2])]
    # Nothing of the environment: keys are in it. One thread: each has a stack and an arena of its own, which count as
    # memory on a machine of many cores.
    popen = subprocess.Popen(  # noqa: S603 - fixed words
        [sys.executable, "-I", "-S", "-c", _PATHS + start, "litellm_compaction contained", *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ONE_THREAD | {key: os.environ[key] for key in ("SYSTEMROOT", "PATH") if key in os.environ},
    )
    if popen.stdin is None or popen.stdout is None:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
    return _Process(popen, popen.stdin, popen.stdout, os.getpid(), {})


def answer_of(start: str, request: bytes, *, wall_s: float = _WALL_S) -> bytes:
    """What a process of its own answers to one request, after which it ends; waits, so it belongs into a thread.

    Args:
        start: a line of Python that calls `serve_once`.
        request: for the function that it names.
        wall_s: seconds after which the process is ended.

    Raises:
        Died: it took more than 5 s of processor time, 1 GiB of memory or `wall_s`, or it failed.
        OSError: no process can be started.
    """
    process = _spawned(start)
    clock = threading.Timer(wall_s, process.popen.kill)
    clock.daemon = True
    clock.start()
    try:
        _write(process.asks, request)
        return _read(process.answers)
    except OSError as error:
        raise Died from error
    finally:
        clock.cancel()
        _end(process)


def serve_once(answer: Callable[[bytes], bytes]) -> None:
    """What the process of `answer_of` does."""
    _limit_all(_CPU_S)
    try:
        _write(sys.stdout.buffer, answer(_read(sys.stdin.buffer)))
    except (Died, MemoryError):
        os._exit(1)


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


def _note_use(containment: Containment) -> None:
    tired: list[Containment] = []
    with _alive_lock:
        _alive[id(containment)] = weakref.ref(containment)
        _alive.move_to_end(id(containment))
        while len(_alive) > _MAX_PROCESSES:
            _, oldest = _alive.popitem(last=False)
            found = oldest()
            if found is not None and found is not containment:
                tired.append(found)
    for each in tired:
        each.rest()


def remember_in(path: Path | None) -> None:
    """Reads from a file what is not tried any more, and writes later ones there; None keeps them in memory.

    What cannot be read or written is only remembered by this process.
    """
    _graveyard[:] = [path] if path is not None else []
    if path is not None:
        try:
            lines = path.read_text(encoding="ascii", errors="replace").split()[-_MAX_BURIED:]
        except OSError:
            return
        _buried.update(dict.fromkeys(lines))


def is_buried(source: str | bytes) -> bool:
    """Whether a template, or the bytes of a tokenizer.json, has ended its process before."""
    return _digest(source) in _buried


def bury(source: str | bytes) -> None:
    """Has a template, or the bytes of a tokenizer.json, not tried any more."""
    digest = _digest(source)
    kind = "template" if isinstance(source, str) else "tokenizer"
    logger.warning("%s_refused hash=%s; it took too much time or memory, and is not tried again", kind, digest)
    _buried[digest] = None
    for path in _graveyard:
        _note(path, digest)


def _note(path: Path, digest: str) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(path, flags, 0o600), "a", encoding="ascii") as file:
            file.write(f"{digest}\n")
    except OSError as error:
        logger.warning("refusal_not_noted %s; it is tried once more after a restart", error.strerror)


def _digest(source: str | bytes) -> str:
    raw = source.encode("utf-8", "replace") if isinstance(source, str) else source
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


class Compiled(Protocol):
    """A template that renders in this very process."""

    def parts(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue], *, bos: str, eos: str, now: datetime | None
    ) -> list[str]:
        """The prompt; raises TemplateRefusal."""


def serve_requests(compile_template: Callable[[str], Compiled]) -> None:
    """What the process does: reads a template, then requests, until its pipe is closed."""
    asks, answers = sys.stdin.buffer, sys.stdout.buffer
    _limit_all(_FIRST_CPU_S)
    try:
        source, first_cpu_s = json.loads(_read(asks))
        _limit_cpu(first_cpu_s)
        template = compile_template(source)
        talks: dict[int, _Talk] = {}
        while True:
            number, known, new, tools, bos, eos, now = json.loads(_read(asks))
            _limit_cpu(_CPU_S if talks else first_cpu_s)
            before = talks.pop(number, _Talk((), []))
            messages = (*before.messages[:known], *new)
            try:
                when = datetime.fromisoformat(now) if now else None
                parts = template.parts(messages, tools, bos=bos, eos=eos, now=when)
            except TemplateRefusal as error:
                if isinstance(error.__cause__, MemoryError):
                    raise error.__cause__ from error
                answer: dict[str, Any] = {"refusal": str(error)[:500]}
            else:
                same = _same(before.parts, parts)
                answer = {"same": same, "parts": parts[same:]}
                talks[number] = _Talk(messages, parts)
            _write(answers, json.dumps(answer).encode())
    except Died:
        # Whoever asked has gone.
        return
    except MemoryError:
        os._exit(1)


def _limit_all(cpu_s: float) -> None:
    try:
        import resource
    except ImportError:
        return
    for name, limit in (("AS", _MEMORY_BYTES), ("CORE", 0), ("NOFILE", _MOST_FILES), ("FSIZE", 0)):
        _limit(getattr(resource, f"RLIMIT_{name}"), limit)
    _limit_cpu(cpu_s)


def _limit_cpu(cpu_s: float) -> None:
    """So much more than was used so far: the system ends the process, whatever it is doing."""
    try:
        import resource
    except ImportError:
        return
    # Finer than seconds; the limit behind it is what no interrupted call can miss.
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
