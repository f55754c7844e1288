"""Follows a guarded request's answer through LiteLLM's hooks: its stream, its end, its failure, its headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from litellm_compaction.engine import Compactor, RequestContext
from litellm_compaction.errors import LiteLLMChanged
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.answer.client import SILENT, Asked, notices_for
from litellm_compaction.proxy.answer.legs import UNNAMED, judged
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import with_heartbeat
from litellm_compaction.proxy.client import sent_body
from litellm_compaction.proxy.exchange import Exchange, Exchanges
from litellm_compaction.proxy.refusals import Refusal, failing_open, log_refused, reworded
from litellm_compaction.proxy.standards.orders import NO_ORDERS
from litellm_compaction.proxy.standards.standards import Standards

# A request of OpenAI's Responses has it; the only other route with orders is Anthropic's.
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of requests under way."""

    compactor: Compactor
    exchanges: Exchanges
    standards: Standards
    heartbeat_s: float  # A stream is silent for no longer than this while a compaction is made.
    router: Callable[[], Any]  # LiteLLM's.
    fault: Callable[[], LiteLLMChanged | None]  # What is missing by which requests are guarded.

    async def streamed(self, response: Any, data: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """LiteLLM's stream for a client: carried over the limit where the hooks do that, never silent."""
        exchange = self.exchanges.get(data)
        if exchange is None:
            async for chunk in response:
                yield chunk
            return
        is_carried_here = exchange.is_hooked and wire.can_be_continued(data)
        stream = self._hooked(exchange, response, data) if is_carried_here else response
        told = self._told(stream, exchange)
        if (orders := exchange.client.orders) is not NO_ORDERS and orders.shows:
            told = self.standards.showing(told, exchange, is_messages=_INPUT not in data)
        try:
            async for chunk in told:
                yield chunk
        finally:
            await told.aclose()
            if is_carried_here:
                await stream.aclose()
            self.exchanges.close(data)

    async def _told(self, stream: Any, exchange: Exchange) -> AsyncGenerator[Any, None]:
        async for chunk in with_heartbeat(stream, exchange, every_s=self.heartbeat_s):
            yield wire.with_details(chunk, exchange.attempt.details)

    def _hooked(self, exchange: Exchange, first: Any, data: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Carries a stream that LiteLLM has opened over the limit by its hooks."""
        from litellm_compaction.proxy.answer.upstream import HookedUpstream

        context, prepared = exchange.attempt.context, exchange.attempt.prepared
        assert context is not None and prepared is not None  # noqa: S101, PT018 - the caller asked `is_hooked`
        upstream = HookedUpstream(first, self.router(), exchange.pin, data)
        asked = asked_of(exchange, context, data, wants_usage=wire.asks_for_usage(data))
        # A compaction that an earlier hook made is reused by this one, and still news for the client.
        told = replace(prepared, action=exchange.attempt.action)
        # None if the deployment hook has failed open.
        room = exchange.room or self.compactor.room(context)
        answer = Answer(self.compactor, context, upstream, asked, told, exchange, room)
        return upstream.carried(answer, prepared)

    async def whole(self, response: Any, data: Mapping[str, Any]) -> Any:
        """An answer that is not streamed, with its details; None to leave it as it is."""
        exchange = self.exchanges.get(data)
        if exchange is None:
            return None
        context, prepared, usage = exchange.attempt.context, exchange.attempt.prepared, wire.usage_of(response)
        is_ours = exchange.is_hooked and wire.can_be_continued(data)
        if is_ours and usage is not None and context is not None and prepared is not None:
            # The transport learns from the answers that it carries.
            with failing_open("learn"):
                self.compactor.replies.learn(context, prepared, **usage._asdict())
        told = wire.with_details(response, exchange.attempt.details)
        if (orders := exchange.client.orders) is not NO_ORDERS and orders.shows:
            return await self.standards.shown(told, exchange, is_messages=_INPUT not in data)
        return told if exchange.attempt.details is not None else None

    def failed(self, data: Mapping[str, Any], error: Exception) -> Refusal | None:
        """Learns from an overflow that came in spite of us, forgets the request, and words its error for clients.

        LiteLLM tells the returned error, but for /v1/messages and inside streams, where it tells the error's `message`.
        """
        exchange = self.exchanges.close(data)
        if exchange is None:
            return reworded(self.fault(), error, is_guarded=False)
        sent, client = exchange.attempt, exchange.client
        self._learn(exchange, str(error))
        told = reworded(exchange.refusal, error, is_guarded=sent.prepared is not None, client_text=client.client_text)
        if told is not None and exchange.refusal is not None:
            log_refused(client.group, exchange.refusal)
        if told is not None and hasattr(error, "message"):
            error.message = told.message
            error.status_code = told.status_code  # type: ignore[attr-defined] # LiteLLM's own errors have it
        return told

    def _learn(self, exchange: Exchange, message: str) -> None:
        """Learns from an overflow that no loop has read; the loop learns from its own streams itself."""
        context, prepared = exchange.attempt.context, exchange.attempt.prepared
        if context is None:
            return
        overflow, client_text = None, exchange.client.client_text
        with failing_open("learn_overflow"):
            if prepared is not None:
                used_tokens, window_tokens = prepared.count.high, prepared.window.tokens
                overflow = judged(message, client_text, used_tokens=used_tokens, window_tokens=window_tokens)
            self.compactor.replies.learn_overflow(context, prepared, overflow or UNNAMED)

    def headers(self, data: Mapping[str, Any]) -> dict[str, str] | None:
        """The headers that tell clients of guarded deployments about the changes to their request.

        LiteLLM asks for them after the success hook and before a stream's first chunk: the last word on an answer that
        is not streamed.
        """
        exchange = self.exchanges.get(data) if data.get("stream") else self.exchanges.close(data)
        return exchange.headers if exchange is not None else None


def asked_of(exchange: Exchange, context: RequestContext, body: Mapping[str, Any], *, wants_usage: bool) -> Asked:
    """The client's wishes, as far as the loop that carries its answer has to know; `body` is its request."""
    client = exchange.client
    # A client that summarizes keeps the answer in place of its history.
    is_kept = client.is_client_summary or client.orders.wants_item
    notices = SILENT if is_kept else notices_for(context.settings.notices, body)
    return Asked(
        request=client.original,
        output_tokens=wire.asked_output_tokens(body),
        is_json=wire.is_structured(body),
        notices=notices,
        wants_usage=wants_usage,
        stops=wire.stops(body),
        thoughts_tokens=wire.asked_thoughts_tokens(sent_body(body) or body),
        client_text=client.client_text,
    )
