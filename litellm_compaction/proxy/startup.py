"""Begins the proxy's work: settings when LiteLLM loads the callback, windows and vocabularies when its router is there.

An error in the settings stops the proxy's start. The rest is done in the background, and again when LM Studio has
loaded another model: making a vocabulary holds the interpreter lock for 50 to 500 ms, which every running stream feels.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from litellm_compaction.config import SAME_MODEL, Settings, settings_from
from litellm_compaction.engine import Compactor, shares_context
from litellm_compaction.errors import ModelNotLoaded, WindowUnknown
from litellm_compaction.master_key import ensure_master_key
from litellm_compaction.proxy.config_check import SECTION, check_config
from litellm_compaction.proxy.litellm_inside import Seam
from litellm_compaction.proxy.litellm_inside.application import configuration
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.report import targets_of
from litellm_compaction.proxy.routing import DeploymentSelector, GuardedDeployment, as_entry
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
    return settings_from(as_entry(config["callback_settings"]).get(SECTION)).with_store(os.environ)


def spare_collections() -> None:
    """Makes Python's garbage collector pass over the objects of the process so far.

    LiteLLM and its imports are more than a million objects. A full collection looks at all of them, which stops
    everything for 500 to 700 ms whenever a request makes as many objects as a quarter of these. Objects that are passed
    over are still freed with their last reference. Called when the router is there, and again when models are prepared.
    """
    gc.collect()
    gc.freeze()


def provide_master_key() -> None:
    """Makes a key if none is set, so that plain `litellm --config config.yaml` starts, and starts locked.

    LiteLLM refuses to start without a key. It reads `LITELLM_MASTER_KEY` after the callbacks are loaded, if
    `general_settings` is there and has no `master_key` of its own (proxy_server.py).
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
    """Looks at the windows of guarded deployments, and loads the counters of their prompts, each once."""

    def __init__(self, compactor: Compactor, guards: DeploymentSelector) -> None:
        self._compactor = compactor
        self._guards = guards
        self._prepared: set[tuple[str, str]] = set()

    async def keep(self, router: Callable[[], Any]) -> None:
        """Prepares what is loaded, and again whenever a server has loaded another model, until it is cancelled.

        Args:
            router: gives LiteLLM's.
        """
        windows, is_wanted, is_first = self._compactor.windows, asyncio.Event(), True
        windows.on_loaded = is_wanted.set
        try:
            while True:
                is_wanted.clear()
                try:
                    await self.prepare(router())
                except Exception as error:  # noqa: BLE001 - fails open (P8)
                    log_failure("prepare", error)
                if is_first:
                    # Vocabularies, templates and listings stay.
                    spare_collections()
                    is_first = False
                await is_wanted.wait()
        finally:
            windows.on_loaded = None

    async def look(self, router: Any) -> None:
        """Looks at every guarded deployment's window once, so that trouble shows at start and not at night.

        Then says in one line what is guarded.
        """
        settings = self._guards.configured
        found: list[str] = []
        pruning_models: dict[str, None] = {}
        async for guard, targets in self._models(router):
            found += [await self._look_at_window(guard, target) for target in targets]
            if not targets:
                found.append(f"{guard.deployment.group} (no model known yet)")
            pruning_models[guard.settings.pruning_model] = None
        for name in pruning_models:
            await self._look_at_pruning_model(router, name)
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        page = "/compaction, with the master key" if settings.page == "on" else "off"
        named = ", ".join(found[:_MOST_NAMED]) or "nothing"
        logger.info("guarding %s%s; mode=%s; page: %s", named, more, settings.mode, page)

    async def prepare(self, router: Any) -> None:
        """Loads the counters of the loaded models, of guarded deployments only, also of wildcards.

        A download may take minutes.
        """
        async for guard, targets in self._models(router):
            for target in targets:
                await self._prepare(_name(guard, target), target)

    async def _models(self, router: Any) -> AsyncIterator[tuple[GuardedDeployment, list[Target]]]:
        """The guarded deployments, each with its model, or with those that its wildcard's server has loaded."""
        async for guard in self._guards.guarded(router):
            yield guard, await targets_of(self._compactor.windows, guard.deployment)

    async def _look_at_window(self, guard: GuardedDeployment, target: Target) -> str:
        """Returns the model's name with its window, in words."""
        name = _name(guard, target)
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
        is_one_of_several = self._compactor.leases is None and multiprocessing.parent_process() is not None
        if is_one_of_several and shares_context(guard.settings.admission, window.parallel):
            logger.warning("admission model=%s only within each worker: requests to it share one context", name)
        return f"{name} ({window.tokens:,} tokens)"

    async def _look_at_pruning_model(self, router: Any, name: str) -> None:
        """Logs if another model will write the summaries."""
        if name == SAME_MODEL:
            return
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
            "package" if source.family.template else "formula",
        )


def _name(guard: GuardedDeployment, target: Target) -> str:
    return target.model if guard.deployment.is_wildcard else guard.deployment.group
