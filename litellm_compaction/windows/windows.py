"""The context length that a deployment's model is loaded with: the number's source, and its largest age.

The engine asks for every request: from memory in microseconds, over the network only when the value is old. Such a
value is read again first, and if its server is silent, only the operator's number counts: a model may have been
loaded anew with a smaller window, and LM Studio would cut silently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import httpx

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Request
from litellm_compaction.errors import ModelNotLoaded, WindowUnknown, WindowUnread
from litellm_compaction.windows.cache import Listings, Place, Reading
from litellm_compaction.windows.fetch import without_userinfo
from litellm_compaction.windows.lmstudio import Listing, match
from litellm_compaction.windows.lmstudio_questions import (
    Instance,
    LoadedModel,
    ModelSettings,
    count_tokens,
    is_busy,
    list_loaded,
    read_settings,
    render,
)
from litellm_compaction.windows.lmstudio_rpc import CallRefused, LMStudioRpc
from litellm_compaction.windows.other_servers import SERVERS, Api, LocalServer, Served, find_served, tokens_by_server

__all__ = ["Source", "Target", "Window", "Windows", "server_of"]

_LEARNED_S = 600.0
# Wildcard deployments get their model names from clients, so the number of targets needs an end.
_MAX_TARGETS = 4096
# Facts about a kind of model, not about the server at this address.
GUESSES = ("model_map", "default")


class _Learned(NamedTuple):
    tokens: int
    until_s: float


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
        self._clock = clock
        self._listings = Listings(cache_s=cache_s, http=http, clock=clock, timeout_s=timeout_s)
        self._shared: Bounded[str, int] = Bounded(_MAX_TARGETS)
        # By target and asker.
        self._learned: Bounded[tuple[str, str], _Learned] = Bounded(_MAX_TARGETS)
        self._rpc = rpc if rpc is not None else LMStudioRpc(is_on=False)
        # The models that were loaded with an instance when its settings were last read, and these settings.
        self._loaded: Bounded[Instance, tuple[frozenset[LoadedModel], ModelSettings | None]] = Bounded(_MAX_TARGETS)

    @property
    def on_loaded(self) -> Callable[[], None] | None:
        """Is called if a new listing has a loaded model that the one before had not, in the event loop."""
        return self._listings.on_loaded

    @on_loaded.setter
    def on_loaded(self, told: Callable[[], None] | None) -> None:
        self._listings.on_loaded = told

    async def resolve(self, target: Target, *, fresh: bool = False) -> Window:
        """The window of a target: its server's own number, else the operator's, else a learned limit.

        `max_context_length` is never used, and LM Studio has no default: a guess would let it cut silently.

        Raises:
            ModelNotLoaded: LM Studio lists the model without a loaded instance. An operator's number does not help:
                loading on request may use another context length (lmstudio-bug-tracker 1463). Ollama has not loaded
                it, and its operator wrote no number.
            WindowUnknown: there is no number; the message names the server that was asked and its answer.
            WindowUnread: the server gave one, but does not answer any more, and no source has the present one.
        """
        place = target.place
        if place is None:
            return self._without_listing(target, "no server was asked")
        reading = await self._listings.get(place, fresh=fresh)
        found = look_up(target, reading)
        if found.not_loaded and target.is_lmstudio:
            raise ModelNotLoaded(target.model)
        if found.not_loaded and (target.context_length is None or target.context_source in GUESSES):
            raise ModelNotLoaded(target.model, server="Ollama")
        if found.window is None:
            return self._without_listing(target, found.absence, is_silent=reading.is_silent)
        window = found.window
        learned = self._learned.get((target.key, target.asker))
        if learned is not None and self._clock() < learned.until_s and learned.tokens < window.tokens:
            window = replace(window, tokens=learned.tokens, source="learned")
        if reading.failure:
            written = target.context_length if target.context_source not in GUESSES else None
            if not written:
                # A model that was loaded anew with a smaller window looks the same.
                tried = (
                    f"{reading.failure}; its last answer, {window.tokens} tokens, is "
                    f"{self._clock() - reading.read_s:.0f} s old and may hold no more, so nothing was sent. The next "
                    "request asks again; `model_info.compaction.context_length` is used meanwhile where set"
                )
                raise WindowUnread(target.model, tried=tried, address=target.lmstudio_address)
            window = replace(window, tokens=min(window.tokens, written))
        return self._as_shared(target, window)

    def learn(self, target: Target, window_tokens: int) -> None:
        """Takes over a limit that an overflow error named: `resolve` gives no more for 600 s.

        It holds for the asker only: an error text may be of a client's making, and must not decide about other people's
        windows. A limit that is the only number known stays. Ignored: a limit below one token, or above the listed one.
        """
        window = self._last_seen(target)
        if window_tokens >= 1 and (window is None or window_tokens <= window.tokens):
            self._learned[target.key, target.asker] = _Learned(window_tokens, self._clock() + _LEARNED_S)

    def served(self, target: Target, tokens: int) -> None:
        """Forgets a limit below a prompt that the server has counted and answered since."""
        learned = self._learned.get((target.key, target.asker))
        if learned is not None and learned.tokens < tokens:
            del self._learned[target.key, target.asker]

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
            self._listings.invalidate(target.place)

    def instance(self, target: Target) -> Instance | None:
        """The loaded copy that a target's requests reach, if LM Studio may be asked about it now; else None."""
        if (
            target.api_base is None
            or not target.is_lmstudio
            or not self._rpc.is_usable(target.api_base, target.api_key)
        ):
            return None
        window = self._last_seen(target)
        return Instance(target.api_base, target.api_key, window.instance_id) if window is not None else None

    async def confirmed(self, target: Target, window: Window) -> Window:
        """`window`, or the one that holds now if LM Studio's own protocol shows that a model was loaded anew since.

        A question of less than a millisecond; after a change, the list is read and the settings are asked for.

        Raises:
            ModelNotLoaded, WindowUnknown, WindowUnread: as `resolve`.
        """
        instance = self.instance(target)
        loaded = await list_loaded(self._rpc, instance) if instance is not None else None
        if instance is None or loaded is None:
            return window
        is_news = loaded != self._loaded.get(instance, ((), None))[0]
        # Another request may have seen it while this one waited.
        window = await self.resolve(target, fresh=is_news)
        if is_news:
            instance = instance._replace(identifier=window.instance_id)
            self._loaded[instance] = loaded, await read_settings(self._rpc, instance, loaded)
        return window

    def model_settings(self, target: Target) -> ModelSettings | None:
        """LM Studio's own settings for a target's answers, as `confirmed` has seen; None for none."""
        instance = self.instance(target)
        return self._loaded.get(instance, ((), None))[1] if instance is not None else None

    async def is_busy(self, target: Target) -> bool:
        """Returns True if LM Studio says that it works on something for a target's model."""
        instance = self.instance(target)
        return instance is not None and await is_busy(self._rpc, instance)

    async def tokens_of(self, target: Target, request: Request) -> int | None:
        """The target's count of a request by its own tokenizer; None if it has none. Never raises.

        LM Studio's protocol counts neither images nor reasoning.
        """
        if target.is_lmstudio:
            instance = self.instance(target)
            try:
                return await count_tokens(self._rpc, instance, request) if instance is not None else None
            except CallRefused:
                # Its model may be gone.
                self.invalidate(target)
                return None
        if target.place is None or target.api_base is None:
            return None
        reading = self._listings.last(target.place)
        served = reading.listing if reading is not None else None
        if not isinstance(served, Served) or served.api is None or not SERVERS[served.api].counts:
            return None
        return await tokens_by_server(
            self._listings.client(), served.api, target.api_base, target.api_key, target.model, request
        )

    async def rendered(self, target: Target, request: Request, *, without_bos: bool = False) -> str | None:
        """The prompt that LM Studio's template makes of a request; None if it refuses it, or is not asked."""
        instance = self.instance(target)
        try:
            return await render(self._rpc, instance, request, without_bos=without_bos) if instance is not None else None
        except CallRefused:
            return None

    async def listed(self, target: Target) -> Mapping[str, bool]:
        """The chat models that a target's server lists, and if each is loaded; empty if it does not answer.

        By their keys, and those that LM Studio has loaded also by the names that they were loaded with.
        """
        reading = await self._listings.get(target.place) if target.place is not None else None
        if reading is None or reading.listing is None or (reading.failure and not reading.is_busy):
            return {}
        if isinstance(reading.listing, Served):
            return {model.names[0]: True for model in reading.listing.models if model.names}
        chats = [model for model in reading.listing.models if model.kind == "llm"]
        copies = {instance.id: True for model in chats for instance in model.instances}
        return {**{model.key: model.loaded for model in chats}, **copies}

    async def is_lmstudio(self, api_base: str, api_key: str | None) -> bool | None:
        """Returns True if a server is LM Studio; None without an answer. Cached: yes for good, no 60 s, None 5 s."""
        return await self._listings.is_lmstudio(Place.of(api_base, api_key))

    async def aclose(self) -> None:
        """Ends background reads and closes sockets, and the client if it was made here."""
        await self._listings.aclose()
        await self._rpc.aclose()

    def _last_seen(self, target: Target) -> Window | None:
        """The window by the last listing that was read, whatever its age."""
        reading = self._listings.last(target.place) if target.place is not None else None
        return look_up(target, reading).window if reading is not None else None

    def _without_listing(self, target: Target, reason: str, *, is_silent: bool = False) -> Window:
        """The operator's number, no larger than a limit that was learned; else that limit.

        A server's own number is worth more than a guess, however old it is.
        """
        learned = self._learned.get((target.key, target.asker))
        known: list[tuple[int, Source]] = []
        if (target.context_length or 0) > 0:
            known.append((target.context_length or 0, target.context_source))
        is_young = learned is not None and self._clock() < learned.until_s
        if learned is not None and (is_young or not known or target.context_source in GUESSES):
            known.append((learned.tokens, "learned"))
        if not known:
            tried = f"{reason}; no context length is configured; no overflow error named one"
            if is_silent:
                raise WindowUnread(target.model, tried=tried, address=target.lmstudio_address)
            raise WindowUnknown(target.model, tried=tried)
        tokens, source = min(known, key=lambda each: each[0])
        window = Window(tokens=tokens, source=source, instance_id=target.model, read_s=self._clock())
        return self._as_shared(target, window)

    def _as_shared(self, target: Target, window: Window) -> Window:
        """`window` with a fact that no listing has: how many share it."""
        parallel = max(window.parallel, self._shared.get(target.key, 1))
        return replace(window, parallel=parallel) if parallel > window.parallel else window


