"""The context length that a deployment's model is loaded with: the number's source, and its largest age.

The engine asks for every request: from memory in microseconds, over the network only when the value is old; one read
serves every deployment of a server. Such a value is read again first, and if its server is silent, only the operator's
number counts: a model may have been loaded anew with a smaller window, and LM Studio would cut silently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import httpx

from litellm_compaction.concurrency import Bounded, Kept
from litellm_compaction.core.messages import JsonValue, Request
from litellm_compaction.errors import CompactionError, ModelNotLoaded, ServerUnavailable, WindowUnknown, WindowUnread
from litellm_compaction.windows.fetch import PATIENT_TIMEOUT_S, NotThisApi, Unreached, without_userinfo
from litellm_compaction.windows.lmstudio import answers_as_lmstudio, list_models, server_root
from litellm_compaction.windows.lmstudio_rpc import InstanceAddress, LMStudioRpc, LoadedModel, ModelSettings
from litellm_compaction.windows.other_servers import SERVERS, Api, LocalServer, Served, list_served, tokens_by_server
from litellm_compaction.windows.window import Found, Listing, Source, Window

__all__ = ["Source", "Target", "Window", "Windows", "server_of"]

logger = logging.getLogger("litellm_compaction")

_LEARNED_S = 600.0
# Retry delay after a refused connection or a wrong API, so that requests do not queue for time limits. A server that
# takes connections but does not answer is asked by each request: it is alive; one late answer must refuse only one.
_RETRY_S = 1.0
# Servers end idle connections after 5 s and more (Node.js; uvicorn), which is how long a listing is kept by default.
_IDLE_S = 2.0
# How long is believed that a server is LM Studio, is not, did not say: one that is started later has to be found.
_VERDICTS_S = {True: inf, False: 60.0, None: 5.0}
# A server that tells no window is asked again this seldom: another one may listen there some day.
_SILENT_S = 60.0
# Supposed of any hosted server, and not known of the one at this address.
_GUESS = "default"
_LMSTUDIO = ("api/v1", "api/v0")
# No model is loaded with a window that cuts this.
_UNCUT_TOKENS = 2_000


class Place(NamedTuple):
    """A server and how it is asked; no `apis` is LM Studio's own."""

    root: str
    api_key: str | None
    apis: tuple[Api, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A deployment as this layer needs it.

    Attributes:
        key: stable identity of the deployment.
        model: as LM Studio knows it, without provider prefix.
        context_length: tokens that the operator wrote down; used only if the server does not say.
        context_source: the source of `context_length`.
        apis: ways to ask a server that is not LM Studio for its window; empty leaves it in peace.
        asker: its fingerprint: a limit from an overflow of its own holds for it first.
        tokenizer: of this deployment; "" follows the global setting (`registry.py`).
    """

    key: str
    model: str
    api_base: str | None
    api_key: str | None = field(repr=False)
    context_length: int | None
    context_source: Source = "operator"
    is_lmstudio: bool = True
    apis: tuple[Api, ...] = ()
    tokenizer: str = ""
    asker: str = ""

    @property
    def place(self) -> Place | None:
        """The server to ask for its list; None if there is none."""
        if self.api_base is None or not (self.is_lmstudio or self.apis):
            return None
        return Place(server_root(self.api_base), self.api_key, () if self.is_lmstudio else self.apis)

    @property
    def lmstudio_address(self) -> str:
        """LM Studio's expected address, without a user's name and password; "" for other servers."""
        return without_userinfo(self.api_base) if self.is_lmstudio and self.api_base else ""


class Reading(NamedTuple):
    """A server's last good listing, and when its reading began; with a `failure` of the newest one it may not hold."""

    listing: Listing | None = None
    read_s: float = -inf
    failure: ServerUnavailable | None = None

    @property
    def is_silent(self) -> bool:
        """The server did not answer."""
        return self.failure is not None and not isinstance(self.failure, NotThisApi)

    @property
    def is_busy(self) -> bool:
        """It took the connection, at least: the next attempt need not wait."""
        return self.is_silent and not isinstance(self.failure, Unreached)


class Windows:
    """The windows of all targets.

    Args:
        cache_s: how long a value read from a server is served without reading it again.
        http: the client to use; None makes one in the running loop, closed by `aclose`.
        timeout_s: limit for a connection to a server; its answer is waited for longer.
        rpc: carries questions by LM Studio's own protocol; None asks none.
    """

    def __init__(
        self,
        *,
        cache_s: float,
        http: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = 3.0,
        rpc: LMStudioRpc | None = None,
    ) -> None:
        self._cache_s, self._timeout_s, self._clock = cache_s, timeout_s, clock
        self._http, self._owns_http = http, http is None
        self._readings: Kept[Place, Reading] = Kept(self._read, self._life_s, clock=clock)
        self._verdicts: Kept[Place, bool | None] = Kept(self._judge, _VERDICTS_S.__getitem__, clock=clock)
        self._shared: Bounded[str, int] = Bounded()
        # A limit, its end, and what was listed when it was learned; by target and asker.
        self._learned: Bounded[tuple[str, str], tuple[int, float, int | None]] = Bounded()
        self._rpc = rpc if rpc is not None else LMStudioRpc(is_on=False)
        # The models that were loaded with an instance when a list was last read for it, and its load by then.
        self._loaded: Bounded[InstanceAddress, tuple[frozenset[LoadedModel], int]] = Bounded()

    async def resolve(self, target: Target, *, fresh: bool = False) -> Window:
        """The window of a target: its server's own number, else the operator's, else a learned limit.

        LM Studio has no default: a guess would let it cut silently.

        Args:
            fresh: waits for a read that begins after this call.

        Raises:
            ModelNotLoaded: LM Studio lists the model without a loaded instance. An operator's number does not help:
                loading on request may use another context length (lmstudio-bug-tracker 1463).
            WindowUnknown: there is no number; the message names the server that was asked and its answer.
            WindowUnread: the server gave one, but does not answer any more, and no source has the present one.
        """
        if target.place is None:
            return self._without_listing(target, "no server was asked")
        reading = await self._readings.get(target.place, fresh=fresh)
        window, absence, is_unloaded = look_up(target, reading)
        if is_unloaded:
            raise ModelNotLoaded(target.model)
        if window is None:
            return self._without_listing(target, absence, is_silent=reading.is_silent)
        learned = self._learned_tokens(target, listed_tokens=window.tokens)
        if learned is not None and learned < window.tokens:
            window = replace(window, tokens=learned, source="learned")
        if reading.failure is not None:
            written = _written(target)
            if written is None:
                # A model that was loaded anew with a smaller window looks the same.
                tried = (
                    f"{reading.failure}; its last answer, {window.tokens} tokens, is "
                    f"{self._clock() - reading.read_s:.0f} s old and may hold no more, so nothing was sent. The next "
                    "request asks again; `model_info.compaction.context_length` is used meanwhile where set"
                )
                raise WindowUnread(target.model, tried=tried, address=target.lmstudio_address)
            window = replace(window, tokens=min(window.tokens, written))
        return self._as_known(target, window)

    def learn(self, target: Target, window_tokens: int) -> None:
        """Takes over a limit that an overflow error named: `resolve` gives no more for 600 s.

        It ends if another length is listed: the model was loaded anew. It holds for the asker only: an error text may
        be of a client's making, and must not decide about other people's windows. A limit that is the only number known
        stays. Ignored: a limit below one token, or above the listed one.
        """
        window = self._last_seen(target)
        if window_tokens >= 1 and (window is None or window_tokens <= window.tokens):
            listed_tokens = window.tokens if window is not None else None
            self._learned[target.key, target.asker] = window_tokens, self._clock() + _LEARNED_S, listed_tokens

    def learn_shared(self, target: Target, parallel: int) -> bool:
        """Notes that so many requests fill one context together, which no listing says; returns True if that is news.

        It holds for as long as this process runs: a server that serves fewer at once after all only lets some wait.
        """
        known = self._shared.get(target.key, 1)
        self._shared[target.key] = max(parallel, known, 2)
        return known == 1

    def invalidate(self, target: Target) -> None:
        """Makes the next `resolve` of this server wait for a fresh read."""
        if target.place is not None:
            self._readings.invalidate(target.place)

    def instance(self, target: Target) -> InstanceAddress | None:
        """The loaded copy that a target's requests reach, if LM Studio may be asked about it now; else None."""
        base, window = target.api_base, self._last_seen(target)
        if base is None or window is None or not target.is_lmstudio or not self._rpc.is_usable(base, target.api_key):
            return None
        return InstanceAddress(self._rpc, base, target.api_key, window.instance_id)

    async def confirmed(self, target: Target, window: Window) -> Window:
        """`window`, or the one that holds now if LM Studio's own protocol shows that a model was loaded anew since.

        A question of less than a millisecond; after a change the list is read. Errors as `resolve`.
        """
        instance = self.instance(target)
        loaded = await instance.list_loaded() if instance is not None else None
        if instance is None or loaded is None:
            return window
        # Another request may have seen it while this one waited.
        before, load = self._loaded.get(instance, (frozenset[LoadedModel](), 0))
        load += bool(before) and all(each.identifier != instance.identifier for each in before & loaded)
        window = await self.resolve(target, fresh=loaded != before)
        self._loaded[instance._replace(identifier=window.instance_id)] = loaded, load
        return self._as_known(target, window)

    async def ready(
        self, target: Target, *, prompt_tokens: int, load: Callable[[], Awaitable[None]] | None, fresh: bool = False
    ) -> Window:
        """As `resolve`, after `load` if the model is not loaded.

        Of `prompt_tokens` that a smaller window would cut LM Studio says at once if it still holds them. A model that
        is not served, it seems, is looked for in a list that begins to be read now.
        """
        try:
            window = await self.resolve(target, fresh=fresh)
            return await self.confirmed(target, window) if may_cut(window, prompt_tokens) else window
        except WindowUnread:
            raise
        except (ModelNotLoaded, WindowUnknown) as absence:
            if fresh and (load is None or not isinstance(absence, ModelNotLoaded)):
                raise
        if fresh and load is not None:
            await load()
            load = None
        return await self.ready(target, prompt_tokens=prompt_tokens, load=load, fresh=True)

    async def tokens_now(self, target: Target, *, fresh: bool = False) -> int:
        """As `resolve`; 0 if nobody knows it any more."""
        try:
            return (await self.resolve(target, fresh=fresh)).tokens
        except CompactionError:
            return 0

    async def model_settings(self, target: Target) -> ModelSettings | None:
        """LM Studio's own settings for a target's answers; None for none."""
        instance = self.instance(target)
        return await instance.settings() if instance is not None else None

    async def is_busy(self, target: Target) -> bool:
        """Returns True if LM Studio says that it works on something for a target's model."""
        instance = self.instance(target)
        return instance is not None and await instance.is_busy()

    async def tokens_of(self, target: Target, request: Request) -> int | None:
        """The target's count of a request by its own tokenizer; None if it has none. Never raises.

        LM Studio's protocol counts neither images nor reasoning.
        """
        if target.is_lmstudio:
            instance = self.instance(target)
            return await instance.count_tokens(request) if instance is not None else None
        base, reading = target.api_base, self._readings.last(target.place) if target.place is not None else None
        api = reading.listing.api if reading is not None and isinstance(reading.listing, Served) else None
        if base is None or api is None:
            return None
        return await tokens_by_server(self._client(), api, base, target.api_key, target.model, request)

    async def rendered(self, target: Target, request: Request, *, without_bos: bool = False) -> str | None:
        """The prompt that LM Studio's template makes of a request; None if it refuses it, or is not asked."""
        instance = self.instance(target)
        return await instance.render(request, without_bos=without_bos) if instance is not None else None

    async def accepts(self, target: Target, request: Request, instead_of: Request) -> bool:
        """Returns False if LM Studio's template refuses a request, though not the one in whose place it is sent."""
        is_made = await self.rendered(target, request) is not None
        return is_made or await self.rendered(target, instead_of) is None

    async def listed(self, target: Target) -> Mapping[str, bool]:
        """The chat models that a target's server lists, and if each is loaded; empty if it does not answer."""
        reading = await self._readings.get(target.place) if target.place is not None else Reading()
        if reading.listing is None or (reading.failure is not None and not reading.is_busy):
            return {}
        return reading.listing.chats

    async def is_lmstudio(self, api_base: str, api_key: str | None) -> bool | None:
        """Returns True if a server is LM Studio; None without an answer.

        One that takes the connection and is silent may be LM Studio that loads a model, which requests would pass
        without a guard: the first question is waited for as long as its list, later ones for `timeout_s`.
        """
        place = Place(server_root(api_base), api_key)
        wait_s = self._timeout_s if self._verdicts.has(place) else PATIENT_TIMEOUT_S
        return await self._verdicts.soon(place, wait_s=wait_s)

    async def aclose(self) -> None:
        """Ends background reads and closes sockets, and the client if it was made here."""
        await self._readings.aclose()
        await self._verdicts.aclose()
        if self._owns_http and self._http is not None:
            await self._http.aclose()
            self._http = None
        await self._rpc.aclose()

    def _last_seen(self, target: Target) -> Window | None:
        """The window by the last listing that was read, whatever its age."""
        reading = self._readings.last(target.place) if target.place is not None else None
        return look_up(target, reading).window if reading is not None else None

    def _learned_tokens(self, target: Target, *, listed_tokens: int | None = None, is_only: bool = False) -> int | None:
        """The limit that an overflow has taught, if it is young, or all that is known.

        Beside another length than was listed by then it is of a model that has been loaded anew since.
        """
        key = target.key, target.asker
        tokens, until_s, listed_before_tokens = self._learned.get(key, (None, inf, None))
        if None not in (listed_tokens, listed_before_tokens) and listed_tokens != listed_before_tokens:
            self._learned.pop(key, None)
            return None
        return tokens if is_only or self._clock() < until_s else None

    def _without_listing(self, target: Target, reason: str, *, is_silent: bool = False) -> Window:
        """The operator's number, no larger than a limit that was learned; else that limit.

        A server's own number is worth more than a guess, however old it is.
        """
        learned = self._learned_tokens(target, is_only=_written(target) is None)
        numbers = ((target.context_length, target.context_source), (learned, "learned"))
        if limits := [(tokens, source) for tokens, source in numbers if tokens]:
            tokens, source = min(limits, key=lambda each: each[0])
            return self._as_known(target, Window(tokens=tokens, source=source, instance_id=target.model))
        tried = f"{reason}; no context length is configured; no overflow error named one"
        if is_silent:
            raise WindowUnread(target.model, tried=tried, address=target.lmstudio_address)
        raise WindowUnknown(target.model, tried=tried)

    def _as_known(self, target: Target, window: Window) -> Window:
        """`window` with facts that no listing has: how many share it, and the load of its model."""
        instance = InstanceAddress(self._rpc, target.api_base or "", target.api_key, window.instance_id)
        parallel = max(window.parallel, self._shared.get(target.key, 1))
        return replace(window, parallel=parallel, load=self._loaded.get(instance, (None, 0))[1])

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            # trust_env=False: a corporate proxy must never see these probes.
            # The whole exchange has a limit of its own: a server that cannot be reached shows that sooner.
            # No read has to wait for another server's place in the pool.
            self._http = httpx.AsyncClient(
                trust_env=False,
                timeout=httpx.Timeout(None, connect=self._timeout_s),
                limits=httpx.Limits(keepalive_expiry=_IDLE_S),
            )
        return self._http

    def _life_s(self, reading: Reading) -> float:
        if reading.failure is not None:
            return 0.0 if reading.is_busy else min(self._cache_s, _RETRY_S)
        is_mute = isinstance(reading.listing, Served) and reading.listing.api is None
        cache_s = max(self._cache_s, _SILENT_S) if is_mute else self._cache_s
        # One request asks several times: an answer that came late holds for a moment, however old it is.
        return max(cache_s - (self._clock() - reading.read_s), min(self._cache_s, _RETRY_S))

    async def _read(self, place: Place) -> Reading:
        """Never raises for a server that does not answer: the last good listing stays, with the reason for doubt."""
        began_s, last = self._clock(), self._readings.last(place) or Reading()
        listing: Listing
        try:
            if place.apis:
                listing = await list_served(self._client(), place.root, place.api_key, place.apis)
            else:
                listing = await list_models(self._client(), place.root, place.api_key)
        except ServerUnavailable as exc:
            if last.listing is not None and last.failure is None:
                logger.warning("window_not_read: only what operators wrote counts until the server answers: %s", exc)
            return last._replace(failure=exc)
        return Reading(listing, began_s)

    async def _judge(self, place: Place) -> bool | None:
        try:
            return await answers_as_lmstudio(self._client(), place.root, place.api_key)
        except ServerUnavailable:
            return None


def may_cut(window: Window, prompt_tokens: int) -> bool:
    """Returns True if the model may have been loaded anew with a window that such a prompt does not fit."""
    return prompt_tokens > min(_UNCUT_TOKENS, window.tokens // 4)


def server_of(source: Source) -> LocalServer | None:
    """The kind of server that a window was read from; None for LM Studio, and if no server said it."""
    return SERVERS.get(source)


def goes_on_itself(target: Target, source: Source) -> bool:
    """Returns True for a server of a kind that goes on with an answer itself.

    LM Studio goes on with a last message of the assistant (lmstudio-bug-tracker 2041) and puts no template around the
    prompt of a text completion (its documentation, "Completions"); so does llama.cpp, and vLLM if it is told to
    (`continue_final_message`).
    """
    server = server_of(source)
    return target.is_lmstudio or source in _LMSTUDIO or (server is not None and server.continues)


def no_thoughts(target: Target, source: Source, family: str) -> Mapping[str, JsonValue]:
    """Returns the fields of a request's body that have a server think no more; empty if none is known.

    LM Studio takes `reasoning_effort: none` on chats since 0.4.17 (its bug tracker 2057, by the vendor); gpt-oss knows
    no other efforts than low, medium and high.
    """
    if target.is_lmstudio or source in _LMSTUDIO:
        return {"reasoning_effort": "low" if family == "gpt-oss" else "none"}
    server = server_of(source)
    return server.no_thoughts if server is not None else {}


def _written(target: Target) -> int | None:
    """The number of an operator, who knows this very server."""
    return target.context_length or None if target.context_source != _GUESS else None


# Asked for several times for each request.
@lru_cache(maxsize=64)
def look_up(target: Target, reading: Reading) -> Found:
    """The target's window by a listing of its server."""
    return Found(None, str(reading.failure)) if reading.listing is None else reading.listing.find(target.model)
