"""Selects the deployments that are guarded, with their settings, and tells the engine of a request to one of them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.engine import PruningModel, RequestContext
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy.client import identity_of, metadata_of
from litellm_compaction.proxy.exchange import Exchange
from litellm_compaction.proxy.internal import Caller, may_write_ahead
from litellm_compaction.proxy.litellm_inside import router as litellm_router
from litellm_compaction.proxy.litellm_inside.application import may_use
from litellm_compaction.proxy.litellm_inside.connections import with_credentials
from litellm_compaction.proxy.live_settings import LiveSettings, for_deployment
from litellm_compaction.proxy.report import why_unasked
from litellm_compaction.proxy.routing import (
    Carrier,
    Deployment,
    as_entry,
    asked_deployment_of,
    carrier_of,
    deployment_of,
    group_entries,
    is_bridged,
    is_listed_here,
    router_entries,
)
from litellm_compaction.proxy.wire import asked_output_tokens, can_be_continued
from litellm_compaction.windows.windows import Target, Window, Windows

logger = logging.getLogger("litellm_compaction")


def limits_of(window: Window, settings: Settings) -> dict[str, int]:
    """A window as LiteLLM's lists show it, by LiteLLM's names.

    Clients ask for no longer an answer than `max_output_tokens`, and take it off the window for their own compaction:
    it is the part that we set aside for an answer ourselves.
    """
    answer_tokens = math.floor(settings.constants.output_buffer_ratio * window.tokens)
    least_tokens = min(settings.constants.output_buffer_min_tokens, window.tokens // 10)
    return {
        "max_input_tokens": window.tokens,
        "max_output_tokens": min(max(answer_tokens, least_tokens, 1), window.tokens),
    }


@dataclass(frozen=True, slots=True)
class GuardedDeployment:
    """A guarded deployment with the settings in force for it."""

    deployment: Deployment
    settings: Settings

    @property
    def carrier(self) -> Carrier:
        return carrier_of(self.deployment, self.settings)


class DeploymentSelector:
    """The operator's settings, applied to deployments."""

    def __init__(self, source: LiveSettings, windows: Windows) -> None:
        self._source = source
        self._windows = windows
        self._warned: set[str] = set()

    @property
    def configured(self) -> Settings:
        """The settings of config.yaml."""
        return self._source.configured

    def deployment(self, entry: Mapping[str, Any], read: Callable[..., Deployment] = deployment_of) -> Deployment:
        """The deployment that an entry of the router's list describes."""
        return read(
            with_credentials(as_entry(entry.get("litellm_params"))),
            as_entry(entry.get("model_info")),
            group=str(entry.get("model_name") or ""),
            environ=os.environ,
        )

    async def guard(self, deployment: Deployment) -> GuardedDeployment | None:
        """None for a deployment that is left alone."""
        if deployment.kind == "foreign":
            return None
        settings, conflict = for_deployment(await self._source.current(), self._source.configured, deployment.settings)
        if conflict:
            message = "settings changed at run time do not reach model=%s: %s"
            self._warn_once(f"{deployment.id}|{conflict}", message, deployment.group, conflict)
        if settings.mode == "off":
            return None
        target = await self._target(deployment)
        return None if target is None else GuardedDeployment(replace(deployment, target=target), settings)

    async def guarded(self, router: Any) -> AsyncIterator[GuardedDeployment]:
        """Every guarded deployment of a router, in its order."""
        for entry in router_entries(router):
            guard = await self.guard(self.deployment(entry))
            if guard is not None:
                yield guard

    async def _target(self, deployment: Deployment) -> Target | None:
        """The deployment's target, after it is known which server it is; None for one that was not opted in."""
        target, other = deployment.target, deployment.other_target
        if deployment.kind != "maybe_lm_studio":
            return target
        answer = target.api_base is not None and await self._windows.is_lmstudio(target.api_base, target.api_key)
        if answer is None and other is None:
            message = (
                "model=%s is not guarded while its server does not answer: if it is LM Studio, write "
                "`model: lm_studio/…`, or `model_info: {compaction: {enabled: true}}`"
            )
            self._warn_once(f"{deployment.id}?", message, deployment.group)
        if answer or other is None:
            return target if answer else None
        # LM Studio, which it may be while it is silent, has no window by default.
        return other if answer is False else replace(other, context_length=deployment.settings.context_length)

    async def pruning_target(self, router: Any, name: str) -> Target | None:
        """The target of a pruning model of any kind; None for a name that the router does not know.

        Of several deployments the one with the smallest window: any of them may be asked.
        """
        deployments = [self.deployment(entry, asked_deployment_of) for entry in group_entries(router, name)]
        targets = [await self._target(deployment) for deployment in deployments]
        sized: list[tuple[int, Target]] = []
        for target in targets if len(targets) > 1 else ():
            with contextlib.suppress(CompactionError):
                sized += [((await self._windows.resolve(target)).tokens, target)] if target is not None else []
        first = next(filter(None, targets), None)
        return min(sized, key=lambda each: each[0])[1] if sized else first

    async def why_unusable(self, router: Any, name: str) -> str:
        """Says why summaries do not go to a pruning model now; "" if they do."""
        target = await self.pruning_target(router, name)
        if target is None:
            return "no model of this proxy has this name"
        try:
            await self._windows.resolve(target)
        except CompactionError as error:
            return why_unasked(error)
        return ""

    async def context(
        self, router: Any, guard: GuardedDeployment, exchange: Exchange, body: Mapping[str, Any]
    ) -> RequestContext:
        """A request's surroundings for the engine; notes in `exchange` how the deployment is reached."""
        deployment, settings, client = guard.deployment, guard.settings, exchange.client
        metadata = metadata_of(body)
        exchange.pin = _pin(router, deployment) or client.group
        caller = Caller(router, exchange.pin, metadata, settings.summary_timeout_s, client.group, is_same=True)
        same = PruningModel(label=client.group, target=deployment.target, ask=caller.ask, is_same=True)
        others = await self._other_pruning_model(router, settings, metadata)
        names = [client.group, *(other.label for other in others)]
        carrier = guard.carrier
        # A text completion is never compacted, unless LiteLLM makes a chat of it, which is carried like any other.
        is_text = "prompt" in body and not body.get("messages")
        is_chat = not is_text or (carrier == "transport" and is_bridged(deployment.provider))
        # One of several processes of a proxy: uvicorn starts those as children of multiprocessing's.
        is_worker, is_in_memory = multiprocessing.parent_process() is not None, settings.store.startswith("memory:")
        may_be_ahead = deployment.target.is_listed and not client.is_client_summary and not (is_worker and is_in_memory)
        return RequestContext(
            label=client.group,
            target=replace(deployment.target, asker=client.tenant),
            settings=settings,
            scope=_scope(metadata, client.group, settings),
            tenant=client.tenant,
            pruning_models=(*others, same),
            warm_up=replace(caller, timeout_s=settings.constants.warm_up_timeout_s).load,
            attempts=exchange.attempts,
            asked_tokens=asked_output_tokens(body),
            measure=caller.measure,
            may_write_ahead=partial(may_write_ahead, router, names, metadata) if may_be_ahead else None,
            has_siblings=is_worker or not settings.store.startswith(("sqlite:", "memory:")),
            now=client.orders.compacts_only or (client.wish.now and not client.is_client_summary),
            focus="" if client.is_client_summary else client.wish.focus or client.orders.focus,
            pins=client.wish.pins,
            is_client_summary=client.is_client_summary,
            is_beside=client.is_beside,
            portable=client.bases,
            threshold_tokens=client.orders.threshold_tokens,
            may_change=client.orders.may_change and is_chat,
            carries_calls=can_be_continued(body)
            and (carrier == "transport" or (client.is_chat and bool(body.get("stream")))),
        )

    async def _other_pruning_model(
        self, router: Any, settings: Settings, metadata: Mapping[str, Any]
    ) -> Sequence[PruningModel]:
        name = settings.pruning_model
        if name == SAME_MODEL:
            return ()
        target = await self.pruning_target(router, name)
        if target is None:
            self._warn_once(name, "pruning_model=%s is not a model of this proxy; the same model is used", name)
        elif not may_use(router, name, metadata):
            self._warn_once(f"{name}!", "pruning_model=%s is not allowed for some keys; they use the same model", name)
            target = None
        caller = Caller(router, name, metadata, settings.summary_timeout_s, name)
        return () if target is None else (PruningModel(label=name, target=target, ask=caller.ask, is_same=False),)

    def _warn_once(self, key: str, message: str, *values: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *values)


def _pin(router: Any, deployment: Deployment) -> str:
    """The name under which the router reaches this very deployment and model.

    A wildcard deployment's id would reach the model `*`: LiteLLM fills in the name only if it routes by name, and says
    it in the entries and arguments that a `Deployment` is made of. One that we have listed for a wildcard may be gone
    when its answer goes on.
    """
    own = litellm_router.deployment(router, deployment.id)
    is_passing = own is None or "*" in str(own.litellm_params.model) or is_listed_here(deployment.id)
    return deployment.group if is_passing else deployment.id


def _scope(metadata: Mapping[str, Any], group: str, settings: Settings) -> str:
    """Stored compactions are shared by one tenant, model group and settings."""
    shape = (
        settings.strategy,
        settings.pruning_model,
        settings.target_ratio,
        settings.keep_recent_messages,
        settings.constants.summary_max_tokens,
        # Text that was written down with its secrets is not read again once they are to be left out.
        settings.redact_patterns,
    )
    return hashlib.blake2b(repr((identity_of(metadata), group, shape)).encode(), digest_size=16).hexdigest()
