"""One process's part in a context that other processes send to as well: tells it to them, and hears what it may do.

Used by `admission.py`, which decides by the same rules (`core/sharing.py`) where no other process can be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from litellm_compaction.core.sharing import Loan, Part, Verdict, Wish, settle
from litellm_compaction.engine.coordination import LEASE_S, RENEWED_EVERY_S, Coordination
from litellm_compaction.errors import StoreError

# Whoever waits looks this often whether there is room, whoever runs beside others whether one of theirs waits.
_WAITING_S = 0.1
_RUNNING_S = 0.25
# So long others count as there after they were last seen. Before they are known they wait for a renewal.
_KNOWN_S = 600.0
# A board counts in milliseconds.
_LEAST_LEASE_S = 0.001

_PART = TypeAdapter(Part)
# What leads to another server from another machine or container, and what to one and the same from all containers of a
# machine.
_OWN_HOSTS = ("", "localhost", "0.0.0.0", "::", "::1")  # noqa: S104 - nobody listens here
_CONTAINERS_HOSTS = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Stance(NamedTuple):
    """What one process has and wants; arguments of `core.sharing.settle`."""

    part: Part
    window_tokens: int
    loans: tuple[Loan, ...] = ()
    more: tuple[Wish, ...] = ()


class Place(Protocol):
    """The process's own seats."""

    def stance(self) -> Stance:
        """What they have and want now."""

    def apply(self, verdict: Verdict) -> None:
        """Does what a verdict allows of what is still wanted."""

    def go_on_alone(self) -> None:
        """Decides by itself: the others cannot be reached."""

    def emptied(self) -> None:
        """Everybody has left, and the others know it."""

    def held_for_s(self) -> float:
        """How long what is held will be held at most, where nobody is served any more: until servers have stopped."""


class SharedPool:
    """A place among all processes that send to one context.

    One look at the board answers all who came since the last: nothing is asked while nothing changes, but for the
    renewals, and more often while others are there.

    Args:
        coordination: of the process.
        topic: names the context to all processes alike.
        place: the process's own seats.
        clock: seconds, monotonic.
    """

    def __init__(
        self, coordination: Coordination, topic: str, place: Place, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._coordination = coordination
        self._topic = topic
        self._place = place
        self._clock = clock
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._changed = asyncio.Event()
        self._others_known_until_s = -1.0
        # One that was lost is worth a question again after a while.
        self.is_up = not (coordination.is_lost and coordination.is_silent)
        self.others_tokens = 0
        self.others_seats = 0
        self.is_waited_for = False
        self.has_ended = False
        coordination.while_held(self._run(), farewell=self._farewell)

    def wake(self) -> None:
        """Has the others told soon that something has changed; from any thread."""
        if threading.get_ident() == self._thread:
            self._changed.set()
            return
        # The loop may have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _run(self) -> None:
        try:
            while True:
                self._changed.clear()
                stance = self._place.stance()
                pause_s = await self._settled(stance)
                if not stance.part.seats and not self._place.stance().part.seats:
                    self._place.emptied()
                    return
                await self._change(pause_s)
        except BaseException:
            # The process ends; whoever is still served is served by itself.
            self.has_ended = True
            self._be_alone()
            self._place.go_on_alone()
            if not self._place.stance().part.seats:
                self._place.emptied()
            raise

    async def _change(self, limit_s: float) -> None:
        """Waits for a change, or for so long."""
        # Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that meets a change.
        timer = self._loop.call_later(limit_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _farewell(self) -> None:
        """Tells the others what the process leaves to its servers when it ends: free when these have stopped."""
        part = replace(self._place.stance().part, spare_tokens=0, leaving_tokens=0, wishes=())
        note = _PART.dump_json(part) if part.held_tokens else None
        with contextlib.suppress(StoreError):
            lease_s = max(min(self._place.held_for_s(), LEASE_S), _LEAST_LEASE_S)
            await self._coordination.update(self._topic, lambda _: (note, None), lease_s=lease_s)

    async def _settled(self, stance: Stance) -> float:
        """Tells the others and does what is allowed; how long that is good for while nothing changes, in s."""

        def decide(others: Sequence[bytes]) -> tuple[bytes | None, Verdict]:
            verdict = settle(stance.part, _parts(others), stance.window_tokens, loans=stance.loans, more=stance.more)
            return (_PART.dump_json(verdict.part) if verdict.part.seats else None), verdict

        try:
            verdict = await self._coordination.update(self._topic, decide)
        except StoreError:
            if not self._coordination.is_lost:
                return _RUNNING_S
            self._be_alone()
            self._place.go_on_alone()
            return RENEWED_EVERY_S
        self.is_up = True
        self.others_tokens, self.others_seats = verdict.others_tokens, verdict.others_seats
        self.is_waited_for = verdict.is_waited_for
        if verdict.others_seats:
            self._others_known_until_s = self._clock() + _KNOWN_S
        self._place.apply(verdict)
        if self._clock() >= self._others_known_until_s:
            return RENEWED_EVERY_S
        return _WAITING_S if verdict.part.wishes else _RUNNING_S

    def _be_alone(self) -> None:
        self.is_up = self.is_waited_for = False
        self.others_tokens = self.others_seats = 0


def shared_name(pool: str) -> str:
    """The name of a pool, the same in all processes that mean the same loaded context, and in no other.

    Args:
        pool: the server's address as this process has it, and the instance.
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


def _parts(notes: Sequence[bytes]) -> list[Part]:
    parts: list[Part] = []
    for note in notes:
        # Another version's, which cannot be understood, is as if it were not there.
        with contextlib.suppress(ValidationError):
            parts.append(_PART.validate_json(note))
    return parts
