"""The newest listing of each server, its age, and whether a server is LM Studio at all.

One read serves every deployment of a server, and a listing that another process has just found unchanged is not read
again. Called by `windows.py`, which turns a listing into a window.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import httpx

from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import NotThisApi, Unreached
from litellm_compaction.windows.lmstudio import Listing, answers_as_lmstudio, list_models, server_root
from litellm_compaction.windows.other_servers import SILENT, Api, Served, list_served

# A server that nobody can reach, or that is no such server, is asked again this soon, so that nobody queues behind time
# limits. One that takes connections and does not answer is asked by each request: it is alive, and one late answer must
# not refuse all that come after it.
_RETRY_S = 1.0
# It may be busy, as while it loads a model: just then the last number is the least sure, so its answer is waited for.
_PATIENT_TIMEOUT_S = 30.0
# Servers end idle connections after 5 s and more (Node.js; uvicorn), which is how long a listing is kept by default.
_IDLE_S = 2.0
# An LM Studio that is started later has to be found; one that does not answer is asked again soon.
_NOT_LMSTUDIO_S = 60.0
_NO_ANSWER_S = 5.0
# A server that takes connections and says nothing is asked on for about ten minutes; then by whoever needs it again.
_ASKED_ON_TIMES = 20
# What others say is that nothing has changed since this process read it; so often it looks for itself.
_OWN_READ_S = 60.0
# The digest of so many models takes 0.5 ms (2026-11-23).
_MANY_ROWS = 200
# A server that tells no window is asked again this seldom: another one may listen there some day.
_SILENT_S = 60.0


class Reading(NamedTuple):
    """What is known of a server.

    Attributes:
        listing: the last good one; None when there has never been one.
        read_s: clock value when its reading began: it says nothing of what came later.
        is_silent: whether it failed because nobody answered.
        is_busy: whether it failed although somebody took the connection: the next attempt need not wait.
        failure: why the newest attempt failed; "" when it succeeded. With one, `listing` may no longer hold.
    """

    listing: Listing | Served | None
    read_s: float
    failure: str
    is_silent: bool = False
    is_busy: bool = False


_NOTHING = Reading(None, -inf, "")


class _Place(NamedTuple):
    """A server and how it is asked; no `apis` is LM Studio's own."""

    root: str
    api_key: str | None
    apis: tuple[Api, ...] = ()