# LM Studio's API (`api/v1`, `api/v0`), a name in `SERVERS`, the operator's number (`operator`, `max_input_tokens`),
# LiteLLM's `model_map`, a `default`, or `learned` of an overflow error.
Source: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A deployment as this layer needs it.

    Attributes:
        key: stable identity of the deployment.
        model: as LM Studio knows it, without provider prefix.
        context_length: tokens that the operator wrote down; used only if the server does not say.
        context_source: the source of `context_length`.
        apis: ways to ask a server that is not LM Studio for its window; empty leaves it in peace.
        asked_tokens: the length that each request allocates (Ollama's `num_ctx`): its window is no larger.
        asker: its fingerprint: a limit from an overflow of its own holds for it first.
        tokenizer: of this deployment; "" follows the global setting (`sources.py`).
    """

    key: str
    model: str
    api_base: str | None
    api_key: str | None = field(repr=False)
    context_length: int | None
    context_source: Source = "operator"
    is_lmstudio: bool = True
    apis: tuple[Api, ...] = ()
    asked_tokens: int | None = None
    tokenizer: str = ""
    asker: str = ""

    @property
    def place(self) -> Place | None:
        """The server to ask for its list; None if there is none."""
        if self.api_base is None or not (self.is_lmstudio or self.apis):
            return None
        return Place.of(self.api_base, self.api_key, () if self.is_lmstudio else self.apis)

    @property
    def is_listed(self) -> bool:
        """If there is a server to ask."""
        return self.place is not None

    @property
    def lmstudio_address(self) -> str:
        """LM Studio's expected address, without a user's name and password; "" for other servers."""
        return without_userinfo(self.api_base) if self.is_lmstudio and self.api_base else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The context length to stay inside.

    Attributes:
        instance_id: the loaded copy that the number belongs to; the model's name when LM Studio was not asked.
        read_s: clock value when the number was read; old if later reads failed.
        architecture: as LM Studio names it; "" when it was not asked.
        parallel: requests that share `tokens` at the same time.
        slots: requests that have `tokens` each at the same time, as llama.cpp's server says; older ones do not say
            whether they share a unified cache.
        adds_bos: False if a raw prompt needs the token that begins every prompt. llama.cpp adds it to a completion's
            text (`tokenize_input_prompts`), LM Studio's MLX engine takes the text as it is (mlx-engine 017af0e,
            `BatchedModelKit.tokenize`). Without it models such as Gemma write nonsense.
    """

    tokens: int
    source: Source
    instance_id: str
    read_s: float
    architecture: str = ""
    parallel: int = 1
    slots: int = 1
    adds_bos: bool = True

    def is_like(self, other: Window) -> bool:
        """Returns True if both are the same, whenever they were read."""
        return replace(self, read_s=other.read_s) == other


class Found(NamedTuple):
    """A listing's facts about one target; `window` is None if it gives no number, `absence` says why."""

    window: Window | None
    absence: str = ""
    not_loaded: bool = False


def server_of(source: Source) -> LocalServer | None:
    """The kind of server that a window was read from; None for LM Studio, and if no server said it."""
    return SERVERS.get(source)


def look_up(target: Target, reading: Reading) -> Found:
    """The target's window by a listing of its server, no larger than the requests themselves make it."""
    listing = reading.listing
    if listing is None:
        return Found(None, reading.failure)
    if isinstance(listing, Listing):
        found = _by_lmstudio(target, listing, reading.read_s)
    else:
        found = _by_server(target, listing, reading.read_s)
    window = found.window
    if window is None or target.asked_tokens is None or window.tokens <= target.asked_tokens:
        return found
    # Another client may have loaded the model larger.
    return Found(replace(window, tokens=target.asked_tokens, source="operator"))


def _by_lmstudio(target: Target, listing: Listing, read_s: float) -> Found:
    path = f"/api/{listing.api}/models"
    found = match(listing, target.model)
    if found is None:
        return Found(None, f"{path} lists {len(listing.models)} models, none of them {target.model}")
    listed, instance = found
    if instance is None:
        return Found(None, f"{path}: not loaded", not_loaded=True)
    if instance.context_length is None:
        return Found(None, f"{path} lists {instance.id} as loaded, without a context length")
    return Found(
        Window(
            tokens=instance.context_length,
            source=f"api/{listing.api}",
            instance_id=instance.id,
            read_s=read_s,
            architecture=listed.architecture,
            parallel=instance.parallel,
            adds_bos=listed.file_format != "mlx",
        )
    )


def _by_server(target: Target, served: Served, read_s: float) -> Found:
    """The window as another server tells it; a model that is not loaded has none, although it may be loaded."""
    if served.api is None:
        return Found(
            None, f"its server tells no context length ({', '.join(SERVERS[api].path for api in target.apis)})"
        )
    server, found = SERVERS[served.api], find_served(served, target.model)
    if found is None or found.context_length is None:
        absence = f"{server.path} names no context length of {target.model}"
        return Found(None, absence, not_loaded=found is None and server.loads_on_request)
    return Found(
        Window(
            tokens=found.context_length,
            source=served.api,
            instance_id=target.model,
            read_s=read_s,
            parallel=found.slots if found.is_shared else 1,
            slots=found.slots,
        )
    )
