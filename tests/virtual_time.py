"""An event loop whose clock jumps to the next timer: hours of waiting in a moment; and a clock moved by hand."""

from __future__ import annotations

import asyncio
import functools
import gc
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    """Waits for events alone, never for a timer: time passes to the next one."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time, which begins at 0; what would go to a thread runs at once.

    Code that reads another clock is not fooled.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def jump(self, seconds: float) -> None:
        self._jumping.now_s += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        return done


def run(awaitable: Any) -> Any:
    """The result of a coroutine, in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(awaitable)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def in_virtual_time(test: Callable[..., Any]) -> Callable[..., None]:
    """A test whose coroutine runs in virtual time."""

    @functools.wraps(test)
    def timed(*arguments: Any, **given: Any) -> None:
        run(test(*arguments, **given))

    return timed


async def settled(count: int = 20) -> None:
    """Lets every task run that can: a woken task that wakes another needs one turn of the loop for each."""
    for _ in range(count):
        await asyncio.sleep(0)


class Complaints:
    """The errors of which the running event loop finds that nobody has waited for them."""

    def __init__(self) -> None:
        self._heard: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._heard.append(context["message"]))

    def heard(self) -> list[str]:
        gc.collect()
        return self._heard
