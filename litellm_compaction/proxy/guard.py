"""Guards a client's request on its way out of the proxy, and follows its answer on the way back, for LiteLLM's hooks.

`before_routing` decides as soon as the window is certain, `before_deployment` installs the client that carries the
answer; the others follow it through LiteLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx

from litellm_compaction.engine import Compactor, Decided, PreparedRequest, RequestContext
from litellm_compaction.errors import NO_CHAT, TOO_DEEP, BadItem, CompactionError, LiteLLMChanged, NotServed
from litellm_compaction.proxy import litellm_inside, refusals, routing, wire
from litellm_compaction.proxy.answer.client import SILENT, Asked, notices_for
from litellm_compaction.proxy.answer.legs import UNNAMED, judged
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import with_heartbeat
from litellm_compaction.proxy.answer.transport import GuardedTransport, client_over
from litellm_compaction.proxy.client import Body, metadata_of, sent_body
from litellm_compaction.proxy.exchange import ClientRequest, Exchange, Exchanges, context_of
from litellm_compaction.proxy.internal import group_of, is_internal_call, name_call
from litellm_compaction.proxy.litellm_inside.application import connect
from litellm_compaction.proxy.presence import while_here
from litellm_compaction.proxy.routing import Deployment, DeploymentSelector, GuardedDeployment
from litellm_compaction.proxy.standards.orders import NO_ORDERS
from litellm_compaction.proxy.standards.protocols import field_of_item
from litellm_compaction.proxy.standards.standards import Standards
from litellm_compaction.stores import Store

# LiteLLM's kinds of calls (litellm/types/utils.py, `CallTypes`): those that are guarded; routes with a client's orders;
# all that LiteLLM turns into chats, with "" for what it does not name; words in the names without a conversation.
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
_NO_ANSWER: Body = MappingProxyType({"mock_response": " ", "n": 1})
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
        """Notes in the store, for `doctor`, what lacks of all that requests are guarded by."""
        fault = await self._fault(router, is_carried=self.guards.configured.carrier == "auto")
        said = "\n".join([str(fault or ""), *litellm_inside.missing()]).rstrip()
        # The store tells its own troubles.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(*litellm_inside.LACKS, said), _STORE_LIMIT_S)

    async def _fault(self, router: Any, *, is_carried: bool) -> LiteLLMChanged | None:
        """What is missing by which requests are guarded; a client that is not passed on, only if it `is_carried`."""
        fault = self.seams.of_router(router)
        return await self.seams.of_client() if fault is None and is_carried else fault

    async def is_guarded(self, router: Any, data: Body) -> bool:
        """Returns True if every deployment that a request, such as `{"model": name}`, can reach is guarded."""
        guards = await self._reachable(router, data)
        return bool(guards) and all(guard is not None and guard.does_guard for guard in guards)

    async def _reachable(self, router: Any, data: Body) -> list[GuardedDeployment | None]:
        """Every deployment that a request can reach, None for those that are left alone; [] if that cannot be said."""
        model = data.get("model")
        if router is None or not isinstance(model, str) or self.seams.of_router(router) is not None:
            return []
        entries = routing.reachable_entries(router, model, data)
        return [await self.guards.guard(self.guards.deployment(entry)) for entry in entries]

    async def before_routing(self, router: Any, data: dict[str, Any], call_type: str) -> None:
        """Decides about a request that can only reach one model of one server; takes a client's orders out of `data`.

        A CompactionError cannot be served, or asks for something that cannot be followed.
        """
        if call_type in _BRIDGED_CALLS:
            # LiteLLM, and deployments that are left alone, have their own way with it.
            if await self.is_guarded(router, data):
                await self._standards.read_orders(data, call_type)
            return
        guards = await self._reachable(router, data) if call_type in _GUARDED_CALLS else []
        if (first := next(filter(None, guards), None)) is None:
            return
        is_chat, group = call_type == "acompletion", str(data.get("model"))
        exchange = await self._exchanges.of(data, group, self.guards.configured, is_chat=is_chat)
        is_certain = first.does_guard and all(each is not None and each.shape == first.shape for each in guards)
        if exchange is None or not is_certain or exchange.client.opted_out:
            return
        with while_here():
            context = await context_of(router, self.guards, first, exchange, data)
            exchange.foreseen = await self._decided(exchange, context)
            if is_chat and first.carrier == "hooks":
                # The transport does the slow part itself, in the open response.
                room = self._compactor.room(context)
                try:
                    exchange.foreseen = prepared = await self._compactor.finish(exchange.foreseen, room)
                finally:
                    room.release()
                exchange.sent(context, prepared)

    async def _decided(self, exchange: Exchange, context: RequestContext) -> Decided:
        """What to send, or to make first, without doing again what was done when this deployment was foreseen."""
        # Of the first attempt only: a later one may come minutes after.
        foreseen, exchange.foreseen = exchange.foreseen, None
        return await self._compactor.prepare(exchange.client.original, context, foreseen)

    async def before_deployment(self, router: Any, kwargs: Body, kind: str) -> dict[str, Any] | None:
        """The arguments of a call, whose `kind` LiteLLM names so, as they go out; None if nothing changes."""
        if router is None or any(word in kind for word in _ASIDE):
            return None
        # Also if nothing else changes, or something fails: LiteLLM could not reach the server.
        changed = own = wire.from_chats_alone(kwargs)
        try:
            if not is_internal_call.get():
                changed = await self._changed(router, own, kind)
            elif kind in _GUARDED_CALLS:
                changed = self._of_ours(router, own)
        except CompactionError as error:
            if isinstance(error, LiteLLMChanged):
                # It comes before there is an exchange.
                refusals.log_refused(str(kwargs.get("model")), error)
            raise self._refused(kwargs, error) from error
        except Exception as error:
            exchange = self._exchanges.get(kwargs)
            too_long = exchange.attempts.too_long if exchange is not None else None
            refusals.log_failure("deployment", error, too_long=too_long)
            if too_long is not None:
                raise self._refused(kwargs, too_long) from error
        return None if changed is kwargs else {**changed}

    def _refused(self, kwargs: Body, error: CompactionError) -> Exception:
        if (exchange := self._exchanges.get(kwargs)) is not None:
            exchange.refusal = error
        return refusals.litellm_error_of(error, kwargs)

    def _of_ours(self, router: Any, kwargs: Body) -> Body:
        """The arguments of a call that we make ourselves, which nobody guards."""
        name_call(router, kwargs)
        deployment = self.guards.called(kwargs)
        # A summary of half of a text, or a count of it, is as wrong as an answer to it.
        extra = wire.refusing(kwargs, deployment.provider)
        if deployment.kind != "foreign" and routing.carrier_of(deployment, self.guards.configured) == "transport":
            extra |= wire.as_chat(kwargs)
        return {**kwargs, **extra} if extra else kwargs

    async def _changed(self, router: Any, received: Body, kind: str) -> Body:
        """The arguments of a call of a client's; the same object if nothing changes."""
        kwargs = self._as_deployed(router, received)
        group = str(metadata_of(kwargs).get("model_group") or "") or group_of(router, kwargs)
        deployment = self.guards.called(kwargs, group)
        guard, exchange = await self.guards.guard(deployment), self._exchanges.get(kwargs)
        if guard is None:
            if exchange is not None and kind in _GUARDED_CALLS:
                exchange.begins_attempt(deployment.id)
                exchange.attempts.too_long = None
            return kwargs
        if guard.does_guard:
            fault = await self._fault(router, is_carried=guard.carrier == "transport")
            if fault is not None:
                raise fault
        if kind not in _GUARDED_CALLS:
            # LiteLLM itself makes it of a chat that has been prepared.
            is_prepared = exchange is not None and exchange.is_hooked and exchange.attempt.deployment == deployment.id
            return self._bridged(deployment, kwargs, kind) if guard.does_guard and not is_prepared else kwargs
        try:
            with while_here():
                return await self._guarded(guard, router, kwargs)
        except RecursionError as error:
            if not guard.does_guard:
                raise
            # How deep a request is nested is the client's choice, and must not switch the guard off.
            raise NotServed(TOO_DEEP) from error

    def _as_deployed(self, router: Any, kwargs: Body) -> Body:
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

    def _bridged(self, deployment: Deployment, kwargs: Body, kind: str) -> Body:
        """The arguments of another call, for LiteLLM to make a chat of it: by its own route it would have no guard."""
        if kind not in _BECOME_CHATS:
            raise NotServed(NO_CHAT)
        field = field_of_item(kwargs.get(_INPUT))
        if field and self._exchanges.orders(kwargs) is None:
            raise BadItem(field, _UNREAD)
        return wire.to_chats_alone(kwargs, deployment.provider)

    async def _guarded(self, guard: GuardedDeployment, router: Any, kwargs: Body) -> Body:
        """The arguments of a chat or text completion for a guarded deployment."""
        deployment = guard.deployment
        exchange = await self._exchanges.of(kwargs, deployment.group, self.guards.configured)
        if exchange is None:
            return kwargs
        exchange.begins_attempt(deployment.id)
        client = exchange.client
        if client.opted_out:
            return {**kwargs, **_cleaned(client, kwargs)} if client.orders.portable is not None else kwargs
        context = await context_of(router, self.guards, guard, exchange, kwargs)
        if not guard.does_guard:
            await self._compactor.observe(client.original, context)
            return kwargs
        if client.orders is not NO_ORDERS and await self._standards.answers(exchange, context):
            return {**kwargs, **_NO_ANSWER}
        # What was ordered to go has been taken out of it.
        own = {**kwargs, **_cleaned(exchange.client, kwargs)}
        if guard.carrier == "transport":
            return {**own, **await self._carried(exchange, context, kwargs)}
        return {**own, **await self._bounded(exchange, context, kwargs, deployment.provider)}

    async def _bounded(
        self, exchange: Exchange, context: RequestContext, kwargs: Body, provider: str
    ) -> dict[str, Any]:
        """The changes to a call whose answer LiteLLM's hooks carry."""
        is_chat, is_stream = exchange.client.is_chat, bool(kwargs.get("stream"))
        # Given back by whoever carries the stream, at the answer's end, or with the exchange.
        room = exchange.room = self._compactor.room(context)
        if (task := asyncio.current_task()) is not None:
            # LiteLLM calls no hook if a client leaves meanwhile; a plain answer its server writes to the end.
            task.add_done_callback(lambda ended: ended.cancelled() and (room.release if is_stream else room.abandon)())
        prepared = await self._compactor.finish(await self._decided(exchange, context), room)
        limit = await room.acquire(
            prepared,
            prepared.max_output_tokens(wire.asked_output_tokens(kwargs)),
            is_watched=is_stream and is_chat and wire.can_be_continued(kwargs),
            answers=wire.asked_answers(kwargs),
        )
        exchange.sent(context, prepared)
        changed = wire.with_output_limit(kwargs, limit) | wire.refusing(kwargs, provider)
        if is_stream and is_chat:
            changed |= wire.with_usage(kwargs)
        if prepared.messages is not None:
            changed["messages"] = wire.encode(prepared.messages)
        if prepared.tools is not None:
            changed["tools"] = list(prepared.tools)
        return changed

    async def _carried(self, exchange: Exchange, context: RequestContext, kwargs: Body) -> dict[str, Any]:
        """The changes to a call: a client whose transport compacts it, and carries its answer over the limit."""
        attempt = exchange.attempt
        prepared = await self._decided(exchange, context)
        attempt.is_carried = True
        if isinstance(prepared, PreparedRequest):
            exchange.sent(context, prepared)
        else:
            # It is made while the answer is already open.
            attempt.needed, attempt.prepared, attempt.action = prepared, None, "compacted"
            exchange.may_pause = True
        # LiteLLM logs and bills by the usage chunk, and keeps it from a client that did not ask for it.
        asked = _asked_of(exchange, context, kwargs, wants_usage=True)
        attempt.begins_silently = not exchange.client.is_chat and (asked.is_json or asked.notices.before == "off")
        # The connection pool that all guarded deployments share, made in the running loop.
        self._inner = self._inner or connect()
        transport = GuardedTransport(self._inner, self._compactor, context, asked, prepared, exchange)
        target = context.target
        openai_client = client_over(transport, api_base=str(target.api_base), api_key=target.api_key)
        return {**wire.as_chat(kwargs), "client": openai_client}

    async def streamed(self, response: Any, data: Body) -> AsyncGenerator[Any, None]:
        """LiteLLM's stream for a client: carried over the limit where the hooks do that, never silent."""
        exchange = self._exchanges.get(data)
        if exchange is None:
            async for chunk in response:
                yield chunk
            return
        is_carried_here = exchange.is_hooked and wire.can_be_continued(data)
        stream = self._hooked(exchange, response, data) if is_carried_here else response
        beat_s, orders = self.guards.configured.constants.heartbeat_s, exchange.client.orders
        beating = with_heartbeat(stream, exchange, every_s=beat_s)
        told = (wire.with_details(chunk, exchange.attempt.details) async for chunk in beating)
        if orders is not NO_ORDERS and orders.shows:
            told = self._standards.showing(told, exchange, is_messages=_INPUT not in data)
        try:
            async for chunk in told:
                yield chunk
        finally:
            await told.aclose()
            if is_carried_here:
                await stream.aclose()
            self._exchanges.close(data)

    def _hooked(self, exchange: Exchange, first: Any, data: Body) -> AsyncGenerator[Any, None]:
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

    async def whole(self, response: Any, data: Body) -> Any:
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

    def failed(self, data: Body, error: Exception) -> refusals.Refusal | None:
        """Learns from an overflow that came in spite of us, forgets the request, and words its error for clients."""
        exchange = self._exchanges.close(data)
        if exchange is None:
            return refusals.reworded(self.seams.fault, error, is_guarded=False)
        client, context, prepared = exchange.client, exchange.attempt.context, exchange.attempt.prepared
        with refusals.failing_open("learn_overflow"):
            if context is not None:
                # No loop has read it: that learns from its own streams itself.
                overflow = prepared and judged(
                    str(error),
                    client.client_text,
                    used_tokens=prepared.count.high,
                    window_tokens=prepared.window.tokens,
                )
                self._compactor.replies.learn_overflow(context, prepared, overflow or UNNAMED)
        told = refusals.reworded(
            exchange.refusal, error, is_guarded=prepared is not None, client_text=client.client_text
        )
        if told is not None and exchange.refusal is not None:
            refusals.log_refused(client.group, exchange.refusal)
        if told is not None and hasattr(error, "message"):
            # LiteLLM tells this one for /v1/messages and inside streams.
            error.message = told.message
            error.status_code = told.status_code  # type: ignore[attr-defined] # LiteLLM's own errors have it
        return told

    def headers(self, data: Body) -> dict[str, str] | None:
        """The headers for clients of guarded deployments; of an answer that is not streamed LiteLLM's last question."""
        exchange = self._exchanges.get(data) if data.get("stream") else self._exchanges.close(data)
        return exchange.headers if exchange is not None else None


def _cleaned(client: ClientRequest, kwargs: Body) -> dict[str, Any]:
    """The client's messages without notices that came back with them; {} if there were none."""
    is_changed = client.original is not client.received and kwargs.get("messages")
    return {"messages": wire.encode(client.original.messages)} if is_changed else {}


def _asked_of(exchange: Exchange, context: RequestContext, body: Body, *, wants_usage: bool) -> Asked:
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
