"""`/compaction` in the proxy: one static page, and the JSON routes that it and other programs use (`docs/page.md`).

Each route asks LiteLLM whose key the request shows. Errors are JSON, too; nothing of a conversation reaches a log.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import HTTPException, Request, Response

from litellm_compaction.config import LIVE, SAME_MODEL
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.engine.records import events_of as events_of_record
from litellm_compaction.engine.records import undo, view_of
from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.litellm_inside import Seam, current_router
from litellm_compaction.proxy.live_settings import WrongValues
from litellm_compaction.proxy.page import data
from litellm_compaction.proxy.page.data import Visitor, fields_of
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.routing import reachable_entries
from litellm_compaction.proxy.service import Service
from litellm_compaction.recall import NOT_KEPT, found_fields, message_fields
from litellm_compaction.stores import digest

_Answer: TypeAlias = Callable[[Request, Visitor], Awaitable[JsonObject]]
_Endpoint: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]

PATH = "/compaction"
logger = logging.getLogger("litellm_compaction")
_ROUTE_NAME = "litellm_compaction_page"
_ID = re.compile(r"[0-9a-f]{16}")
_MAX_BODY_BYTES = 64 * 1024
_TOLD = ("round", "level", "window_tokens", "covered_messages", "record")
_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def _source(element: str) -> str:
    """The only text that a browser may take for a style sheet or a script (CSP level 3, `hash-source`)."""
    text = _PAGE.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SECURITY_HEADERS = {
    # By their hashes and not `'self'`: that would allow every script of LiteLLM's own.
    "Content-Security-Policy": f"default-src 'none'; style-src {_source('style')}; script-src {_source('script')}; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(service: Service) -> None:
    """Adds the page and its routes to the proxy that is being started; nothing happens outside of one."""
    app = Seam.PAGE.get()
    if app is None:
        return
    routes = _Routes(service)
    # A configuration that is loaded anew brings a new handler; the page must belong to that one.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "name", "") != _ROUTE_NAME]
    answers: dict[str, _Answer] = {
        "GET /settings": routes.settings,
        "POST /settings": routes.write,
        "GET /deployments": lambda _, visitor: data.deployments_of(service, visitor),
        "GET /conversations": lambda _, visitor: data.conversations_of(service.store, visitor),
        "GET /events": routes.events,
        "GET /records/{record}": routes.record,
        "POST /records/{record}/undo": routes.undo,
        "POST /recall": routes.recall,
    }
    served = {"GET ": _page, "GET /": _page, **{name: _endpoint(answer) for name, answer in answers.items()}}
    for name, endpoint in served.items():
        method, _, path = name.partition(" ")
        app.add_api_route(f"{PATH}{path}", endpoint, methods=[method], name=_ROUTE_NAME, include_in_schema=False)


class _Routes:
    """The answers; every key sees what is its own, administrators the numbers of all."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def settings(self, request: Request, visitor: Visitor) -> JsonObject:
        await self._service.live.read()
        return data.settings_of(self._service, visitor)

    async def write(self, request: Request, visitor: Visitor) -> JsonObject:
        """Changes the settings that the body names; null gives config.yaml's value back."""
        if not visitor.may_write:
            raise HTTPException(403, "only proxy administrators may change settings")
        live, values = self._service.live, (await _body_of(request)).get("values")
        if not isinstance(values, dict):
            raise HTTPException(400, 'the body is JSON like {"values": {"mode": "observe"}}')
        try:
            if values.get("pruning_model") not in (None, SAME_MODEL, live.in_force.settings.pruning_model):
                _check_served(values["pruning_model"])
            await live.write(values, role=visitor.role)
        except WrongValues as error:
            raise HTTPException(422, {"message": f"Not saved. {error}", "problems": error.problems}) from None
        return data.settings_of(self._service, visitor)

    async def events(self, request: Request, visitor: Visitor) -> JsonObject:
        return await data.events_of(self._service.store, visitor, _limit(request.query_params.get("limit", 200), 1000))

    async def record(self, request: Request, visitor: Visitor) -> JsonObject:
        """A record beside its messages for its owner; for administrators its numbers, or all if the operator allows."""
        service, record, owner = self._service, _record_of(request), visitor.tenant
        stored = await service.store.named(owner, record)
        if stored is None:
            events = await events_of_record(service.store, record) if visitor.sees_all else []
            if not events:
                raise HTTPException(404, "not found")
            owner = events[-1].tenant
            stored = await service.store.named(owner, record) if service.live.configured.admins_see_text else None
            if stored is None:
                return {"id": record, "events": [fields_of(event) for event in events]}
        view, compaction = await view_of(stored, service.store, service.originals, owner), stored.compaction
        return {
            "id": record,
            "is_own": owner == visitor.tenant,
            "digest": digest(compaction),
            **{name: getattr(compaction, name) for name in _TOLD},
            "made_s": stored.created_s,
            "used_s": stored.used_s,
            "messages": [pair._asdict() for pair in view.pairs],
            "why_incomplete": view.why_incomplete,
            "events": [fields_of(event) for event in view.events],
        }

    async def undo(self, request: Request, visitor: Visitor) -> JsonObject:
        store, record = self._service.store, _record_of(request)
        if (stored := await store.named(visitor.tenant, record)) is None:
            raise HTTPException(404, "not found")
        return {"id": record, "forgotten": await undo(store, stored, visitor.tenant)}

    async def recall(self, request: Request, visitor: Visitor) -> JsonObject:
        """A search, or a message by its handle; the words stand in the body, since servers log addresses."""
        if (lookup := self._service.compactor.recaller.lookup) is None:
            raise HTTPException(404, "this proxy keeps no originals")
        asked = await _body_of(request)
        if isinstance(handle := asked.get("handle"), str):
            if parts := await lookup.find(visitor.tenant, handle):
                return message_fields(parts)
            raise HTTPException(404, NOT_KEPT)
        query, limit = asked.get("query"), _limit(asked.get("limit", 5), 50)
        if not isinstance(query, str) or not query.strip():
            raise HTTPException(400, "query is empty: give words, an id, or a handle")
        return found_fields(await lookup.search(visitor.tenant, query, limit=limit))


