"""Shared by requests: one run for all who want the same, bounds, rests after failures, ended tasks, work in threads.

`off_loop` keeps work over a whole conversation from holding up the event loop. A thread that runs Python lets the
loop's go on every 5 ms. One call into C does not (`json`, `re`, a copy): its input has to be cut into slices.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# More than one: the collector may come again while one map is being copied.
_held: deque[contextvars.Context] = deque(maxlen=8)


def hold_contexts() -> None:
    """Keeps the proxy process alive on Python before 3.12, where setting a context variable can crash it; idempotent.

    If a garbage collection inside `ContextVar.set` ends a generator that resets a variable, as LiteLLM's do, the map
    that is being copied is freed (Python/context.c). So every collection holds the context that is current.
    """
    if sys.version_info < (3, 12) and _hold not in gc.callbacks:
        gc.callbacks.append(_hold)


def _hold(phase: str, _info: dict[str, Any]) -> None:
    if phase == "start":
        _held.append(contextvars.copy_context())


# Wildcard deployments get their model names from clients, who may send keys of their own: what is kept by one ends.
_MOST = 4096


class Bounded(OrderedDict[_Key, _Value]):
    """A dict of `most` entries, 1 or more, that forgets the one that was written longest ago; threads may write.

    Reading keeps nothing alive; `move_to_end` does.
    """

    def __init__(self, most: int = _MOST) -> None:
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


# Until when a rest lasts, and its length.
_NO_REST = -math.inf, 0.0


class Rests(Generic[_Key]):
    """Keys that are left alone after a failure: `first_s`, and twice as long with each in a row, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._longest_s, self._clock = first_s, longest_s, clock
        self._kept: Bounded[_Key, tuple[float, float]] = Bounded()

    def is_over(self, key: _Key) -> bool:
        return self._clock() >= self._kept.get(key, _NO_REST)[0]

    def begin(self, key: _Key) -> bool:
        """Notes a failure, one of several together; returns True for the first one ever, which is worth a warning."""
        is_first, (until_s, rest_s) = key not in self._kept, self._kept.get(key, _NO_REST)
        if self._clock() >= until_s:
            rest_s = max(self._first_s, min(2 * rest_s, self._longest_s))
            self._kept[key] = self._clock() + rest_s, rest_s
        return is_first

    def end(self, key: _Key) -> None:
        if key in self._kept:
            self._kept[key] = _NO_REST


class Flights(Generic[_Result]):
    """Runs by key, in one event loop. A run is cancelled with its last waiter, and its result is not kept."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, asyncio.Task[_Result]] = {}
        self._waiters: dict[asyncio.Task[_Result], int] = {}

    def is_under_way(self, key: Hashable) -> bool:
        return key in self._runs

    async def join(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """The result, or the error, of the one run under `key`, in the context of its first caller."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = asyncio.ensure_future(start())
            run.add_done_callback(lambda run: self._forget(key, run))
        self._waiters[run] = self._waiters.get(run, 0) + 1
        try:
            return await asyncio.shield(run)
        finally:
            self._waiters[run] -= 1
            if not self._waiters[run]:
                del self._waiters[run]
                self._forget(key, run)
                run.cancel()

    def _forget(self, key: Hashable, run: asyncio.Task[_Result]) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]
        _retrieve(run)


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
        done, waiting = await asyncio.wait(waiting, timeout=0.1)
        for task in done:
            _retrieve(task)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks a task's error as seen: all its waiters may have gone."""
    if task.done() and not task.cancelled():
        task.exception()


