"""Prepares the first request: reads settings, looks at windows, and loads the vocabularies.

The settings when LiteLLM loads the callback: an error raised then stops the proxy's start. The rest in the background,
and again when LM Studio has loaded another model.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

from litellm_compaction.concurrency import ended
from litellm_compaction.config import SAME_MODEL, Settings, settings_from
from litellm_compaction.engine import Compactor, shares_context
from litellm_compaction.errors import ModelNotLoaded, WindowUnknown
from litellm_compaction.master_key import ensure_master_key
from litellm_compaction.proxy.config_check import SECTION, check_config
from litellm_compaction.proxy.deployments import DeploymentSelector, GuardedDeployment
from litellm_compaction.proxy.litellm_inside.application import configuration
from litellm_compaction.proxy.litellm_inside.seam import Seam
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.report import targets_of
from litellm_compaction.proxy.routing import BYPASS_VARIABLE, as_entry, is_bypassed
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE
from litellm_compaction.windows.windows import Target

logger = logging.getLogger("litellm_compaction")
# Names come from LM Studio's list, which is bounded for each server.
_MAX_PREPARED = 4096
# More models are counted in the line at the start.
_MOST_NAMED = 5


def load_settings() -> Settings:
    """The operator's settings, checked together with every deployment's own.

    Raises:
        ConfigError: the first thing in the config file with which the proxy must not start (`config_check.py`).
    """
    config = {"callback_settings": Seam.SETTINGS.needed(), **configuration()}
    for finding in check_config(config, os.environ):
        if finding.error is not None:
            raise finding.error
    settings = settings_from(as_entry(config["callback_settings"]).get(SECTION)).with_store(os.environ)
    if settings.carrier == "auto" and is_bypassed():
        logger.warning("carrier=hooks because %s is set: LiteLLM ignores the client that it is given", BYPASS_VARIABLE)
    return settings


def spare_collections() -> None:
    """Makes Python's garbage collector pass over the objects of the process so far.

    LiteLLM and its imports are more than a million objects. A full collection looks at all of them, which stops
    everything for 500 to 700 ms whenever a request makes as many objects as a quarter of these (measured 2026-11-22
    with 40,000 messages). Objects that are passed over are still freed with their last reference.

    Called when the router is there, and again when models are prepared: the routes that FastAPI makes meanwhile, a
    listing and vocabularies were 225,000 more, which took 80 ms each time (2026-11-23).
    """
    gc.collect()
    gc.freeze()


def provide_master_key() -> None:
    """Makes a key if none is set, so that plain `litellm --config config.yaml` starts, and starts locked.

    LiteLLM refuses to start without a key. It reads `LITELLM_MASTER_KEY` after the callbacks are loaded, if
    `general_settings` is there and has no `master_key` of its own (proxy_server.py, 1.100.5 to 1.109.1).
    """
    general = configuration().get("general_settings")
    if not isinstance(general, Mapping) or not general or "master_key" in general:
        return
    if not general.get("dangerously_permit_weak_or_unset_master_key"):
        made = ensure_master_key(os.environ)
        if made.path is not None:
            logger.warning("master_key file=%s clients must send the key in it; or set LITELLM_MASTER_KEY", made.path)


def provide_api_base() -> None:
    """Points `lm_studio/` deployments without an address at LM Studio's own port on this machine.

    LiteLLM would leave the OpenAI client at its default, and send conversations to that company's servers.
    """
    os.environ.setdefault("LM_STUDIO_API_BASE", DEFAULT_API_BASE)


class Preparing:
    """Looks at the windows of guarded deployments, and loads the counters of their prompts, each once.

    Making a vocabulary holds the interpreter lock for 50 to 500 ms, which every running stream would feel.
    """

    def __init__(self, compactor: Compactor, guards: DeploymentSelector, settings: Settings) -> None:
        self._settings = settings
        self._compactor = compactor
        self._guards = guards
        self._prepared: set[tuple[str, str]] = set()
        self._pruning_models: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False

    async def start(self, router: Any) -> None:
        """Looks at every guarded deployment's window once, so that trouble shows at start and not at night.

        Then says in one line what is guarded, and prepares the models that are loaded; last, since a download may take
        minutes.
        """
        found: list[str] = []
        async for guard in self._guards.guarded(router):
            targets = await targets_of(self._compactor.windows, guard.deployment)
            found += [await self._look_at_window(guard, target) for target in targets]
            if not targets:
                found.append(f"{guard.deployment.group} (no model known yet)")
            await self._look_at_pruning_model(router, guard)
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        page = "/compaction, with the master key" if self._settings.page == "on" else "off"
        named = ", ".join(found[:_MOST_NAMED]) or "nothing"
        logger.info("guarding %s%s; mode=%s; page: %s", named, more, self._settings.mode, page)
        await self.prepare(router)

    async def prepare(self, router: Any) -> None:
        """Loads the counters of the loaded models, of guarded deployments only, also of wildcards."""
        async for guard in self._guards.guarded(router):
            deployment = guard.deployment
            for target in await targets_of(self._compactor.windows, deployment):
                await self._prepare(target.model if deployment.is_wildcard else deployment.group, target)

    def watch(self, router: Callable[[], Any]) -> None:
        """From now on prepares whenever a server has loaded another model; `router` gives LiteLLM's."""
        self._compactor.windows.on_loaded = lambda: self._notice(router)

    async def aclose(self) -> None:
        self._compactor.windows.on_loaded = None
        await ended([self._task] if self._task is not None else [])

    def _notice(self, router: Callable[[], Any]) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._prepare_again(router))
        else:
            self._is_wanted = True

    async def _prepare_again(self, router: Callable[[], Any]) -> None:
        while True:
            self._is_wanted = False
            try:
                await self.prepare(router())
            except Exception as error:  # noqa: BLE001 - fails open (P8)
                log_failure("prepare", error)
            if not self._is_wanted:
                return

    async def _look_at_window(self, guard: GuardedDeployment, target: Target) -> str:
        """Returns the model's name with its window, in words."""
        deployment = guard.deployment
        name = target.model if deployment.is_wildcard else deployment.group
        try:
            window = await self._compactor.windows.resolve(target)
        except ModelNotLoaded:
            return f"{name} (not loaded yet)"
        except WindowUnknown as error:
            # The message is the finding, a traceback is noise.
            logger.error("%s `litellm-compaction doctor` says what to change.", error)  # noqa: TRY400
            return f"{name} (window unknown)"
        logger.info(
            "window model=%s tokens=%d source=%s parallel=%d", name, window.tokens, window.source, window.parallel
        )
        # Uvicorn starts workers as children of multiprocessing's only if there is more than one.
        is_one_of_several = not self._compactor.is_coordinated and multiprocessing.parent_process() is not None
        if is_one_of_several and shares_context(guard.settings.admission, window.parallel):
            logger.warning("admission model=%s only within each worker: requests to it share one context", name)
        return f"{name} ({window.tokens:,} tokens)"

    async def _look_at_pruning_model(self, router: Any, guard: GuardedDeployment) -> None:
        """Logs once for each name if another model will write the summaries."""
        name = guard.settings.pruning_model
        if name == SAME_MODEL or name in self._pruning_models:
            return
        self._pruning_models.add(name)
        if why := await self._guards.why_unusable(router, name):
            logger.warning("pruning_model=%s is not used while %s; the model that is asked is", name, why)
        else:
            logger.info("pruning_model=%s writes summaries", name)

    async def _prepare(self, name: str, target: Target) -> None:
        if (name, target.key) in self._prepared:
            return
        try:
            source = await self._compactor.prepare_counting(target)
        except (ModelNotLoaded, WindowUnknown):
            return
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared.add((name, target.key))
        logger.info(
            "tokenizer model=%s source=%s vocabulary=%s template=%s",
            name,
            source.kind,
            source.path or source.family.vocabulary,
            source.template,
        )
