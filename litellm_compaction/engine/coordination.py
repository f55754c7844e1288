"""What a process agrees on with the others that share its store: who does what all of them would do.

`shared_pool.py` fits answers beside the other processes' with it, `compactor.py` has one of them make a summary. A
board that cannot be reached is no error: the process then goes on as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.stores.board import Board, Decide

_Result = TypeVar("_Result")

logger = logging.getLogger("litellm_compaction")

# Of a process that was killed everything is free after this. One whose event loop stands still for longer is taken for
# dead as well; what it holds counts again as soon as it goes on.
LEASE_S = 10.0
RENEWED_EVERY_S = 2.5
# What may be told to others only behind a lease's own work, as a record that is stored, is there by then.
_LINGERS_S = 1.0
# A board that failed is left alone for so long: nobody waits for it in vain with every request.
_RETRY_S = 5.0
_WARN_AGAIN_S = 3600.0


class Coordination:
    """This process's place on the board.

    Args:
        board: of all processes that share a store.
        clock: seconds, monotonic.
        wait: like `asyncio.sleep`.
    """

    def __init__(
        self,
        board: Board,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._board = board
        self._clock = clock
        self._wait = wait
        self._name = uuid.uuid4().hex
        self._silent_until_s = -1.0
        self._warned_s: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_silent(self) -> bool:
        """Whether the board has just failed, so that it is not worth asking."""
        return self._clock() < self._silent_until_s

    async def update(self, topic: str, decide: Decide[_Result], *, lease_s: float = LEASE_S, name: str = "") -> _Result:
        """Looks at what the other processes do, and says what this one does; arguments as `Board.update`.

        Args:
            topic: hashed, so it may hold names and addresses.
            name: where one process has several notes under a topic.

        Raises:
            StoreError: the board failed, now or a moment ago.
        """
        if self.is_silent:
            raise StoreError("the other processes could not be reached a moment ago")
        hashed = hashlib.sha256(topic.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            return await self._board.update(hashed, self._name + name, decide, lease_s=lease_s)
        except Exception as error:
            self._silent_until_s = self._clock() + _RETRY_S
            self._warn(error)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"the board failed: {type(error).__name__}") from error

    def lease(self, topic: str) -> Lease:
        """A right to do something that one process at a time is to do; not taken yet."""
        return Lease(self, topic)

    async def pause(self, seconds: float) -> None:
        """Waits about so long: others who began in the same moment do not ask in the same moment again."""
        await self._wait(seconds * random.uniform(0.8, 1.2))  # noqa: S311 - not a secret

    async def wait(self, seconds: float) -> None:
        """Waits so long."""
        await self._wait(seconds)

    def behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Has something done when nobody waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Ends what runs behind, and the board."""
        # What was given back a moment ago is worth telling; nothing is worth waiting for.
        await asyncio.sleep(0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._board.aclose()

    def _warn(self, error: Exception) -> None:
        now_s = self._clock()
        if self._warned_s is not None and now_s < self._warned_s + _WARN_AGAIN_S:
            return
        self._warned_s = now_s
        said = str(error) if isinstance(error, StoreError) else type(error).__name__
        logger.warning(
            "coordination_failed %s; summaries and room in shared contexts are kept apart within this process only",
            said,
        )


class Lease:
    """A right that one process at a time has; renewed by its owner until it is given back.

    Args:
        coordination: of the process.
        topic: what it is a right to.
    """

    def __init__(self, coordination: Coordination, topic: str) -> None:
        self._coordination = coordination
        self._topic = topic
        # Several in one process are strangers to each other.
        self._name = f"-{uuid.uuid4().hex}"
        self._renewing: asyncio.Task[None] | None = None

    async def take(self) -> bool:
        """Takes it if nobody has it; whether it may be acted upon, which it may be where nobody can be asked."""
        if self._renewing is not None:
            return True
        try:
            is_mine = await self._write(_taken)
        except StoreError:
            return True
        except BaseException:
            # Whether it was taken is not known.
            self._coordination.behind(self._give_back(0.0))
            raise
        if is_mine:
            self._renewing = self._coordination.behind(self._renew())
        return is_mine

    async def pause(self, seconds: float) -> None:
        """Waits about so long, before it is tried again."""
        await self._coordination.pause(seconds)

    def release(self, *, is_done: bool) -> None:
        """Gives it back, when the process comes to it; again is no change.

        Args:
            is_done: whether its work is done, so that others need not begin it before they can see that.
        """
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            self._coordination.behind(self._give_back(_LINGERS_S if is_done else 0.0))

    async def _renew(self) -> None:
        while True:
            await self._coordination.wait(RENEWED_EVERY_S)
            with contextlib.suppress(StoreError):
                await self._write(_kept)

    async def _give_back(self, after_s: float) -> None:
        with contextlib.suppress(StoreError):
            await self._write(_kept if after_s else _gone, lease_s=after_s or LEASE_S)

    async def _write(self, decide: Decide[bool], *, lease_s: float = LEASE_S) -> bool:
        return await self._coordination.update(self._topic, decide, lease_s=lease_s, name=self._name)


def _taken(others: Sequence[bytes]) -> tuple[bytes | None, bool]:
    return (None, False) if others else (b"1", True)


def _kept(_others: Sequence[bytes]) -> tuple[bytes | None, bool]:
    return b"1", True


def _gone(_others: Sequence[bytes]) -> tuple[bytes | None, bool]:
    return None, False
