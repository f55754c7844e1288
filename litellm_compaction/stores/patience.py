"""How long a request waits for what another machine is asked: a moment, and not at all while answers come late.

Called by `fallback.py`, `redis_connection.py` and `proxy/live_settings.py`. What is asked runs on, and whoever asked
makes use of its answer when it comes. A healthy server that is far away (5 to 15 ms) is waited for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

from litellm_compaction.errors import StoreLate

_Result = TypeVar("_Result")

# With the grace 20 ms. A loop that was held up sees the answer and the end of the wait in the same moment; the answer
# counts.
WAIT_S = 0.016
_GRACE_S = 0.004
# One that was late is waited for again after this.
_LATE_S = 1.0
# An answer is several steps of the loop: to connect, to sign in, to ask, to read.
_STEPS = 25


async def attentive_wait(task: asyncio.Future[Any], limit_s: float) -> float | None:
    """Waits for a task, which runs on; for how long, in s, or None where it is not done in time.

    Counted is how often this loop could look, so that a server does not seem slow to a process that is held up itself,
    as on a machine with more work than processors.

    Args:
        limit_s: of a loop that is never held up.
    """
    loop, step_s = asyncio.get_running_loop(), limit_s / _STEPS
    for steps in range(_STEPS):
        begun_s = loop.time()
        done, _ = await asyncio.wait({task}, timeout=step_s)
        if done:
            return steps * step_s + min(loop.time() - begun_s, step_s)
    return None


class Patience:
    """The wait of all who ask one server.

    One that is late is waited for once: for a second, or until an answer has come in time, nobody waits, so that a
    request which asks several times is not late by several waits.

    Args:
        limit_s: of the wait; None for no end.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._late_until_s = -math.inf
        # The event loop itself would forget them.
        self._under_way: set[asyncio.Future[Any]] = set()

    async def wait(self, work: Awaitable[_Result]) -> _Result:
        """What `work` gives, where it does in time; with a limit, a caller that is cancelled does not stop it.

        Raises:
            StoreLate: it has not come yet, and runs on.
        """
        limit_s = self._limit_s
        if limit_s is None:
            return await work
        task = asyncio.ensure_future(work)
        begun_s = task.get_loop().time()
        self._under_way.add(task)
        task.add_done_callback(lambda _: self._note(task, begun_s, limit_s))
        for each_s in (limit_s, _GRACE_S) if begun_s >= self._late_until_s else (0.0,):
            done, _ = await asyncio.wait({task}, timeout=each_s)
            if done:
                return task.result()
        self._late_until_s = task.get_loop().time() + _LATE_S
        raise StoreLate("the store has not answered yet")

    async def settle(self) -> None:
        """Waits for all that runs on in this event loop."""
        here = asyncio.get_running_loop()
        if under_way := [task for task in self._under_way if task.get_loop() is here]:
            await asyncio.wait(under_way)

    def _note(self, task: asyncio.Future[Any], begun_s: float, limit_s: float) -> None:
        self._under_way.discard(task)
        if task.get_loop().time() - begun_s <= limit_s:
            self._late_until_s = -math.inf
        if not task.cancelled():
            # Seen, so that nobody complains where all who waited have gone.
            task.exception()


UNLIMITED = Patience()
