"""`/compaction` in the proxy: one static page, and the JSON routes that it and other programs use (`docs/page.md`).

Each route asks LiteLLM whose key the request shows. Errors are JSON, too; nothing of a conversation reaches a log.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import Request, Response

from litellm_compaction.config import SAME_MODEL
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.engine.records import events_of as events_of_record
from litellm_compaction.engine.records import undo, view_of
from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.litellm_inside.seam import Seam
from litellm_compaction.proxy.live_settings import WrongValues
from litellm_compaction.proxy.page.auth import Visitor, visitor_of
from litellm_compaction.proxy.page.data import Surroundings, deployments_of, events_of, fields_of, settings_of, worded
from litellm_compaction.proxy.page.turns import conversations_of
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.routing import reachable_entries
from litellm_compaction.recall import NOT_KEPT, Lookup, QueryTooLong, found_fields, message_fields
from litellm_compaction.stores import StoredCompaction, digest

_Answer: TypeAlias = Callable[[Request, Visitor], Awaitable[JsonObject]]
_Endpoint: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]

PATH = "/compaction"
logger = logging.getLogger("litellm_compaction")
_ROUTE_NAME, _ACCESS_LOG = "litellm_compaction_page", "uvicorn.access"
_ID = re.compile(r"[0-9a-f]{16}")
_MAX_BODY_BYTES = 64 * 1024
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
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Refused(Exception):
    """An answer without what was asked for; `problems` are sentences by setting."""

    def __init__(self, status: int, message: str, problems: JsonObject | None = None) -> None:
        self.status = status
        self.error: JsonObject = {"message": message, "code": status}
        if problems is not None:
            self.error = {**self.error, "problems": problems}


def add_page(around: Surroundings) -> None:
    """Adds the page and its routes to the proxy that is being started; nothing happens outside of one."""
    app = Seam.PAGE.get()
    if app is None:
        return
    routes = _Routes(around)
    # A configuration that is loaded anew brings a new handler; the page must belong to that one.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "name", "") != _ROUTE_NAME]
    answers: dict[str, _Answer] = {
        "GET /settings": routes.settings,
        "POST /settings": routes.write,
        "GET /deployments": lambda _, visitor: deployments_of(around, visitor),
        "GET /conversations": routes.conversations,
        "GET /events": lambda request, visitor: events_of(around.store, visitor, _limit_of(request, 200, 1000)),
        "GET /records/{record}": routes.record,
        "POST /records/{record}/undo": routes.undo,
        "GET /recall": routes.recall,
        "GET /messages/{handle:path}": routes.message,
    }
    served = {"GET ": _page, "GET /": _page, **{name: _endpoint(answer) for name, answer in answers.items()}}
    for name, endpoint in served.items():
        method, _, path = name.partition(" ")
        app.add_api_route(f"{PATH}{path}", endpoint, methods=[method], name=_ROUTE_NAME, include_in_schema=False)
    logging.getLogger(_ACCESS_LOG).addFilter(_without_query)


class _Routes:
    """The answers; every key sees what is its own, administrators the numbers of all."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def settings(self, request: Request, visitor: Visitor) -> JsonObject:
        await self._around.live.read()
        return settings_of(self._around, visitor)

    async def write(self, request: Request, visitor: Visitor) -> JsonObject:
        """Changes the settings that the body names; null gives config.yaml's value back."""
        if not visitor.may_write:
            raise Refused(403, "only proxy administrators may change settings")
        live, values = self._around.live, await _values_in(request)
        try:
            if values.get("pruning_model") not in (None, SAME_MODEL, live.settings.pruning_model):
                self._must_be_served(values["pruning_model"])
            await live.write(values, role=visitor.role)
        except WrongValues as error:
            problems = worded(error.problems, values)
            raise Refused(422, " ".join(["Not saved.", *dict.fromkeys(problems.values())]), {**problems}) from None
        return settings_of(self._around, visitor)

    def _must_be_served(self, model: object) -> None:
        router = self._around.router()
        if not isinstance(model, str) or router is None or not reachable_entries(router, model, {}):
            raise WrongValues({"pruning_model": "not a model of this proxy"})

    async def conversations(self, request: Request, visitor: Visitor) -> JsonObject:
        # The store looks for the characters alone.
        lines = await self._around.store.turns(containing=visitor.tenant_seen)
        return {"conversations": await asyncio.to_thread(conversations_of, lines, visitor.tenant_seen)}

    async def record(self, request: Request, visitor: Visitor) -> JsonObject:
        """A record beside its messages for its owner; for administrators its numbers, or all if the operator allows."""
        store, record = self._around.store, request.path_params["record"]
        if (own := await self._own(record, visitor)) is not None:
            return await self._shown(own, visitor.tenant, is_own=True)
        events = await events_of_record(store, record) if visitor.sees_all and _ID.fullmatch(record) else []
        if not events:
            raise Refused(404, "not found")
        owner = events[-1].tenant
        if self._around.live.configured.admins_see_text and (found := await store.named(owner, record)) is not None:
            return await self._shown(found, owner, is_own=False)
        return {"id": record, "events": [fields_of(event) for event in events]}

    async def _shown(self, stored: StoredCompaction, tenant: str, *, is_own: bool) -> JsonObject:
        view, compaction = await view_of(stored, self._around.store, self._around.originals, tenant), stored.compaction
        return {
            "id": stored.id,
            "is_own": is_own,
            "digest": digest(compaction),
            "round": compaction.round,
            "level": compaction.level,
            "window_tokens": compaction.window_tokens,
            "covered_messages": compaction.covered_messages,
            "made_s": stored.created_s,
            "used_s": stored.used_s,
            "record": compaction.record,
            # Without their entries in the hash chain.
            "messages": [{key: item for key, item in pair._asdict().items() if key != "entry"} for pair in view.pairs],
            "why_incomplete": view.why_incomplete,
            "events": [fields_of(event) for event in view.events],
        }

    async def undo(self, request: Request, visitor: Visitor) -> JsonObject:
        stored = await self._own(request.path_params["record"], visitor)
        if stored is None:
            raise Refused(404, "not found")
        return {"id": stored.id, "forgotten": await undo(self._around.store, stored, visitor.tenant)}

    async def _own(self, record: str, visitor: Visitor) -> StoredCompaction | None:
        return await self._around.store.named(visitor.tenant, record) if _ID.fullmatch(record) else None

    async def recall(self, request: Request, visitor: Visitor) -> JsonObject:
        query = request.query_params.get("q", "")
        if not query.strip():
            raise Refused(400, "q is empty: give words, an id, or a handle")
        try:
            found = await self._lookup.search(visitor.tenant, query, limit=_limit_of(request, 5, 50))
        except QueryTooLong as error:
            raise Refused(400, str(error)) from None
        return found_fields(found)

    async def message(self, request: Request, visitor: Visitor) -> JsonObject:
        if parts := await self._lookup.find(visitor.tenant, request.path_params["handle"]):
            return message_fields(parts)
        raise Refused(404, NOT_KEPT)

    @property
    def _lookup(self) -> Lookup:
        if self._around.lookup is None:
            raise Refused(404, "this proxy keeps no originals")
        return self._around.lookup


