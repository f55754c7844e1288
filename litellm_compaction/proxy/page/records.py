"""`/compaction/records/ID`: a record beside the messages that it covers, for the holder of its owner's key, who may
undo, redo and pin.

A browser gets a page, a program JSON. Administrators see the numbers of others' records, and their text if the operator
allows it. An id that is forged, another tenant's or forgotten gives the same 404. A form of another site's is refused
as for the settings (`auth.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus

from fastapi import Request, Response

from litellm_compaction.core.messages import JsonObject, JsonValue
from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.engine.records import View, events_of, pin, undo, view_of
from litellm_compaction.errors import BadWish, StoreError
from litellm_compaction.events import CompactionEvent
from litellm_compaction.proxy.page.auth import Visitor, form_of
from litellm_compaction.proxy.page.view import SECURITY_HEADERS, Shown, plain_page, record_page
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.stores import Originals, Store, StoredCompaction, digest

RECORDS_PATH = "/compaction/records"
_ID = re.compile(r"[0-9a-f]{16}")
_NOT_FOUND = "not found"
_MOST_DIGITS = 10


class RecordRoutes:
    """Answers about one record; nothing of its text reaches a log.

    Args:
        originals: None if none are kept.
        visitor: gives the owner of a request's key, None if it has none that the proxy knows.
        admins_see_text: the operator allows administrators to read others' records.
    """

    def __init__(
        self,
        store: Store,
        originals: Originals | None,
        visitor: Callable[[Request], Awaitable[Visitor | None]],
        *,
        admins_see_text: bool = False,
    ) -> None:
        self._admins_see_text = admins_see_text
        self._store = store
        self._originals = originals
        self._visitor = visitor

    async def show(self, request: Request) -> Response:
        return await self._answered(request, self._shown)

    async def undo(self, request: Request) -> Response:
        return await self._answered(request, self._undone)

    async def redo(self, request: Request) -> Response:
        return await self._answered(request, self._redone)

    async def pin(self, request: Request) -> Response:
        return await self._answered(request, self._pinned)

    async def _answered(self, request: Request, answer: Callable[[Request, Visitor], Awaitable[Response]]) -> Response:
        try:
            visitor = await self._visitor(request)
            if visitor is None:
                return _unknown(request)
            return await answer(request, visitor)
        except Exception as error:  # noqa: BLE001 - the proxy goes on
            log_failure("records", error)
            return _error(request, HTTPStatus.INTERNAL_SERVER_ERROR, "this has failed; the proxy's log says where")

    async def _shown(self, request: Request, visitor: Visitor) -> Response:
        record = request.path_params["record"]
        if (stored := await self._own(visitor, record)) is not None:
            return await self._with_text(request, stored, visitor.tenant, is_own=True)
        if visitor.sees_all and _ID.fullmatch(record) and (events := await events_of(self._store, record)):
            owner = events[-1].tenant
            if self._admins_see_text and (stored := await self._store.named(owner, record)) is not None:
                return await self._with_text(request, stored, owner, is_own=False)
            if _is_browser(request):
                return _page(Shown(record=record, events=events))
            return _json({"id": record, "events": _numbers(events)})
        return _error(request, HTTPStatus.NOT_FOUND, _NOT_FOUND)

    async def _with_text(self, request: Request, stored: StoredCompaction, tenant: str, *, is_own: bool) -> Response:
        view = await view_of(stored, self._store, self._originals, tenant)
        if _is_browser(request):
            return _page(Shown(record=stored.id, events=view.events, view=view, is_own=is_own))
        return _json(_fields(view))

    async def _undone(self, request: Request, visitor: Visitor) -> Response:
        return await self._forgotten(request, visitor, done="undone")

    async def _redone(self, request: Request, visitor: Visitor) -> Response:
        form = await form_of(request) or {}
        try:
            focus = one_line_topic(form.get("focus", ""))
        except ValueError as error:
            return _error(request, HTTPStatus.BAD_REQUEST, f"focus has {error}")
        if not focus:
            return _error(request, HTTPStatus.BAD_REQUEST, "focus is empty: a form with the topic to keep in detail")
        return await self._forgotten(request, visitor, done="redone", focus=focus)

    async def _forgotten(self, request: Request, visitor: Visitor, *, done: str, focus: str = "") -> Response:
        stored = await self._own(visitor, request.path_params["record"])
        if stored is None:
            return _error(request, HTTPStatus.NOT_FOUND, _NOT_FOUND)
        try:
            forgotten = await undo(self._store, stored, visitor.tenant, focus=focus)
        except StoreError as error:
            return _error(request, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if _is_browser(request):
            headers = {**SECURITY_HEADERS, "Location": f"../../?done={done}"}
            return Response(status_code=HTTPStatus.SEE_OTHER, headers=headers)
        return _json({"id": stored.id, "forgotten": forgotten})

    async def _pinned(self, request: Request, visitor: Visitor) -> Response:
        stored = await self._own(visitor, request.path_params["record"])
        if stored is None:
            return _error(request, HTTPStatus.NOT_FOUND, _NOT_FOUND)
        form = await form_of(request) or {}
        number, wanted = form.get("number", ""), form.get("do") != "unpin"
        if not (number.isascii() and number.isdecimal() and len(number) < _MOST_DIGITS):
            return _error(request, HTTPStatus.BAD_REQUEST, "number is missing: a form with the number of a message")
        view = await view_of(stored, self._store, self._originals, visitor.tenant)
        try:
            await pin(self._store, view, int(number), wanted=wanted)
        except BadWish as error:
            return _error(request, HTTPStatus.BAD_REQUEST, str(error))
        except StoreError as error:
            return _error(request, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if _is_browser(request):
            headers = {**SECURITY_HEADERS, "Location": f"../{stored.id}"}
            return Response(status_code=HTTPStatus.SEE_OTHER, headers=headers)
        return _json({"id": stored.id, "number": int(number), "pinned": wanted})

    async def _own(self, visitor: Visitor, record: str) -> StoredCompaction | None:
        return await self._store.named(visitor.tenant, record) if _ID.fullmatch(record) else None


def _fields(view: View) -> JsonObject:
    stored = view.stored
    compaction = stored.compaction
    before: list[JsonValue] = [
        {"number": pair.number, "role": pair.role, "text": pair.before, "pinned": pair.is_pinned} for pair in view.pairs
    ]
    after: list[JsonValue] = [
        {"number": pair.number, "role": pair.role, "fate": pair.fate, "text": pair.after} for pair in view.pairs
    ]
    return {
        "id": stored.id,
        "digest": digest(compaction),
        "round": compaction.round,
        "level": compaction.level,
        "window_tokens": compaction.window_tokens,
        "covered_messages": compaction.covered_messages,
        "made_s": stored.created_s,
        "used_s": stored.used_s,
        "record": compaction.record,
        "before": before,
        "after": after,
        "why_incomplete": view.why_incomplete,
        "events": _numbers(view.events),
    }


def _numbers(events: Sequence[CompactionEvent]) -> list[JsonValue]:
    """Events without the fingerprint of their owner."""
    return [{name: value for name, value in asdict(event).items() if name != "tenant"} for event in events]


def _is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _unknown(request: Request) -> Response:
    if _is_browser(request) and request.method == "GET" and "authorization" not in request.headers:
        # To the page, which asks for a key.
        return Response(status_code=HTTPStatus.SEE_OTHER, headers={**SECURITY_HEADERS, "Location": "../"})
    refused = _error(request, HTTPStatus.UNAUTHORIZED, "a key of this proxy is needed")
    refused.headers["WWW-Authenticate"] = "Bearer"
    return refused


def _error(request: Request, status: HTTPStatus, message: str) -> Response:
    if _is_browser(request):
        return _page(f"{message[0].upper()}{message[1:]}.", status)
    return _json({"error": {"message": message, "code": int(status)}}, status)


def _page(shown: Shown | str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    text = plain_page(shown, back="../") if isinstance(shown, str) else record_page(shown)
    body = text.encode("utf-8", "replace")
    return Response(body, status_code=int(status), media_type="text/html; charset=utf-8", headers=SECURITY_HEADERS)


def _json(fields: JsonObject, status: HTTPStatus = HTTPStatus.OK) -> Response:
    # In ASCII: clients send half surrogate pairs, too.
    body = json.dumps(fields)
    return Response(body, status_code=int(status), media_type="application/json", headers=SECURITY_HEADERS)
