"""Guards a client's request on its way out of the proxy, and follows its answer on the way back, for LiteLLM's hooks.

`before_routing` measures and decides as soon as the window is certain, and hands on what it has found;
`before_deployment` installs the client that carries the answer; the others follow the answer through LiteLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx

from litellm_compaction.concurrency import is_long, off_loop_if
from litellm_compaction.engine import Compactor, Decided, PreparedRequest, RequestContext
from litellm_compaction.errors import NO_CHAT, TOO_DEEP, BadItem, CompactionError, LiteLLMChanged, NotServed
from litellm_compaction.proxy import litellm_inside, refusals, routing, wire
from litellm_compaction.proxy.answer.client import SILENT, Asked, notices_for
from litellm_compaction.proxy.answer.legs import UNNAMED, judged
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import with_heartbeat
from litellm_compaction.proxy.answer.transport import GuardedTransport, client_over
from litellm_compaction.proxy.client import metadata_of, sent_body, tenant_of
from litellm_compaction.proxy.exchange import (
    ClientRequest,
    Exchange,
    Exchanges,
    context_of,
)
from litellm_compaction.proxy.internal import group_of, is_internal_call, name_call
from litellm_compaction.proxy.litellm_inside.application import connect
from litellm_compaction.proxy.routing import Deployment, DeploymentSelector, GuardedDeployment, is_bridged
from litellm_compaction.proxy.standards.orders import NO_ORDERS
from litellm_compaction.proxy.standards.protocols import field_of_item
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
# A request of OpenAI's Responses has it; the only other route with orders is Anthropic's.
_INPUT = "input"
_STORE_LIMIT_S = 2.0


class Guard:
    """Decides about requests before they leave the proxy, and follows their answers."""

    def __init__(
        self, guards: DeploymentSelector, compactor: Compactor, exchanges: Exchanges, standards: Standards, store: Store
    ) -> None:
        self.guards = guards
        self.seams = litellm_inside.Seams()
        self._standards = standards
        self._compactor = compactor
        self._exchanges = exchanges
        self._store = store
        self._inner: httpx.AsyncBaseTransport | None = None

    async def look_at_seams(self, router: Any) -> None:
        """Looks at all that requests are guarded by as soon as there is a router, and notes in the store what lacks."""
        fault = await self._fault(router, is_carried=self.guards.configured.carrier == "auto")
        said = "\n".join([str(fault or ""), *litellm_inside.missing()]).rstrip()
        # The note is for `doctor`; the store tells its own troubles.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(*litellm_inside.LACKS, said), _STORE_LIMIT_S)

    async def _fault(self, router: Any, *, is_carried: bool) -> LiteLLMChanged | None:
        """What is missing by which requests are guarded; a client that is not passed on, only if it `is_carried`."""
        fault = self.seams.of_router(router)
        return await self.seams.of_client() if fault is None and is_carried else fault

    async def is_guarded(self, router: Any, data: Mapping[str, Any]) -> bool:
        """Returns True if every deployment that a request, such as `{"model": name}`, can reach is guarded."""
        guards = await self._reachable(router, data)
        return bool(guards) and all(guard is not None and guard.settings.mode == "guard" for guard in guards)

    async def _reachable(self, router: Any, data: Mapping[str, Any]) -> list[GuardedDeployment | None]:
        """Every deployment that a request can reach, None for those that are left alone; [] if that cannot be said."""
        model = data.get("model")
        if router is None or not isinstance(model, str) or self.seams.of_router(router) is not None:
            return []
        entries = routing.reachable_entries(router, model, data)
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
            if await self.is_guarded(router, data):
                await self._standards.read_orders(data, call_type)
        elif call_type in _GUARDED_CALLS and any(guards := await self._reachable(router, data)):
            await self._decide(router, data, guards, is_chat=call_type == "acompletion")

    async def _decide(
        self, router: Any, data: dict[str, Any], guards: Sequence[GuardedDeployment | None], *, is_chat: bool
    ) -> None:
        becomes_chat = all(is_bridged(guard.deployment.provider) for guard in guards if guard is not None)
        exchange = await self._exchanges.read(
            data, str(data.get("model")), self.guards.configured, is_bridged=becomes_chat, is_chat=is_chat
        )
        if exchange is None or exchange.client.is_unread:
            return
        self._exchanges.open(data, exchange)
        guard = _one_for_all(guards)
        if guard is None or guard.settings.mode != "guard" or exchange.client.opted_out:
            return
        context = await context_of(router, self.guards, guard, exchange, data)
        if exchange.client.bad_wish is not None:
            raise exchange.client.bad_wish
        exchange.foreseen = await self._decided(exchange, context)
        if is_chat and guard.carrier == "hooks":
            # The transport does the slow part itself, in the open response.
            room = self._compactor.room(context)
            try:
                exchange.foreseen = prepared = await self._compactor.finish(exchange.foreseen, room)
            finally:
                room.release()
            exchange.sent(context, prepared)

    async def _decided(self, exchange: Exchange, context: RequestContext) -> Decided:
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
            refusals.log_failure("deployment", error, too_long=too_long)
            if too_long is not None:
                raise self._refused(kwargs, too_long) from error
        return None if changed is kwargs else {**changed}

    def _refused(self, kwargs: Mapping[str, Any], error: CompactionError) -> Exception:
        if (exchange := self._exchanges.get(kwargs)) is not None:
            exchange.refused(error)
        told = refusals.litellm_error_of(error, kwargs)
        if isinstance(error, LiteLLMChanged):
            # It comes before there is an exchange.
            refusals.log_refused(str(kwargs.get("model")), error)
            refusals.mark_told(told)
        return told

    def _of_ours(self, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call that we make ourselves, which nobody guards."""
        name_call(router, kwargs)
        asked = self._deployment_of(kwargs)
        # A summary of half of a text, or a count of it, is as wrong as an answer to it.
        extra = wire.with_extra(kwargs, routing.refuses_by(asked.provider))
        if asked.kind != "foreign" and routing.carrier_of(asked, self.guards.configured) == "transport":
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
        exchange = self._exchanges.get(kwargs)
        if kind not in _GUARDED_CALLS:
            # LiteLLM itself makes it of a chat that has been prepared.
            is_prepared = exchange is not None and exchange.is_hooked and exchange.attempt.deployment == deployment.id
            return self._bridged(deployment, kwargs, kind) if does_guard and not is_prepared else kwargs
        if exchange is not None:
            exchange.begins_attempt(deployment.id)
            exchange.attempts.too_long = exchange.attempts.too_long if guard is not None else None
        try:
            return await self._guarded(guard, router, kwargs, exchange) if guard is not None else kwargs
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
        field = field_of_item(kwargs.get(_INPUT))
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
        context = await context_of(router, self.guards, guard, exchange, kwargs)
        if guard.settings.mode == "observe":
            await self._compactor.observe(client.original, context)
            return kwargs
        if client.bad_wish is not None:
            raise client.bad_wish
        if client.orders is not NO_ORDERS and await self._standards.answers(exchange, context):
            return {**kwargs, **_NO_ANSWER}
        if client.is_unread and guard.carrier == "hooks":
            return kwargs
        carry = self._carried if guard.carrier == "transport" else self._bounded
        # What was ordered to go has been taken out of it.
        return {**kwargs, **_cleaned(exchange.client, kwargs), **await carry(exchange, context, kwargs)}

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
        is_chat, becomes_chat = known is not None and known.client.is_chat, is_bridged(deployment.provider)
        fresh = await self._exchanges.read(
            kwargs, deployment.group, self.guards.configured, is_bridged=becomes_chat, is_chat=is_chat
        )
        if fresh is None:
            self._exchanges.close(kwargs)
            return None
        fresh.attempts = known.attempts if known is not None else fresh.attempts
        fresh.begins_attempt(deployment.id)
        return self._exchanges.open(kwargs, fresh)

    async def _bounded(self, exchange: Exchange, context: RequestContext, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The changes to a call whose answer LiteLLM's hooks carry: compacted, and with a bound on the answer."""
        client, is_stream, provider = exchange.client, bool(kwargs.get("stream")), self._deployment_of(kwargs).provider
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
        changed = wire.with_output_limit(kwargs, limit) | wire.with_extra(kwargs, routing.refuses_by(provider))
        if is_stream and client.is_chat:
            changed |= wire.with_usage(kwargs)
        if prepared.messages is not None:
            changed["messages"] = wire.encode(prepared.messages)
        if prepared.tools is not None:
            changed["tools"] = list(prepared.tools)
        return changed

    async def _carried(self, exchange: Exchange, context: RequestContext, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The changes to a call: a client whose transport compacts it, and carries its answer over the limit."""
        client, attempt, target = exchange.client, exchange.attempt, context.target
        # The transport does so itself with all that it sees in another form.
        prepared = await self._decided(exchange, context) if client.original.messages else None
        attempt.is_carried = True
        if isinstance(prepared, PreparedRequest):
            exchange.sent(context, prepared)
        elif prepared is not None:
            exchange.will_be_compacted(prepared)
        # LiteLLM logs and bills by the usage chunk, and keeps it from a client that did not ask for it.
        asked = _asked_of(exchange, context, kwargs, wants_usage=True)
        attempt.begins_silently = not client.is_chat and (asked.is_json or asked.notices.before == "off")
        # The connection pool that all guarded deployments share, made in the running loop.
        self._inner = self._inner or connect()
        transport = GuardedTransport(self._inner, self._compactor, context, asked, prepared, exchange)
        openai_client = client_over(transport, api_base=str(target.api_base), api_key=target.api_key)
        return {**wire.as_chat(kwargs), "client": openai_client}

    def _deployment_of(self, kwargs: Mapping[str, Any], group: str = "") -> Deployment:
        entry = {"model_name": group, "litellm_params": kwargs, "model_info": kwargs.get("model_info")}
        return self.guards.deployment(entry)

    def _as_deployed(self, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call as its deployment's own entry has them; of one that is left alone as they came."""
        info = kwargs.get("model_info")
        if not isinstance(info, Mapping) or not (kwargs.get("custom_llm_provider") or kwargs.get("extra_body")):
            return kwargs
        if (fault := self.seams.of_router(router)) is not None:
            # The body may name another kind of server than the entry, which cannot be read.
            raise fault
        entry = litellm_inside.deployment(router, str(info.get("id")))
        own = self.guards.deployment(routing.as_entry(entry))
        return kwargs if entry is None or own.kind == "foreign" else wire.without_overrides(kwargs, own.provider)

    # ------------------------------------------------------------------ the answer, through LiteLLM's hooks

    async def streamed(self, response: Any, data: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """LiteLLM's stream for a client: carried over the limit where the hooks do that, never silent."""
        exchange = self._exchanges.get(data)
        if exchange is None:
            async for chunk in response:
                yield chunk
            return
        is_carried_here = exchange.is_hooked and wire.can_be_continued(data)
        stream = self._hooked(exchange, response, data) if is_carried_here else response
        told = self._with_details(stream, exchange)
        if (orders := exchange.client.orders) is not NO_ORDERS and orders.shows:
            told = self._standards.showing(told, exchange, is_messages=_INPUT not in data)
        try:
            async for chunk in told:
                yield chunk
        finally:
            await told.aclose()
            if is_carried_here:
                await stream.aclose()
            self._exchanges.close(data)

    async def _with_details(self, stream: Any, exchange: Exchange) -> AsyncGenerator[Any, None]:
        async for chunk in with_heartbeat(stream, exchange, every_s=self.guards.configured.constants.heartbeat_s):
            yield wire.with_details(chunk, exchange.attempt.details)

    def _hooked(self, exchange: Exchange, first: Any, data: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Carries a stream that LiteLLM has opened over the limit by its hooks."""
        from litellm_compaction.proxy.answer.upstream import HookedUpstream

        context, prepared = exchange.attempt.context, exchange.attempt.prepared
        assert context is not None and prepared is not None  # noqa: S101, PT018 - the caller asked `is_hooked`
        upstream = HookedUpstream(first, litellm_inside.current_router(), exchange.pin, data)
        asked = _asked_of(exchange, context, data, wants_usage=wire.asks_for_usage(data))
        # A compaction that an earlier hook made is reused by this one, and still news for the client.
        told = replace(prepared, action=exchange.attempt.action)
        # None if the deployment hook has failed open.
        room = exchange.room or self._compactor.room(context)
        answer = Answer(self._compactor, context, upstream, asked, told, exchange, room)
        return upstream.carried(answer, prepared)

    async def whole(self, response: Any, data: Mapping[str, Any]) -> Any:
        """An answer that is not streamed, with its details; None to leave it as it is."""
        exchange = self._exchanges.get(data)
        if exchange is None:
            return None
        context, prepared, usage = exchange.attempt.context, exchange.attempt.prepared, wire.usage_of(response)
        is_ours = exchange.is_hooked and wire.can_be_continued(data)
        if is_ours and usage is not None and context is not None and prepared is not None:
            # The transport learns from the answers that it carries.
            with refusals.failing_open("learn"):
                self._compactor.replies.learn(context, prepared, **usage._asdict())
        told = wire.with_details(response, exchange.attempt.details)
        if (orders := exchange.client.orders) is not NO_ORDERS and orders.shows:
            return await self._standards.shown(told, exchange, is_messages=_INPUT not in data)
        return told if exchange.attempt.details is not None else None

    def failed(self, data: Mapping[str, Any], error: Exception) -> refusals.Refusal | None:
        """Learns from an overflow that came in spite of us, forgets the request, and words its error for clients.

        LiteLLM tells the returned error, but for /v1/messages and inside streams, where it tells the error's `message`.
        """
        exchange = self._exchanges.close(data)
        if exchange is None:
            return refusals.reworded(self.seams.fault, error, is_guarded=False)
        client_text, context, prepared = (
            exchange.client.client_text,
            exchange.attempt.context,
            exchange.attempt.prepared,
        )
        with refusals.failing_open("learn_overflow"):
            if context is not None:
                # No loop has read it: that learns from its own streams itself.
                overflow = prepared and judged(
                    str(error), client_text, used_tokens=prepared.count.high, window_tokens=prepared.window.tokens
                )
                self._compactor.replies.learn_overflow(context, prepared, overflow or UNNAMED)
        is_guarded = prepared is not None
        told = refusals.reworded(exchange.refusal, error, is_guarded=is_guarded, client_text=client_text)
        if told is not None and exchange.refusal is not None:
            refusals.log_refused(exchange.client.group, exchange.refusal)
        if told is not None and hasattr(error, "message"):
            error.message = told.message
            error.status_code = told.status_code  # type: ignore[attr-defined] # LiteLLM's own errors have it
        return told

    def headers(self, data: Mapping[str, Any]) -> dict[str, str] | None:
        """The headers that tell clients of guarded deployments about the changes to their request.

        LiteLLM asks for them after the success hook and before a stream's first chunk: the last word on an answer that
        is not streamed.
        """
        exchange = self._exchanges.get(data) if data.get("stream") else self._exchanges.close(data)
        return exchange.headers if exchange is not None else None


def _one_for_all(guards: Sequence[GuardedDeployment | None]) -> GuardedDeployment | None:
    """Returns one if all deployments are the same model of the same server, with the same settings; None otherwise."""
    shapes = [
        guard and (guard.settings, guard.deployment.target.api_base, guard.deployment.target.model) for guard in guards
    ]
    return guards[0] if all(shape == shapes[0] for shape in shapes) else None


def _cleaned(client: ClientRequest, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The client's messages without notices that came back with them; {} if there were none."""
    is_changed = client.original is not client.received and kwargs.get("messages")
    return {"messages": wire.encode(client.original.messages)} if is_changed else {}


def _asked_of(exchange: Exchange, context: RequestContext, body: Mapping[str, Any], *, wants_usage: bool) -> Asked:
    """The client's wishes, as far as the loop that carries its answer has to know; `body` is its request."""
    client = exchange.client
    # A client that summarizes keeps the answer in place of its history.
    is_kept = client.is_client_summary or client.orders.wants_item
    return Asked(
        request=client.original,
        output_tokens=wire.asked_output_tokens(body),
        is_json=wire.is_structured(body),
        notices=SILENT if is_kept else notices_for(context.settings.notices, body),
        wants_usage=wants_usage,
        stops=wire.stops(body),
        thoughts_tokens=wire.asked_thoughts_tokens(sent_body(body) or body),
        client_text=client.client_text,
    )
