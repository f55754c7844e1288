"""Which deployments are guarded, by which settings, and what the engine is told of a request to one of them.

Called by the gate, once for every deployment that a request may reach and again for the one that it has reached.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.engine import Case, PruningModel
from litellm_compaction.models.window import Target, Windows
from litellm_compaction.proxy.access import may_use, with_credentials
from litellm_compaction.proxy.calls import Call
from litellm_compaction.proxy.internal import prompt_measure, summary_asker, warm_up
from litellm_compaction.proxy.live_settings import SettingsSource, for_deployment
from litellm_compaction.proxy.opted_in import without_guesses
from litellm_compaction.proxy.publishing import Publisher
from litellm_compaction.proxy.routing import Deployment, deployment_of, reachable_entries, router_entries
from litellm_compaction.proxy.wire import asked_output_tokens

logger = logging.getLogger("litellm_compaction")


@dataclass(frozen=True, slots=True)
class Guard:
    """A guarded deployment with the settings in force for it."""

    deployment: Deployment
    settings: Settings


class Guards:
    """The operator's settings, applied to deployments.

    Args:
        source: knows the settings in force.
        windows: knows which addresses answer as LM Studio.
        publisher: knows which numbers in the router's list are ours.
    """

    def __init__(self, source: SettingsSource, windows: Windows, publisher: Publisher) -> None:
        self._source = source
        self._windows = windows
        self._publisher = publisher
        self._warned: set[str] = set()

    def deployment(self, entry: Mapping[str, Any]) -> Deployment:
        """The deployment that an entry of the router's list describes."""
        params, info = entry.get("litellm_params"), entry.get("model_info")
        return deployment_of(
            with_credentials(params) if isinstance(params, Mapping) else {},
            self._publisher.as_written(info) if isinstance(info, Mapping) else {},
            group=str(entry.get("model_name") or ""),
            environ=os.environ,
        )

    async def guard(self, deployment: Deployment) -> Guard | None:
        """The deployment as guarded, or None when it is left alone."""
        if deployment.kind == "foreign":
            return None
        settings, conflict = for_deployment(await self._source.current(), self._source.configured, deployment.settings)
        if conflict:
            message = "settings changed at run time do not reach model=%s: %s"
            self._warn_once(f"{deployment.id}|{conflict}", message, deployment.group, conflict)
        if settings.mode == "off":
            return None
        if deployment.kind == "maybe_lm_studio":
            answer = await self._answers_as_lmstudio(deployment.target)
            if not answer:
                if deployment.other_target is None:
                    return None
                other = deployment.other_target
                if answer is None:
                    other = without_guesses(other, deployment.settings.context_length)
                deployment = replace(deployment, target=other)
        return Guard(deployment, settings)

    async def guarded(self, router: Any) -> AsyncIterator[Guard]:
        """Every guarded deployment of a router, in its order."""
        for entry in router_entries(router):
            guard = await self.guard(self.deployment(entry))
            if guard is not None:
                yield guard

    async def _answers_as_lmstudio(self, target: Target) -> bool | None:
        if target.api_base is None:
            return False
        return await self._windows.is_lmstudio(target.api_base, target.api_key)

    def case(self, router: Any, guard: Guard, call: Call, body: Mapping[str, Any]) -> Case:
        """A request's surroundings for the engine; notes in `call` under which name the deployment is reached.

        Args:
            router: LiteLLM's router.
            guard: the deployment that would serve it.
            call: the request.
            body: of the request, with LiteLLM's metadata.
        """
        deployment, settings = guard.deployment, guard.settings
        metadata = metadata_of(body)
        pin = call.pin = _pin(router, deployment) or call.group
        same = PruningModel(
            label=call.group,
            target=deployment.target,
            ask=summary_asker(
                router, pin, metadata, timeout_s=settings.summary_timeout_s, group=call.group, is_same=True
            ),
            is_same=True,
        )
        return Case(
            label=call.group,
            target=replace(deployment.target, asker=tenant_of(metadata)),
            settings=settings,
            scope=_scope(metadata, call.group, settings),
            tenant=tenant_of(metadata),
            pruning_models=(*self._other_pruning_model(router, settings, metadata), same),
            warm_up=warm_up(router, pin, metadata, timeout_s=settings.warm_up_timeout_s),
            attempts=call.attempts,
            asked_tokens=asked_output_tokens(body),
            measure=prompt_measure(router, pin, metadata, timeout_s=settings.summary_timeout_s),
        )

    def _other_pruning_model(
        self, router: Any, settings: Settings, metadata: Mapping[str, Any]
    ) -> Sequence[PruningModel]:
        name = settings.pruning_model
        if name == SAME_MODEL:
            return ()
        entries = reachable_entries(router, name, {})
        if not entries:
            self._warn_once(name, "pruning_model=%s is not a model of this proxy; the same model is used", name)
            return ()
        if not may_use(router, name, metadata):
            self._warn_once(f"{name}!", "pruning_model=%s is not allowed for some keys; they use the same model", name)
            return ()
        deployment = self.deployment(entries[0])
        target = deployment.target
        if not target.is_lmstudio and target.context_length is None:
            target = _told_by_operator(deployment, router.get_model_group_info(name))
        return (
            PruningModel(
                label=name,
                target=target,
                ask=summary_asker(router, name, metadata, timeout_s=settings.summary_timeout_s, group=name),
                is_same=False,
            ),
        )

    def _warn_once(self, key: str, message: str, *values: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *values)


def _pin(router: Any, deployment: Deployment) -> str:
    """The name under which the router reaches this very deployment and model.

    A wildcard deployment's id would reach the model `*`: LiteLLM fills in the name only where it routes by name,
    and says it in the entries and arguments that a `Deployment` is made of.
    """
    own = router.get_deployment(model_id=deployment.id)
    return deployment.group if own is None or "*" in str(own.litellm_params.model) else deployment.id


def _told_by_operator(deployment: Deployment, group_info: Any = None) -> Target:
    """A target whose window is what the operator or LiteLLM's model map says."""
    known = deployment.settings.context_length or getattr(group_info, "max_input_tokens", None)
    return replace(
        deployment.target,
        is_lmstudio=False,
        context_length=int(known) if known else deployment.target.context_length,
    )


def metadata_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("litellm_metadata", "metadata"):
        found = body.get(key)
        if isinstance(found, Mapping) and "user_api_key" in found:
            return found
    found = body.get("metadata")
    return found if isinstance(found, Mapping) else {}


def _scope(metadata: Mapping[str, Any], group: str, settings: Settings) -> str:
    """Who shares stored compactions: the same tenant, per model group and settings."""
    shape = (
        settings.strategy,
        settings.pruning_model,
        settings.target_ratio,
        settings.keep_recent_messages,
        settings.summary_max_tokens,
        *sorted((name, settings.own_prompt(name)) for name in settings.prompt_file),
    )
    return hashlib.blake2b(repr((_tenant(metadata), group, shape)).encode(), digest_size=16).hexdigest()


def tenant_of(metadata: Mapping[str, Any]) -> str:
    """A fingerprint of who asks, for events: whoever has the same one may see them."""
    return hashlib.blake2b(_tenant(metadata).encode(errors="replace"), digest_size=16).hexdigest()


def _tenant(metadata: Mapping[str, Any]) -> str:
    """The team, else the user, else the key."""
    for name in ("team_id", "user_id", "hash"):
        if value := metadata.get(f"user_api_key_{name}"):
            return f"{name}:{value}"
    return "nobody"
