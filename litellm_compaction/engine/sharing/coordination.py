"""Agrees with the other processes that share a store on which one does the work of all.

`pool.py` fits answers beside the other processes' with it, `compactor.py` has one of them make a summary. A board
that cannot be reached is no error: the process then goes on as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from litellm_compaction.concurrency import Tasks, ended
from litellm_compaction.errors import StoreError
from litellm_compaction.stores import Board, Decide

_Result = TypeVar("_Result")

logger = logging.getLogger("litellm_compaction")

# Of a process that was killed everything is free after this. One whose event loop stands still for longer is taken for
# dead as well; what it holds counts again as soon as it goes on.
LEASE_S = 10.0
RENEWED_EVERY_S = 2.5
# What may be told to others only after a lease's own work, as a record that is stored, is there by then.
_LINGERS_S = 1.0
# The pauses between looks at another process's work: at first, and later.
_LOOKS_EVERY_S = (0.1, 0.5)
# A board that worked and fails is asked again soon, and for so long no process acts as if alone: others still hold what
# they held, and a context that two fill at once loses the answers of both.
_HICCUP_S, _ASKED_AGAIN_S = 2.0, 0.25
# One that is lost is left alone for so long: no request waits for it in vain.
_RETRY_S = 5.0
# So long a process that ends tells the others what they need not wait for; what they do not hear ends by itself.
_FAREWELL_S = 2.0
_WARN_AGAIN_S = 3600.0
# What leads to another server from another machine or container, and what to one and the same from all containers of a
# machine.
_OWN_HOSTS = ("", "localhost", "0.0.0.0", "::", "::1")  # noqa: S104 - no server listens here
_CONTAINERS_HOSTS = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Coordination:
    """This process's place on the board of all that share a store; `wait` is like `asyncio.sleep`."""

    def __init__(
        self,
        board: Board,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._board = board
        self._clock = clock
        self.wait = wait
        self._name = uuid.uuid4().hex
        self._silent_until_s = -1.0
        # True if it has failed for so long that this process goes on as if it were alone. Nothing is known of others
        # before it has worked once.
        self.is_lost = False
        self._has_worked = False
        self._failing_since_s: float | None = None
        self._warned_s: float | None = None
        self._is_told = False
        # Tasks for which nothing waits.
        self.tasks = Tasks()
        self._held: dict[asyncio.Task[None], Callable[[], Coroutine[Any, Any, None]]] = {}

    @property
    def is_silent(self) -> bool:
        """The board has just failed, so that it is not worth asking."""
        return self._clock() < self._silent_until_s

    async def update(self, topic: str, decide: Decide[_Result], *, lease_s: float = LEASE_S, name: str = "") -> _Result:
        """Reads the other processes' notes, and writes this one's; arguments as `Board.update`.

        Args:
            topic: hashed, so it may hold names and addresses.
            decide: is given the others' notes.
            lease_s: for how long this one's note is valid.
            name: if one process has several notes under a topic.

        Raises:
            StoreError: the board failed, now or a moment ago.
        """
        if self.is_silent:
            raise StoreError("the other processes could not be reached a moment ago")
        hashed = hashlib.sha256(topic.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            # A process that was forked has a name of its own.
            result = await self._board.update(hashed, f"{self._name}-{os.getpid()}{name}", decide, lease_s=lease_s)
        except Exception as error:
            self._note_failure(error)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"the board failed: {type(error).__name__}") from error
        self._has_worked, self.is_lost, self._failing_since_s = True, False, None
        if self._is_told:
            self._is_told = False
            logger.info("coordination_recovered summaries and room are kept together with other processes again")
        return result

    def lease(self, topic: str) -> Lease:
        return Lease(self, topic)

    @asynccontextmanager
    async def one_of_all(
        self, topic: str, look: Callable[[], Awaitable[_Result | None]], *, limit_s: float
    ) -> AsyncGenerator[_Result | None, None]:
        """Lets one process do what several need: gives another one's result, or None to the one that has to do it.

        None is the right to it until the block ends. If its owner fails or is killed, or after `limit_s`, the next one
        does it. `look` finds what another process has done.
        """
        lease, is_done = self.lease(topic), False
        try:
            yield await self._done_by_another(lease, look, limit_s)
            is_done = True
        finally:
            lease.release(is_done=is_done)

    async def _done_by_another(
        self, lease: Lease, look: Callable[[], Awaitable[_Result | None]], limit_s: float
    ) -> _Result | None:
        until_s, pause_s = self._clock() + limit_s, _LOOKS_EVERY_S[0]
        while not await lease.acquire() and self._clock() < until_s:
            # Others who began in the same moment do not look in the same moment again.
            await self.wait(pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - not a secret
            pause_s = min(1.5 * pause_s, _LOOKS_EVERY_S[1])
            if (found := await look()) is not None:
                return found
        return None

    def while_held(
        self, measured: Coroutine[Any, Any, None], *, farewell: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Has `measured` done until it is cancelled, or this process holds nothing any more that others wait for.

        If the process ends before that, `farewell` tells the others what is still held.
        """
        task = asyncio.ensure_future(measured)
        self._held[task] = farewell
        task.add_done_callback(lambda ended_task: self._held.pop(ended_task, None))
        return task

    async def aclose(self) -> None:
        """Gives back what this process holds, so that the others need not wait for its leases; ends the board."""
        farewells = list(self._held.values())
        await ended(list(self._held))
        leaving = {*self.tasks, *(asyncio.ensure_future(farewell()) for farewell in farewells)}
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=_FAREWELL_S)
            await ended(late)
        await self._board.aclose()

    def _note_failure(self, error: Exception) -> None:
        now_s = self._clock()
        # Failures from before a time without questions do not count.
        if self._failing_since_s is None or now_s > self._silent_until_s + _HICCUP_S:
            self._failing_since_s = now_s
        self.is_lost = self.is_lost or not self._has_worked or now_s >= self._failing_since_s + _HICCUP_S
        self._silent_until_s = now_s + (_RETRY_S if self.is_lost else _ASKED_AGAIN_S)
        if self.is_lost:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        now_s = self._clock()
        if self._warned_s is not None and now_s < self._warned_s + _WARN_AGAIN_S:
            return
        self._warned_s, self._is_told = now_s, True
        said = str(error) if isinstance(error, StoreError) else type(error).__name__
        logger.warning(
            "coordination_failed %s; summaries and room in shared contexts are kept apart within this process only",
            said,
        )


class Lease:
    """A right to `topic` that one process at a time has; renewed by its owner until it is given back."""

    def __init__(self, coordination: Coordination, topic: str) -> None:
        self._coordination = coordination
        self._topic = topic
        # Several in one process are strangers to each other.
        self._name = f"-{uuid.uuid4().hex}"
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self) -> bool:
        """Takes it if it is free; returns True if it may be acted upon, as it may be when the board is lost."""
        if self._renewing is not None:
            return True
        try:
            is_mine = await self._write(_taken)
        except StoreError:
            return self._coordination.is_lost
        except BaseException:
            # It may have been taken or not.
            self._coordination.tasks.begin(self._give_back(0.0))
            raise
        if is_mine:
            self._renewing = self._coordination.while_held(self._renew(), farewell=lambda: self._give_back(0.0))
        return is_mine

    def release(self, *, is_done: bool) -> None:
        """Gives it back soon; again is no change. Work that `is_done` is not begun by others before they can see it."""
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            self._coordination.tasks.begin(self._give_back(_LINGERS_S if is_done else 0.0))

    async def _renew(self) -> None:
        while True:
            await self._coordination.wait(RENEWED_EVERY_S)
            with contextlib.suppress(StoreError):
                await self._write(lambda _: (b"1", True))

    async def _give_back(self, after_s: float) -> None:
        with contextlib.suppress(StoreError):
            await self._write(lambda _: (b"1" if after_s else None, True), lease_s=after_s or LEASE_S)

    async def _write(self, decide: Decide[bool], *, lease_s: float = LEASE_S) -> bool:
        return await self._coordination.update(self._topic, decide, lease_s=lease_s, name=self._name)


def _taken(others: Sequence[bytes]) -> tuple[bytes | None, bool]:
    return (None, False) if others else (b"1", True)


def shared_name(pool: str) -> str:
    """Returns the same name in all processes that mean the same loaded context, and in no other.

    `pool` is the server's address as this process has it, a blank, and the instance.
    """
    address, _, instance = pool.partition(" ")
    root = address.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(root)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return f"{root} {instance}"
    if host in _OWN_HOSTS or host.startswith("127.") or host.endswith(".localhost"):
        return f"{socket.gethostname()} {_machine()} {port} {parts.path} {instance}"
    if host in _CONTAINERS_HOSTS:
        return f"{_machine()} {port} {parts.path} {instance}"
    return f"{parts.scheme} {host} {port} {parts.path} {instance}"


@cache
def _machine() -> str:
    """This machine among all that may share a store, the same in all of its containers; elsewhere than on Linux ""."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""
