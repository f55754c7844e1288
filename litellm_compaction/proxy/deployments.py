"""Selects the deployments that are guarded, with their settings, and tells the engine of a request to one of them.

Known windows are shown as `max_input_tokens` in the proxy's lists of models: clients steer their own compaction by that
number, and LM Studio's OpenAI endpoint does not tell it (lmstudio-bug-tracker 2139).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from litellm_compaction.concurrency import Bounded
from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.engine import PruningModel, RequestContext
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy.call import Call
from litellm_compaction.proxy.internal import Caller, may_write_ahead
from litellm_compaction.proxy.litellm_inside import router as litellm_router
from litellm_compaction.proxy.litellm_inside.callers import may_use
from litellm_compaction.proxy.litellm_inside.connections import with_credentials
from litellm_compaction.proxy.live_settings import LiveSettings, for_deployment
from litellm_compaction.proxy.report import why_unasked
from litellm_compaction.proxy.routing import (
    Deployment,
    asked_deployment_of,
    carrier_of,
    deployment_of,
    group_entries,
    router_entries,
)
from litellm_compaction.proxy.wire import asked_output_tokens, can_be_continued
from litellm_compaction.stores import Facts
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Target, Window, Windows

_MAX_SERVERS = 1024
# Facts of servers belong to no conversation.
_SERVERS_SCOPE = "servers"
_STORE_TIMEOUT_S = 2.0
# An unused fact expires after `store_ttl_s`.
_KEPT_AGAIN_S, _ASKED_AGAIN_S = 3600.0, 30.0
logger = logging.getLogger("litellm_compaction")
# Where LiteLLM looks for a key, in its order (proxy/auth/user_api_key_auth.py, 1.106.2).
_KEY_HEADERS = ("x-litellm-api-key", "authorization", "api-key", "x-api-key", "x-goog-api-key")
_JSON = (dict, list, str, int, float, type(None))
_credential: ContextVar[str] = ContextVar("litellm_compaction_credential", default="")


class Publisher:
    """Writes windows into the router's own list, from which LiteLLM answers `/model/info` and `/v1/models`."""

    def __init__(self) -> None:
        self._written: dict[str, Mapping[str, int]] = {}

    def publish(self, router: Any, shown: Mapping[str, Mapping[str, int]]) -> None:
        """Shows these limits, by deployment ids, and none of those shown before; never in place of the operator's.

        With `enable_pre_call_checks` LiteLLM would refuse by them requests that are about to be compacted, so nothing
        is shown then.
        """
        if litellm_router.refuses_by_window(router):
            shown = {}
        if shown or self._written:
            litellm_router.rewrite_info(router, lambda info: self._rewritten(info, shown))

    def as_written(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """A deployment's `model_info` as its operator wrote it: our own numbers would come back to us as theirs."""
        own = self._written.get(str(info.get("id")), {})
        ours = {key for key, tokens in own.items() if info.get(key) == tokens}
        return {key: value for key, value in info.items() if key not in ours} if ours else info

    def _rewritten(self, info: Mapping[str, Any], shown: Mapping[str, Mapping[str, int]]) -> Mapping[str, Any]:
        deployment_id, written = str(info.get("id")), self.as_written(info)
        limits = shown.get(deployment_id, {}) if written.get("max_input_tokens") is None else {}
        own = {key: tokens for key, tokens in limits.items() if written.get(key) is None}
        self._written.pop(deployment_id, None)
        if own:
            self._written[deployment_id] = own
        return {**written, **own}


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


class FormerAnswers:
    """Remembers across restarts which servers have answered as LM Studio, for those that are silent now."""

    def __init__(self, store: Facts, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        # The last answer of each, with the time since when it is known.
        self._known: Bounded[str, tuple[bool, float]] = Bounded(_MAX_SERVERS)

    async def note(self, api_base: str, answer: bool) -> None:
        """Keeps an answer; again only if it has changed, or was last kept an hour ago."""
        key = _fact_key(api_base)
        known, since_s = self._known.get(key, (None, -math.inf))
        if known == answer and (not answer or self._clock() - since_s < _KEPT_AGAIN_S):
            return
        self._known[key] = (answer, self._clock())
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(_SERVERS_SCOPE, key, str(int(answer))), _STORE_TIMEOUT_S)

    async def was_lmstudio(self, api_base: str) -> bool:
        """True if the last answer was a yes; the store is asked once in half a minute at most."""
        key = _fact_key(api_base)
        known, since_s = self._known.get(key, (False, -math.inf))
        if not known and self._clock() - since_s >= _ASKED_AGAIN_S:
            with contextlib.suppress(Exception):
                text = await asyncio.wait_for(self._store.get_fact(_SERVERS_SCOPE, key), _STORE_TIMEOUT_S)
                known = text == "1"
            self._known[key] = (known, self._clock())
        return known


def _fact_key(api_base: str) -> str:
    # Addresses may hold passwords.
    return f"lm_studio:{hashlib.blake2b(server_root(api_base).encode(), digest_size=16).hexdigest()}"


class DeploymentSelector:
    """The operator's settings, applied to deployments."""

    def __init__(
        self, source: LiveSettings, windows: Windows, publisher: Publisher, former: FormerAnswers | None = None
    ) -> None:
        self._source = source
        self._windows = windows
        self._publisher = publisher
        self._former = former
        self._warned: set[str] = set()

    def deployment(self, entry: Mapping[str, Any], read: Callable[..., Deployment] = deployment_of) -> Deployment:
        """The deployment that an entry of the router's list describes."""
        params, info = entry.get("litellm_params"), entry.get("model_info")
        return read(
            with_credentials(params) if isinstance(params, Mapping) else {},
            self._publisher.as_written(info) if isinstance(info, Mapping) else {},
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
        if deployment.kind != "maybe_lm_studio":
            return deployment.target
        answer = await self._answers_as_lmstudio(deployment.target)
        if answer or deployment.other_target is None:
            return deployment.target if answer else None
        if answer is None:
            # LM Studio, which it may be, has no window by default.
            written = deployment.settings.context_length
            return replace(deployment.other_target, context_length=written, context_source="operator")
        return deployment.other_target

    async def pruning_target(self, router: Any, name: str) -> Target | None:
        """The target of a pruning model of any kind; None for a name that the router does not know.

        Of several deployments the one with the smallest window: any of them may be asked.
        """
        known: list[tuple[int, Target]] = []
        first: Target | None = None
        entries = group_entries(router, name)
        for entry in entries:
            target = await self._target(self.deployment(entry, asked_deployment_of))
            first = first or target
            if target is None or len(entries) == 1:
                continue
            with contextlib.suppress(CompactionError):
                known.append(((await self._windows.resolve(target)).tokens, target))
        return min(known, key=lambda each: each[0])[1] if known else first

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

    async def _answers_as_lmstudio(self, target: Target) -> bool | None:
        """True for LM Studio; None for a server that has not answered, and never has as that.

        A known one that is silent, as while it loads a model, would be served without a guard otherwise (promise P1).
        """
        if target.api_base is None:
            return False
        answer = await self._windows.is_lmstudio(target.api_base, target.api_key)
        if self._former is None:
            return answer
        if answer is None:
            return await self._former.was_lmstudio(target.api_base) or None
        await self._former.note(target.api_base, answer)
        return answer

    async def context(
        self, router: Any, guard: GuardedDeployment, call: Call, body: Mapping[str, Any]
    ) -> RequestContext:
        """A request's surroundings for the engine; notes in `call` the name under which the deployment is reached.

        Args:
            guard: the deployment that would serve it.
            body: of the request, with LiteLLM's metadata.
        """
        deployment, settings, client = guard.deployment, guard.settings, call.client
        metadata = metadata_of(body)
        tenant = tenant_of(metadata)
        if (pin := call.pins.get(deployment.id)) is None:
            pin = call.pins[deployment.id] = _pin(router, deployment) or client.group
        caller = Caller(router, pin, metadata, settings.summary_timeout_s, client.group, is_same=True)
        same = PruningModel(label=client.group, target=deployment.target, ask=caller.ask, is_same=True)
        others = await self._other_pruning_model(router, settings, metadata)
        names = [client.group, *(other.label for other in others)]
        may_be_ahead = deployment.target.is_listed and not client.is_client_summary
        if _is_worker() and settings.store.startswith("memory:"):
            may_be_ahead = False
        return RequestContext(
            label=client.group,
            target=replace(deployment.target, asker=tenant),
            settings=settings,
            scope=_scope(metadata, client.group, settings),
            tenant=tenant,
            pruning_models=(*others, same),
            warm_up=replace(caller, timeout_s=settings.constants.warm_up_timeout_s).load,
            attempts=call.attempts,
            asked_tokens=asked_output_tokens(body),
            measure=caller.measure,
            may_write_ahead=partial(may_write_ahead, router, names, metadata) if may_be_ahead else None,
            has_siblings=_is_worker() or not settings.store.startswith(("sqlite:", "memory:")),
            now=client.orders.compacts_only or (client.wish.now and not client.is_client_summary),
            focus="" if client.is_client_summary else client.wish.focus or client.orders.focus,
            pins=client.wish.pins,
            is_client_summary=client.is_client_summary,
            is_beside=client.is_beside,
            portable=client.bases,
            threshold_tokens=client.orders.threshold_tokens,
            may_change=client.orders.may_change,
            carries_calls=can_be_continued(body)
            and (carrier_of(deployment, settings) == "transport" or (client.is_chat and bool(body.get("stream")))),
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
            return ()
        if not may_use(router, name, metadata):
            self._warn_once(f"{name}!", "pruning_model=%s is not allowed for some keys; they use the same model", name)
            return ()
        caller = Caller(router, name, metadata, settings.summary_timeout_s, name)
        return (PruningModel(label=name, target=target, ask=caller.ask, is_same=False),)

    def _warn_once(self, key: str, message: str, *values: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *values)


def _is_worker() -> bool:
    """One of several processes of a proxy: uvicorn starts those as children of multiprocessing's."""
    return multiprocessing.parent_process() is not None


def _pin(router: Any, deployment: Deployment) -> str:
    """The name under which the router reaches this very deployment and model.

    A wildcard deployment's id would reach the model `*`: LiteLLM fills in the name only if it routes by name, and says
    it in the entries and arguments that a `Deployment` is made of.
    """
    own = litellm_router.deployment(router, deployment.id)
    return deployment.group if own is None or "*" in str(own.litellm_params.model) else deployment.id


def metadata_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """LiteLLM's metadata of a request and its client; {} without any.

    It writes into one of two places, depending on the route, and leaves the client's own metadata in the other one.
    LiteLLM takes a client's words about keys away (1.106.2, `add_litellm_data_to_request`), but only its own place
    has the object of the key, which no JSON can be.
    """
    places = [found for key in ("litellm_metadata", "metadata") if isinstance(found := body.get(key), Mapping)]
    named = [found for found in places if "user_api_key" in found]
    own = [found for found in named if not isinstance(found.get("user_api_key_auth"), _JSON)]
    written = next(iter([*own, *named]), body.get("metadata"))
    return written if isinstance(written, Mapping) else {}


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
    return hashlib.blake2b(repr((_tenant(metadata), group, shape)).encode(), digest_size=16).hexdigest()


def tenant_of(metadata: Mapping[str, Any]) -> str:
    """A fingerprint of the client: events are shown to the same tenant."""
    return hashlib.blake2b(_tenant(metadata).encode(errors="replace"), digest_size=16).hexdigest()


def _tenant(metadata: Mapping[str, Any]) -> str:
    """The team, or else the user, the key, or the value that the client has shown as one.

    Custom authentication may name none of them. If no key is asked for, all are one.
    """
    for name in ("team_id", "user_id", "hash"):
        if value := metadata.get(f"user_api_key_{name}"):
            return f"{name}:{value}"
    return _credential.get() or "nobody"


def raw_headers(data: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers of a request as they came, which LiteLLM keeps for itself in the pre-call hook's data."""
    secret = data.get("secret_fields")
    found = secret.get("raw_headers") if isinstance(secret, Mapping) else getattr(secret, "raw_headers", None)
    return found if isinstance(found, Mapping) else {}


def note_credential(headers: Mapping[str, str]) -> None:
    """Notes the running task's client's key as it was shown, for clients without an identity in LiteLLM."""
    lowered = {str(name).lower(): str(value) for name, value in headers.items()}
    shown = next((lowered[name] for name in _KEY_HEADERS if lowered.get(name)), "")
    key = shown.removeprefix("Bearer ").strip().encode(errors="replace")
    _credential.set(f"shown:{hashlib.blake2b(key, digest_size=16).hexdigest()}" if key else "")