async def _page(request: Request) -> Response:
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=SECURITY_HEADERS)


def _endpoint(answer: _Answer) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            if (visitor := await visitor_of(request)) is not None:
                return _json(200, await answer(request, visitor))
            refused = Refused(401, "a key of this proxy is needed: Authorization: Bearer KEY")
        except Refused as error:
            refused = error
        except StoreError as error:
            logger.warning("page_store_failed %s", str(error))
            refused = Refused(503, "the store does not answer now; ask again")
        except Exception as error:  # noqa: BLE001 - the proxy goes on
            log_failure("page", error)
            refused = Refused(500, "this has failed; the proxy's log says where")
        return _json(refused.status, {"error": refused.error})

    return endpoint


def _json(status: int, fields: JsonObject) -> Response:
    headers = SECURITY_HEADERS | ({"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {})
    # In ASCII: clients send half surrogate pairs, too.
    return Response(json.dumps(fields), status_code=status, media_type="application/json", headers=headers)


async def _values_in(request: Request) -> JsonObject:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise Refused(413, f"the body has more than {_MAX_BODY_BYTES} bytes")
    try:
        values = json.loads(body)["values"]
    except (ValueError, RecursionError, TypeError, KeyError):
        values = None
    if not isinstance(values, dict):
        raise Refused(400, 'the body is JSON like {"values": {"mode": "observe"}}')
    return values


def _limit_of(request: Request, default: int, most: int) -> int:
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= most):
        raise Refused(400, f"limit is a number from 1 to {most}")
    return int(limit)


def _without_query(record: logging.LogRecord) -> bool:
    """Has the server's access log show searches without their words."""
    # Uvicorn's arguments: the client, the method, the path with its query, the version, the status.
    arguments = record.args
    if isinstance(arguments, tuple) and len(arguments) > 2 and isinstance(arguments[2], str):
        path, mark, _ = arguments[2].partition("?")
        if mark and path.rstrip("/").endswith(f"{PATH}/recall"):
            record.args = (*arguments[:2], path, *arguments[3:])
    return True
