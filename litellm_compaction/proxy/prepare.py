"""Before the first request windows are looked at, and what counts prompts is loaded; likewise when LM Studio has loaded
another model.

Making a vocabulary holds the interpreter lock for 50 to 500 ms, which every running stream would feel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from litellm_compaction.concurrency import ended
from litellm_compaction.config import SAME_MODEL
from litellm_compaction.engine import Compactor
from litellm_compaction.errors import ModelNotLoaded, WindowUnknown
from litellm_compaction.proxy.deployments import DeploymentSelector, GuardedDeployment, Publisher
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.report import targets_of
from litellm_compaction.proxy.startup import warn_of_workers
from litellm_compaction.windows.windows import Target

logger = logging.getLogger("litellm_compaction")
# Names come from LM Studio's list, which is bounded for each server.
_MAX_PREPARED = 4096


class Preparing:
    """Looks at the windows of guarded deployments, and loads what counts their prompts, each once."""

    def __init__(self, compactor: Compactor, guards: DeploymentSelector, publisher: Publisher) -> None:
        self._compactor = compactor
        self._guards = guards
        self._publisher = publisher
        self._prepared: set[tuple[str, str]] = set()
        self._pruning_models: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False

    async def start(self, router: Any) -> None:
        """Looks at every guarded deployment's window once, so that trouble shows at start and not at night.

        Then prepares the models that are loaded; last, since a download may take minutes.
        """
        async for guard in self._guards.guarded(router):
            for target in await targets_of(self._compactor.windows, guard.deployment):
                await self._look_at_window(router, guard, target)
            await self._look_at_pruning_model(router, guard)
        await self.prepare(router)

    async def prepare(self, router: Any) -> None:
        """Loads what counts the models that are loaded, of guarded deployments only, also behind wildcards."""
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

    async def _look_at_window(self, router: Any, guard: GuardedDeployment, target: Target) -> None:
        deployment = guard.deployment
        name = target.model if deployment.is_wildcard else deployment.group
        try:
            window = await self._compactor.windows.resolve(target)
        except ModelNotLoaded:
            logger.info("window model=%s not loaded yet, known after its first request", name)
            return
        except WindowUnknown as error:
            # The message is the finding, a traceback is noise.
            logger.error("%s `litellm-compaction doctor` says what to change.", error)  # noqa: TRY400
            return
        self._publisher.publish(router, deployment, window)
        logger.info(
            "window model=%s tokens=%d source=%s parallel=%d", name, window.tokens, window.source, window.parallel
        )
        if not self._compactor.is_coordinated:
            warn_of_workers(name, guard.settings.admission, window.parallel)

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
