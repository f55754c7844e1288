"""An event loop whose clock jumps to the next timer: hours of waiting in a moment, always in the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest


class _Jumping(selectors.SelectSelector):
    """Waits for nothing but what other threads wake it for; time passes where a timer is next."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time, which begins at 0; code that reads another clock is not fooled."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(awaitable: Any) -> Any:
    """The result of a coroutine, in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(awaitable)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def played(
    test: Callable[..., Any], play: Callable[[], Coroutine[Any, Any, None]]
) -> Callable[[pytest.MonkeyPatch], None]:
    """A test under the name of `test` that runs `play`, which calls it, in virtual time and without threads."""

    def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
        without_threads(monkeypatch)
        run(play())

    in_virtual_time.__name__, in_virtual_time.__doc__ = test.__name__, test.__doc__
    return in_virtual_time


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs at once what would go to a thread: virtual time does not wait for threads."""

    async def at_once(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return run(*args, **options)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
