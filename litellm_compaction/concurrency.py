"""Shared by requests: one run for all who want the same, bounds, rests after failures, ended tasks, work in threads.

`off_loop` keeps work over a whole conversation from holding up the event loop. A thread that runs Python lets the
loop's go on every 5 ms. One call into C does not (`json`, `re`, a copy): its input has to be cut into slices.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

_Result = TypeVar("_Result")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_ASKED_AGAIN_S = 0.1
_MAX_RESTS = 4096
# While one map is being copied the collector may come more than once: with the last context alone the interpreter still
# died when it came after every third object (3.11.7), with two it did not.
_held: deque[contextvars.Context] = deque(maxlen=8)


def hold_contexts() -> None:
    """Keeps the proxy process alive on Python before 3.12, where setting a context variable can crash it; idempotent.

    The garbage collector runs inside any allocation, also inside `ContextVar.set`. If it then ends a generator whose
    `finally` sets or resets a variable, the map that is being copied is freed under the copy (CPython 3.11,
    Python/context.c `contextvar_set`: `ctx->ctx_vars` is borrowed), and the process dies with a segmentation fault. A
    stock LiteLLM, which resets variables in such generators, died after some hundred streamed requests. Since
    3.12 the collector runs between bytecodes only (What's New in Python 3.12, "gc"). So every collection holds the
    context that is current, and with it the map that may be in use.
    """
    if sys.version_info < (3, 12) and _hold not in gc.callbacks:
        gc.callbacks.append(_hold)


def _hold(phase: str, _info: dict[str, Any]) -> None:
    if phase == "start":
        _held.append(contextvars.copy_context())


class Bounded(OrderedDict[_Key, _Value]):
    """A dict of `most` entries, 1 or more, that forgets the one that was written longest ago.

    Reading keeps nothing alive; `move_to_end` does. Threads that write at the same time lose nothing of each other:
    `setdefault` gives all of them the same value, which an OrderedDict's own does not once writing is Python code.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._lock = threading.RLock()

    def __setitem__(self, key: _Key, value: _Value) -> None:
        with self._lock:
            super().__setitem__(key, value)
            self.move_to_end(key)
            if len(self) > self._most:
                self.popitem(last=False)

    def setdefault(self, key: _Key, default: _Value) -> _Value:
        with self._lock:
            if key not in self:
                self[key] = default
            return self[key]


class Rests(Generic[_Key]):
    """Keys that are left alone after a failure: `first_s`, and twice as long with each in a row, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._longest_s, self._clock = first_s, longest_s, clock
        # Until when, and the rest's length.
        self._kept: Bounded[_Key, tuple[float, float]] = Bounded(_MAX_RESTS)

    def is_over(self, key: _Key) -> bool:
        return self._clock() >= self._kept.get(key, (-math.inf, 0.0))[0]

    def begin(self, key: _Key) -> bool:
        """Notes a failure, one of several together; returns True for the first one ever, which is worth a warning."""
        known = self._kept.get(key)
        if not self.is_over(key):
            return False
        pause_s = max(self._first_s, min(2 * known[1], self._longest_s)) if known is not None else self._first_s
        self._kept[key] = self._clock() + pause_s, pause_s
        return known is None

    def end(self, key: _Key) -> None:
        if key in self._kept:
            self._kept[key] = -math.inf, 0.0


@dataclass(slots=True)
class _Flight(Generic[_Result]):
    task: asyncio.Task[_Result]
    waiters: int = 0


class Flights(Generic[_Result]):
    """Runs by key, in one event loop. A run is cancelled with its last waiter, and its result is not kept."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[_Result]] = {}

    def is_under_way(self, key: Hashable) -> bool:
        return key in self._flights

    async def join(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """The result, or the error, of the one run under `key`, in the context of its first caller."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(start()))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()

    def _landed(self, key: Hashable, task: asyncio.Task[_Result]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        _retrieve(task)


class Tasks(set["asyncio.Task[Any]"]):
    """Running tasks without a waiter; an event loop itself would forget them."""

    def begin(self, job: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.get_running_loop().create_task(job)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks, and returns when they have ended.

    A task may miss it, and is cancelled again: before Python 3.12 `wait_for` gives a result of the same moment instead.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        done, waiting = await asyncio.wait(waiting, timeout=_ASKED_AGAIN_S)
        for task in done:
            _retrieve(task)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks a task's error as seen: all its waiters may have gone."""
    if not task.cancelled():
        task.exception()


@dataclass(slots=True)
class _Run(Generic[_Value]):
    begun_s: float
    has_begun: bool = False
    task: asyncio.Task[_Value] = field(init=False)


class Kept(Generic[_Key, _Value]):
    """Values by key: each is obtained once at a time for all who ask, and kept for a while.

    Args:
        obtain: its error reaches those who wait, and is not kept.
        life_s: of a value, from when it was obtained.
        most: the number of values that are kept.
    """

    def __init__(
        self,
        obtain: Callable[[_Key], Coroutine[Any, Any, _Value]],
        life_s: Callable[[_Value], float],
        *,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._obtain = obtain
        self._life_s = life_s
        self._clock = clock
        # With the time until which each holds.
        self._held: Bounded[_Key, tuple[_Value, float]] = Bounded(most)
        self._runs: dict[_Key, _Run[_Value]] = {}
        self._tasks: set[asyncio.Task[_Value]] = set()

    async def get(self, key: _Key, *, fresh: bool = False) -> _Value:
        """The value, obtained now unless one holds; `fresh` waits for one whose obtaining begins after this call."""
        if fresh:
            self.invalidate(key)
        held = self._held.get(key)
        if held is not None and self._clock() < held[1]:
            return held[0]
        return await asyncio.shield((self._runs.get(key) or self._started(key)).task)

    async def soon(self, key: _Key, *, wait_s: float) -> _Value | None:
        """As `get`, but gives the previous value, or None, once obtaining has taken `wait_s`."""
        held = self._held.get(key)
        if held is not None and self._clock() < held[1]:
            return held[0]
        run = self._runs.get(key) or self._started(key)
        await asyncio.wait({run.task}, timeout=max(0.0, run.begun_s + wait_s - self._clock()))
        return run.task.result() if run.task.done() else self.last(key)

    def last(self, key: _Key) -> _Value | None:
        """The value that was obtained last, even if it does not hold any more."""
        held = self._held.get(key)
        return held[0] if held is not None else None

    def has(self, key: _Key) -> bool:
        return key in self._held

    def invalidate(self, key: _Key) -> None:
        """Has the next `get` wait for a value whose obtaining begins after this call."""
        held = self._held.get(key)
        if held is not None:
            self._held[key] = (held[0], -math.inf)
        if key in self._runs and self._runs[key].has_begun:
            del self._runs[key]

    async def aclose(self) -> None:
        self._runs.clear()
        await ended(self._tasks)

    def _started(self, key: _Key) -> _Run[_Value]:
        run: _Run[_Value] = _Run(self._clock())
        run.task = asyncio.create_task(self._keep(key, run))
        run.task.add_done_callback(lambda _: self._landed(key, run))
        self._tasks.add(run.task)
        self._runs[key] = run
        return run

    async def _keep(self, key: _Key, run: _Run[_Value]) -> _Value:
        run.has_begun = True
        value = await self._obtain(key)
        if self._runs.get(key) is run:
            self._held[key] = (value, self._clock() + self._life_s(value))
        return value

    def _landed(self, key: _Key, run: _Run[_Value]) -> None:
        self._tasks.discard(run.task)
        if self._runs.get(key) is run:
            del self._runs[key]
        _retrieve(run.task)


# Work over more text than this leaves the event loop: the ledger takes about 0.3 ms for 1,000 characters.
_OFF_LOOP_CHARS = 20_000
# Reading this many messages, parts or calls takes 2 to 3 ms, as does looking through so much text.
_OFF_LOOP_ITEMS, _CHARS_OF_AN_ITEM = 400, 2_000


class HasText(Protocol):
    """A message, as far as its size is asked for; `raw` is its JSON."""

    @property
    def text(self) -> str: ...


async def off_loop(messages: Sequence[HasText], run: Callable[[], _Result]) -> _Result:
    """Returns the result of `run`, a walk over `messages`; uses a thread if it would hold up the event loop."""
    if not is_long(messages) and sum(len(message.text) for message in messages) < _OFF_LOOP_CHARS:
        return run()
    return await asyncio.to_thread(run)


async def off_loop_if(is_long: bool, run: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(run) if is_long else run()


def is_long(*lists: object) -> bool:
    """Returns True if lists of JSON, such as `messages` and `tools`, hold so much that a walk takes some ms."""
    left = _OFF_LOOP_ITEMS
    for each in lists:
        if not isinstance(each, Sequence) or isinstance(each, str):
            continue
        left -= len(each)
        if left < 0:
            return True
        for value in each:
            left -= _items(value)
        if left < 0:
            return True
    return False


def _items(value: object) -> int:
    """The weight of a message or a tool besides itself: the lists in it, and its texts.

    JSON's types are asked for first: an abstract class takes ten times as long to answer, and a request looks at each
    message of a conversation several times.
    """
    value = getattr(value, "raw", value)
    if isinstance(value, (dict, Mapping)):
        return sum(_size(part) for part in value.values() if part is not None)
    return _size(value)


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value) // _CHARS_OF_AN_ITEM
    return len(value) if isinstance(value, (list, dict, tuple, Sequence, Mapping)) else 0
