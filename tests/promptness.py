"""Time limits that mean something on a machine with other work to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


def is_prompt(attempt: Callable[[], float], limit_s: float, *, tries: int = 6) -> bool:
    """Whether `attempt` takes less than `limit_s` seconds, by its own clock.

    Load can delay any one attempt; what waits for a timer, a poll or another chunk is late every time.
    """
    return any(attempt() < limit_s for _ in range(tries))


async def is_prompt_async(attempt: Callable[[], Awaitable[float]], limit_s: float, *, tries: int = 6) -> bool:
    """`is_prompt` for a coroutine."""
    for _ in range(tries):
        if await attempt() < limit_s:
            return True
    return False
