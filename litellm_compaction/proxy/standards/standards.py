"""Follows what clients order about their context in their protocols' words, and tells them in the same.

Compacting alone and counting are routes that LiteLLM does not serve for a local model. A request on one of them is
passed to LiteLLM as a request for an answer, so that keys, budgets, routing and the chat that is made of it are
LiteLLM's, and its answer, which needs no model, is passed back as the route's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect, Request

from litellm_compaction.core.forms import cleared
from litellm_compaction.engine import Compactor, RequestContext
from litellm_compaction.proxy.answer.sse import json_object
from litellm_compaction.proxy.client import Body, metadata_of, tenant_of
from litellm_compaction.proxy.exchange import Exchange, note_of
from litellm_compaction.proxy.presence import Application, Route
from litellm_compaction.proxy.refusals import failing_open
from litellm_compaction.proxy.standards.orders import Items, Orders, Told, record_of
from litellm_compaction.proxy.standards.protocols import TRIGGER, Messages, Responses, compacted_response, messages_of

_Json: TypeAlias = dict[str, Any]
# A field of a body that wants the tokens of its prompt in place of an answer. Whoever sends it himself gets them, too.
COUNTS = "litellm_compaction_counts"
# The rest of a body says how an answer is made: LiteLLM would refuse some values, and ask for others in vain.
_COUNTED = (
    *("model", "messages", "system", "input", "instructions", "previous_response_id", "conversation"),
    *("tools", "tool_choice", "parallel_tool_calls", "context_management", "metadata", "user"),
)
_OK = 200
# A route as a request for an answer: makes that one's body of the client's, None if LiteLLM could make no chat of it,
# which it tries for seconds; and of the client's body and the answer the route's.
_Route: TypeAlias = tuple[Callable[[_Json], "_Json | None"], Callable[[_Json, _Json], _Json]]


class Standards:
    """The protocols of all clients."""

    def __init__(self, compactor: Compactor, items: Items) -> None:
        self._compactor = compactor
        self._items = items

    async def read_orders(self, data: dict[str, Any]) -> None:
        """Takes what the client of a guarded model says of its context out of `data`; a BadItem cannot be followed."""
        tenant = tenant_of(metadata_of(data))
        read = _form_of(data).read_orders
        orders, changed = await read(data, lambda text, at: asyncio.to_thread(self._items.opened, tenant, text, at))
        if data.get(COUNTS):
            orders, changed[COUNTS] = replace(orders, counts_only=True), None
        if changed or orders != Orders():
            note_of(data).orders = orders
        # LiteLLM keeps what nothing could remind us of.
        if note_of(data).orders is orders:
            data.update(changed)
            for key in [key for key in changed if changed[key] is None]:
                del data[key]

    async def answers(self, exchange: Exchange, context: RequestContext) -> bool:
        """Follows a request's orders before a model is asked; returns True if no model has to be asked."""
        orders, request, compactor = exchange.orders, exchange.original, self._compactor
        if orders.clear is not None and not exchange.told.cleared_calls:
            tokens = await compactor.count(request, context)
            rest, calls = cleared(request.messages, orders.clear, tokens)
            smaller = replace(request, messages=rest)
            saved_tokens = tokens - await compactor.count(smaller, context) if calls else 0
            if calls and saved_tokens >= orders.clear.at_least_tokens:
                request = exchange.original = smaller
                exchange.told = Told(cleared_calls=calls, cleared_tokens=saved_tokens)
        if orders.counts_only:
            tokens = await compactor.count(request, context)
            exchange.told = exchange.told._replace(read_tokens=tokens, is_alone=True)
        elif orders.compacts_only or orders.pauses:
            prepared = await compactor.guard(request, context)
            if orders.returned(request, prepared) is not None:
                exchange.sent(prepared)
                # Without an item the client takes an answer.
                if (told := await self.told(exchange)).text:
                    exchange.told = told._replace(is_alone=True)
        return exchange.told.is_alone

    async def told(self, exchange: Exchange) -> Told:
        """Returns what the answer to a request that was sent says of its context."""
        prepared, report = exchange.prepared, exchange.told
        if report.is_alone:
            return report
        # The answer is whole without (P8).
        with failing_open("item"):
            portable = exchange.orders.returned(exchange.original, prepared)
            if portable is not None:
                text = await asyncio.to_thread(self._items.sealed, exchange.tenant, portable)
                report = report._replace(text=text, record=record_of(portable))
            if prepared is not None and prepared.action == "compacted" and prepared.compaction is not None:
                written = prepared.count_text(prepared.compaction.summary)
                report = report._replace(read_tokens=prepared.tokens_before, written_tokens=written)
        return report

    async def showing(
        self, stream: AsyncGenerator[Any, None], exchange: Exchange, body: Body
    ) -> AsyncGenerator[Any, None]:
        """A stream of LiteLLM's with a part of ours before what the model says, which waits for it, or in its place."""
        form = _form_of(body)
        waiting: list[_Json] = []
        told: Told | None = None
        async for frame in stream:
            for event in form.events(frame):
                if not isinstance(event, dict) or "type" not in event:
                    yield event
                    continue
                if event["type"] in form.at_once:
                    yield form.frame(event)
                    continue
                waiting.append(event)
                if told is None:
                    is_settled = exchange.told.is_alone or exchange.prepared is not None
                    if not (is_settled or event["type"] in form.at_end):
                        continue
                    told = await self.told(exchange)
                    for own in form.part(told):
                        yield form.frame(own)
                for each in waiting:
                    if each["type"] in form.at_end:
                        yield form.frame(form.ended(each, told))
                    elif not told.is_alone:
                        moved = {form.index: each[form.index] + bool(told.text)} if form.index in each else {}
                        yield form.frame({**each, **moved})
                waiting.clear()

    async def shown(self, answer: Any, exchange: Exchange, body: Body) -> Any:
        """The same for an answer that is not streamed; None to leave it as it is."""
        return _form_of(body).answered(answer, await self.told(exchange))


