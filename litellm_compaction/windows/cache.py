"""The newest listing of each server, its age, and if a server is LM Studio at all.

One read serves every deployment of a server. Called by `windows.py`, which turns a listing into a window.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import httpx

from litellm_compaction.concurrency import Kept
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import NotThisApi, Unreached
from litellm_compaction.windows.lmstudio import Listing, answers_as_lmstudio, list_models, server_root
from litellm_compaction.windows.other_servers import SILENT, Api, Served, list_served

logger = logging.getLogger("litellm_compaction")

# Retry delay after a refused connection or a wrong API, so that requests do not queue for time limits. A server that
# takes connections but does not answer is asked by each request: it is alive; one late answer must refuse only one.
_RETRY_S = 1.0
# It may be busy, as while it loads a model: just then the last number is the least sure, so its answer is waited for.
_PATIENT_TIMEOUT_S = 30.0
# Servers end idle connections after 5 s and more (Node.js; uvicorn), which is how long a listing is kept by default.
_IDLE_S = 2.0
# An LM Studio that is started later has to be found; one that does not answer is asked again soon.
_NOT_LMSTUDIO_S, _NO_ANSWER_S = 60.0, 5.0
# A server that tells no window is asked again this seldom: another one may listen there some day.
_SILENT_S = 60.0
# Addresses and keys; clients may send keys of their own.
_MAX_PLACES = 4096


class Reading(NamedTuple):
    """The knowledge of a server.

    Attributes:
        listing: the last good one; None when there has never been one.
        read_s: clock value when its reading began: it says nothing of later changes.
        is_silent: whether it failed because the server did not answer.
        is_busy: whether it failed although the server took the connection: the next attempt need not wait.
        failure: why the newest attempt failed; "" when it succeeded. With one, `listing` may no longer hold.
    """

    listing: Listing | Served | None
    read_s: float
    failure: str
    is_silent: bool = False
    is_busy: bool = False


class Place(NamedTuple):
    """A server and how it is asked; no `apis` is LM Studio's own."""

    root: str
    api_key: str | None
    apis: tuple[Api, ...] = ()

    @classmethod
    def of(cls, api_base: str, api_key: str | None, apis: tuple[Api, ...] = ()) -> Place:
        """The place behind an address, however that is written."""
        return cls(server_root(api_base), api_key, apis)


class Listings:
    """The listings of all servers, in memory.

    Args:
        cache_s: how long a listing is served without reading it again.
        http: the client to use; None makes one in the running loop, closed by `aclose`.
        timeout_s: limit for a connection, and for finding out a server's kind again.
    """

    def __init__(
        self,
        *,
        cache_s: float,
        http: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = 3.0,
    ) -> None:
        # Is called if a listing of LM Studio's has a loaded model that the one before had not.
        self.on_loaded: Callable[[], None] | None = None
        self._cache_s = cache_s
        self._http = http
        self._clock = clock
        self._timeout_s = timeout_s
        self._own: httpx.AsyncClient | None = None
        self._readings: Kept[Place, Reading] = Kept(self._read, self._life_s, most=_MAX_PLACES, clock=clock)
        self._verdicts: Kept[Place, bool | None] = Kept(self._judge, _verdict_life_s, most=_MAX_PLACES, clock=clock)

    async def get(self, place: Place, *, fresh: bool = False) -> Reading:
        """The listing of a server, from memory if it is young enough; an older one is read again first.

        Never raises for a server that does not answer: the last good listing stays, with the reason for doubt. `fresh`
        waits for a read that begins after this call.
        """
        return await self._readings.get(place, fresh=fresh)

    def last(self, place: Place) -> Reading | None:
        """The knowledge of a server without asking it."""
        return self._readings.last(place)

    def invalidate(self, place: Place) -> None:
        """Makes the next `get` wait for a read that begins after this call."""
        self._readings.invalidate(place)

    def client(self) -> httpx.AsyncClient:
        """The client that servers are asked with, made in the running loop."""
        if self._http is not None:
            return self._http
        if self._own is None:
            # trust_env=False: a corporate proxy must never see these probes.
            # The whole exchange has a limit of its own: a server that cannot be reached shows that sooner.
            # No read has to wait for another server's place in the pool.
            self._own = httpx.AsyncClient(
                trust_env=False,
                timeout=httpx.Timeout(None, connect=self._timeout_s),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_IDLE_S),
            )
        return self._own

    async def is_lmstudio(self, place: Place) -> bool | None:
        """If the server is LM Studio: a yes is kept, a no for 60 s, None (no answer) for 5 s.

        One that takes the connection and is silent may be LM Studio that loads a model, which requests would pass
        without a guard: the first question is waited for as long as its list, later ones for `timeout_s`.
        """
        is_known = self._verdicts.has(place)
        return await self._verdicts.soon(place, wait_s=self._timeout_s if is_known else _PATIENT_TIMEOUT_S)

    async def aclose(self) -> None:
        """Ends running reads and closes the client that was made here."""
        await self._readings.aclose()
        await self._verdicts.aclose()
        if self._own is not None:
            await self._own.aclose()
            self._own = None

    def _life_s(self, reading: Reading) -> float:
        if reading.failure:
            return 0.0 if reading.is_busy else min(self._cache_s, _RETRY_S)
        cache_s = max(self._cache_s, _SILENT_S) if reading.listing == SILENT else self._cache_s
        return cache_s - (self._clock() - reading.read_s)

    async def _read(self, place: Place) -> Reading:
        began_s, last = self._clock(), self._readings.last(place) or Reading(None, -inf, "")
        try:
            listing = await self._listing(place)
        except ServerUnavailable as exc:
            if last.listing is not None and not last.failure:
                logger.warning("window_not_read: only what operators wrote counts until the server answers: %s", exc)
            return last._replace(
                failure=str(exc),
                is_silent=not isinstance(exc, NotThisApi),
                is_busy=not isinstance(exc, (NotThisApi, Unreached)),
            )
        if self.on_loaded is not None and _loaded(listing) - _loaded(last.listing):
            self.on_loaded()
        return Reading(listing, began_s, "")

    async def _listing(self, place: Place) -> Listing | Served:
        patient_s = max(self._timeout_s, _PATIENT_TIMEOUT_S)
        if place.apis:
            return await list_served(self.client(), place.root, place.api_key, place.apis, timeout_s=patient_s)
        return await list_models(self.client(), place.root, place.api_key, timeout_s=patient_s)

    async def _judge(self, place: Place) -> bool | None:
        patient_s = max(self._timeout_s, _PATIENT_TIMEOUT_S)
        try:
            return await answers_as_lmstudio(self.client(), place.root, place.api_key, timeout_s=patient_s)
        except ServerUnavailable:
            return None


def _verdict_life_s(is_lmstudio: bool | None) -> float:
    return {True: inf, False: _NOT_LMSTUDIO_S, None: _NO_ANSWER_S}[is_lmstudio]


def _loaded(listing: Listing | Served | None) -> set[str]:
    if not isinstance(listing, Listing):
        return set()
    return {model.key for model in listing.models if model.kind == "llm" and model.loaded}
