"""A client's request on its way in: whether it is guarded, by which deployment's window, and with which changes.

`before_routing` serves LiteLLM's pre-call hook, `before_deployment` its deployment hook. Both bring the original
messages to the same engine; the store makes the second look free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx

from litellm_compaction.concurrency import Bounded, is_long, off_loop_if
from litellm_compaction.core.messages import Message, Request, cleaned
from litellm_compaction.core.transcripts import is_client_summary as asks_for_summary
from litellm_compaction.engine import Attempts, CompactionNeeded, Compactor, Foreseen, PreparedRequest, RequestContext
from litellm_compaction.errors import (
    NO_CHAT,
    TOO_DEEP,
    BadItem,
    BadWish,
    CompactionError,
    DoesNotFit,
    ModelNotLoaded,
    NotServed,
    WindowUnknown,
)
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.hooks import Hooked, HookedUpstream, compacted, prepared_in_room
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.protocol import SILENT, Announced, Asked, notices_for
from litellm_compaction.proxy.answer.transport import Clients, GuardedTransport
from litellm_compaction.proxy.answer.upstream import Unsupported
from litellm_compaction.proxy.beside import Conversations, asks_for_little
from litellm_compaction.proxy.call import (
    NONE,
    Call,
    Calls,
    ClientRequest,
    is_off_for_owner,
    sent_body,
    told_headers,
    wish_of,
)
from litellm_compaction.proxy.deployments import (
    DeploymentSelector,
    FormerAnswers,
    GuardedDeployment,
    Publisher,
    metadata_of,
    tenant_of,
)
from litellm_compaction.proxy.discovery import Discovery
from litellm_compaction.proxy.internal import group_of, is_internal_call, name_call
from litellm_compaction.proxy.litellm_inside import router as litellm_router
from litellm_compaction.proxy.litellm_inside.application import keeps_responses
from litellm_compaction.proxy.litellm_inside.connections import connect, with_credentials
from litellm_compaction.proxy.litellm_inside.seam import LACKS, missing
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.routing import (
    Deployment,
    as_entry,
    carrier_of,
    deployment_of,
    has_window_fallback,
    is_bridged,
    is_bypassed,
    reachable_entries,
    refuses_by,
)
from litellm_compaction.proxy.seams import Seams
from litellm_compaction.proxy.standards import responses
from litellm_compaction.proxy.standards.items import Items
from litellm_compaction.proxy.standards.orders import NO_ORDERS
from litellm_compaction.proxy.standards.standards import Standards
from litellm_compaction.proxy.startup import Preparing
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")

# LiteLLM (1.106.2) makes a WebSocket's requests itself and shows them to no plug-in, and would leave the item out.
_UNREAD = "is a compaction item, which is not followed over a WebSocket, nor by a model that is guarded only in part"
_MAX_SERVERS = 1024
# LiteLLM answers nothing then; it would make as many such answers as a client has asked for.
_NO_ANSWER: Mapping[str, Any] = MappingProxyType({"mock_response": " ", "n": 1})
_STORE_LIMIT_S = 2.0


class Intake:
    """Decides about requests before they leave the proxy."""

    def __init__(self, source: LiveSettings, compactor: Compactor, calls: Calls, store: Store, items: Items) -> None:
        self._settings = source.configured
        self.standards = Standards(compactor, calls, items)
        self._compactor = compactor
        self._calls = calls
        self._publisher = Publisher()
        self._announced = Announced()
        self._inner: httpx.AsyncBaseTransport | None = None
        self._unsupported: Unsupported = Bounded(_MAX_SERVERS)
        self._clients = Clients()
        self._conversations = Conversations()
        # Told once: an agent sends the same tools with every request.
        self._store = store
        self.seams = Seams()
        self.guards = DeploymentSelector(source, compactor.windows, self._publisher, FormerAnswers(store))
        self.preparing = Preparing(compactor, self.guards, self._settings)
        self.discovery = Discovery(compactor.windows, self.guards, self._publisher)

    async def read_orders(self, router: Any, data: dict[str, Any], call_type: str) -> None:
        """Reads what a client says of its context in its protocol's words, and takes it out of `data`.

        Only where every deployment that it can reach is guarded: others, and LiteLLM, have their own way with it.

        Raises:
            BadItem: it says something that cannot be followed.
        """
        if not await self.is_guarded(router, data.get("model"), data):
            return
        await self.standards.read_orders(data, call_type)

    async def is_guarded(self, router: Any, model: object, data: Mapping[str, Any] | None = None) -> bool:
        """Returns True if every deployment that a request for a model can reach is guarded."""
        guards = await self._reachable(router, {"model": model} if data is None else data)
        return bool(guards) and all(guard is not None and guard.settings.mode == "guard" for guard in guards)

    async def before_routing(self, router: Any, data: dict[str, Any]) -> None:
        """Guards a chat completion whose every possible deployment has the same window and settings.

        Otherwise only the chosen deployment can say what fits: its hook decides. May replace `messages` in `data`.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded: as the engine does.
            BadWish: the client asks for something unknown.
        """
        guards = await self._reachable(router, data)
        known = [guard for guard in guards if guard is not None]
        request = await _decoded(data) if known else None
        if request is None:
            return
        model = str(data.get("model"))
        call = self._calls.open(data, await self._new_call(request, model, data, is_chat=True))
        contexts = await self._certain(router, guards, call, data)
        if not contexts:
            return
        if call.client.bad_wish is not None:
            raise call.client.bad_wish
        try:
            decided = await self._compactor.prepare(call.client.original, contexts[0])
            call.foreseen = Foreseen(contexts[0], decided)
            if any(carrier_of(guard.deployment, guard.settings) == "transport" for guard in known):
                # It does the slow part itself, in the open response.
                return
            if isinstance(decided, CompactionNeeded):
                call.is_told = self._announced.is_next_in_a_row(decided)
            room = self._compactor.room(contexts[0])
            try:
                prepared = await compacted(self._compactor, decided, room)
            finally:
                room.release()
        except DoesNotFit:
            if has_window_fallback(router, model):
                return
            raise
        call.foreseen = Foreseen(contexts[0], prepared)
        call.sent(contexts[0], prepared)
        if prepared.messages is not None:
            data["messages"] = wire.encode(prepared.messages)
            call.leaves(data["messages"])
            call.rewritten = True

    async def refuse_text(self, router: Any, data: Mapping[str, Any]) -> None:
        """Refuses a text completion that fits no deployment that it can reach; nothing else is done with it here."""
        guards = await self._reachable(router, data)
        are_bridged = {guard is not None and is_bridged(guard.deployment.provider) for guard in guards}
        if None in guards or len(are_bridged) != 1:
            return
        request = await _decoded_prompt(data, is_bridged=True in are_bridged)
        ids = await _longest_ids(data) if request is None else None
        if request is None and ids is None:
            return
        model = str(data.get("model"))
        call = await self._new_call(request or Request(messages=()), model, data)
        contexts = await self._certain(router, guards, call, data)
        if not contexts or has_window_fallback(router, model):
            return
        with contextlib.suppress(WindowUnknown, ModelNotLoaded):
            prepared: PreparedRequest | CompactionNeeded
            if ids is not None:
                prepared = await self._compactor.bound(ids, contexts[0])
            else:
                prepared = await self._compactor.prepare(call.client.original, contexts[0])
            if isinstance(prepared, PreparedRequest):
                prompts = 1 if True in are_bridged else wire.asked_prompts(data)
                await self._refuse_several(prepared, contexts, data, prompts=prompts)

    async def _refuse_several(
        self, prepared: PreparedRequest, contexts: Sequence[RequestContext], data: Mapping[str, Any], *, prompts: int
    ) -> None:
        """Refuses answers that fit one by one and never together, if each deployment's context is shared by them."""
        answers = wire.asked_answers(data)
        if prompts * answers <= 1:
            return
        rooms = [self._compactor.room(context) for context in contexts]
        for room, context in zip(rooms, contexts, strict=True):
            if not room.is_shared(await self._compactor.windows.resolve(context.target)):
                return
        limit_tokens = prepared.max_output_tokens(wire.asked_output_tokens(data))
        rooms[0].check(prepared, limit_tokens, answers=answers, prompts=prompts)

    async def _reachable(self, router: Any, data: Mapping[str, Any]) -> list[GuardedDeployment | None]:
        """Every deployment that a request can reach, None for those that are left alone; [] if that cannot be said."""
        model = data.get("model")
        if router is None or not isinstance(model, str) or self.seams.of_router(router) is not None:
            return []
        deployments = [self.guards.deployment(entry) for entry in reachable_entries(router, model, data)]
        return [await self.guards.guard(deployment) for deployment in deployments]

    async def _certain(
        self, router: Any, guards: Sequence[GuardedDeployment | None], call: Call, data: Mapping[str, Any]
    ) -> list[RequestContext]:
        """The request for each deployment if all have one window and the same settings, or else nothing."""
        known = [guard for guard in guards if guard is not None]
        if not known or call.client.opted_out or len(known) < len(guards):
            return []
        settings = known[0].settings
        if any(guard.settings != settings for guard in known) or settings.mode != "guard":
            return []
        contexts = [await self.guards.context(router, guard, call, data) for guard in known]
        if len(contexts) > 1 and len({await self._window_tokens(context) for context in contexts}) > 1:
            return []
        return contexts

    async def look_at_seams(self, router: Any) -> None:
        """Looks at all that requests are guarded by as soon as there is a router, and notes in the store what lacks."""
        fault = self.seams.of_router(router)
        if fault is None and self._settings.carrier == "auto" and not is_bypassed():
            fault = await self.seams.of_client()
        said = "\n".join([str(fault or ""), *missing()]).rstrip()
        # The note is for `doctor`; the store tells its own troubles.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(*LACKS, said), _STORE_LIMIT_S)

    async def check_seams(self, router: Any, kwargs: Mapping[str, Any]) -> None:
        """Lets a call to a deployment pass if nothing lacks by which it is guarded, or if it is left alone.

        Raises:
            LiteLLMChanged: it cannot be guarded.
        """
        if router is None or is_internal_call():
            return
        fault = self.seams.of_router(router)
        if self.seams.is_sound:
            return
        if fault is not None and wire.may_override(kwargs):
            # The body may name another kind of server than the deployment's entry, which cannot be read.
            raise fault
        guard = await self.guards.guard(self._deployment_of(kwargs, ""))
        if guard is None or guard.settings.mode != "guard":
            return
        if fault is None and carrier_of(guard.deployment, guard.settings) == "transport":
            fault = await self.seams.of_client()
        if fault is not None:
            raise fault

    async def before_deployment(self, router: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The call's arguments with the changes for the chosen deployment; None if there are none.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded: as the engine does.
            BadWish: the client asks for something unknown.
        """
        if router is None:
            return None
        if is_internal_call():
            name_call(router, kwargs)
            # A summary of half of a text, or a count of it, is as wrong as an answer to it.
            asked = self._deployment_of(kwargs, "")
            extra = wire.with_extra(kwargs, refuses_by(asked.provider))
            if asked.kind != "foreign" and carrier_of(asked, self._settings) == "transport":
                extra |= wire.as_chat(kwargs)
            return {**kwargs, **extra} if extra else None
        received, kwargs = kwargs, self._as_deployed(router, kwargs)
        metadata = metadata_of(kwargs)
        group = str(metadata.get("model_group") or "") or group_of(router, kwargs)
        deployment = self._deployment_of(kwargs, group)
        call = await self._call_of(kwargs, metadata, deployment)
        guard = await self.guards.guard(deployment)
        if guard is None:
            if call is not None:
                call.attempts.too_long = None
            return _as_received(call, received)
        try:
            return await self._for(guard, call, router, received, kwargs)
        except RecursionError as error:
            if guard.settings.mode == "observe":
                raise
            # How deep a request is nested is the client's choice, and must not switch the guard off.
            raise NotServed(TOO_DEEP) from error

    async def _for(
        self,
        guard: GuardedDeployment,
        call: Call | None,
        router: Any,
        received: Mapping[str, Any],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any] | None:
        """The arguments of a call to a guarded deployment; `received` as they came, `kwargs` as its entry has them."""
        deployment = guard.deployment
        carrier = carrier_of(deployment, guard.settings)
        request = call.client.original if call is not None else await _decoded(kwargs)
        if call is None and request is None and "prompt" in kwargs:
            request = await _decoded_prompt(kwargs, is_bridged=is_bridged(deployment.provider))
            is_carried = carrier == "transport" and (request is None or not is_bridged(deployment.provider))
            if is_carried or await _longest_ids(kwargs) is not None:
                # Only the transport sees the body that leaves; of token ids only their number is known.
                request = Request(messages=())
        if call is not None and call.client.opted_out and call.client.orders.portable is not None:
            return {**kwargs, "messages": wire.encode(call.client.original.messages)}
        if request is None or (call is not None and call.client.opted_out):
            return _as_received(call, kwargs) or (None if kwargs is received else {**kwargs})
        if call is None:
            call = self._calls.open(kwargs, await self._new_call(request, deployment.group, kwargs))
            call.begins_attempt(deployment.id)
            request = call.client.original
        # For the first attempt only: a later one may come minutes after.
        foreseen, call.foreseen = call.foreseen, None
        context = await self.guards.context(router, guard, call, kwargs)
        if guard.settings.mode == "observe":
            await self._compactor.observe(request, context)
            return None if kwargs is received else {**kwargs}
        if call.client.bad_wish is not None:
            raise call.client.bad_wish
        orders = call.client.orders
        if orders.count is not None:
            orders.count(await self._compactor.count(call.client.original, context))
        if orders.clear is not None:
            await self.standards.clear(call, context, orders.clear)
            request = call.client.original
        if orders.count is not None:
            return {**kwargs, **_NO_ANSWER}
        if (orders.compacts_only or orders.pauses) and await self.standards.is_compacted_alone(call, context):
            return {**kwargs, **_NO_ANSWER}
        if carrier == "transport":
            return await self._carried(router, guard, call, context, kwargs, foreseen)
        is_watched = bool(kwargs.get("stream")) and call.client.is_chat and wire.can_be_continued(kwargs)
        ids = None if request.messages else await _longest_ids(kwargs)
        prepared, limit, call.room = await prepared_in_room(
            self._compactor,
            request if ids is None else ids,
            context,
            wire.asked_output_tokens(kwargs),
            foreseen=foreseen,
            is_watched=is_watched,
            is_stream=bool(kwargs.get("stream")),
            answers=wire.asked_answers(kwargs),
            prompts=1 if is_bridged(deployment.provider) else wire.asked_prompts(kwargs),
        )
        call.sent(context, prepared)
        changed = wire.with_output_limit(kwargs, limit)
        if kwargs.get("stream") and call.client.is_chat:
            changed |= wire.with_usage(kwargs)
        if "prompt" in kwargs and not kwargs.get("messages"):
            changed |= await _with_prompt(kwargs, request, prepared.messages) if prepared.messages is not None else {}
        elif prepared.messages is not None:
            changed["messages"] = wire.encode(prepared.messages)
        elif call.rewritten or call.client.original is not call.client.received:
            changed["messages"] = wire.encode(call.client.original.messages)
        changed |= wire.with_extra(kwargs, refuses_by(deployment.provider))
        if prepared.tools is not None:
            changed["tools"] = list(prepared.tools)
        return {**kwargs, **changed}

    async def before_bridging(
        self, router: Any, kwargs: Mapping[str, Any], *, becomes_chat: bool = True
    ) -> dict[str, Any] | None:
        """The arguments of a call to a guarded deployment that is no chat, for LiteLLM to make one of it.

        Otherwise LiteLLM may reach the same server by another route of it, without a guard. None if nothing has to
        change: for other deployments, and for what LiteLLM itself makes of a chat that has been prepared.

        Args:
            becomes_chat: LiteLLM can make one.

        Raises:
            NotServed: it cannot.
            BadItem: it holds a compaction item that nobody has read, which LiteLLM would leave out.
        """
        if is_internal_call() or router is None:
            return None
        changed = self._as_deployed(router, kwargs)
        deployment = self._deployment_of(changed, "")
        guard = await self.guards.guard(deployment)
        call = self._calls.get(kwargs)
        is_prepared = call is not None and call.is_hooked and call.attempt.deployment == deployment.id
        if guard is None or guard.settings.mode != "guard" or is_prepared:
            return None if changed is kwargs else {**changed}
        if not becomes_chat:
            raise NotServed(NO_CHAT)
        field = responses.field_of_item(kwargs.get("input"))
        if field and self._calls.orders(kwargs) is None:
            raise BadItem(field, _UNREAD)
        return wire.to_chats_alone(changed, deployment.provider)

    def _deployment_of(self, kwargs: Mapping[str, Any], group: str) -> Deployment:
        info = kwargs.get("model_info")
        written = self._publisher.as_written(info) if isinstance(info, Mapping) else {}
        return deployment_of(with_credentials(kwargs), written, group=group, environ=os.environ)

    def _as_deployed(self, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call as the deployment's own entry has them; of one that is left alone as they came."""
        info = kwargs.get("model_info")
        if not isinstance(info, Mapping) or not wire.may_override(kwargs):
            return kwargs
        found = litellm_router.deployment(router, str(info.get("id")))
        if found is None:
            return kwargs
        own = self.guards.deployment(as_entry(found))
        return kwargs if own.kind == "foreign" else wire.without_overrides(kwargs, own.provider)

    async def _call_of(
        self, kwargs: Mapping[str, Any], metadata: Mapping[str, Any], deployment: Deployment
    ) -> Call | None:
        """The request that a deployment is asked for, None for none; a new one if its messages are others by now."""
        call = self._calls.get(kwargs)
        if call is None:
            return None
        call.begins_attempt(deployment.id)
        tenant = tenant_of(metadata)
        messages, tools = kwargs.get("messages"), kwargs.get("tools") or kwargs.get("functions")
        extras = wire.extras_of(kwargs)
        if await off_loop_if(is_long(messages, tools), lambda: call.is_of(tenant, messages, tools, extras)):
            return call
        request = await _decoded(kwargs) if call.client.tenant == tenant else None
        if request is None:
            self._calls.close(kwargs)
            return None
        fresh = await self._new_call(request, deployment.group, kwargs, is_chat=call.client.is_chat)
        fresh.attempts = call.attempts
        fresh.begins_attempt(deployment.id)
        return self._calls.open(kwargs, fresh)

    async def _carried(
        self,
        router: Any,
        guard: GuardedDeployment,
        call: Call,
        context: RequestContext,
        kwargs: Mapping[str, Any],
        foreseen: Foreseen | None,
    ) -> dict[str, Any]:
        """The call's arguments with a client that carries the answer over the limit."""
        # Text completions show their messages only to the transport, which then prepares them itself.
        has_messages = bool(call.client.original.messages)
        prepared = await self._compactor.prepared_for(call.client.original, context, foreseen) if has_messages else None
        changed: dict[str, Any] = {}
        if call.client.original is not call.client.received:
            changed["messages"] = wire.encode(call.client.original.messages)
        call.attempt.is_carried = True
        if isinstance(prepared, PreparedRequest):
            call.sent(context, prepared)
        elif prepared is not None:
            call.will_be_compacted(prepared)
            call.is_told = self._announced.is_next_in_a_row(prepared)
        # LiteLLM logs and bills by the usage chunk, and keeps it from a client that did not ask for it.
        asked = self._asked(router, call, context, kwargs, wants_usage=True)
        call.attempt.begins_silently = not call.client.is_chat and (asked.is_json or asked.notices.before == "off")
        inner = self._inner_transport()
        transport = GuardedTransport(inner, self._compactor, context, asked, prepared, call, self._unsupported)
        target = guard.deployment.target
        return {
            **kwargs,
            **changed,
            **wire.as_chat(kwargs),
            "client": self._clients.over(transport, api_base=str(target.api_base), api_key=target.api_key),
        }

    def read_whole(self, call: Call, response: Any) -> None:
        """Learns from the usage of a whole answer that LiteLLM's hooks have; a stream's is learned as it is read."""
        context, prepared, usage = call.attempt.context, call.attempt.prepared, wire.usage_of(response)
        if context is None or prepared is None or usage is None:
            return
        call.is_read = True
        try:
            self._compactor.replies.learn(context, prepared, **usage._asdict())
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            log_failure("learn", error)
        call.answered(context, prepared, usage.prompt_tokens, usage.completion_tokens)

    def hooked_answer(self, router: Any, call: Call, first: Any, data: Mapping[str, Any]) -> Hooked:
        """Carries a stream that LiteLLM has opened over the limit by its hooks.

        Args:
            call: the request that it answers; it has been sent.
            first: LiteLLM's stream.
            data: the client's request as the hooks see it.
        """
        context, prepared = call.attempt.context, call.attempt.prepared
        assert context is not None and prepared is not None  # noqa: S101, PT018 - the caller asked `call.was_sent`
        call.is_read = True
        pin = call.pins.get(call.attempt.deployment, call.client.group)
        upstream = HookedUpstream(first, router, pin, data)
        asked = self._asked(router, call, context, data, wants_usage=call.client.asks_for_usage)
        # A compaction that an earlier hook made is reused by this one, and still news for the client.
        told = replace(prepared, action=call.attempt.action)
        # None if the deployment hook has failed open.
        room = call.room or self._compactor.room(context)
        answer = Answer(self._compactor, context, upstream, asked, told, call, room=room)
        return Hooked(answer, upstream, prepared)

    def _asked(
        self, router: Any, call: Call, context: RequestContext, body: Mapping[str, Any], *, wants_usage: bool
    ) -> Asked:
        notices = notices_for(
            context.settings.notices, body, is_document=call.client.is_structured, is_whole=not body.get("stream")
        )
        if litellm_router.goes_on_elsewhere(router):
            notices = notices.out_of_thoughts
        if call.client.is_client_summary or call.client.orders.wants_item:
            # It keeps the answer in place of its history.
            notices = SILENT
        elif call.is_told:
            notices = notices._replace(before="off")
        return Asked(
            request=call.client.original,
            output_tokens=wire.asked_output_tokens(body),
            is_json=call.client.is_structured,
            notices=notices,
            wants_usage=wants_usage,
            stops=wire.stops(body),
            thoughts_tokens=wire.asked_thoughts_tokens(sent_body(body) or body),
            client_text=call.client.client_text,
        )

    def _inner_transport(self) -> httpx.AsyncBaseTransport:
        """The connection pool that all guarded deployments share, made in the running loop."""
        if self._inner is None:
            self._inner = connect()
        return self._inner

    async def _new_call(self, received: Request, group: str, body: Mapping[str, Any], *, is_chat: bool = False) -> Call:
        long = is_long(body.get("messages"), received.tools) or _has_long_prompt(body)
        client = await off_loop_if(long, lambda: self._client_request(received, group, body, is_chat=is_chat))
        call = Call(client, Attempts(summary_calls_left=self._settings.constants.max_summary_calls))
        call.leaves(body.get("messages"))
        return call

    def _client_request(
        self, received: Request, group: str, body: Mapping[str, Any], *, is_chat: bool
    ) -> ClientRequest:
        orders = self._calls.orders(body)
        sent, bases = (orders or NO_ORDERS).unfolded(received.messages)
        messages = tuple(cleaned(message) for message in sent)
        metadata = metadata_of(body)
        route = str(metadata.get("user_api_key_request_route") or "")
        bad_wish: CompactionError | None = wire.not_served(
            sent_body(body), route, keeps_responses=keeps_responses(), is_read=orders is not None
        )
        try:
            wish = wish_of(body, metadata)
        except BadWish as error:
            # Told only if it is guarded: a deployment that is just observed answers as ever.
            wish, bad_wish = NONE, error
        acts = self._settings.mode == "guard"
        original = received
        is_other = sent is not received.messages
        if is_other or any(new is not old for new, old in zip(messages, sent, strict=True)):
            original = replace(received, messages=messages)
        tenant, asked_tokens = tenant_of(metadata), wire.asked_output_tokens(body)
        is_client_summary = acts and asks_for_summary(messages, told_headers(body), has_tools=bool(received.tools))
        is_beside = is_client_summary and asks_for_little(asked_tokens)
        if acts and not is_client_summary:
            is_beside = is_client_summary = self._conversations.is_beside(
                tenant, messages, has_tools=bool(received.tools), asked_tokens=asked_tokens
            )
        return ClientRequest(
            received=received,
            original=original,
            group=group,
            tenant=tenant,
            client_text=wire.client_texts(body),
            is_chat=is_chat,
            opted_out=(self._settings.allow_opt_out and wish.off) or is_off_for_owner(metadata),
            wish=wish,
            bad_wish=bad_wish,
            is_client_summary=is_client_summary,
            is_beside=is_beside,
            asks_for_usage=wire.asks_for_usage(body),
            is_structured=wire.is_structured(body),
            program=told_headers(body).get("user-agent", "").partition(" ")[0],
            orders=orders or NO_ORDERS,
            bases=bases,
        )

    async def _window_tokens(self, context: RequestContext) -> int:
        """The window as far as known without loading anything; 0 when unknown."""
        try:
            return (await self._compactor.windows.resolve(context.target)).tokens
        except CompactionError:
            return 0


async def _decoded(body: Mapping[str, Any]) -> Request | None:
    """Reads a long body in a thread."""
    return await off_loop_if(is_long(body.get("messages")), lambda: wire.decode(body))


def _as_received(call: Call | None, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments with the client's own messages; None if they have them."""
    if call is None or not call.rewritten:
        return None
    return {**kwargs, "messages": wire.encode(call.client.received.messages)}


def _has_long_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    return is_long(prompt, [prompt])


async def _decoded_prompt(body: Mapping[str, Any], *, is_bridged: bool = True) -> Request | None:
    return await off_loop_if(_has_long_prompt(body), lambda: wire.decode_prompt(body, is_bridged=is_bridged))


async def _longest_ids(body: Mapping[str, Any]) -> int | None:
    return await off_loop_if(_has_long_prompt(body), lambda: wire.longest_ids(body))


async def _with_prompt(body: Mapping[str, Any], request: Request, sent: Sequence[Message]) -> dict[str, Any]:
    return await off_loop_if(_has_long_prompt(body), lambda: wire.with_prompt(body, request, sent))