def _check_served(model: object) -> None:
    router = current_router()
    if not isinstance(model, str) or router is None or not reachable_entries(router, model, {}):
        said = f"{LIVE['pruning_model'].label}: “{str(model)[:100]}”: not a model of this proxy."
        raise WrongValues({"pruning_model": said})


def _record_of(request: Request) -> str:
    record = str(request.path_params["record"])
    if not _ID.fullmatch(record):
        raise HTTPException(404, "not found")
    return record


async def _page(request: Request) -> Response:
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=SECURITY_HEADERS)


def _endpoint(answer: _Answer) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            if (visitor := await data.visitor_of(request)) is not None:
                return _json(200, await answer(request, visitor))
            refused = HTTPException(401, "a key of this proxy is needed: Authorization: Bearer KEY")
        except HTTPException as error:
            refused = error
        except StoreError as error:
            logger.warning("page_store_failed %s", str(error))
            refused = HTTPException(503, "the store does not answer now; ask again")
        except Exception as error:  # noqa: BLE001 - the proxy goes on
            log_failure("page", error)
            refused = HTTPException(500, "this has failed; the proxy's log says where")
        said = refused.detail if isinstance(refused.detail, dict) else {"message": refused.detail}
        return _json(refused.status_code, {"error": {**said, "code": refused.status_code}})

    return endpoint


def _json(status: int, fields: JsonObject) -> Response:
    headers = SECURITY_HEADERS | ({"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {})
    # In ASCII: clients send half surrogate pairs, too.
    return Response(json.dumps(fields), status_code=status, media_type="application/json", headers=headers)


async def _body_of(request: Request) -> dict[str, Any]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {_MAX_BODY_BYTES} bytes")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise HTTPException(400, "the body is one JSON object")
    return fields


def _limit(asked: object, most: int) -> int:
    limit = str(asked)
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= most):
        raise HTTPException(400, f"limit is a number from 1 to {most}")
    return int(limit)
