"""What many requests have in common: one run for all who want the same (single flight), memory with a bound, an end.

A shared run ends with its last waiter: when all of them are cancelled, it is cancelled too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_ASKED_AGAIN_S = 0.1


class Bounded(OrderedDict[_Key, _Value]):
    """A dict that forgets the entry that was written longest ago when a new one is too many.

    Reading keeps nothing alive; `move_to_end` does. Threads that write at the same time lose nothing of each other:
    `setdefault` gives all of them the same value, which an OrderedDict's own does not once writing is Python code.

    Args:
        most: how many entries it keeps, 1 or more.
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
        """The value that is there, else `default`, which then is."""
        with self._lock:
            if key not in self:
                self[key] = default
            return self[key]


@dataclass(slots=True)
class _Flight(Generic[_Result]):
    task: asyncio.Task[_Result]
    waiters: int = 0


class Flights(Generic[_Result]):
    """Runs by key; not for use from several event loops."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[_Result]] = {}

    def is_under_way(self, key: Hashable) -> bool:
        """Whether a run under `key` has begun and not ended, so that who joins now will wait for somebody else's."""
        return key in self._flights

    async def join(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """The result of the one run under `key`, started by the first who asks.

        Args:
            key: what makes two runs the same.
            start: makes the coroutine; it runs in the context of the first caller.

        Raises:
            Whatever the run raises, in every waiter.
        """
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
        if not task.cancelled():
            task.exception()  # marks it as retrieved: every waiter may have gone


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Ends tasks, and returns when they have.

    One may miss that it is cancelled, and is told again: before Python 3.12 `asyncio.wait_for` gives its result instead
    where that comes in the same moment.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        done, waiting = await asyncio.wait(waiting, timeout=_ASKED_AGAIN_S)
        for task in done:
            if not task.cancelled():
                # Seen, so that nobody complains that it was not.
                task.exception()