def _form_of(body: Body) -> Responses | Messages:
    return Responses() if "input" in body else Messages()


def route_of(is_guarded: Callable[[object], Awaitable[bool]]) -> Route:
    """Returns the route by which these paths are served for guarded models."""

    async def serve(application: Application, scope: Any, receive: Any, send: Any) -> None:
        try:
            content = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        body = await asyncio.to_thread(json_object, content)
        # What LiteLLM cannot read either it refuses itself.
        if not body or not await is_guarded(body.get("model")):
            await application(scope, _again(content, receive), send)
            return
        path = scope["path"]
        ask, answer = _ROUTES[path.removeprefix(scope.get("root_path", ""))]
        asked = ask(body)
        # LiteLLM's own route names what is missing at once, and without the client's words.
        path = path if asked is None else path.rpartition("/")[0]
        content = await asyncio.to_thread(lambda: json.dumps(asked or {"model": body["model"]}).encode())
        headers = _with_length(scope["headers"], content)
        scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        sent: list[_Json] = []

        async def kept(message: _Json) -> None:
            sent.append(message)

        await application(scope, _again(content, receive), kept)
        start, content = sent[0], b"".join(message.get("body", b"") for message in sent)
        if start["status"] == _OK and (answered := json_object(content)):
            content = json.dumps(answer(body, answered), ensure_ascii=False).encode()
        await send({**start, "headers": _with_length(start.get("headers", ()), content)})
        await send({"type": "http.response.body", "body": content})

    return Route("POST", _ROUTES.__contains__, serve)


def _again(content: bytes, receive: Any) -> Any:
    """Gives a body that was read as if it came now; what comes after it is the client's."""
    waiting = [{"type": "http.request", "body": content, "more_body": False}]

    async def received() -> Any:
        return waiting.pop() if waiting else await receive()

    return received


def _with_length(headers: Any, content: bytes) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(len(content)).encode())]


def _compact(body: _Json) -> _Json:
    return {**body, "input": [*messages_of(body.get("input")), TRIGGER], "stream": False}


def _count(body: _Json, **most_tokens: int) -> _Json:
    """`most_tokens`: the least answer that the protocol has, of a key whose guard is off; its usage is the count."""
    return {**{key: body[key] for key in _COUNTED if key in body}, COUNTS: True, **most_tokens}


def _count_messages(body: _Json) -> _Json | None:
    messages = body.get("messages")
    return _count(body, max_tokens=1) if isinstance(messages, list) and any(map(_is_said, messages)) else None


def _is_said(message: object) -> bool:
    """Returns False for a message of thinking alone, which LiteLLM drops, and for what is no message."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return bool(content) and any(isinstance(part, dict) and "thinking" not in str(part.get("type")) for part in parts)


def _counted(_: _Json, answer: _Json) -> _Json:
    return {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


def _counted_messages(body: _Json, answer: _Json) -> _Json:
    tokens = answer["usage"]["input_tokens"]
    if not body.get("context_management"):
        return {"input_tokens": tokens}
    edits = (answer.get("context_management") or {}).get("applied_edits") or ()
    original = tokens + sum(edit["cleared_input_tokens"] for edit in edits)
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": original}}


_RESPONSES = ("/v1/responses", "/responses", "/openai/v1/responses")
_ROUTES: Mapping[str, _Route] = {
    **{f"{path}/compact": (_compact, compacted_response) for path in _RESPONSES},
    **{f"{path}/input_tokens": (partial(_count, max_output_tokens=16), _counted) for path in _RESPONSES},
    "/v1/messages/count_tokens": (_count_messages, _counted_messages),
}
