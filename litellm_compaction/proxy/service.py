"""The running plug-in: its parts, made once from the settings, and begun with the proxy.

An error in the settings stops the proxy's start. What can wait is done in the background once LiteLLM's router is
there, such as loading a vocabulary, which holds the interpreter lock for 50 to 500 ms: the first request would wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from typing import Any

import anyio

from litellm_compaction.concurrency import Tasks
from litellm_compaction.config import SAME_MODEL, Settings, settings_from
from litellm_compaction.engine import Compactor
from litellm_compaction.errors import ModelNotLoaded
from litellm_compaction.events import log_observer
from litellm_compaction.master_key import ensure_master_key, stretched
from litellm_compaction.proxy import litellm_inside
from litellm_compaction.proxy.client import mapping
from litellm_compaction.proxy.config_check import SECTION, check_config
from litellm_compaction.proxy.discovery import Discovery
from litellm_compaction.proxy.litellm_inside import Seam, configuration, current_router, proxy_redis, proxy_secret
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.observers import History, Metrics
from litellm_compaction.proxy.presence import watched
from litellm_compaction.proxy.refusals import failing_open
from litellm_compaction.proxy.report import DeploymentReport, Reporter
from litellm_compaction.proxy.routing import DeploymentSelector
from litellm_compaction.proxy.standards.orders import Items
from litellm_compaction.proxy.standards.standards import Standards, route_of
from litellm_compaction.stores import board_of, open_store, originals_of
from litellm_compaction.tokenizers.registry import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.windows import Windows

_STORE_LIMIT_S = 2.0
logger = logging.getLogger("litellm_compaction")
_ROUTER_WAIT_S = 0.2
# More models are counted in the line at the start.
_MOST_NAMED = 5


def load_settings() -> Settings:
    """The operator's settings; a ConfigError is the first thing with which the proxy must not start."""
    config = {"callback_settings": Seam.SETTINGS.needed(), **configuration()}
    for finding in check_config(config, os.environ):
        if finding.error is not None:
            raise finding.error
    return settings_from(mapping(config["callback_settings"]).get(SECTION)).with_store(os.environ)


def provide_environment() -> None:
    """Sets what LiteLLM reads after its callbacks are loaded: an address of LM Studio, and a key of the proxy.

    Without the address it would send conversations of `lm_studio/` to OpenAI's servers. Without a key it refuses to
    start; it reads `LITELLM_MASTER_KEY` if `general_settings` is there and has no `master_key` (proxy_server.py).
    """
    os.environ.setdefault("LM_STUDIO_API_BASE", DEFAULT_API_BASE)
    general = mapping(configuration().get("general_settings"))
    if not general or "master_key" in general or general.get("dangerously_permit_weak_or_unset_master_key"):
        return
    if (path := ensure_master_key(os.environ).path) is not None:
        logger.warning("master_key file=%s clients must send the key in it; or set LITELLM_MASTER_KEY", path)


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
        self.compactor = Compactor(
            windows=Windows(cache_s=settings.constants.window_cache_s, rpc=LMStudioRpc.of(settings)),
            counter=TokenCounter(),
            sources=Sources(settings.tokenizer),
            store=store,
            board=board_of(store),
            originals=self.originals,
            observers=(log_observer(logger), Metrics().observe, History(store)),
        )
        self.reporter = Reporter(self.compactor.windows, self.compactor.sources, self.compactor.known_ways)
        self.live = LiveSettings(settings, store if settings.page == "on" else None)
        self.guards = DeploymentSelector(self.live, self.compactor.windows)
        self.standards = Standards(self.compactor, Items(secret))
        self._discovery = Discovery(self.compactor.windows, self.guards)
        self._work = Tasks()

    def start(self) -> None:
        """Serves what LiteLLM does not, and looks at every guarded deployment as soon as the router is there."""
        # At once: a client may ask as soon as the proxy listens.
        standards = route_of(lambda name: self.guards.is_guarded(current_router(), {"model": name}))
        litellm_inside.wrap_requests(lambda application: watched(application, self._discovery.route, standards))
        # Without a loop this is no proxy.
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self._work.begin(self._run())
        if self.live.configured.page == "on":
            # Imported here, so that nothing that the page alone needs can keep the proxy from starting (P8).
            with failing_open("page"):
                from litellm_compaction.proxy.page.routes import add_page

                add_page(self)

    async def _run(self) -> None:
        while (router := current_router()) is None:  # noqa: ASYNC110 - LiteLLM tells nobody when it is there
            await asyncio.sleep(_ROUTER_WAIT_S)
        # LiteLLM and its imports are more than a million objects. A full collection looks at all of them, and stops
        # everything for half a second, unless they are passed over; they are still freed with their last reference.
        gc.collect()
        gc.freeze()
        await self.look_at_seams(router)
        if secret := proxy_secret():
            # Remembered: the first request would wait for it.
            await asyncio.to_thread(stretched, secret)
        await self._discovery.refresh(router)
        with failing_open("prepare"):
            await self._tell(current_router())

    async def look_at_seams(self, router: Any) -> None:
        """Notes in the store, for `doctor`, what lacks of all that requests are guarded by."""
        fault = await self.guards.faults.get((router, self.live.configured.carrier == "auto"))
        said = "\n".join([str(fault or ""), *litellm_inside.missing()]).rstrip()
        # The store tells its own troubles.
        with contextlib.suppress(Exception), anyio.fail_after(_STORE_LIMIT_S):
            await self.store.put_fact(*litellm_inside.LACKS, said)

    async def _tell(self, router: Any) -> None:
        """Says what is guarded, with which window, and which pruning models cannot be asked."""
        models, pruning_models = list[str](), {SAME_MODEL}
        async for deployment in self.guards.guarded(router):
            pruning_models.add(deployment.settings.pruning_model)
            for report in await self.reporter.reports(deployment):
                models.append(_named(deployment.group, report))
        for name in pruning_models - {SAME_MODEL}:
            if why := await self.guards.why_unusable(router, name):
                logger.warning("pruning_model=%s is not used while %s; the model that is asked is", name, why)
        more = f" and {len(models) - _MOST_NAMED} more" if len(models) > _MOST_NAMED else ""
        named = ", ".join(models[:_MOST_NAMED]) or "nothing"
        page = "/compaction, with the master key" if self.live.configured.page == "on" else "off"
        logger.info("guarding %s%s; mode=%s; page: %s", named, more, self.live.configured.mode, page)


def _named(group: str, report: DeploymentReport) -> str:
    """Returns a model's name with its window, in words."""
    if "*" in report.target.model:
        return f"{group} (no model known yet)"
    name = report.target.model if "*" in group else group
    if report.window is not None:
        return f"{name} ({report.window.tokens:,} tokens)"
    if isinstance(report.absence, ModelNotLoaded):
        return f"{name} (not loaded yet)"
    logger.error("%s `litellm-compaction doctor` says what to change.", report.absence)
    return f"{name} (window unknown)"
