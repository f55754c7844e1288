"""The CustomLogger that `config.yaml` names: guards a client's request on its way out, and follows its answer back.

LiteLLM calls the pre-call, iterator and header hooks only when the instance's own class body defines them
(utils.py: `vars(cls)`), so they all stand here, and this class is never subclassed. The first one decides as soon as
the window is certain, the second installs the client that carries the answer; the others follow it through LiteLLM.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
from litellm.integrations.custom_logger import CustomLogger

from litellm_compaction.concurrency import hold_contexts
from litellm_compaction.config import Settings
from litellm_compaction.engine import Decided, PreparedRequest, RequestContext
from litellm_compaction.errors import NO_CHAT, TOO_DEEP, CompactionError, NotServed
from litellm_compaction.events import HarmlessRecords
from litellm_compaction.proxy import litellm_inside, refusals, wire
from litellm_compaction.proxy.answer.client import SILENT, Asked, notices_for, shows_late_thoughts
from litellm_compaction.proxy.answer.hooks import HookedUpstream
from litellm_compaction.proxy.answer.legs import UNNAMED, Leg, judged
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.transport import GuardedTransport, client_over
from litellm_compaction.proxy.client import (
    NONE,
    Body,
    mapping,
    metadata_of,
    note_credential,
    opts_out,
    raw_headers,
    sent_body,
    wish_of,
)
from litellm_compaction.proxy.exchange import NO_ORDERS, Exchange, Exchanges, context_of, note_of, pin_of, serve
from litellm_compaction.proxy.internal import OWN_TAG, is_internal_call
from litellm_compaction.proxy.litellm_inside import connect, current_router, keeps_responses
from litellm_compaction.proxy.presence import BEAT, beats, while_here
from litellm_compaction.proxy.routing import Deployment, id_of
from litellm_compaction.proxy.service import Service, load_settings, provide_environment
from litellm_compaction.proxy.standards.protocols import not_served

logger = logging.getLogger("litellm_compaction")
_harmless = HarmlessRecords()
# LiteLLM's kinds of calls (litellm/types/utils.py, `CallTypes`): those that are guarded; routes with a client's orders;
# all that LiteLLM turns into chats, with "" for what it does not name; words in the names without a conversation.
_GUARDED_CALLS = frozenset({"acompletion", "atext_completion"})
_BRIDGED_CALLS = frozenset({"anthropic_messages", "aresponses"})
_BECOME_CHATS = _BRIDGED_CALLS | {"_aresponses_websocket", "agenerate_content", "agenerate_content_stream", ""}
_ASIDE = re.compile("embedding|rerank|moderation|transcription|speech|image|video|ocr|search|batch|file|fine_tuning")


def load_handler() -> CompactionHandler:
    """The handler with the settings of the configuration that LiteLLM is loading.

    A ConfigError (a setting is unknown or bad) or LiteLLMChanged (it would not call us) keeps LiteLLM from starting.
    """
    logger.addFilter(_harmless)
    if not logger.handlers:
        # LiteLLM configures its own loggers only; ours would have no format, and lines of compactions no place.
        output = logging.StreamHandler()
        output.setFormatter(logging.Formatter("%(asctime)s - %(name)s:%(levelname)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(output)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    litellm_inside.check_classes(name for name in vars(CompactionHandler) if name.startswith("async_"))
    hold_contexts()
    provide_environment()
    handler = CompactionHandler(load_settings())
    handler.service.start()
    return handler


class CompactionHandler(CustomLogger):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
    """Guards LM Studio deployments of a stock LiteLLM proxy."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        service = self.service = Service(settings)
        self._guards, self._compactor, self._standards = service.guards, service.compactor, service.standards
        self._exchanges = Exchanges()
        self._inner: httpx.AsyncBaseTransport | None = None

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any] | None:
        """Phase 1 and 2 before a request is routed, if its window is already certain: measured, decided or refused."""
        serve(data)
        note_credential(raw_headers(data))
        try:
            await self._before_routing(current_router(), data, call_type)
        except CompactionError as error:
            note_of(data).close()
            refusals.log_refused(str(data.get("model")), error)
            raise refusals.Refusal(error) from error
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            refusals.log_failure("pre_call", error)
        return None

    async def _before_routing(self, router: Any, data: dict[str, Any], call_type: str) -> None:
        """Decides about a request that can only reach one model of one server; takes a client's orders out of `data`.

        A CompactionError cannot be served, or asks for something that cannot be followed.
        """
        if call_type in _BRIDGED_CALLS:
            # LiteLLM, and deployments that are left alone, have their own way with it.
            if await self._guards.is_guarded(router, data):
                await self._standards.read_orders(data)
            return
        deployments = await self._guards.reachable(router, data) if call_type in _GUARDED_CALLS else []
        if (first := next(filter(None, deployments), None)) is None:
            return
        is_chat, group = call_type == "acompletion", str(data.get("model"))
        exchange = await self._exchanges.of(data, group, self._guards.configured, is_chat=is_chat)
        is_certain = first.does_guard and all(each is not None and each.shape == first.shape for each in deployments)
        if exchange is None or not is_certain or exchange.opted_out:
            return
        with while_here():
            context = await context_of(router, self._guards, first, exchange, data)
            exchange.decided = await self._decided(exchange, context)
            if is_chat and first.carrier == "hooks":
                # The transport does the slow part itself, in the open response.
                room = exchange.room = self._compactor.room(context)
                exchange.decided = prepared = await self._compactor.finish(exchange.decided, room)
                exchange.sent(prepared)

    async def _decided(self, exchange: Exchange, context: RequestContext) -> Decided:
        """Decides what to send, or to make first; what was done when this deployment was foreseen is not done again."""
        foreseen, exchange.decided = exchange.decided, None
        return await self._compactor.prepare(exchange.original, context, foreseen)

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Phase 1 and 2 for the chosen deployment: its own window, its own bound on the answer."""
        # LiteLLM names no kind for some calls.
        router, kind = current_router(), str(getattr(call_type, "value", call_type) or "")
        if router is None or _ASIDE.search(kind):
            return None
        # Also if nothing else changes, or something fails: LiteLLM could not reach the server.
        changed = own = wire.from_chats_alone(kwargs)
        try:
            if not is_internal_call.get():
                changed = await self._changed(router, own, kind)
            elif kind in _GUARDED_CALLS:
                changed = self._of_ours(router, own)
        except Exception as error:
            exchange = note_of(kwargs).exchange
            too_long = exchange.attempts.too_long if exchange is not None else None
            refusal = error if isinstance(error, CompactionError) else too_long and too_long()
            if exchange is not None:
                exchange.refusal = refusal
            elif refusal is not None:
                note_of({}).refusal = note_of(kwargs).refusal = refusal
                refusals.log_refused(str(kwargs.get("model")), refusal)
            if refusal is not error:
                refusals.log_failure("deployment", error, is_too_long=too_long is not None)
            if refusal is not None:
                raise refusals.litellm_error_of(refusal, kwargs) from error
        return None if changed is kwargs else {**changed}

    def _of_ours(self, router: Any, kwargs: Body) -> Body:
        """The arguments of a call that we make ourselves, which nobody guards."""
        metadata, info = kwargs.get("metadata"), mapping(kwargs.get("model_info"))
        if isinstance(metadata, dict) and info:
            # LiteLLM's books know it by a tag, and by its deployment's `model_name`.
            metadata["tags"] = [*(metadata.get("tags") or ()), OWN_TAG]
            if (group := metadata.get("model_group")) == info.get("id"):
                metadata["model_group"] = litellm_inside.deployment(router, str(group)).get("model_name") or group
        deployment = self._guards.called(router, kwargs)
        # A summary of half of a text, or a count of it, is as wrong as an answer to it.
        extra = wire.refusing(kwargs, deployment.provider)
        if not deployment.is_foreign and deployment.carrier == "transport":
            extra |= wire.as_chat(kwargs)
        return {**kwargs, **extra} if extra else kwargs

    async def _changed(self, router: Any, received: Body, kind: str) -> Body:
        """The arguments of a call of a client's; the same object if nothing changes."""
        kwargs = received
        if received.get("custom_llm_provider") or received.get("extra_body"):
            # The body may name another kind of server than the deployment's own entry.
            own = self._guards.deployment(litellm_inside.deployment(router, id_of(received)))
            kwargs = received if own.is_foreign else wire.without_overrides(received, own.provider)
        called, exchange = self._guards.called(router, kwargs), note_of(kwargs).exchange
        deployment = await self._guards.guard(called)
        if deployment is None:
            if exchange is not None and kind in _GUARDED_CALLS:
                exchange.begins_attempt(called)
                exchange.attempts.too_long = exchange.decided = None
            return received
        if deployment.does_guard:
            fault = await self._guards.faults.get((router, deployment.carrier == "transport"))
            if fault is not None:
                raise fault
        if kind not in _GUARDED_CALLS:
            # LiteLLM itself makes it of a chat that has been prepared.
            before = exchange.deployment if exchange is not None and exchange.is_hooked else None
            is_prepared = before is not None and before.id == deployment.id
            call = kwargs if is_prepared else self._bridged(deployment, kwargs, kind) if deployment.does_guard else None
            return call or received
        try:
            with while_here():
                call = await self._guarded(deployment, router, kwargs)
                return call if deployment.does_guard and call is not kwargs else received
        except RecursionError as error:
            if not deployment.does_guard:
                raise
            # How deep a request is nested is the client's choice, and must not switch the guard off.
            raise NotServed(TOO_DEEP) from error

    def _bridged(self, deployment: Deployment, kwargs: Body, kind: str) -> Body | None:
        """The arguments of another call, for LiteLLM to make a chat of it; None for one that is to be left alone."""
        metadata, is_allowed = metadata_of(kwargs), deployment.settings.allow_opt_out
        opted_out = opts_out(wish_of(kwargs, metadata) if is_allowed else NONE, metadata, is_allowed=is_allowed)
        # What its client keeps of a conversation is unfolded in a chat.
        if opted_out and note_of(kwargs).orders is None:
            return None
        if kind not in _BECOME_CHATS:
            raise NotServed(NO_CHAT)
        if not opted_out and (refusal := not_served(kwargs, kind, keeps=keeps_responses)) is not None:
            raise refusal
        return wire.to_chats_alone(kwargs, deployment.provider)

    async def _guarded(self, deployment: Deployment, router: Any, kwargs: Body) -> Body:
        """The arguments of a chat or text completion for a guarded deployment."""
        exchange = await self._exchanges.of(kwargs, deployment.group, self._guards.configured)
        if exchange is None:
            return kwargs
        exchange.begins_attempt(deployment)
        if exchange.opted_out:
            return _cleaned(exchange, kwargs) if exchange.orders.portable is not None else kwargs
        context = await context_of(router, self._guards, deployment, exchange, kwargs)
        if not deployment.does_guard:
            await self._compactor.observe(exchange.original, context)
            return kwargs
        if exchange.orders is not NO_ORDERS and await self._standards.answers(exchange, context):
            # LiteLLM answers nothing then; it would make as many such answers as a client has asked for.
            return {**kwargs, "mock_response": " ", "n": None}
        # What was ordered to go has been taken out of it.
        call = _cleaned(exchange, kwargs)
        if deployment.carrier == "transport":
            return {**call, **await self._carried(exchange, context, kwargs)}
        return {**call, **await self._bounded(exchange, context, kwargs), **wire.refusing(kwargs, deployment.provider)}

    async def _bounded(self, exchange: Exchange, context: RequestContext, kwargs: Body) -> dict[str, Any]:
        """The changes to a call whose answer LiteLLM's hooks carry."""
        is_chat, is_stream = exchange.is_chat, bool(kwargs.get("stream"))
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
        exchange.sent(prepared)
        changed = Leg(prepared=prepared, max_tokens=limit).changes(kwargs)
        return changed | wire.added(kwargs, wire.REPORTS_USAGE) if is_stream and is_chat else changed

    async def _carried(self, exchange: Exchange, context: RequestContext, kwargs: Body) -> dict[str, Any]:
        """The changes to a call: a client whose transport compacts it, and carries its answer over the limit."""
        exchange.decided = prepared = await self._decided(exchange, context)
        if isinstance(prepared, PreparedRequest):
            exchange.sent(prepared)
        else:
            # It is made while the answer is already open.
            exchange.prepared, exchange.action, exchange.may_pause = None, "compacted", True
        # LiteLLM logs and bills by the usage chunk, and keeps it from a client that did not ask for it.
        asked = _asked_of(exchange, context, kwargs, wants_usage=True)
        exchange.begins_silently = not exchange.is_chat and (asked.is_json or asked.notices.before == "off")
        # The connection pool that all guarded deployments share, made in the running loop.
        self._inner = self._inner or connect()
        transport = GuardedTransport(self._inner, self._compactor, context, asked, prepared, exchange)
        openai_client = client_over(transport, api_base=str(context.target.api_base), api_key=context.target.api_key)
        return {**wire.as_chat(kwargs), "client": openai_client}

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Phase 3 if the hooks carry it, and a heartbeat while a compaction keeps any stream silent."""
        exchange = note_of(request_data).exchange
        if exchange is None:
            async for chunk in response:
                yield chunk
            return
        # As the first call had it.
        asked = wire.without_overrides(request_data, "")
        is_carried_here = exchange.is_hooked and wire.can_be_continued(asked)
        stream = self._hooked(exchange, response, asked) if is_carried_here else response
        beats(lambda: exchange.may_pause, every_s=self._guards.configured.constants.heartbeat_s)
        shown = (wire.with_details(chunk, exchange.details) async for chunk in stream)
        if exchange.orders.shows:
            shown = self._standards.showing(shown, exchange, request_data)
        try:
            if exchange.may_pause and exchange.begins_silently:
                # LiteLLM's router keeps what opens Responses and Messages until some of the answer has come.
                yield BEAT
            async for chunk in shown:
                yield chunk
        finally:
            await shown.aclose()
            if is_carried_here:
                await stream.aclose()
            note_of(request_data).close()

    def _hooked(self, exchange: Exchange, first: Any, data: Body) -> AsyncGenerator[Any, None]:
        """Carries a stream that LiteLLM has opened over the limit by its hooks."""
        prepared, deployment, room = exchange.prepared, exchange.deployment, exchange.room
        assert prepared and deployment and room  # noqa: S101, PT018 - the caller asked `is_hooked`
        context, router = prepared.measured.context, current_router()
        upstream = HookedUpstream(first, router, pin_of(router, deployment, exchange.group), data)
        asked = _asked_of(exchange, context, data, wants_usage=wire.asks_for_usage(data))
        # A compaction that an earlier hook made is reused by this one, and still news for the client.
        told = replace(prepared, action=exchange.action)
        answer = Answer(self._compactor, context, upstream, asked, told, exchange, room)
        return upstream.carried(answer, prepared)

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> Any:
        """Learns from an answer that is not streamed, and tells if the window has ended it; None leaves it as it is."""
        exchange = note_of(data).exchange
        if exchange is None:
            return None
        prepared, usage = exchange.prepared, wire.usage_of(response)
        if exchange.is_hooked and wire.can_be_continued(data) and usage is not None and prepared is not None:
            # The transport learns from the answers that it carries.
            with refusals.failing_open("learn"):
                self._compactor.replies.learn(prepared.measured.context, prepared, **usage._asdict())
        detailed = wire.with_details(response, exchange.details)
        if exchange.orders.shows:
            return await self._standards.shown(detailed, exchange, data)
        return detailed if exchange.details is not None else None

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], original_exception: Exception, *_: Any, **__: Any
    ) -> refusals.Refusal | None:
        """Learns from an overflow that came in spite of us, forgets the request, and words its error for clients."""
        error, note, client_text = original_exception, note_of(request_data), wire.client_texts(request_data)
        exchange = note.close()
        prepared, refusal = (exchange.prepared, exchange.refusal) if exchange else (None, note.refusal)
        if prepared is not None:
            with refusals.failing_open("learn_overflow"):
                # No loop has read it: that learns from its own streams itself.
                used_tokens, window_tokens = prepared.count.high, prepared.window.tokens
                overflow = judged(str(error), client_text, used_tokens=used_tokens, window_tokens=window_tokens)
                self._compactor.replies.learn_overflow(prepared.measured.context, prepared, overflow or UNNAMED)
        reworded = refusals.reworded(refusal, error, is_guarded=prepared is not None, client_text=client_text)
        if reworded is not None and refusal is not None and exchange is not None:
            refusals.log_refused(exchange.group, refusal)
        if reworded is not None and hasattr(error, "message"):
            # LiteLLM tells this one for /v1/messages and inside streams.
            error.message = reworded.message
            error.status_code = reworded.status_code  # type: ignore[attr-defined] # LiteLLM's own errors have it
        return reworded

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], *_: Any, **__: Any
    ) -> dict[str, str] | None:
        """The headers for clients of guarded deployments; of an answer that is not streamed LiteLLM's last question."""
        exchange = note_of(data).exchange if data.get("stream") else note_of(data).close()
        return exchange.headers if exchange is not None else None


def _cleaned(exchange: Exchange, kwargs: Body) -> Body:
    """A call with the client's messages without notices that came back with them."""
    is_changed = exchange.original is not exchange.received and kwargs.get("messages")
    return {**kwargs, "messages": wire.encode(exchange.original.messages)} if is_changed else kwargs


def _asked_of(exchange: Exchange, context: RequestContext, body: Body, *, wants_usage: bool) -> Asked:
    """The client's wishes, as far as the loop that carries its answer has to know; `body` is its request."""
    # A client that summarizes keeps the answer in place of its history.
    is_kept = exchange.is_client_summary or exchange.orders.wants_item
    return Asked(
        request=exchange.original,
        output_tokens=wire.asked_output_tokens(body),
        is_json=wire.is_structured(body),
        notices=SILENT if is_kept else notices_for(context.settings.notices, body),
        wants_usage=wants_usage,
        stops=wire.stops(body),
        thoughts_tokens=wire.asked_thoughts_tokens(sent_body(body) or body),
        client_text=wire.client_texts(body),
        takes_late_thoughts=shows_late_thoughts(body),
    )
