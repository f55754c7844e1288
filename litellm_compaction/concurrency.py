"""One run for everybody who wants the same thing at the same time (single flight).

Used where work is slow and its result shared: summaries, listings of a server. The run ends with its last
waiter: when all of them are cancelled, it is cancelled too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


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
