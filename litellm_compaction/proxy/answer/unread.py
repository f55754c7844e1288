"""Answers that are read late or never: a server's end is seen all the same, and a stream without a reader ends.

LiteLLM leaves a stream open whose client has gone while the proxy was behind its server. Nothing then reads it, closes
it or gives its room in a shared context back; objects of LiteLLM still refer to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

import httpx

from litellm_compaction.concurrency import Tasks, ended
from litellm_compaction.errors import LeftUnread

_Item = TypeVar("_Item")

# Nothing is pulled from a stream for so long: its reader has left. A slow one pulls now and then.
UNREAD_S = 30.0
# Kept of an answer beyond its reader: all of 10,000 tokens with 400 bytes around each. A server with more has to wait.
_MOST_UNREAD_BYTES = 4 * 2**20
# Handed on at once, as if it had come in one read.
_PIECE_BYTES = 16 * 1024
_closing = Tasks()


class ReadAhead:
    """A server's answer that a task of its own reads as it comes; `aclose` ends it upstream.

    Args:
        response: read by nothing else.
        on_end: called when the server has ended the answer or its connection, read or not; not after `aclose`.
    """

    def __init__(self, response: httpx.Response, on_end: Callable[[], object]) -> None:
        self._response = response
        self._on_end = on_end
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = 0
        self._error: Exception | None = None
        self._has_ended = self._is_closing = False
        self._came, self._went = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        """The body, decoded.

        Raises:
            httpx.HTTPError: after all that came before it.
        """
        while True:
            if self._pieces:
                # What is there already must not keep other answers from their turn.
                await asyncio.sleep(0)
            else:
                await self._came.wait()
            if piece := self._taken():
                yield piece
            elif self._error is not None:
                raise self._error
            elif self._has_ended:
                return

    async def aclose(self) -> None:
        """Begins to end the answer, and does not wait for it.

        Of a stream that is collected as garbage the event loop closes each generator by itself; one that waited here
        would be closed twice at a time, which is an error. anyio cancels all waiting of a client that has gone.
        """
        self._on_end = bool
        if not self._is_closing:
            self._is_closing = True
            _closing.begin(self._close())

    async def _close(self) -> None:
        await ended([self._task])
        await self._response.aclose()

    def _taken(self) -> bytes:
        taken: list[bytes] = []
        taken_bytes = 0
        while self._pieces and (not taken or taken_bytes + len(self._pieces[0]) <= _PIECE_BYTES):
            taken.append(self._pieces.popleft())
            taken_bytes += len(taken[-1])
        self._unread_bytes -= taken_bytes
        self._went.set()
        if not self._pieces and not self._has_ended:
            self._came.clear()
        return b"".join(taken)

    async def _read(self) -> None:
        try:
            async for data in self._response.aiter_bytes():
                self._pieces.append(data)
                self._unread_bytes += len(data)
                self._came.set()
                while self._unread_bytes > _MOST_UNREAD_BYTES:
                    self._went.clear()
                    await self._went.wait()
        except Exception as error:  # noqa: BLE001 - it is the reader's
            self._error = error
        self._has_ended = True
        self._came.set()
        self._on_end()


async def closed_if_unread(
    source: AsyncGenerator[_Item, None],
) -> AsyncGenerator[_Item, None]:
    """The items of `source`, which is closed at the end, and if its reader pulls none for `UNREAD_S`.

    Closing it has to end the answer upstream, and then to give its room back.

    Raises:
        LeftUnread: it was closed before.
    """
    loop = asyncio.get_running_loop()
    closing: asyncio.Task[None] | None = None

    def give_up() -> None:
        nonlocal closing
        closing = _closing.begin(source.aclose())

    timer: asyncio.TimerHandle | None = None
    try:
        async for item in source:
            timer = loop.call_later(UNREAD_S, give_up)
            yield item
            timer.cancel()
            if closing is not None:
                raise LeftUnread(UNREAD_S)
    finally:
        if timer is not None:
            timer.cancel()
        if closing is None:
            await source.aclose()
