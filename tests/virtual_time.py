"""An event loop whose clock jumps to the next timer: hours of waiting in a moment, always in the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class _Jumping(selectors.SelectSelector):
    """Waits for events alone, never for a timer: time passes to the next one."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time, which begins at 0; code that reads another clock is not fooled.

    What would go to a thread runs at once, but with `in_threads`: timers pass by the thousand while a thread works.
    """

    def __init__(self, *, in_threads: bool = False) -> None:
        self._in_threads = in_threads
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        if self._in_threads:
            return super().run_in_executor(executor, func, *args)
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        return done


def run(awaitable: Any, *, in_threads: bool = False) -> Any:
    """The result of a coroutine, in virtual time."""
    loop = VirtualLoop(in_threads=in_threads)
    try:
        return loop.run_until_complete(awaitable)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
