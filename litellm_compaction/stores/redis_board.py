"""A board in Redis or Valkey, for all processes that name one server.

A topic is one hash, `compaction:{TOPIC}:board`. What a process decides is written only if nobody has written there
since it looked; else it looks again. Time is the server's, so clocks of the processes do not matter.
"""

from __future__ import annotations

import asyncio
import random
from typing import TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.stores.board import MAX_LEASE_S, RENEWED_RATIO, Decide, Look
from litellm_compaction.stores.redis_connection import RedisConnection, script

_Result = TypeVar("_Result")

# Each attempt fails only because another process has done what it wanted.
_MOST_ATTEMPTS = 40
_MOST_PAUSE_S = 0.02
# No version, so that the notes are told.
_UNREAD = "?"
_MOST_MS = round(1000 * MAX_LEASE_S)


class RedisBoard:
    """Notes in hashes of a server.

    Args:
        connection: the store's, which also ends it.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    async def update(self, topic: str, name: str, decide: Decide[_Result], *, lease_s: float) -> _Result:
        """Reads what others have written, and replaces one's own note."""
        key, own = self._key(topic), name.encode()
        found = await self._connection.run(script("update_board"), [key], (_UNREAD, name, "", 0, _MOST_MS))
        for attempt in range(_MOST_ATTEMPTS):
            version, now_ms, *fields = found
            notes = {each: _note(note) for each, note in zip(fields[::2], fields[1::2], strict=True)}
            body, result = decide([note[1] for each, note in notes.items() if each != own])
            until_ms, before = notes.get(own, (0.0, None))
            left_ms = until_ms - float(now_ms)
            if body == before and (body is None or (1 - RENEWED_RATIO) * lease_s < left_ms / 1000 <= lease_s):
                return result
            arguments = (version, name, body or b"", round(1000 * lease_s), _MOST_MS)
            found = await self._connection.run(script("update_board"), [key], arguments)
            if found is None:
                return result
            await asyncio.sleep(random.uniform(0, min(_MOST_PAUSE_S, 0.001 * 2**attempt)))  # noqa: S311 - no secret
        raise StoreError(f"store {self._connection.address} is written by too many at the same time")

    async def look(self, topic: str, name: str) -> Look:
        """What others have written; the time is the server's."""
        arguments = (_UNREAD, name, "", 0, _MOST_MS)
        _, now_ms, *fields = await self._connection.run(script("update_board"), [self._key(topic)], arguments)
        notes = zip(fields[::2], fields[1::2], strict=True)
        return Look(float(now_ms) / 1000, [_note(note)[1] for each, note in notes if each != name.encode()])

    def _key(self, topic: str) -> str:
        return f"{self._connection.address.prefix}:{{{topic}}}:board"

    async def aclose(self) -> None:
        """Nothing: the store ends its connection."""


def _note(note: bytes) -> tuple[float, bytes]:
    until_ms, _, body = note.partition(b" ")
    return float(until_ms), body
