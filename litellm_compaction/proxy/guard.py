"""Decides about a client's request before it leaves the proxy: from a call's arguments to those with which it goes out.

`before_routing` serves LiteLLM's pre-call hook, which measures and decides as soon as the window is certain, and hands
on what it has found; `before_deployment` serves the deployment hook, which installs the client that carries the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import httpx

from litellm_compaction.concurrency import is_long, off_loop_if
from litellm_compaction.config import SAME_MODEL, Settings
from litellm_compaction.engine import Attempts, Compactor, Foreseen, PreparedRequest, PruningModel, RequestContext
from litellm_compaction.errors import NO_CHAT, TOO_DEEP, BadItem, CompactionError, LiteLLMChanged, NotServed
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.transport import GuardedTransport, client_over
from litellm_compaction.proxy.answers import asked_of
from litellm_compaction.proxy.client import identity_of, metadata_of, tenant_of
from litellm_compaction.proxy.exchange import ClientRequest, Conversations, Exchange, Exchanges, client_request
from litellm_compaction.proxy.internal import Caller, group_of, is_internal_call, may_write_ahead, name_call
from litellm_compaction.proxy.litellm_inside import LACKS, missing
from litellm_compaction.proxy.litellm_inside import router as litellm_router
from litellm_compaction.proxy.litellm_inside.application import connect, may_use
from litellm_compaction.proxy.refusals import litellm_error_of, log_failure, log_refused, mark_told
from litellm_compaction.proxy.routing import (
    Deployment,
    DeploymentSelector,
    GuardedDeployment,
    as_entry,
    carrier_of,
    is_bridged,
    is_listed_here,
    reachable_entries,
    refuses_by,
)
from litellm_compaction.proxy.seams import Seams
from litellm_compaction.proxy.standards import responses
from litellm_compaction.proxy.standards.orders import NO_ORDERS
from litellm_compaction.proxy.standards.standards import Standards
from litellm_compaction.stores import Store

# LiteLLM's kinds of calls (litellm/types/utils.py, `CallTypes`): those that are guarded; the routes that it turns into
# those, whose bodies may say how a client's context is to be treated; they and all others that it turns into chats for
# a server that has nothing else, with "" for what it does not name; and words in the names without a conversation.
_GUARDED_CALLS = frozenset({"acompletion", "atext_completion"})
_BRIDGED_CALLS = frozenset({"anthropic_messages", "aresponses"})
_BECOME_CHATS = _BRIDGED_CALLS | {"_aresponses_websocket", "agenerate_content", "agenerate_content_stream", ""}
_ASIDE = (
    *("embedding", "rerank", "moderation", "transcription", "speech", "image", "video", "ocr", "search"),
    *("batch", "file", "fine_tuning"),
)
# LiteLLM makes a WebSocket's requests itself and shows them to no plug-in, and would leave the item out.
_UNREAD = "is a compaction item, which is not followed over a WebSocket, nor by a model that is guarded only in part"
# LiteLLM answers nothing then; it would make as many such answers as a client has asked for.
_NO_ANSWER: Mapping[str, Any] = MappingProxyType({"mock_response": " ", "n": 1})
_STORE_LIMIT_S = 2.0


class Guard:
    """Decides about requests before they leave the proxy."""

    def __init__(
        self, guards: DeploymentSelector, compactor: Compactor, exchanges: Exchanges, standards: Standards, store: Store
    ) -> None:
        self.guards = guards
        self.seams = Seams()
        self._standards = standards
        self._compactor = compactor
        self._exchanges = exchanges
        self._conversations = Conversations()
        self._store = store
        self._inner: httpx.AsyncBaseTransport | None = None

    async def look_at_seams(self, router: Any) -> None:
        """Looks at all that requests are guarded by as soon as there is a router, and notes in the store what lacks."""
        fault = await self._fault(router, is_carried=self.guards.configured.carrier == "auto")
        said = "\n".join([str(fault or ""), *missing()]).rstrip()
        # The note is for `doctor`; the store tells its own troubles.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(*LACKS, said), _STORE_LIMIT_S)

    async def _fault(self, router: Any, *, is_carried: bool) -> LiteLLMChanged | None:
        """What is missing by which requests are guarded; a client that is not passed on, only if it `is_carried`."""
        fault = self.seams.of_router(router)
        return await self.seams.of_client() if fault is None and is_carried else fault

    async def is_guarded(self, router: Any, model: object, data: Mapping[str, Any] | None = None) -> bool:
        """Returns True if every deployment that a request for a model can reach is guarded."""
        guards = await self._reachable(router, {"model": model} if data is None else data)
        return bool(guards) and all(guard is not None and guard.settings.mode == "guard" for guard in guards)

    async def _reachable(self, router: Any, data: Mapping[str, Any]) -> list[GuardedDeployment | None]:
        """Every deployment that a request can reach, None for those that are left alone; [] if that cannot be said."""
        model = data.get("model")
        if router is None or not isinstance(model, str) or self.seams.of_router(router) is not None:
            return []
        entries = reachable_entries(router, model, data)
        return [await self.guards.guard(self.guards.deployment(entry)) for entry in entries]

    # ------------------------------------------------------------------ before the deployment is chosen

    async def before_routing(self, router: Any, data: dict[str, Any], call_type: str) -> None:
        """Reads, measures and decides what it can before the deployment is chosen.

        Of a chat or a text completion, if it can only reach one model of one server: otherwise only the chosen
        deployment can say what fits. Of other routes, what a client says of its context, which is taken out of `data`.

        Raises:
            CompactionError: it cannot be served, or asks for something that cannot be followed.
        """
        if call_type in _BRIDGED_CALLS:
            # LiteLLM, and deployments that are left alone, have their own way with it.
            if await self.is_guarded(router, data.get("model"), data):
                await self._standards.read_orders(data, call_type)
        elif call_type in _GUARDED_CALLS:
            await self._decide(router, data, is_chat=call_type == "acompletion")

    async def _decide(self, router: Any, data: dict[str, Any], *, is_chat: bool) -> None:
        guards = await self._reachable(router, data)
        if not any(guards):
            return
        becomes_chat = all(is_bridged(guard.deployment.provider) for guard in guards if guard is not None)
        group = str(data.get("model"))
        exchange = await self._read(data, group, is_bridged=becomes_chat, is_chat=is_chat)
        if exchange is None or exchange.client.is_unread:
            return
        if is_chat:
            # What is known of a text completion is known by its length.
            self._exchanges.open(data, exchange)
        client, guard = exchange.client, _one_for_all(guards)
        if guard is None or guard.settings.mode != "guard" or client.opted_out:
            return
        context = await self._context(router, guard, exchange, data)
        if client.bad_wish is not None:
            raise client.bad_wish
        exchange.foreseen = await self._decided(exchange, context)
        if is_chat and guard.carrier == "hooks":
            # The transport does the slow part itself, in the open response.
            room = self._compactor.room(context)
            try:
                exchange.foreseen = prepared = await self._compactor.finish(exchange.foreseen, room)
            finally:
                room.release()
            exchange.sent(context, prepared)

    async def _decided(self, exchange: Exchange, context: RequestContext) -> Foreseen:
        """What to send, or to make first, without doing again what was done when this deployment was foreseen."""
        if (token_ids := exchange.client.token_ids) is not None:
            return await self._compactor.bound(token_ids, context)
        # Of the first attempt only: a later one may come minutes after.
        foreseen, exchange.foreseen = exchange.foreseen, None
        return await self._compactor.prepare(exchange.client.original, context, foreseen)

    # ------------------------------------------------------------------ for the chosen deployment

    async def before_deployment(self, router: Any, kwargs: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
        """The arguments of a call, whose `kind` LiteLLM names so, as they go out; None if nothing changes."""
        if any(word in kind for word in _ASIDE):
            return None
        # Also if nothing else changes, or something fails: LiteLLM could not reach the server.
        changed = own = wire.from_chats_alone(kwargs)
        try:
            if router is not None and is_internal_call.get():
                changed = self._of_ours(router, own) if kind in _GUARDED_CALLS else own
            elif router is not None:
                changed = await self._changed(router, own, kind)
        except CompactionError as error:
            raise self._refused(kwargs, error) from error
        except Exception as error:
            exchange = self._exchanges.get(kwargs)
            too_long = exchange.attempts.too_long if exchange is not None else None
            log_failure("deployment", error, too_long=too_long)
            if too_long is not None:
                raise self._refused(kwargs, too_long) from error
        return None if changed is kwargs else {**changed}

    def _refused(self, kwargs: Mapping[str, Any], error: CompactionError) -> Exception:
        if (exchange := self._exchanges.get(kwargs)) is not None:
            exchange.refused(error)
        told = litellm_error_of(error, kwargs)
        if isinstance(error, LiteLLMChanged):
            # It comes before there is an exchange.
            log_refused(str(kwargs.get("model")), error)
            mark_told(told)
        return told

    def _of_ours(self, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call that we make ourselves, which nobody guards."""
        name_call(router, kwargs)
        asked = self._deployment_of(kwargs)
        # A summary of half of a text, or a count of it, is as wrong as an answer to it.
        extra = wire.with_extra(kwargs, refuses_by(asked.provider))
        if asked.kind != "foreign" and carrier_of(asked, self.guards.configured) == "transport":
            extra |= wire.as_chat(kwargs)
        return {**kwargs, **extra} if extra else kwargs

    async def _changed(self, router: Any, received: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """The arguments of a call of a client's; the same object if nothing changes."""
        kwargs = self._as_deployed(router, received)
        group = str(metadata_of(kwargs).get("model_group") or "") or group_of(router, kwargs)
        deployment = self._deployment_of(kwargs, group)
        guard = await self.guards.guard(deployment)
        does_guard = guard is not None and guard.settings.mode == "guard"
        if guard is not None and does_guard:
            fault = await self._fault(router, is_carried=guard.carrier == "transport")
            if fault is not None:
                raise fault
        known = self._exchanges.get(kwargs)
        if kind not in _GUARDED_CALLS:
            # LiteLLM itself makes it of a chat that has been prepared.
            is_prepared = known is not None and known.is_hooked and known.attempt.deployment == deployment.id
            return self._bridged(deployment, kwargs, kind) if does_guard and not is_prepared else kwargs
        if known is not None:
            known.begins_attempt(deployment.id)
        if guard is None:
            if known is not None:
                known.attempts.too_long = None
            return kwargs
        try:
            return await self._guarded(guard, router, kwargs, known)
        except RecursionError as error:
            if not does_guard:
                raise
            # How deep a request is nested is the client's choice, and must not switch the guard off.
            raise NotServed(TOO_DEEP) from error

    def _bridged(self, deployment: Deployment, kwargs: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """The arguments of another call than a chat, for LiteLLM to make a chat of it.

        Otherwise it may reach the same server by another route of it, without a guard.
        """
        if kind not in _BECOME_CHATS:
            raise NotServed(NO_CHAT)
        field = responses.field_of_item(kwargs.get("input"))
        if field and self._exchanges.orders(kwargs) is None:
            raise BadItem(field, _UNREAD)
        return wire.to_chats_alone(kwargs, deployment.provider)

    async def _guarded(
        self, guard: GuardedDeployment, router: Any, kwargs: Mapping[str, Any], known: Exchange | None
    ) -> Mapping[str, Any]:
        """The arguments of a chat or text completion for a guarded deployment."""
        exchange = await self._exchange_of(guard.deployment, kwargs, known)
        if exchange is None:
            return kwargs
        client = exchange.client
        if client.opted_out:
            return {**kwargs, **_cleaned(client, kwargs)} if client.orders.portable is not None else kwargs
        context = await self._context(router, guard, exchange, kwargs)
        if guard.settings.mode == "observe":
            await self._compactor.observe(client.original, context)
            return kwargs
        if client.bad_wish is not None:
            raise client.bad_wish
        if client.orders is not NO_ORDERS and await self._standards.answers(exchange, context):
            return {**kwargs, **_NO_ANSWER}
        # What was ordered to go has been taken out of it.
        client = exchange.client
        if guard.carrier == "transport":
            changed = await self._carried(exchange, context, kwargs)
        elif client.is_unread:
            return kwargs
        else:
            changed = await self._bounded(guard.deployment.provider, exchange, context, kwargs)
        return {**kwargs, **_cleaned(client, kwargs), **changed}

    async def _exchange_of(
        self, deployment: Deployment, kwargs: Mapping[str, Any], known: Exchange | None
    ) -> Exchange | None:
        """The request that a deployment is asked for, a new one if its messages are others by now; None for none."""
        # LiteLLM also makes calls of its own on a request's behalf, and other callbacks change messages.
        if known is not None and known.client.tenant != tenant_of(metadata_of(kwargs)):
            known = None
        if known is not None:
            received, long = known.client.received, is_long(kwargs.get("messages"))
            # A text completion has none.
            if not kwargs.get("messages") or await off_loop_if(long, lambda: wire.is_same_request(kwargs, received)):
                return known
        is_chat = known is not None and known.client.is_chat
        becomes_chat = is_bridged(deployment.provider)
        fresh = await self._read(kwargs, deployment.group, is_bridged=becomes_chat, is_chat=is_chat)
        if fresh is None:
            self._exchanges.close(kwargs)
            return None
        fresh.attempts = known.attempts if known is not None else fresh.attempts
        fresh.begins_attempt(deployment.id)
        return self._exchanges.open(kwargs, fresh)

    async def _bounded(
        self, provider: str, exchange: Exchange, context: RequestContext, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The changes to a call whose answer LiteLLM's hooks carry: compacted, and with a bound on the answer."""
        client, is_stream = exchange.client, bool(kwargs.get("stream"))
        # Given back by whoever carries the stream, at the answer's end, or with the exchange.
        room = exchange.room = self._compactor.room(context)
        if (task := asyncio.current_task()) is not None:
            # LiteLLM calls no hook if a client leaves meanwhile; a plain answer its server writes to the end.
            task.add_done_callback(lambda ended: ended.cancelled() and (room.release if is_stream else room.abandon)())
        prepared = await self._compactor.finish(await self._decided(exchange, context), room)
        limit = await room.acquire(
            prepared,
            prepared.max_output_tokens(wire.asked_output_tokens(kwargs)),
            is_watched=is_stream and client.is_chat and wire.can_be_continued(kwargs),
            answers=wire.asked_answers(kwargs),
            prompts=1 if is_bridged(provider) else wire.asked_prompts(kwargs),
        )
        exchange.sent(context, prepared)
        changed = wire.with_output_limit(kwargs, limit) | wire.with_extra(kwargs, refuses_by(provider))
        if is_stream and client.is_chat:
            changed |= wire.with_usage(kwargs)
        if prepared.messages is not None:
            changed["messages"] = wire.encode(prepared.messages)
        if prepared.tools is not None:
            changed["tools"] = list(prepared.tools)
        return changed

    async def _carried(self, exchange: Exchange, context: RequestContext, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The changes to a call: a client whose transport compacts it, and carries its answer over the limit."""
        client, attempt = exchange.client, exchange.attempt
        # The transport does so itself with all that it sees in another form.
        prepared = await self._decided(exchange, context) if client.original.messages else None
        attempt.is_carried = True
        if isinstance(prepared, PreparedRequest):
            exchange.sent(context, prepared)
        elif prepared is not None:
            exchange.will_be_compacted(prepared)
        # LiteLLM logs and bills by the usage chunk, and keeps it from a client that did not ask for it.
        asked = asked_of(exchange, context, kwargs, wants_usage=True)
        attempt.begins_silently = not client.is_chat and (asked.is_json or asked.notices.before == "off")
        if self._inner is None:
            # The connection pool that all guarded deployments share, made in the running loop.
            self._inner = connect()
        transport = GuardedTransport(self._inner, self._compactor, context, asked, prepared, exchange)
        target = context.target
        openai_client = client_over(transport, api_base=str(target.api_base), api_key=target.api_key)
        return {**wire.as_chat(kwargs), "client": openai_client}

    async def _read(self, body: Mapping[str, Any], group: str, *, is_bridged: bool, is_chat: bool) -> Exchange | None:
        """What is to be done for a request, as `client_request` reads it, before anything is."""
        settings, prompt = self.guards.configured, body.get("prompt")
        long = is_long(body.get("messages"), body.get("tools")) or is_long(prompt, [prompt])
        known = self._exchanges.orders(body), settings, self._conversations
        read = partial(client_request, body, group, *known, is_bridged=is_bridged, is_chat=is_chat)
        client = await off_loop_if(long, read)
        attempts = Attempts(summary_calls_left=settings.constants.max_summary_calls)
        return Exchange(client, attempts) if client is not None else None

    # ------------------------------------------------------------------ a deployment, and what the engine knows of it

    def _deployment_of(self, kwargs: Mapping[str, Any], group: str = "") -> Deployment:
        entry = {"model_name": group, "litellm_params": kwargs, "model_info": kwargs.get("model_info")}
        return self.guards.deployment(entry)

    def _as_deployed(self, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call as its deployment's own entry has them; of one that is left alone as they came."""
        info = kwargs.get("model_info")
        if not isinstance(info, Mapping) or not wire.may_override(kwargs):
            return kwargs
        if (fault := self.seams.of_router(router)) is not None:
            # The body may name another kind of server than the entry, which cannot be read.
            raise fault
        entry = litellm_router.deployment(router, str(info.get("id")))
        if entry is None:
            return kwargs
        own = self.guards.deployment(as_entry(entry))
        return kwargs if own.kind == "foreign" else wire.without_overrides(kwargs, own.provider)

    async def _context(
        self, router: Any, guard: GuardedDeployment, exchange: Exchange, body: Mapping[str, Any]
    ) -> RequestContext:
        """A request's surroundings for the engine; notes in `exchange` how the deployment is reached."""
        deployment, settings, client = guard.deployment, guard.settings, exchange.client
        metadata, is_through = metadata_of(body), guard.carrier == "transport"
        exchange.pin = _pin(router, deployment) or client.group
        caller = Caller(router, exchange.pin, metadata, settings.summary_timeout_s, client.group, is_same=True)
        same = PruningModel(label=client.group, target=deployment.target, ask=caller.ask, is_same=True)
        # A text completion is never compacted, unless LiteLLM makes a chat of it, which is carried like any other.
        is_text = "prompt" in body and not body.get("messages")
        is_chat = not is_text or (is_through and is_bridged(deployment.provider))
        # One of several processes of a proxy: uvicorn starts those as children of multiprocessing's.
        is_worker, is_in_memory = multiprocessing.parent_process() is not None, settings.store.startswith("memory:")
        may_be_ahead = deployment.target.is_listed and not client.is_client_summary and not (is_worker and is_in_memory)
        return RequestContext(
            label=client.group,
            target=replace(deployment.target, asker=client.tenant),
            settings=settings,
            scope=_scope(metadata, client.group, settings),
            tenant=client.tenant,
            pruning_models=(*await self._other_pruning_model(router, settings, metadata), same),
            warm_up=replace(caller, timeout_s=settings.constants.warm_up_timeout_s).load,
            attempts=exchange.attempts,
            asked_tokens=wire.asked_output_tokens(body),
            measure=caller.measure,
            may_write_ahead=partial(may_write_ahead, metadata) if may_be_ahead else None,
            has_siblings=is_worker or not settings.store.startswith(("sqlite:", "memory:")),
            now=client.orders.compacts_only or (client.wish.now and not client.is_client_summary),
            focus="" if client.is_client_summary else client.wish.focus or client.orders.focus,
            pins=client.wish.pins,
            is_client_summary=client.is_client_summary,
            is_beside=client.is_beside,
            portable=client.bases,
            threshold_tokens=client.orders.threshold_tokens,
            may_change=client.orders.may_change and is_chat,
            carries_calls=wire.can_be_continued(body) and (is_through or (client.is_chat and bool(body.get("stream")))),
        )

    async def _other_pruning_model(
        self, router: Any, settings: Settings, metadata: Mapping[str, Any]
    ) -> Sequence[PruningModel]:
        name = settings.pruning_model
        if name == SAME_MODEL:
            return ()
        target, why = await self.guards.pruning_target(router, name), "is not a model of this proxy"
        if target is not None and not may_use(router, name, metadata):
            target, why = None, "is not allowed for some keys"
        if target is None:
            self.guards.warn_once(f"{name} {why}", "pruning_model=%s %s; the same model is used there", name, why)
            return ()
        caller = Caller(router, name, metadata, settings.summary_timeout_s, name)
        return (PruningModel(label=name, target=target, ask=caller.ask, is_same=False),)


def _one_for_all(guards: Sequence[GuardedDeployment | None]) -> GuardedDeployment | None:
    """Returns one if all deployments are the same model of the same server, with the same settings; None otherwise."""
    seen = [
        (guard.settings, guard.deployment.target.api_base, guard.deployment.target.model) for guard in guards if guard
    ]
    return guards[0] if len(seen) == len(guards) and all(each == seen[0] for each in seen) else None


def _cleaned(client: ClientRequest, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The client's messages without notices that came back with them; {} if there were none."""
    is_changed = client.original is not client.received and kwargs.get("messages")
    return {"messages": wire.encode(client.original.messages)} if is_changed else {}


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
