"""Stands before LiteLLM's application: serves routes of ours there, and knows if the client of each request is there.

What is done for one that has left ends. A local model serves one request at a time: an answer that nobody reads would
keep it from everybody. What LiteLLM ends itself it logs and bills, so it goes first; it goes on with the rest, or
leaves it open. One that waits in front of a stream hears a beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import anyio

from litellm_compaction.concurrency import Tasks
from litellm_compaction.errors import ClientLeft

Application: TypeAlias = Callable[..., Awaitable[None]]
_Receive: TypeAlias = Callable[[], Awaitable[Any]]
_Send: TypeAlias = Callable[[Any], Awaitable[None]]
# LiteLLM ends within some ms what it ends.
_LITELLMS_S = 1.0
# A comment is legal between the events of every stream, and read by no client.
BEAT, _END_OF_EVENT = b": ping\n\n", b"\n\n"


class Route(NamedTuple):
    """Requests of a method on the paths that it matches, below the proxy's own root; `serve` gets the application."""

    method: str
    matches: Callable[[str], object]
    serve: Application


class Work(Protocol):
    """Something that is done for a client alone."""

    def cancel(self) -> None:
        """Ends it, or does nothing if it has ended; called in the event loop."""


class Presence:
    """The client of one HTTP request, until it leaves or has its answer."""

    def __init__(self, receive: _Receive, send: _Send) -> None:
        self._receive, self._send = receive, send
        self._is_answered = self._has_left = self._is_gone = False
        self._leaving: asyncio.Task[Any] | None = None
        self._work: weakref.WeakSet[Work] = weakref.WeakSet()
        self._sending, self._sent_s, self._is_between = asyncio.Lock(), 0.0, False
        self._timer: asyncio.TimerHandle | None = None
        self._beats = Tasks()

    async def receive(self) -> Any:
        # One waits for all: some servers tell it once.
        return await (self._received() if self._leaving is None else asyncio.shield(self._leaving))

    async def send(self, message: Any) -> None:
        # Servers tell an application of the end of its answer as if the client had left.
        self._is_answered |= message["type"] == "http.response.body" and not message.get("more_body")
        self._is_between = False
        async with self._sending:
            await self._send(message)
        if self._timer is not None:
            self._sent_s = asyncio.get_running_loop().time()
            self._is_between = bytes(message.get("body", b"")[-2:]) == _END_OF_EVENT

    def beat(self, may_pause: Callable[[], bool], every_s: float) -> None:
        if self._timer is None:
            self._sent_s = asyncio.get_running_loop().time()
            self._look(may_pause, every_s)

    def _look(self, may_pause: Callable[[], bool], every_s: float) -> None:
        """Sends a beat if nothing was sent for so long, and looks again when that may be."""
        loop = asyncio.get_running_loop()
        if (left_s := self._sent_s + every_s - loop.time()) <= 0:
            self._sent_s, left_s = loop.time(), every_s
            # Before the first byte a failure keeps its status.
            if may_pause() and self._is_between:
                self._beats.begin(self._send_beat())
        self._timer = loop.call_later(left_s, self._look, may_pause, every_s)

    def add(self, work: Work) -> None:
        """Has `work` end with the presence; the request's body has been read."""
        self._leaving = self._leaving or asyncio.ensure_future(self._received())
        self._work.add(work)
        if self._is_gone:
            work.cancel()

    def over(self) -> None:
        """LiteLLM has done with the request."""
        if self._timer is not None:
            self._timer.cancel()
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            # It holds all of the request by the error that ends it, and is not held by that.
            leaving.cancel()
        if self._has_left:
            self._end()

    async def _received(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not (self._has_left or self._is_answered):
            self._has_left = True
            asyncio.get_running_loop().call_later(_LITELLMS_S, self._end)
        return message

    async def _send_beat(self) -> None:
        async with self._sending:
            if self._is_between and not self._is_answered:
                # If it cannot be sent, LiteLLM hears of that itself.
                with contextlib.suppress(Exception):
                    await self._send({"type": "http.response.body", "body": BEAT, "more_body": True})

    def _end(self) -> None:
        self._is_gone = True
        for work in tuple(self._work):
            work.cancel()


_present: ContextVar[Presence | None] = ContextVar("litellm_compaction_present", default=None)


def watched(application: Application, *routes: Route) -> Application:
    """Returns an application with `routes` of its own, that leaves the rest to `application`.

    What is posted knows by `ends_with_client` and `while_here` of a client that has left.
    """

    async def serve(scope: Any, receive: _Receive, send: _Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        owns = (partial(each.serve, application) for each in routes if each.method == method and each.matches(path))
        chosen = next(owns, application)
        if method != "POST":
            await chosen(scope, receive, send)
            return
        presence = Presence(receive, send)
        _present.set(presence)
        try:
            await chosen(scope, presence.receive, presence.send)
        finally:
            presence.over()

    return serve


def ends_with_client(work: Work) -> None:
    """Has `work`, which its owner keeps, end when the client of the running request has left."""
    if (presence := _present.get()) is not None:
        presence.add(work)


def beats(may_pause: Callable[[], bool], *, every_s: float) -> None:
    """Has the client of the running request hear a beat after each `every_s` of silence in which its stream may pause.

    In place of LiteLLM's own keep-alive, which leaks a slot of the key's parallel limit with every chat stream.
    """
    if (presence := _present.get()) is not None:
        presence.beat(may_pause, every_s)


@contextlib.contextmanager
def while_here() -> Iterator[None]:
    """Ends what is awaited within when the client of the running request has left, by a ClientLeft."""
    with anyio.CancelScope() as scope:
        ends_with_client(scope)
        yield
    if scope.cancelled_caught:
        raise ClientLeft
