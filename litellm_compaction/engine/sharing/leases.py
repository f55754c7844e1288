"""Agrees with the other processes that share a store on which one does the work of all.

`admission.py` fits answers beside the other processes' with it, `deciding.py` has one of them make a summary. A store
that cannot be reached is no error: the process then goes on as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import re
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeVar

from litellm_compaction.concurrency import Tasks, ended
from litellm_compaction.errors import StoreError
from litellm_compaction.stores.rows import Rows

_Result = TypeVar("_Result")
# Gets the others' notes, and gives the own new one, None for none, with its meaning. May be called more than once, from
# any thread, and only the last counts.
Decide: TypeAlias = "Callable[[Sequence[str]], tuple[str | None, _Result]]"

logger = logging.getLogger("litellm_compaction")

# Of a process that was killed everything is free after this. One whose event loop stands still for longer is taken for
# dead as well; what it holds counts again as soon as it goes on.
LEASE_S = 10.0
RENEWED_EVERY_S = 2.5
# A note that says nothing new is written again when so much of its life is over.
_RENEWED_RATIO = 0.2
_LOOKS_EVERY_S = 0.25
# A store that worked and fails is asked again soon, and for so long no process acts as if alone: others still hold what
# they held, and a context that two fill at once loses the answers of both.
_HICCUP_S, _ASKED_AGAIN_S = 2.0, 0.25
# One that is lost is left alone for so long: no request waits for it in vain.
_RETRY_S = 5.0
_NOTES = "notes"
# The addresses of a server on the same machine; before a port or a path.
_OWN_HOST = re.compile(r"//(localhost|[\w.-]+\.localhost|127\.[\d.]+|0\.0\.0\.0|\[::1?\])(?=[:/]|$)", re.IGNORECASE)


class Leases:
    """This process's notes among those of all that share a store: a row for each topic, a note for each writer.

    A note lives for seconds unless it is renewed, so that nothing of a killed process stays; no conversation's text is
    ever in one.

    Args:
        rows: of notes alone; all processes see the same clock there.

    Attributes:
        is_lost: they have failed for so long, or from the beginning, that this process goes on as if it were alone.
        tasks: for which nothing waits; ended with it.
    """

    def __init__(self, rows: Rows, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = rows
        self.is_lost = False
        self.tasks = Tasks()
        self._clock = clock
        self._name = uuid.uuid4().hex
        # This process's notes that others may wait for, by topic and name.
        self._held: set[tuple[str, str]] = set()
        # A store that has never worked has failed for long enough.
        self._failing_since_s: float | None = -math.inf
        self._silent_until_s = -math.inf

    async def update(self, topic: str, decide: Decide[_Result], *, name: str = "") -> _Result:
        """Reads the others' notes under a topic, and replaces one's own, as one step of all; the result of `decide`.

        The topic may hold addresses; `name` is for a process of several notes. After a StoreError it is not known
        whether the note was written.
        """
        if self._clock() < self._silent_until_s:
            raise StoreError("the other processes could not be reached a moment ago")
        # A process that was forked has a name of its own.
        writer = f"{self._name}-{os.getpid()}{name}"
        decided: list[tuple[bool, _Result]] = []

        def change(body: bytes | None, now_s: float) -> bytes | None:
            notes = _notes(body, now_s)
            until_s, own = notes.pop(writer, (now_s, None))
            note, result = decide([said for _, said in notes.values()])
            decided.append((note is not None, result))
            if note == own and (note is None or until_s - now_s > (1 - _RENEWED_RATIO) * LEASE_S):
                return body
            if note is not None:
                notes[writer] = (now_s + LEASE_S, note)
            return json.dumps(notes, separators=(",", ":")).encode() if notes else None

        # Before it is known: a note that is cancelled may have been written.
        self._held.add((topic, name))
        try:
            await self.rows.change(hashlib.sha256(topic.encode("utf-8", "surrogatepass")).hexdigest(), _NOTES, change)
        except Exception as error:
            said = str(error) if isinstance(error, StoreError) else type(error).__name__
            self._note_failure(said)
            raise StoreError(said) from error
        is_held, result = decided[-1]
        if not is_held:
            self._held.discard((topic, name))
        self._failing_since_s = None
        if self.is_lost:
            self.is_lost = False
            logger.info("coordination_recovered summaries and room are kept together with other processes again")
        return result

    @asynccontextmanager
    async def one_of_all(
        self, topic: str, look: Callable[[], Awaitable[_Result | None]], *, limit_s: float
    ) -> AsyncGenerator[_Result | None, None]:
        """Lets one process do what several need: gives another's result, which `look` finds, or None to do it oneself.

        None is the right to it until the block ends. If its owner fails, or after `limit_s`, the next one has it.
        """
        # Several in one process are strangers to each other.
        name = f"-{uuid.uuid4().hex}"
        renewing: asyncio.Task[None] | None = None
        others_result, until_s = None, self._clock() + limit_s
        try:
            while not await self._takes(topic, name) and self._clock() < until_s:
                # Others who began in the same moment do not look in the same moment again.
                await asyncio.sleep(_LOOKS_EVERY_S * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
                if (others_result := await look()) is not None:
                    break
            else:
                renewing = self.tasks.begin(self._renew(topic, name))
            yield others_result
        finally:
            if renewing is not None:
                renewing.cancel()
            if (topic, name) in self._held:
                self.tasks.begin(self._give_back(topic, name))

    async def aclose(self) -> None:
        """Ends its tasks; what this process holds is free for the others after a while."""
        await ended(self.tasks)

    async def _takes(self, topic: str, name: str) -> bool:
        """Takes the right to a topic if it is free; True if it may be acted upon, as it may when the store is lost."""
        try:
            return await self.update(topic, lambda others: (None, False) if others else ("1", True), name=name)
        except StoreError:
            return self.is_lost

    async def _renew(self, topic: str, name: str) -> None:
        while True:
            await asyncio.sleep(RENEWED_EVERY_S)
            with contextlib.suppress(StoreError):
                await self.update(topic, lambda _: ("1", None), name=name)

    async def _give_back(self, topic: str, name: str) -> None:
        with contextlib.suppress(StoreError):
            await self.update(topic, lambda _: (None, None), name=name)
        self._held.discard((topic, name))

    def _note_failure(self, said: str) -> None:
        now_s, was_lost = self._clock(), self.is_lost
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        self.is_lost = was_lost or now_s >= self._failing_since_s + _HICCUP_S
        self._silent_until_s = now_s + (_RETRY_S if self.is_lost else _ASKED_AGAIN_S)
        if self.is_lost and not was_lost:
            logger.warning(
                "coordination_failed %s; summaries and room in shared contexts are kept apart within this process only",
                said,
            )


def _notes(body: bytes | None, now_s: float) -> dict[str, tuple[float, str]]:
    """Until when the notes last that do, and what they say, by writer; any process may have written `body`.

    One that ends too late was written by a clock that has been set back, or before a restart.
    """
    try:
        written = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return {}
    notes: dict[str, tuple[float, str]] = {}
    for writer, note in written.items() if isinstance(written, dict) else ():
        match note:
            case [float() as until_s, str() as said] if now_s < until_s <= now_s + LEASE_S:
                notes[writer] = (until_s, said)
    return notes


def shared_name(pool: str) -> str:
    """Returns the same name in all processes for an address as one of them has it, a blank, and an instance."""
    address, _, instance = pool.partition(" ")
    root = address.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{_OWN_HOST.sub(f'//{socket.gethostname()}', root)} {instance}"
