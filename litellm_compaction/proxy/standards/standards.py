"""Follows what clients order about their context in their protocols' words, and tells them in the same.

It is asked on a request's way in and on its answer's way out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from litellm_compaction.core.forms import ClearOrder, cleared
from litellm_compaction.engine import Compactor, RequestContext
from litellm_compaction.proxy.client import metadata_of, tenant_of
from litellm_compaction.proxy.exchange import Exchange, Exchanges
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.standards import messages, responses
from litellm_compaction.proxy.standards.orders import NO_ORDERS, Items, Told, record_of
from litellm_compaction.proxy.standards.routes import COUNTS


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
        read = responses.read_orders if call_type == "aresponses" else messages.read_orders
        orders, changed = await read(data, partial(self._items.opened, tenant_of(metadata_of(data))))
        if data.get(COUNTS):
            orders, changed[COUNTS] = replace(orders, counts_only=True), None
        if (changed or orders != NO_ORDERS) and self._calls.note_orders(data, orders):
            for key, value in changed.items():
                if value is None:
                    data.pop(key, None)
                else:
                    data[key] = value

    async def answers(self, call: Exchange, context: RequestContext) -> bool:
        """Follows a request's orders before a model is asked; returns True if no model has to be asked."""
        orders = call.client.orders
        if orders.clear is not None:
            await self._clear(call, context, orders.clear)
        if orders.counts_only:
            tokens = await self._compactor.count(call.client.original, context)
            call.alone = _of_edits(call)._replace(read_tokens=tokens, is_alone=True)
        elif orders.compacts_only or orders.pauses:
            await self._compact(call, context)
        return call.alone is not None

    async def _clear(self, call: Exchange, context: RequestContext, order: ClearOrder) -> None:
        """Clears old tool results as the client has ordered, once for each request."""
        client = call.client
        if client.cleared_calls:
            return
        tokens = await self._compactor.count(client.original, context)
        rest, cleared_calls = cleared(client.original.messages, order, tokens)
        if not cleared_calls:
            return
        smaller = replace(client.original, messages=rest)
        saved_tokens = tokens - await self._compactor.count(smaller, context)
        if saved_tokens >= order.at_least_tokens:
            call.client = replace(client, original=smaller, cleared_calls=cleared_calls, cleared_tokens=saved_tokens)

    async def _compact(self, call: Exchange, context: RequestContext) -> None:
        """Makes the compaction that the client has asked for; without one it takes an answer."""
        decided = await self._compactor.prepare(call.client.original, context)
        room = self._compactor.room(context)
        try:
            prepared = await self._compactor.finish(decided, room)
        finally:
            room.release()
        if call.client.orders.returned(call.client.original, prepared) is not None:
            call.sent(context, prepared)
            told = await self.told(call)
            call.alone = told._replace(is_alone=True) if told.text else None

    async def told(self, call: Exchange) -> Told:
        """Returns what the answer to a request that was sent says of its context."""
        if call.alone is not None:
            return call.alone
        client, prepared, told = call.client, call.attempt.prepared, _of_edits(call)
        try:
            portable = client.orders.returned(client.original, prepared)
            if portable is not None:
                text = await self._items.sealed(client.tenant, portable)
                told = told._replace(text=text, record=record_of(portable))
            if prepared is not None and prepared.action == "compacted" and prepared.compaction is not None:
                written = prepared.count_text(prepared.compaction.model_text)
                told = told._replace(read_tokens=prepared.tokens_before, written_tokens=written)
        except Exception as error:  # noqa: BLE001 - the answer is whole without (P8)
            log_failure("item", error)
        return told

    async def showing(
        self, stream: AsyncGenerator[Any, None], call: Exchange, *, is_messages: bool
    ) -> AsyncGenerator[Any, None]:
        """A stream of LiteLLM's with a part of ours before what the model says, or in its place.

        What comes before the request was sent, and so before it is known what to say, waits.
        """
        form = messages.Stream() if is_messages else responses.Stream()
        waiting: list[dict[str, Any]] = []
        told: Told | None = None
        is_decided, shift = False, 0
        async for frame in stream:
            for event in form.events(frame):
                if not isinstance(event, dict):
                    yield event
                    continue
                if event["type"] in form.at_once:
                    yield form.frame(event)
                    continue
                waiting.append(event)
                if not is_decided:
                    is_decided = event["type"] in form.at_end or _is_settled(call)
                    if not is_decided:
                        continue
                    told = await self.told(call) if _is_settled(call) else None
                    part = form.part(told) if told is not None else []
                    shift = 1 if part else 0
                    for own in part:
                        yield form.frame(own)
                for each in waiting:
                    if each["type"] in form.at_end:
                        yield form.frame(form.ended(each, told))
                    elif told is None or not told.is_alone:
                        yield form.frame({**each, form.index: each[form.index] + shift} if form.index in each else each)
                waiting.clear()

    async def shown(self, answer: Any, call: Exchange, *, is_messages: bool) -> Any:
        """The same for an answer that is not streamed; None to leave it as it is."""
        told = await self.told(call) if _is_settled(call) else None
        return (messages if is_messages else responses).answered(answer, told)


def _of_edits(call: Exchange) -> Told:
    return Told(cleared_calls=call.client.cleared_calls, cleared_tokens=call.client.cleared_tokens)


def _is_settled(call: Exchange) -> bool:
    return call.alone is not None or call.attempt.prepared is not None
