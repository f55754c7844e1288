"""Reads a client's request once, for all phases: its conversation, its wishes, and what kind of request it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from litellm_compaction.concurrency import is_long, off_loop_if
from litellm_compaction.config import Settings
from litellm_compaction.core.messages import Request, cleaned
from litellm_compaction.core.transcripts import is_client_summary as asks_for_summary
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import BadWish, CompactionError
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.beside import Conversations, asks_for_little
from litellm_compaction.proxy.client import is_off_for_owner, metadata_of, sent_body, tenant_of, told_headers
from litellm_compaction.proxy.exchange import ClientRequest, Exchange, Exchanges
from litellm_compaction.proxy.litellm_inside.application import keeps_responses
from litellm_compaction.proxy.standards.orders import NO_ORDERS
from litellm_compaction.proxy.wish import NONE, wish_of


class Reader:
    """Reads requests as the operator's settings want it.

    Args:
        exchanges: have what a request's protocol says of its context.
    """

    def __init__(self, settings: Settings, exchanges: Exchanges) -> None:
        self._settings = settings
        self._exchanges = exchanges
        self._conversations = Conversations()

    async def exchange(
        self, received: Request, group: str, body: Mapping[str, Any], *, is_chat: bool = False
    ) -> Exchange:
        """What is to be done for a request, before anything is.

        Args:
            received: the conversation in `body`.
            group: the model name that it is filed under.
            body: of the request, with LiteLLM's metadata.
            is_chat: the client speaks chat completions.
        """
        prompt = body.get("prompt")
        long = is_long(body.get("messages"), received.tools) or is_long(prompt, [prompt])
        client = await off_loop_if(long, lambda: self._client(received, group, body, is_chat=is_chat))
        return Exchange(
            client=client,
            attempts=Attempts(summary_calls_left=self._settings.constants.max_summary_calls),
            in_hand=received if body.get("messages") else None,
        )

    def _client(self, received: Request, group: str, body: Mapping[str, Any], *, is_chat: bool) -> ClientRequest:
        orders, metadata = self._exchanges.orders(body), metadata_of(body)
        sent, bases = (orders or NO_ORDERS).unfolded(received.messages)
        messages = tuple(cleaned(message) for message in sent)
        is_same = sent is received.messages and all(new is old for new, old in zip(messages, sent, strict=True))
        original = received if is_same else replace(received, messages=messages)
        bad_wish: CompactionError | None = wire.not_served(
            sent_body(body),
            str(metadata.get("user_api_key_request_route") or ""),
            keeps_responses=keeps_responses(),
            is_read=orders is not None,
        )
        try:
            wish = wish_of(body, metadata)
        except BadWish as error:
            # Told only if it is guarded: a deployment that is just observed answers as ever.
            wish, bad_wish = NONE, error
        headers, tenant = told_headers(body), tenant_of(metadata)
        is_client_summary, is_beside = self._kind(tenant, original, headers, wire.asked_output_tokens(body))
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
            orders=orders or NO_ORDERS,
            bases=bases,
        )

    def _kind(
        self, tenant: str, request: Request, headers: Mapping[str, str], asked_tokens: int | None
    ) -> tuple[bool, bool]:
        """Returns if a client summarizes its conversation itself, or asks beside it, and if that goes on unchanged."""
        if self._settings.mode != "guard":
            return False, False
        has_tools = bool(request.tools)
        if asks_for_summary(request.messages, headers, has_tools=has_tools):
            return True, asks_for_little(asked_tokens)
        is_beside = self._conversations.is_beside(
            tenant, request.messages, has_tools=has_tools, asked_tokens=asked_tokens
        )
        return is_beside, is_beside
