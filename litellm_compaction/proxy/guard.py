"""Decides about a client's request before it leaves the proxy: from a call's arguments to those with which it goes out.

`before_routing` serves LiteLLM's pre-call hook, which measures and decides as soon as the window is certain, and hands
on what it has found; `before_deployment` serves the deployment hook, which installs the client that carries the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx

from litellm_compaction.concurrency import is_long, off_loop_if
from litellm_compaction.engine import CompactionNeeded, Compactor, PreparedRequest, RequestContext
from litellm_compaction.errors import NO_CHAT, TOO_DEEP, BadItem, CompactionError, LiteLLMChanged, NotServed
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.transport import GuardedTransport, client_over
from litellm_compaction.proxy.answers import asked_of
from litellm_compaction.proxy.client import metadata_of, tenant_of
from litellm_compaction.proxy.deployments import DeploymentSelector, GuardedDeployment
from litellm_compaction.proxy.exchange import ClientRequest, Exchange, Exchanges
from litellm_compaction.proxy.internal import group_of, is_internal_call, name_call
from litellm_compaction.proxy.litellm_inside import router as litellm_router
from litellm_compaction.proxy.litellm_inside.connections import connect
from litellm_compaction.proxy.litellm_inside.seam import LACKS, missing
from litellm_compaction.proxy.reading import Reader
from litellm_compaction.proxy.refusals import litellm_error_of, log_failure, log_refused, mark_told
from litellm_compaction.proxy.routing import Deployment, as_entry, carrier_of, is_bridged, reachable_entries, refuses_by
from litellm_compaction.proxy.seams import Seams
from litellm_compaction.proxy.standards import responses
from litellm_compaction.proxy.standards.standards import Standards
from litellm_compaction.stores import Store

# The calls that every bridged route (chat, messages, responses) becomes at the deployment, and text completions.
_GUARDED_CALLS = frozenset({"acompletion", "atext_completion"})
# Routes that LiteLLM turns into those, whose bodies may say how a client's context is to be treated.
_BRIDGED_CALLS = frozenset({"anthropic_messages", "aresponses"})
# Those and all others that it turns into chats for a server that has nothing else; "" is a kind that it does not name.
_BECOME_CHATS = _BRIDGED_CALLS | {"_aresponses_websocket", "agenerate_content", "agenerate_content_stream", ""}
# In the names of calls without a conversation (litellm/types/utils.py, `CallTypes`).
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
        self.standards = standards
        self.seams = Seams()
        self._compactor = compactor
        self._exchanges = exchanges
        self._reader = Reader(guards.configured, exchanges)
        self._store = store
        self._inner: httpx.AsyncBaseTransport | None = None

    async def look_at_seams(self, router: Any) -> None:
        """Looks at all that requests are guarded by as soon as there is a router, and notes in the store what lacks."""
        fault = self.seams.of_router(router)
        if fault is None and self.guards.configured.carrier == "auto":
            fault = await self.seams.of_client()
        said = "\n".join([str(fault or ""), *missing()]).rstrip()
        # The note is for `doctor`; the store tells its own troubles.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(*LACKS, said), _STORE_LIMIT_S)

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
                await self.standards.read_orders(data, call_type)
        elif call_type in _GUARDED_CALLS:
            await self._decide(router, data, is_chat=call_type == "acompletion")

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

    async def _decide(self, router: Any, data: dict[str, Any], *, is_chat: bool) -> None:
        guards = await self._reachable(router, data)
        becomes_chat = all(is_bridged(guard.deployment.provider) for guard in guards if guard is not None)
        exchange = None
        if any(guards):
            group = str(data.get("model"))
            exchange = await self._reader.exchange(data, group, is_bridged=becomes_chat, is_chat=is_chat)
        if exchange is None or exchange.client.is_unread:
            return
        if is_chat:
            # What is known of a text completion is known by its length.
            self._exchanges.open(data, exchange)
        client, guard = exchange.client, _one_for_all(guards)
        if guard is None or guard.settings.mode != "guard" or client.opted_out:
            return
        context = await self.guards.context(router, guard, exchange, data)
        if client.bad_wish is not None:
            raise client.bad_wish
        if client.token_ids is not None:
            await self._compactor.bound(client.token_ids, context)
            return
        exchange.foreseen = await self._compactor.prepare(client.original, context)
        # The transport does the slow part itself, in the open response.
        if is_chat and guard.carrier == "hooks":
            await self._compact_here(exchange, context, exchange.foreseen)

    async def _compact_here(
        self, exchange: Exchange, context: RequestContext, decided: PreparedRequest | CompactionNeeded
    ) -> None:
        """Makes the compaction that a request needs whose answer LiteLLM's hooks carry."""
        room = self._compactor.room(context)
        try:
            exchange.foreseen = prepared = await self._compactor.finish(decided, room)
        finally:
            room.release()
        exchange.sent(context, prepared)

    async def before_deployment(self, router: Any, kwargs: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
        """The arguments of a call, whose `kind` LiteLLM names so, as they go out; None if nothing changes."""
        if any(word in kind for word in _ASIDE):
            return None
        own = wire.from_chats_alone(kwargs)
        # Also if nothing else changes, or something fails: LiteLLM could not reach the server.
        unchanged = None if own is kwargs else {**own}
        try:
            if router is None:
                return unchanged
            if is_internal_call():
                return self._of_ours(router, own) if kind in _GUARDED_CALLS else unchanged
            changed = await self._changed(router, own, kind)
        except CompactionError as error:
            raise self._refused(kwargs, error) from error
        except Exception as error:
            exchange = self._exchanges.get(kwargs)
            too_long = exchange.attempts.too_long if exchange is not None else None
            log_failure("deployment", error, too_long=too_long)
            if too_long is None:
                return unchanged
            raise self._refused(kwargs, too_long) from error
        else:
            return unchanged if changed is own else {**changed}

    def _refused(self, kwargs: Mapping[str, Any], error: CompactionError) -> Exception:
        if (exchange := self._exchanges.get(kwargs)) is not None:
            exchange.refused(error)
        told = litellm_error_of(error, kwargs)
        if isinstance(error, LiteLLMChanged):
            # It comes before there is an exchange.
            log_refused(str(kwargs.get("model")), error)
            mark_told(told)
        return told

    def _of_ours(self, router: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call that we make ourselves, which nobody guards."""
        name_call(router, kwargs)
        asked = self._deployment_of(kwargs)
        # A summary of half of a text, or a count of it, is as wrong as an answer to it.
        extra = wire.with_extra(kwargs, refuses_by(asked.provider))
        if asked.kind != "foreign" and carrier_of(asked, self.guards.configured) == "transport":
            extra |= wire.as_chat(kwargs)
        return {**kwargs, **extra} if extra else None

    async def _changed(self, router: Any, received: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """The arguments of a call of a client's; the same object if nothing changes."""
        kwargs = self._as_deployed(router, received)
        group = str(metadata_of(kwargs).get("model_group") or "") or group_of(router, kwargs)
        deployment = self._deployment_of(kwargs, group)
        guard = await self.guards.guard(deployment)
        if guard is not None and guard.settings.mode == "guard":
            fault = self.seams.of_router(router)
            if fault is None and guard.carrier == "transport":
                fault = await self.seams.of_client()
            if fault is not None:
                raise fault
        if kind not in _GUARDED_CALLS:
            return self._bridged(guard, deployment, kwargs, becomes_chat=kind in _BECOME_CHATS)
        known = self._exchanges.get(kwargs)
        if known is not None:
            known.begins_attempt(deployment.id)
        if guard is None:
            if known is not None:
                known.attempts.too_long = None
            return kwargs
        try:
            return await self._guarded(guard, router, kwargs)
        except RecursionError as error:
            if guard.settings.mode == "observe":
                raise
            # How deep a request is nested is the client's choice, and must not switch the guard off.
            raise NotServed(TOO_DEEP) from error

    def _bridged(
        self, guard: GuardedDeployment | None, deployment: Deployment, kwargs: Mapping[str, Any], *, becomes_chat: bool
    ) -> Mapping[str, Any]:
        """The arguments of another call than a chat, for LiteLLM to make a chat of it, if that is guarded."""
        # Otherwise LiteLLM may reach the same server by another route of it, without a guard.
        exchange = self._exchanges.get(kwargs)
        # LiteLLM itself makes it of a chat that has been prepared.
        is_prepared = exchange is not None and exchange.is_hooked and exchange.attempt.deployment == deployment.id
        if guard is None or guard.settings.mode != "guard" or is_prepared:
            return kwargs
        if not becomes_chat:
            raise NotServed(NO_CHAT)
        field = responses.field_of_item(kwargs.get("input"))
        if field and self._exchanges.orders(kwargs) is None:
            raise BadItem(field, _UNREAD)
        return wire.to_chats_alone(kwargs, deployment.provider)

    async def _guarded(self, guard: GuardedDeployment, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a chat or text completion for a guarded deployment."""
        exchange = await self._exchange_of(guard, kwargs)
        if exchange is None:
            return kwargs
        client = exchange.client
        if client.opted_out:
            return {**kwargs, **_cleaned(client, kwargs)} if client.orders.portable is not None else kwargs
        context = await self.guards.context(router, guard, exchange, kwargs)
        if guard.settings.mode == "observe":
            await self._compactor.observe(client.original, context)
            return kwargs
        if client.bad_wish is not None:
            raise client.bad_wish
        if await self.standards.answers(exchange, context):
            return {**kwargs, **_NO_ANSWER}
        if guard.carrier == "transport":
            return await self._carried(exchange, context, kwargs)
        if client.is_unread:
            return kwargs
        return await self._bounded(guard.deployment.provider, exchange, context, kwargs)

    async def _exchange_of(self, guard: GuardedDeployment, kwargs: Mapping[str, Any]) -> Exchange | None:
        """The request that a deployment is asked for, a new one if its messages are others by now; None for none."""
        # LiteLLM also makes calls of its own on a request's behalf, and other callbacks change messages.
        deployment, exchange = guard.deployment, self._exchanges.get(kwargs)
        if exchange is not None and exchange.client.tenant != tenant_of(metadata_of(kwargs)):
            exchange = None
        long, is_chat = is_long(kwargs.get("messages")), False
        if exchange is not None:
            received, is_chat = exchange.client.received, exchange.client.is_chat
            # A text completion has none.
            if not kwargs.get("messages") or await off_loop_if(long, lambda: wire.is_same_request(kwargs, received)):
                return exchange
        becomes_chat = is_bridged(deployment.provider)
        fresh = await self._reader.exchange(kwargs, deployment.group, is_bridged=becomes_chat, is_chat=is_chat)
        if fresh is None:
            self._exchanges.close(kwargs)
            return None
        fresh.attempts = exchange.attempts if exchange is not None else fresh.attempts
        fresh.begins_attempt(deployment.id)
        return self._exchanges.open(kwargs, fresh)

    async def _bounded(
        self, provider: str, exchange: Exchange, context: RequestContext, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a call whose answer LiteLLM's hooks carry: compacted, and with a bound on the answer."""
        client, is_stream = exchange.client, bool(kwargs.get("stream"))
        foreseen = exchange.take_foreseen()
        # Given back by whoever carries the stream, at the answer's end, or with the exchange.
        room = exchange.room = self._compactor.room(context)
        if (task := asyncio.current_task()) is not None:
            # LiteLLM calls no hook if a client leaves meanwhile; a plain answer its server writes to the end.
            task.add_done_callback(lambda ended: ended.cancelled() and (room.release if is_stream else room.abandon)())
        if client.token_ids is not None:
            prepared = await self._compactor.bound(client.token_ids, context)
        else:
            ready = await self._compactor.prepared_for(client.original, context, foreseen)
            prepared = await self._compactor.finish(ready, room)
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
        return {**kwargs, **_cleaned(client, kwargs), **changed}

    async def _carried(self, exchange: Exchange, context: RequestContext, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call with a client whose transport compacts it, and carries its answer over the limit."""
        client, attempt = exchange.client, exchange.attempt
        prepared, foreseen = None, exchange.take_foreseen()
        if client.original.messages:
            # The transport does so itself with all that it sees in another form.
            prepared = await self._compactor.prepared_for(client.original, context, foreseen)
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
        return {
            **kwargs,
            **_cleaned(client, kwargs),
            **wire.as_chat(kwargs),
            "client": client_over(transport, api_base=str(target.api_base), api_key=target.api_key),
        }

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
        found = litellm_router.deployment(router, str(info.get("id")))
        if found is None:
            return kwargs
        own = self.guards.deployment(as_entry(found))
        return kwargs if own.kind == "foreign" else wire.without_overrides(kwargs, own.provider)


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
