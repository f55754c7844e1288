"""Follows what clients order about their context in their protocols' words, and tells them in the same.

`Guard` asks it on a request's way in, the callback on the answer's way out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from litellm_compaction.core.clear_order import ClearOrder, cleared
from litellm_compaction.engine import Compactor, PreparedRequest, RequestContext
from litellm_compaction.proxy.answer.hooks import compacted
from litellm_compaction.proxy.client import metadata_of, tenant_of
from litellm_compaction.proxy.exchange import Exchange, Exchanges
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.standards import messages, responses
from litellm_compaction.proxy.standards.items import Items
from litellm_compaction.proxy.standards.orders import NO_ORDERS, returned
from litellm_compaction.proxy.standards.routes import counting


class Standards:
    """The protocols of all clients."""

    def __init__(self, compactor: Compactor, calls: Exchanges, items: Items) -> None:
        self._compactor = compactor
        self._calls = calls
        self._items = items

    async def read_orders(self, data: dict[str, Any], call_type: str) -> None:
        """Reads what the client of a guarded model says of its context, and takes it out of `data`.

        Raises:
            BadItem: it says something that cannot be followed.
        """
        tenant = tenant_of(metadata_of(data))
        read = responses.read_orders if call_type == "aresponses" else messages.read_orders
        orders, changed = await read(data, partial(self._items.opened, tenant))
        orders = replace(orders, count=counting())
        if (changed or orders != NO_ORDERS) and self._calls.note_orders(data, orders):
            for key, value in changed.items():
                if value is None:
                    data.pop(key, None)
                else:
                    data[key] = value

    async def item(self, call: Exchange) -> str | None:
        """Returns the compaction of a request that was sent as its client keeps it; None if it is to get none."""
        try:
            found = returned(call.client.orders, call.client.original, call.attempt.prepared)
            return None if found is None else await self._items.sealed(call.client.tenant, found)
        except Exception as error:  # noqa: BLE001 - the answer is whole without (P8)
            log_failure("item", error)
            return None

    async def block(self, call: Exchange) -> messages.Block | None:
        """Returns what an answer on Anthropic's route says of its compaction; None for nothing."""
        client, prepared = call.client, call.attempt.prepared
        if prepared is None or not client.orders.shows:
            return None
        text = await self.item(call)
        found = None if text is None else returned(client.orders, client.original, prepared)
        read_tokens, written_tokens = _spent(prepared)
        return messages.Block(
            text=text,
            summary="" if found is None else found.record,
            edits=messages.applied_edits(client.orders, client.cleared_calls, client.cleared_tokens),
            read_tokens=read_tokens,
            written_tokens=written_tokens,
        )

    def showing(
        self, stream: AsyncGenerator[Any, None], call: Exchange, *, is_messages: bool
    ) -> AsyncGenerator[Any, None]:
        """A stream of LiteLLM's, with what its client wants to be told of the compaction."""

        def is_settled() -> bool:
            return call.attempt.prepared is not None

        def is_alone() -> bool:
            return call.is_alone

        if is_messages:
            return messages.with_block(stream, lambda: self.block(call), is_settled=is_settled, is_alone=is_alone)
        return responses.with_item(
            stream,
            lambda: self.item(call),
            is_settled=is_settled,
            is_alone=is_alone,
            usage=lambda: responses.usage_of(*_spent(call.attempt.prepared)),
        )

    async def shown(self, answer: Any, call: Exchange, *, is_messages: bool) -> Any:
        """The same for an answer that is not streamed."""
        if is_messages:
            return messages.answered(answer, await self.block(call), is_alone=call.is_alone)
        usage = responses.usage_of(*_spent(call.attempt.prepared))
        return responses.answered(answer, await self.item(call), usage, is_alone=call.is_alone)

    async def is_compacted_alone(self, call: Exchange, context: RequestContext) -> bool:
        """Makes the compaction that the client has asked for; False if it takes an answer, and there is none."""
        decided = await self._compactor.prepare(call.client.original, context)
        room = self._compactor.room(context)
        try:
            prepared = await compacted(self._compactor, decided, room)
        finally:
            room.release()
        if returned(call.client.orders, call.client.original, prepared) is None:
            return False
        call.sent(context, prepared)
        call.is_alone = True
        return True

    async def clear(self, call: Exchange, context: RequestContext, order: ClearOrder) -> None:
        """Clears old tool results as the client has ordered, once for each request."""
        client = call.client
        if client.cleared_calls:
            return
        tokens = await self._compactor.count(client.original, context)
        found, gone = cleared(client.original.messages, order, tokens)
        if not gone:
            return
        smaller = replace(client.original, messages=found)
        saved_tokens = tokens - await self._compactor.count(smaller, context)
        if saved_tokens >= order.at_least_tokens:
            call.client = replace(client, original=smaller, cleared_calls=gone, cleared_tokens=saved_tokens)
            if client.orders.count is not None:
                client.orders.count(tokens - saved_tokens)


def _spent(prepared: PreparedRequest | None) -> tuple[int, int]:
    """The tokens that the compaction of a request stands for, and those of its summary; 0 if none was made for it."""
    if prepared is None or prepared.action != "compacted" or prepared.compaction is None:
        return 0, 0
    return prepared.tokens_before, prepared.count_text(prepared.compaction.model_text)
