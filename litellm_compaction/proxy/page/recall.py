"""`/compaction/recall` and `/compaction/messages/HANDLE`: a key looks up what its own conversations lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import Request, Response

from litellm_compaction.core.messages import JsonObject
from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.view import SECURITY_HEADERS
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.recall import NOT_KEPT, Lookup, QueryTooLong, found_fields, message_fields

logger = logging.getLogger("litellm_compaction")
RECALL_PATH, MESSAGES_PATH = "/compaction/recall", "/compaction/messages"
_ACCESS_LOG = "uvicorn.access"
_MOST_HITS = 50


class RecallRoutes:
    """Answers with JSON, errors too; nothing of a query or a message reaches a log.

    Args:
        visitor: gives the owner of a request's key, None if it has none that the proxy knows.
    """

    def __init__(self, lookup: Lookup, visitor: Callable[[Request], Awaitable[Visitor | None]]) -> None:
        self._lookup = lookup
        self._visitor = visitor

    async def search(self, request: Request) -> Response:
        return await self._answered(request, self._found)

    async def message(self, request: Request) -> Response:
        return await self._answered(request, self._one)

    async def _answered(self, request: Request, ask: Callable[[Request, str], Awaitable[Response]]) -> Response:
        try:
            visitor = await self._visitor(request)
            if visitor is None:
                return without_key()
            return await ask(request, visitor.tenant)
        except StoreError as error:
            logger.warning("recall_unread %s", error)
            return error_answer(HTTPStatus.SERVICE_UNAVAILABLE, "what was kept cannot be read now; ask again")
        except Exception as error:  # noqa: BLE001 - the proxy goes on
            log_failure("recall", error)
            return error_answer(HTTPStatus.INTERNAL_SERVER_ERROR, "this has failed; the proxy's log says where")

    async def _found(self, request: Request, tenant: str) -> Response:
        query, limit = request.query_params.get("q", ""), request.query_params.get("limit", "5")
        if not query.strip():
            return error_answer(HTTPStatus.BAD_REQUEST, "q is empty: words, an id, a handle, or /a regular expression/")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 3 and 1 <= int(limit) <= _MOST_HITS):
            return error_answer(HTTPStatus.BAD_REQUEST, f"limit is a number from 1 to {_MOST_HITS}")
        try:
            found = await self._lookup.search(tenant, query, limit=int(limit))
        except QueryTooLong as error:
            return error_answer(HTTPStatus.BAD_REQUEST, str(error))
        return _json(HTTPStatus.OK, found_fields(found))

    async def _one(self, request: Request, tenant: str) -> Response:
        parts = await self._lookup.find(tenant, request.path_params["handle"])
        return _json(HTTPStatus.OK, message_fields(parts)) if parts else error_answer(HTTPStatus.NOT_FOUND, NOT_KEPT)


def hide_queries() -> None:
    """Has the server's access log show these routes without what was asked for; again is no change."""
    logging.getLogger(_ACCESS_LOG).addFilter(_without_query)


def _without_query(record: logging.LogRecord) -> bool:
    # Uvicorn's arguments: the client, the method, the path with its query, the version, the status (0.54).
    arguments = record.args
    if isinstance(arguments, tuple) and len(arguments) > 2 and isinstance(arguments[2], str):
        path, mark, _ = arguments[2].partition("?")
        if mark and path.rstrip("/").endswith(RECALL_PATH):
            record.args = (*arguments[:2], path, *arguments[3:])
    return True


def without_key() -> Response:
    """Returns the answer to a request whose key the proxy does not know."""
    refused = error_answer(HTTPStatus.UNAUTHORIZED, "a key of this proxy is needed")
    refused.headers["WWW-Authenticate"] = "Bearer"
    return refused


def error_answer(status: HTTPStatus, message: str) -> Response:
    return _json(status, {"error": {"message": message, "code": int(status)}})


def _json(status: HTTPStatus, fields: JsonObject) -> Response:
    # In ASCII: clients send half surrogate pairs, too.
    return Response(
        json.dumps(fields), status_code=int(status), media_type="application/json", headers=SECURITY_HEADERS
    )