@dataclass(slots=True)
class _Server:
    """Reads are numbered: whoever needs a fresh one waits for a number that had not begun when they asked."""

    reading: Reading = _NOTHING
    attempted_s: float = -inf
    begun: int = 0
    done: int = 0
    wanted: int = 1
    flight: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Verdict:
    value: bool | None = None
    was_waited_for: bool = False
    until_s: float = -inf
    flight: asyncio.Task[None] | None = None
    asking_on: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class Listings:
    """The listings of all servers, in memory.

    Attributes:
        cache_s: how long a listing is served without reading it again.
        http: the client to use; None makes one in the running loop, closed by `aclose`.
        timeout_s: limit for a connection, and for finding out what a server is.
        on_loaded: is called where a listing of LM Studio's has a loaded model that the one before had not.
    """

    cache_s: float
    http: httpx.AsyncClient | None = None
    clock: Callable[[], float] = time.monotonic
    timeout_s: float = 3.0
    on_loaded: Callable[[], None] | None = None
    _own: httpx.AsyncClient | None = None
    _servers: dict[_Place, _Server] = field(default_factory=dict)
    _verdicts: dict[_Place, _Verdict] = field(default_factory=dict)

    async def get(
        self, api_base: str, api_key: str | None, apis: tuple[Api, ...] = (), *, fresh: bool = False
    ) -> Reading:
        """The listing of a server, from memory where it is young enough; `fresh` reads it now.

        Args:
            api_base: of the server.
            api_key: sent with the reads.
            apis: what a server that is not LM Studio may speak; empty for LM Studio.
            fresh: waits for a read that begins after this call.

        An older one is read again before it is given, by one read for all who ask. Never raises for a server that does
        not answer: the last good listing stays, with the reason why it is not known to hold.
        """
        place = _Place(server_root(api_base), api_key, apis)
        server = self._servers.setdefault(place, _Server())
        cache_s = self._kept_s(server.reading)
        if fresh:
            server.wanted = server.begun + 1
        wanted = server.wanted
        if server.done >= wanted:
            now_s = self.clock()
            since_s, limit_s = server.reading.read_s, cache_s
            if server.reading.failure:
                since_s, limit_s = server.attempted_s, 0.0 if server.reading.is_busy else min(cache_s, _RETRY_S)
            if now_s - since_s < limit_s:
                return server.reading
            await asyncio.shield(self._flight(place, server))
        while server.done < wanted:
            # Shielded: a waiter that is cancelled must not take the read away from the others.
            await asyncio.shield(self._flight(place, server))
        return server.reading

    def last(self, api_base: str, api_key: str | None, apis: tuple[Api, ...] = ()) -> Reading | None:
        """What is known of a server without asking it."""
        server = self._servers.get(_Place(server_root(api_base), api_key, apis))
        return server.reading if server is not None else None

    def client(self) -> httpx.AsyncClient:
        """The client that servers are asked with, made in the running loop."""
        if self.http is not None:
            return self.http
        if self._own is None:
            # trust_env=False: a corporate proxy must never see these probes.
            # The whole exchange has a limit of its own: a server that cannot be reached shows that sooner.
            # No read has to wait for another server's place in the pool.
            self._own = httpx.AsyncClient(
                trust_env=False,
                timeout=httpx.Timeout(None, connect=self.timeout_s),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_IDLE_S),
            )
        return self._own

    def invalidate(self, api_base: str, api_key: str | None, apis: tuple[Api, ...] = ()) -> None:
        """Makes the next `get` wait for a read that begins after this call."""
        server = self._servers.get(_Place(server_root(api_base), api_key, apis))
        if server is not None:
            server.wanted = server.begun + 1

    async def is_lmstudio(self, api_base: str, api_key: str | None) -> bool | None:
        """Whether the server is LM Studio: a yes is kept, a no for 60 s, None (nobody answered) for 5 s.

        One that has not answered yet is waited for, by every request that wants to know; one that stays silent is asked
        on in the background.
        """
        place = _Place(server_root(api_base), api_key)
        verdict = self._verdicts.setdefault(place, _Verdict())
        if self.clock() >= verdict.until_s:
            if verdict.flight is None or verdict.flight.done():
                verdict.flight = asyncio.create_task(self._judge(place, verdict))
            await asyncio.shield(verdict.flight)
        return verdict.value

    async def aclose(self) -> None:
        """Ends running reads and closes the client that was made here."""
        flights = [server.flight for server in self._servers.values()]
        for verdict in self._verdicts.values():
            flights += [verdict.flight, verdict.asking_on]
        running = [flight for flight in flights if flight is not None and not flight.done()]
        for flight in running:
            flight.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._own is not None:
            await self._own.aclose()
            self._own = None

    def _kept_s(self, reading: Reading) -> float:
        return max(self.cache_s, _SILENT_S) if reading.listing == SILENT else self.cache_s

    def _flight(self, place: _Place, server: _Server) -> asyncio.Task[None]:
        if server.flight is None or server.flight.done():
            server.flight = asyncio.create_task(self._read(place, server))
        return server.flight

    async def _read(self, place: _Place, server: _Server) -> None:
        server.begun += 1
        number, began_s = server.begun, self.clock()
        try:
            listing = await self._listing(place)
        except ServerUnavailable as exc:
            server.reading = server.reading._replace(
                failure=str(exc),
                is_silent=not isinstance(exc, NotThisApi),
                is_busy=not isinstance(exc, (NotThisApi, Unreached)),
            )
        else:
            is_new = bool(_loaded(listing) - _loaded(server.reading.listing))
            server.reading = Reading(listing, began_s, "")
            if is_new and self.on_loaded is not None:
                self.on_loaded()
        finally:
            server.attempted_s = self.clock()
            server.done = number

    async def _listing(self, place: _Place) -> Listing | Served:
        patient_s = max(self.timeout_s, _PATIENT_TIMEOUT_S)
        if place.apis:
            return await list_served(self.client(), place.root, place.api_key, place.apis, timeout_s=patient_s)
        return await list_models(self.client(), place.root, place.api_key, timeout_s=patient_s)

    async def _judge(self, place: _Place, verdict: _Verdict) -> None:
        """Asks a server whether it is LM Studio.

        One that takes the connection and is silent may be LM Studio that loads a model: requests would pass it without
        a guard, so it is waited for as long as for its list. Once: others may never answer what they do not know.
        """
        timeout_s = self.timeout_s if verdict.was_waited_for else max(self.timeout_s, _PATIENT_TIMEOUT_S)
        is_silent = await self._asked(place, verdict, timeout_s)
        if is_silent:
            verdict.asking_on = asyncio.create_task(self._ask_on(place, verdict))

    async def _ask_on(self, place: _Place, verdict: _Verdict) -> None:
        """Asks a silent server until it answers or has gone; nobody waits, and it is guarded as soon as it is known."""
        try:
            for _ in range(_ASKED_ON_TIMES):
                verdict.until_s = inf
                await asyncio.sleep(_NO_ANSWER_S)
                if not await self._asked(place, verdict, max(self.timeout_s, _PATIENT_TIMEOUT_S)):
                    return
        finally:
            # However this ends: with nobody asking on, whoever needs the answer asks.
            if verdict.value is None and verdict.until_s == inf:
                verdict.until_s = self.clock()

    async def _asked(self, place: _Place, verdict: _Verdict, timeout_s: float) -> bool:
        """Asks once, notes the answer and how long it holds, and says whether the server was there and silent."""
        is_silent = False
        try:
            verdict.value = await answers_as_lmstudio(self.client(), place.root, place.api_key, timeout_s=timeout_s)
            verdict.was_waited_for = True
        except ServerUnavailable as error:
            verdict.value = None
            is_silent = not isinstance(error, Unreached)
            verdict.was_waited_for = verdict.was_waited_for or is_silent
        keep_s = {True: inf, False: _NOT_LMSTUDIO_S, None: _NO_ANSWER_S}[verdict.value]
        verdict.until_s = self.clock() + keep_s
        return is_silent


def _loaded(listing: Listing | Served | None) -> set[str]:
    """The chat models that LM Studio has loaded."""
    if not isinstance(listing, Listing):
        return set()
    return {model.key for model in listing.models if model.kind == "llm" and model.loaded}
