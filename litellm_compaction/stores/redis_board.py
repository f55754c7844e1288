"""A board in Redis or Valkey, for all processes that name one server.

A topic is one hash, `compaction:{TOPIC}:board`. What a process decides is written only if nobody has written there
since it looked; else it looks again. Time is the server's, so clocks of the processes do not matter.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import Sequence
from typing import TypeVar

from litellm_compaction.errors import StoreError
from litellm_compaction.master_key import UNSIGNED, Seal
from litellm_compaction.stores.board import MAX_LEASE_S, RENEWED_RATIO, Decide
from litellm_compaction.stores.redis_connection import RedisConnection, script

logger = logging.getLogger("litellm_compaction")
_Result = TypeVar("_Result")

# Each attempt fails only because another process has done what it wanted.
_MOST_ATTEMPTS = 40
_MOST_PAUSE_S = 0.02
# No version, so that the notes are told.
_UNREAD = "?"
_MOST_MS = round(1000 * MAX_LEASE_S)
# Those that are written have a few thousand.
_MOST_BYTES = 262_144


class RedisBoard:
    """Notes in hashes of a server, signed with the proxy's secret where there is one: others may write there, too.

    Args:
        connection: the store's, which also ends it.
        seal: signs notes; one that it has not signed for this topic and writer counts as none.
    """

    def __init__(self, connection: RedisConnection, seal: Seal = UNSIGNED) -> None:
        self._connection = connection
        self._seal = seal
        self._is_told = False

    async def update(self, topic: str, name: str, decide: Decide[_Result], *, lease_s: float) -> _Result:
        """Reads what others have written, and replaces one's own note."""
        key, own = self._key(topic), name.encode()
        found = await self._connection.run(script("update_board"), [key], (_UNREAD, name, "", 0, _MOST_MS, _MOST_BYTES))
        for attempt in range(_MOST_ATTEMPTS):
            version, now_ms, *fields = found
            notes = self._read(topic, fields)
            body, result = decide([note[1] for each, note in notes.items() if each != own])
            until_ms, before = notes.get(own, (0.0, None))
            left_ms = until_ms - float(now_ms)
            if body == before and (body is None or (1 - RENEWED_RATIO) * lease_s < left_ms / 1000 <= lease_s):
                return result
            signed = self._seal.mac(topic.encode(), own, body) + body if body else b""
            arguments = (version, name, signed, round(1000 * lease_s), _MOST_MS, _MOST_BYTES)
            found = await self._connection.run(script("update_board"), [key], arguments)
            if found is None:
                return result
            await asyncio.sleep(random.uniform(0, min(_MOST_PAUSE_S, 0.001 * 2**attempt)))  # noqa: S311 - no secret
        raise StoreError(f"store {self._connection.address} is written by too many at the same time")

    def _read(self, topic: str, fields: Sequence[bytes]) -> dict[bytes, tuple[float, bytes]]:
        """Until when a note lasts and what it says, by writer."""
        notes: dict[bytes, tuple[float, bytes]] = {}
        for writer, note in zip(fields[::2], fields[1::2], strict=True):
            # Digits and a blank, as the script has made sure.
            until_ms, _, signed = note.partition(b" ")
            mac = self._seal.mac(topic.encode(), writer, signed[self._seal.size :])
            if hmac.compare_digest(mac, signed[: len(mac)]):
                notes[writer] = float(until_ms), signed[len(mac) :]
            elif not self._is_told:
                self._is_told = True
                logger.warning(
                    "notes_ignored store=%s holds notes that are not signed with this proxy's master key; "
                    "workers that share a store need the same one",
                    self._connection.address,
                )
        return notes

    def _key(self, topic: str) -> str:
        return f"{self._connection.address.prefix}:{{{topic}}}:board"

    async def aclose(self) -> None:
        """Nothing: the store ends its connection."""
