"""A client's request on its way in: what of it is guarded, by which deployment's window, with what changed.

`before_routing` serves LiteLLM's pre-call hook, `before_deployment` its deployment hook. Both bring the original
messages to the same engine; the store makes the second look free.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message, Request, cleaned
from litellm_compaction.core.stretches import is_client_summary as asks_for_summary
from litellm_compaction.core.tool_schemas import Slimmed, slimmed
from litellm_compaction.engine import Attempts, CompactionNeeded, Compactor, Foreseen, PreparedRequest, RequestContext
from litellm_compaction.engine.threads import is_long, off_loop_if
from litellm_compaction.errors import (
    BadWish,
    CompactionError,
    DoesNotFit,
    ModelNotLoaded,
    TooDeep,
    WindowUnknown,
)
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.hooks import Hooked, HookedUpstream, Whole, compacted, guarded_in_room
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.protocol import SILENT, Announced, Asked, notices_for
from litellm_compaction.proxy.answer.transport import Abilities, GuardedTransport, client_over
from litellm_compaction.proxy.call import NONE, Call, Calls, sent_body, told_headers, wish_of
from litellm_compaction.proxy.deployments import (
    DeploymentSelector,
    FormerAnswers,
    GuardedDeployment,
    Publisher,
    metadata_of,
    tenant_of,
)
from litellm_compaction.proxy.internal import group_of, is_internal_call, name_call
from litellm_compaction.proxy.litellm_api import connect, has_database
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.prepare import Preparing
from litellm_compaction.proxy.routing import (
    Deployment,
    as_entry,
    carrier_of,
    deployment_of,
    has_window_fallback,
    is_bridged,
    reachable_entries,
)
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")

_MOST_TOLD = 256


class Intake:
    """Decides about requests before they leave the proxy."""

    def __init__(self, source: LiveSettings, compactor: Compactor, calls: Calls, store: Store) -> None:
        self._settings = source.configured
        self._compactor = compactor
        self._calls = calls
        self._publisher = Publisher()
        self._announced = Announced()
        self._inner: httpx.AsyncBaseTransport | None = None
        self._abilities = Abilities()
        # Told once: an agent sends the same tools with every request.
        self._slimmed: Bounded[tuple[str, int], None] = Bounded(_MOST_TOLD)
        self.guards = DeploymentSelector(source, compactor.windows, self._publisher, FormerAnswers(store))
        self.preparing = Preparing(compactor, self.guards, self._publisher)

    async def before_routing(self, router: Any, data: dict[str, Any]) -> None:
        """Guards a chat completion whose every possible deployment has the same window and settings.

        Otherwise only the chosen deployment can say what fits, and the deployment hook decides.

        Args:
            router: LiteLLM's router, None before it is there.
            data: the request's body with LiteLLM's additions; `messages` may be replaced in it.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded: as the engine does.
            BadWish: the client asks for something that is not known.
        """
        guards = await self._reachable(router, data)
        known = [guard for guard in guards if guard is not None]
        request = await _decoded(data) if known else None
        if request is None:
            return
        model = str(data.get("model"))
        call = self._calls.open(data, await self._new_call(request, model, data))
        call.is_chat = True
        cases = await self._certain(router, guards, call, data)
        if not cases:
            return
        if call.bad_wish is not None:
            raise call.bad_wish
        try:
            prepared = await self._compactor.prepare(call.original, cases[0])
            if any(carrier_of(guard.deployment, guard.settings) == "transport" for guard in known):
                # It does the slow part itself, in the open response.
                call.foreseen = Foreseen(cases[0], prepared)
                return
            if isinstance(prepared, CompactionNeeded):
                call.is_told = self._announced.is_next_in_a_row(prepared)
            room = self._compactor.room(cases[0])
            try:
                guarded = await compacted(self._compactor, prepared, room)
            finally:
                room.leave()
        except DoesNotFit:
            if has_window_fallback(router, model):
                return
            raise
        call.sent(cases[0], guarded)
        if guarded.messages is not None:
            data["messages"] = wire.encode(guarded.messages)
            call.leaves(data["messages"])
            call.rewritten = True

    async def refuse_text(self, router: Any, data: Mapping[str, Any]) -> None:
        """Refuses a text completion that fits no deployment that it can reach; nothing else is done with it here.

        Raises:
            DoesNotFit: as the engine does.
        """
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
        cases = await self._certain(router, guards, call, data)
        if not cases or has_window_fallback(router, model):
            return
        with contextlib.suppress(WindowUnknown, ModelNotLoaded):
            prepared: PreparedRequest | CompactionNeeded
            if ids is not None:
                prepared = await self._compactor.bound(ids, cases[0])
            else:
                prepared = await self._compactor.prepare(call.original, cases[0])
            if isinstance(prepared, PreparedRequest):
                prompts = 1 if True in are_bridged else wire.asked_prompts(data)
                await self._refuse_several(prepared, cases, data, prompts=prompts)

    async def _refuse_several(
        self, prepared: PreparedRequest, cases: Sequence[RequestContext], data: Mapping[str, Any], *, prompts: int
    ) -> None:
        """Refuses answers that fit one by one and never together, where each deployment's context is shared by them.

        Raises:
            DoesNotFit: as the engine does.
        """
        answers = self._compactor.answer_counts.expected(cases[0].target, wire.asked_answers(data))
        if prompts * answers <= 1:
            return
        rooms = [self._compactor.room(case) for case in cases]
        for room, case in zip(rooms, cases, strict=True):
            if not room.is_shared(await self._compactor.windows.resolve(case.target)):
                return
        limit_tokens = prepared.max_output_tokens(wire.asked_output_tokens(data))
        rooms[0].check(prepared, limit_tokens, answers=answers, prompts=prompts)

    async def _reachable(self, router: Any, data: Mapping[str, Any]) -> list[GuardedDeployment | None]:
        """Every deployment that a request can reach, None for those that are left alone."""
        model = data.get("model")
        if router is None or not isinstance(model, str):
            return []
        deployments = [self.guards.deployment(entry) for entry in reachable_entries(router, model, data)]
        return [await self.guards.guard(deployment) for deployment in deployments]

    async def _certain(
        self, router: Any, guards: Sequence[GuardedDeployment | None], call: Call, data: Mapping[str, Any]
    ) -> list[RequestContext]:
        """The request for each deployment where all have one window and the same settings; else nothing."""
        known = [guard for guard in guards if guard is not None]
        if not known or call.opted_out or len(known) < len(guards):
            return []
        settings = known[0].settings
        if any(guard.settings != settings for guard in known) or settings.mode != "guard":
            return []
        cases = [await self.guards.case(router, guard, call, data) for guard in known]
        windows = {await self._window_tokens(case) for case in cases}
        return cases if len(windows) == 1 else []

    async def before_deployment(self, router: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The call's arguments with what has to change for the chosen deployment; None when nothing has to.

        Args:
            router: LiteLLM's router, None before it is there.
            kwargs: of the upstream call.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded: as the engine does.
            BadWish: the client asks for something that is not known.
        """
        if router is None:
            return None
        if is_internal_call():
            name_call(router, kwargs)
            return None
        received, kwargs = kwargs, self._as_deployed(router, kwargs)
        metadata = metadata_of(kwargs)
        group = str(metadata.get("model_group") or "") or group_of(router, kwargs)
        deployment = self._deployment_of(kwargs, group)
        call = await self._call_of(kwargs, metadata, deployment)
        guard = await self.guards.guard(deployment)
        if guard is None:
            if call is not None:
                call.attempts.too_long = None
            return {**received, "messages": wire.encode(call.received.messages)} if call and call.rewritten else None
        try:
            return await self._for(guard, call, router, received, kwargs)
        except RecursionError as error:
            if guard.settings.mode == "observe":
                raise
            # How deep a request is nested is the client's choice, and must not switch the guard off.
            raise TooDeep from error

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
        request = call.original if call is not None else await _decoded(kwargs)
        if call is None and request is None and "prompt" in kwargs:
            request = await _decoded_prompt(kwargs, is_bridged=is_bridged(deployment.provider))
            is_carried = carrier == "transport" and (request is None or not is_bridged(deployment.provider))
            if is_carried or await _longest_ids(kwargs) is not None:
                # Only the transport sees what leaves; of token ids nobody sees more than their number.
                request = Request(messages=())
        if request is None or (call is not None and call.opted_out):
            if kwargs is not received and not (call and call.rewritten):
                return {**kwargs}
            return {**kwargs, "messages": wire.encode(call.received.messages)} if call and call.rewritten else None
        if call is None:
            call = self._calls.open(kwargs, await self._new_call(request, deployment.group, kwargs))
            call.begins_attempt(deployment.id)
            request = call.original
        case = await self.guards.case(router, guard, call, kwargs)
        if guard.settings.mode == "observe":
            await self._compactor.observe(request, case)
            return None if kwargs is received else {**kwargs}
        if call.bad_wish is not None:
            raise call.bad_wish
        if carrier == "transport":
            return await self._carried(router, guard, call, case, kwargs)
        is_watched = bool(kwargs.get("stream")) and call.is_chat and wire.can_be_carried_over(kwargs)
        asked_tokens = wire.asked_output_tokens(kwargs)
        ids = None if request.messages else await _longest_ids(kwargs)
        guarded, limit, call.room = await guarded_in_room(
            self._compactor,
            request if ids is None else ids,
            case,
            asked_tokens,
            is_watched=is_watched,
            is_stream=bool(kwargs.get("stream")),
            answers=self._compactor.answer_counts.expected(case.target, wire.asked_answers(kwargs)),
            prompts=1 if is_bridged(deployment.provider) else wire.asked_prompts(kwargs),
        )
        call.sent(case, guarded)
        self._publisher.publish(router, deployment, guarded.window)
        changed = wire.with_output_limit(kwargs, limit)
        if kwargs.get("stream") and call.is_chat:
            changed |= wire.with_usage(kwargs)
        if "prompt" in kwargs and not kwargs.get("messages"):
            changed |= await _with_prompt(kwargs, request, guarded.messages) if guarded.messages is not None else {}
        elif guarded.messages is not None:
            changed["messages"] = wire.encode(guarded.messages)
        elif call.rewritten or call.original is not call.received:
            changed["messages"] = wire.encode(call.original.messages)
        return {**kwargs, **changed, **_slim_tools(call, kwargs)}

    def before_bridging(self, router: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call that LiteLLM may bridge to a chat completion, with its deployment's own provider.

        With a client's, LiteLLM would send it to the same server by a way on which nothing is guarded. None where
        nothing has to change.
        """
        if is_internal_call() or router is None:
            return None
        changed = self._as_deployed(router, kwargs)
        return None if changed is kwargs else {**changed}

    def _deployment_of(self, kwargs: Mapping[str, Any], group: str) -> Deployment:
        info = kwargs.get("model_info")
        written = self._publisher.as_written(info) if isinstance(info, Mapping) else {}
        return deployment_of(kwargs, written, group=group, environ=os.environ)

    def _as_deployed(self, router: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call as the deployment's own entry has them; of one that is left alone as they came."""
        info = kwargs.get("model_info")
        found = router.get_deployment(model_id=str(info.get("id"))) if isinstance(info, Mapping) else None
        if found is None:
            return kwargs
        own = self.guards.deployment(as_entry(found))
        return kwargs if own.kind == "foreign" else wire.without_overrides(kwargs, own.provider)

    async def _call_of(
        self, kwargs: Mapping[str, Any], metadata: Mapping[str, Any], deployment: Deployment
    ) -> Call | None:
        """What is remembered of the request that a deployment is asked for; None for nothing.

        Where the messages are others by now, only what does not depend on them.
        """
        call = self._calls.get(kwargs)
        if call is None:
            return None
        call.begins_attempt(deployment.id)
        tenant = tenant_of(metadata)
        messages, tools = kwargs.get("messages"), kwargs.get("tools") or kwargs.get("functions")
        extras = wire.extras_of(kwargs)
        if await off_loop_if(is_long(messages, tools), lambda: call.is_of(tenant, messages, tools, extras)):
            return call
        request = await _decoded(kwargs) if call.tenant == tenant else None
        if request is None:
            self._calls.close(kwargs)
            return None
        fresh = await self._new_call(request, deployment.group, kwargs)
        fresh.is_chat, fresh.attempts = call.is_chat, call.attempts
        fresh.begins_attempt(deployment.id)
        return self._calls.open(kwargs, fresh)

    async def _carried(
        self, router: Any, guard: GuardedDeployment, call: Call, case: RequestContext, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The call's arguments with a client that carries the answer over the limit."""
        # Text completions show their messages only to the transport, which then prepares them itself.
        has_messages = bool(call.original.messages)
        # For the first attempt only: a later one may come minutes after.
        foreseen, call.foreseen = call.foreseen, None
        prepared = await self._compactor.prepared_for(call.original, case, foreseen) if has_messages else None
        changed: dict[str, Any] = {}
        if call.original is not call.received:
            changed["messages"] = wire.encode(call.original.messages)
        call.is_carried = True
        if isinstance(prepared, PreparedRequest):
            call.sent(case, prepared)
            self._publisher.publish(router, guard.deployment, prepared.window)
        elif prepared is not None:
            call.will_be_compacted(prepared)
            call.is_told = self._announced.is_next_in_a_row(prepared)
        # LiteLLM logs and bills by the usage chunk, and keeps it from a client that did not ask for it.
        asked = self._asked(call, case, kwargs, wants_usage=True)
        call.begins_silently = not call.is_chat and (asked.is_json or asked.notices.before == "off")
        inner = self._inner_transport()
        transport = GuardedTransport(inner, self._compactor, case, asked, prepared, call, self._abilities)
        target = guard.deployment.target
        return {
            **kwargs,
            **changed,
            **_slim_tools(call, kwargs),
            "client": client_over(transport, api_base=str(target.api_base), api_key=target.api_key),
        }

    def hooked_answer(self, router: Any, call: Call, first: Any, data: Mapping[str, Any], *, stream: bool) -> Hooked:
        """How an answer that LiteLLM has opened is carried over the limit by its hooks.

        Args:
            router: LiteLLM's router.
            call: the request that it answers; it has been sent.
            first: LiteLLM's stream or response.
            data: the client's request as the hooks see it.
            stream: whether `first` is a stream.
        """
        case, guarded = call.case, call.guarded
        assert case is not None and guarded is not None  # noqa: S101, PT018 - the caller asked `call.was_sent`
        call.is_read = True
        upstream = HookedUpstream(first, router, call.pin, {**data, **_slim_tools(call, data)})
        asked = self._asked(call, case, data, wants_usage=call.asks_for_usage)
        if not stream:
            asked = replace(asked, notices=asked.notices.at_the_end_only, is_whole=True)
        carried = upstream if stream else Whole(upstream)
        # A compaction that an earlier hook made is reused by this one, and still news for the client.
        told = replace(guarded, action=call.action)
        answer = Answer(self._compactor, case, carried, asked, told, call, room=call.room, is_watched=stream)
        return Hooked(answer, upstream, guarded)

    def learn_answers(self, call: Call, data: Mapping[str, Any], choices: int) -> None:
        """Takes note of how many answers came to a request that the hooks carry, where it asks for several.

        Args:
            call: the request.
            data: as the hooks see it.
            choices: of all its answers, at their end.
        """
        asked = wire.asked_answers(data)
        if asked and call.case is not None and wire.asked_prompts(data) == 1:
            self._compactor.answer_counts.learn(call.case.target, asked, choices)

    def _asked(self, call: Call, case: RequestContext, body: Mapping[str, Any], *, wants_usage: bool) -> Asked:
        notices = notices_for(
            case.settings.notices, body, is_document=call.is_structured, is_whole=not body.get("stream")
        )
        if call.is_client_summary:
            # It keeps the answer in place of its history.
            notices = SILENT
        elif call.is_told:
            notices = notices._replace(before="off")
        return Asked(
            request=call.original,
            output_tokens=wire.asked_output_tokens(body),
            is_json=call.is_structured,
            notices=notices,
            wants_usage=wants_usage,
            stops=wire.stops(body),
            said=call.said,
        )

    def _inner_transport(self) -> httpx.AsyncBaseTransport:
        """The connection pool that all guarded deployments share, made in the running loop."""
        if self._inner is None:
            self._inner = connect()
        return self._inner

    async def _new_call(self, received: Request, group: str, body: Mapping[str, Any]) -> Call:
        long = is_long(body.get("messages"), received.tools) or _has_long_prompt(body)
        call = await off_loop_if(long, lambda: self._call_from(received, group, body))
        if call.slimmed_chars and (group, call.slimmed_chars) not in self._slimmed:
            self._slimmed[(group, call.slimmed_chars)] = None
            logger.info(
                "tool_schemas_slimmed model=%s tools=%d saved_chars=%d", group, len(received.tools), call.slimmed_chars
            )
        return call

    def _call_from(self, received: Request, group: str, body: Mapping[str, Any]) -> Call:
        messages = tuple(cleaned(message) for message in received.messages)
        route = str(metadata_of(body).get("user_api_key_request_route") or "")
        bad_wish: CompactionError | None = wire.not_served(sent_body(body), route, keeps_responses=has_database())
        try:
            wish = wish_of(body, metadata_of(body))
        except BadWish as error:
            # Told only where it is guarded: a deployment that is just observed answers as ever.
            wish, bad_wish = NONE, error
        is_client_summary = self._settings.mode == "guard" and asks_for_summary(messages, told_headers(body))
        unchanged = all(new is old for new, old in zip(messages, received.messages, strict=True))
        slim = self._settings.tool_schemas == "slim" and self._settings.mode == "guard"
        tools, saved_chars = slimmed(received.tools) if slim else Slimmed(received.tools, 0)
        call = Call(
            received=received,
            original=received
            if unchanged and not saved_chars
            else replace(received, messages=messages, tools=tools if saved_chars else received.tools),
            slimmed_chars=saved_chars,
            group=group,
            attempts=Attempts(summary_calls_left=self._settings.max_summary_calls),
            tenant=tenant_of(metadata_of(body)),
            opted_out=self._settings.allow_opt_out and wish.off,
            wish=wish,
            bad_wish=bad_wish,
            is_client_summary=is_client_summary,
            asks_for_usage=wire.asks_for_usage(body),
            is_structured=wire.is_structured(body),
            said=wire.client_texts(body),
        )
        call.leaves(body.get("messages"))
        return call

    async def _window_tokens(self, case: RequestContext) -> int:
        """The window as far as known without loading anything; 0 when unknown."""
        try:
            return (await self._compactor.windows.resolve(case.target)).tokens
        except CompactionError:
            return 0


async def _decoded(body: Mapping[str, Any]) -> Request | None:
    """The request in a body; read beside the event loop where that takes long."""
    return await off_loop_if(is_long(body.get("messages")), lambda: wire.decode(body))


def _slim_tools(call: Call, body: Mapping[str, Any]) -> dict[str, Any]:
    """The tools of a body as they are sent, where they are not as they came."""
    if not call.slimmed_chars:
        return {}
    return {"tools" if body.get("tools") else "functions": list(call.original.tools)}


def _has_long_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    return is_long(prompt, [prompt])


async def _decoded_prompt(body: Mapping[str, Any], *, is_bridged: bool = True) -> Request | None:
    """The request in a text completion's body; likewise."""
    return await off_loop_if(_has_long_prompt(body), lambda: wire.decode_prompt(body, is_bridged=is_bridged))


async def _longest_ids(body: Mapping[str, Any]) -> int | None:
    return await off_loop_if(_has_long_prompt(body), lambda: wire.longest_ids(body))


async def _with_prompt(body: Mapping[str, Any], request: Request, sent: Sequence[Message]) -> dict[str, Any]:
    return await off_loop_if(_has_long_prompt(body), lambda: wire.with_prompt(body, request, sent))