class Kept(Generic[_Key, _Value]):
    """Values by key, `most` of them: each is obtained once at a time for all who ask, and kept for its `life_s`."""

    def __init__(
        self,
        obtain: Callable[[_Key], Coroutine[Any, Any, _Value]],
        life_s: Callable[[_Value], float],
        *,
        most: int = _MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._obtain, self._life_s, self._clock = obtain, life_s, clock
        # With the time until which each holds.
        self._held: Bounded[_Key, tuple[_Value, float]] = Bounded(most)
        # With the time at which each has begun.
        self._runs: Bounded[_Key, tuple[asyncio.Task[_Value], float]] = Bounded(most)
        self._tasks = Tasks()

    async def get(self, key: _Key, *, fresh: bool = False) -> _Value:
        """The value, obtained now unless one holds; `fresh` waits for one whose obtaining begins after this call."""
        if fresh:
            self.invalidate(key)
        held = self._held.get(key)
        return held[0] if held and self._clock() < held[1] else await asyncio.shield(self._run(key)[0])

    async def soon(self, key: _Key, *, wait_s: float) -> _Value | None:
        """As `get`, but gives the previous value, or None, once obtaining has taken `wait_s`."""
        held = self._held.get(key)
        if held and self._clock() < held[1]:
            return held[0]
        run, begun_s = self._run(key)
        await asyncio.wait({run}, timeout=begun_s + wait_s - self._clock())
        return run.result() if run.done() else self.last(key)

    def last(self, key: _Key) -> _Value | None:
        """The value that was obtained last, even if it does not hold any more."""
        held = self._held.get(key)
        return held[0] if held else None

    def has(self, key: _Key) -> bool:
        return key in self._held

    def invalidate(self, key: _Key) -> None:
        """Has the next `get` wait for a value whose obtaining begins after this call."""
        if key in self._held:
            self._held[key] = self._held[key][0], -math.inf
        run = self._runs[key][0] if key in self._runs else None
        if run and inspect.getcoroutinestate(run.get_coro()) != inspect.CORO_CREATED:  # type: ignore[arg-type]
            del self._runs[key]

    async def aclose(self) -> None:
        await ended(self._tasks)

    def _run(self, key: _Key) -> tuple[asyncio.Task[_Value], float]:
        if key not in self._runs or self._runs[key][0].done():
            run = self._tasks.begin(self._obtained(key))
            run.add_done_callback(_retrieve)
            self._runs[key] = run, self._clock()
        return self._runs[key]

    async def _obtained(self, key: _Key) -> _Value:
        value = await self._obtain(key)
        # If it was not invalidated meanwhile.
        if key in self._runs and self._runs[key][0] is asyncio.current_task():
            self._held[key] = value, self._clock() + self._life_s(value)
        return value


# Work over more text than this leaves the event loop: the ledger takes about 0.3 ms for 1,000 characters.
_OFF_LOOP_CHARS = 20_000
# Reading this many messages, parts or calls takes 2 to 3 ms, as does looking through so much text, or an image's data.
_OFF_LOOP_ITEMS, _CHARS_OF_AN_ITEM, _FIELDS = 400, 250, 8


async def off_loop(messages: Sequence[Any], run: Callable[[], _Result]) -> _Result:
    """Returns the result of `run`, a walk over `messages`; uses a thread if it would hold up the event loop."""
    long = is_long(messages) or sum(len(message.text) for message in messages) >= _OFF_LOOP_CHARS
    return await off_loop_if(long, run)


async def off_loop_if(is_long: bool, run: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(run) if is_long else run()


def is_long(*lists: object) -> bool:
    """Returns True if lists of JSON, such as `messages` and `tools`, hold so much that a walk takes some ms."""
    left = _OFF_LOOP_ITEMS
    for values in lists:
        for value in values if isinstance(values, (list, tuple)) else ():
            raw = getattr(value, "raw", value)
            left -= 1 + sum(map(_size, raw.values() if isinstance(raw, dict) else (raw,)))
            if left < 0:
                return True
    return False


def _size(value: object, depth: int = 0) -> int:
    """The weight of a part of a message or a tool: a list, or a text; of what is in a list that of its texts."""
    if isinstance(value, str):
        return len(value) // _CHARS_OF_AN_ITEM
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    # An image's data is in the field of a field of a part, which has few.
    texts = islice(inside, _FIELDS if depth else _OFF_LOOP_ITEMS) if depth < 3 else ()
    return len(inside) // (_FIELDS if depth else 1) + sum(_size(each, depth + 1) for each in texts)
