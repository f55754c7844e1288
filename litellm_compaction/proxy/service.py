"""The running plug-in: its parts, made once from the settings, begun with the proxy and ended with it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from litellm_compaction.concurrency import ended
from litellm_compaction.config import Settings
from litellm_compaction.engine import Compactor
from litellm_compaction.events import log_observer
from litellm_compaction.history import History
from litellm_compaction.master_key import stretched
from litellm_compaction.proxy.answers import Answers
from litellm_compaction.proxy.discovery import Discovery
from litellm_compaction.proxy.exchange import Exchanges
from litellm_compaction.proxy.guard import Guard
from litellm_compaction.proxy.litellm_inside.application import key_owner, proxy_redis, proxy_secret, wrap_requests
from litellm_compaction.proxy.litellm_inside.router import current_router
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.metrics import Metrics
from litellm_compaction.proxy.refusals import ToldOnce, log_failure
from litellm_compaction.proxy.routing import DeploymentSelector
from litellm_compaction.proxy.standards.items import Items
from litellm_compaction.proxy.standards.routes import serving
from litellm_compaction.proxy.standards.standards import Standards
from litellm_compaction.proxy.startup import Preparing, spare_collections
from litellm_compaction.stores import board_of, open_store, originals_of
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")
_ROUTER_WAIT_S = 0.2
_ROUTER_TRIES = 600
# A store or a server that hangs delays the end of the proxy by no more than this.
_END_LIMIT_S = 5.0


class Service:
    """The parts of the running plug-in."""

    def __init__(self, settings: Settings) -> None:
        where, secret = settings.store, proxy_secret
        self.store = store = open_store(
            where, ttl_s=settings.store_ttl_s, max_bytes=settings.store_max_bytes, redis=proxy_redis, secret=secret
        )
        self.originals = originals_of(
            store, ttl_s=settings.originals_ttl_s, max_bytes=settings.originals_max_bytes, secret=secret
        )
        self._metrics, self._history = Metrics(), History(store)
        self.compactor = Compactor(
            windows=Windows(cache_s=settings.constants.window_cache_s, rpc=LMStudioRpc.of(settings)),
            counter=TokenCounter(),
            sources=Sources(settings.tokenizer),
            store=store,
            board=board_of(store),
            originals=self.originals,
            observers=(log_observer(logger), self._metrics.observe, self._history),
        )
        self.live = LiveSettings(settings, store if settings.page == "on" else None)
        self.exchanges = Exchanges()
        ToldOnce(self.exchanges.refusal).install()
        self.guards = DeploymentSelector(self.live, self.compactor.windows)
        standards = Standards(self.compactor, self.exchanges, Items(secret))
        self.guard = Guard(self.guards, self.compactor, self.exchanges, standards, store)
        self.answers = Answers(
            self.compactor,
            self.exchanges,
            standards,
            heartbeat_s=settings.constants.heartbeat_s,
            router=current_router,
            fault=lambda: self.guard.seams.fault,
        )
        self._preparing = Preparing(self.compactor, self.guards)
        self._discovery = Discovery(self.compactor.windows, self.guards)
        self._work: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serves what LiteLLM does not, and looks at every guarded deployment as soon as the router is there."""
        if self.live.is_asleep:
            return
        # At once: a client may ask as soon as the proxy listens.
        wrap_requests(
            lambda application: self._discovery.serving(application, current_router, key_owner),
            lambda application: serving(application, lambda name: self.guard.is_guarded(current_router(), name)),
        )
        try:
            self._work = asyncio.get_running_loop().create_task(self._run())
        except RuntimeError:
            return

    def show_page(self) -> None:
        """Adds the settings and history page to the proxy, if config.yaml wants it; never raises."""
        if self.live.configured.page != "on":
            return
        try:
            # Here, so that nothing that the page alone needs can keep the proxy from starting.
            from litellm_compaction.proxy.page.data import Surroundings
            from litellm_compaction.proxy.page.routes import add_page

            recaller = self.compactor.recaller
            add_page(
                Surroundings(
                    live=self.live,
                    guards=self.guards,
                    compactor=self.compactor,
                    store=self.store,
                    router=current_router,
                    lookup=None if recaller is None else recaller.lookup,
                    originals=self.originals,
                )
            )
        except Exception as error:  # noqa: BLE001 - the proxy serves without its page (P8)
            log_failure("page", error)

    async def aclose(self) -> None:
        """Gives back holds that other processes would wait for, and writes down the rest; never raises.

        Work without a request ends: summaries that are written ahead, and looks at servers.
        """
        try:
            await asyncio.wait_for(self._aclose(), _END_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - the proxy ends all the same
            log_failure("end", error)

    async def _aclose(self) -> None:
        await ended([self._work] if self._work is not None else [])
        await self._discovery.aclose()
        await self.guard.seams.aclose()
        await self._history.settle()
        await self.compactor.aclose()

    async def _run(self) -> None:
        router = await _first_router()
        if router is None:
            return
        spare_collections()
        self._metrics.show_held(self.compactor.admission.held)
        await self.guard.look_at_seams(router)
        if secret := proxy_secret():
            # Remembered: the first request would wait for it.
            await asyncio.to_thread(stretched, secret)
        await self._discovery.refresh(router)
        try:
            await self._preparing.look(router)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            log_failure("probe", error)
        await self._preparing.keep(current_router)


async def _first_router() -> Any:
    """LiteLLM's router as soon as there is one; None if none comes."""
    for _ in range(_ROUTER_TRIES):
        if (router := current_router()) is not None:
            return router
        await asyncio.sleep(_ROUTER_WAIT_S)
    return None
