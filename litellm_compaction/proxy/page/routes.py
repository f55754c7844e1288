"""`/compaction` in the proxy: one static page, and the JSON routes that it and other programs use (`docs/page.md`).

LiteLLM says with each request whose key it shows. Servers are asked by the same cached reads as for requests, and none
is waited for long. Errors are JSON, too; nothing of a conversation reaches a log.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
from fastapi import HTTPException, Request, Response

from litellm_compaction.config import LIVE, SAME_MODEL, Settings, WrongSettings, choices
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.engine.records import events_of as events_of_record
from litellm_compaction.engine.records import undo, view_of
from litellm_compaction.errors import CompactionError, StoreError
from litellm_compaction.events import Event, event_from_json, event_to_json
from litellm_compaction.proxy.answer.sse import json_object
from litellm_compaction.proxy.client import note_credential, tenant_of
from litellm_compaction.proxy.litellm_inside import Seam, current_router, is_allowed, key_owner
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.proxy.routing import reachable_entries, router_entries
from litellm_compaction.proxy.service import Service
from litellm_compaction.recall import NOT_KEPT, found_fields, message_fields
from litellm_compaction.stores import digest
from litellm_compaction.stores.sqlite import MemoryRows

_Result = TypeVar("_Result")

PATH = "/compaction"
logger = logging.getLogger("litellm_compaction")
_ROUTE_NAME = "litellm_compaction_page"
# LiteLLM refuses a path that it does not know to all but administrators (auth/route_checks.py). A key that may list
# models may look here.
_KNOWN_PATH = "/v1/models"
_LIMIT_S = 2.0
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
_NO_RECORD = "not found: a record is shown to its owner's key, and to administrators with `admins_see_text: true`"
_NEEDS_KEY = "a key of this proxy is needed: Authorization: Bearer KEY"


class Visitor(NamedTuple):
    """A client with a valid key: its role ("" if LiteLLM does not say), its tenant as in events, LiteLLM's record."""

    role: str
    tenant: str
    auth: Any

    @property
    def may_write(self) -> bool:
        return self.role == "proxy_admin"

    @property
    def sees_all(self) -> bool:
        return self.role in ("proxy_admin", "proxy_admin_viewer")


async def visitor_of(request: Request) -> Visitor:
    """Returns the owner of the key in a request's headers, as LiteLLM sees it; a 401 if it refuses.

    Only a header that a client sets itself counts: neither a cookie nor a browser's password, which another site can
    make a browser send.
    """
    if request.headers.get("authorization", "")[:6].lower() == "basic ":
        raise HTTPException(401, _NEEDS_KEY)
    try:
        auth = await key_owner(request, _KNOWN_PATH)
    except Exception:  # noqa: BLE001 - whatever it raises is a no, such as a ModuleNotFoundError without `prisma`
        raise HTTPException(401, _NEEDS_KEY) from None
    note_credential(dict(request.headers))
    # The metadata that LiteLLM gives this key's requests (litellm_pre_call_utils.py).
    names = {"user_api_key_team_id": "team_id", "user_api_key_user_id": "user_id", "user_api_key_hash": "api_key"}
    tenant = tenant_of({key: getattr(auth, name, None) for key, name in names.items()})
    role = getattr(auth, "user_role", None)
    return Visitor(role=str(getattr(role, "value", role) or ""), tenant=tenant, auth=auth)


def add_page(service: Service) -> None:
    """Adds the page and its routes to the proxy that is being started; nothing happens outside of one."""
    if (app := Seam.PAGE.get()) is None:
        return
    page = _Page(service)
    # A configuration that is loaded anew brings a new handler; the page must belong to that one.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "name", "") != _ROUTE_NAME]
    for method, path, answer in (
        ("GET", "/settings", page.settings),
        ("POST", "/settings", page.write),
        ("GET", "/deployments", page.deployments),
        ("GET", "/events", page.events),
        ("GET", "/records/{record}", page.record),
        ("POST", "/records/{record}/undo", page.undo),
        ("POST", "/recall", page.recall),
        ("GET", "", None),
        ("GET", "/", None),
    ):
        serve = _static if answer is None else _endpoint(answer)
        app.add_api_route(f"{PATH}{path}", serve, methods=[method], name=_ROUTE_NAME, include_in_schema=False)


async def _static(request: Request) -> Response:
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=SECURITY_HEADERS)


def _endpoint(answer: Callable[[Request, Visitor], Awaitable[JsonObject]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            fields = await answer(request, await visitor_of(request))
            # A thousand events, or a long record.
            return await asyncio.to_thread(_json, 200, fields)
        except HTTPException as error:
            refused = error
        except StoreError as error:
            logger.warning("page_store_failed %s", str(error))
            refused = HTTPException(503, "the store does not answer now; ask again")
        except Exception as error:  # noqa: BLE001 - the proxy goes on
            log_failure("page", error)
            refused = HTTPException(500, "this has failed; the proxy's log says where")
        fields = refused.detail if isinstance(refused.detail, dict) else {"message": refused.detail}
        return _json(refused.status_code, {"error": {**fields, "code": refused.status_code}})

    return endpoint


def _json(status: int, fields: JsonObject) -> Response:
    headers = SECURITY_HEADERS | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    # In ASCII: clients send half surrogate pairs, too.
    return Response(json.dumps(fields), status_code=status, media_type="application/json", headers=headers)


async def _body_of(request: Request) -> dict[str, Any]:
    """{} for anything but a JSON object. Whoever has a key may send LiteLLM a body of any size."""
    return await asyncio.to_thread(json_object, await request.body())


def _limit(asked: object, most: int) -> int:
    if str(asked) not in map(str, range(1, most + 1)):
        raise HTTPException(400, f"limit is a number from 1 to {most}")
    return int(str(asked))


async def _soon(answer: Awaitable[_Result], otherwise: _Result) -> _Result:
    try:
        with anyio.fail_after(_LIMIT_S):
            return await answer
    except (CompactionError, TimeoutError):
        return otherwise


class _Page:
    """The answers; every key sees what is its own, administrators the numbers of all."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # ------------------------------------------------------------------ settings

    async def settings(self, request: Request, visitor: Visitor) -> JsonObject:
        await self._service.live.read()
        return self._settings(visitor)

    async def write(self, request: Request, visitor: Visitor) -> JsonObject:
        """Changes the settings that the body names; null gives config.yaml's value back."""
        if not visitor.may_write:
            raise HTTPException(403, "only proxy administrators may change settings")
        live, values = self._service.live, (await _body_of(request)).get("values")
        if not isinstance(values, dict):
            raise HTTPException(400, 'the body is JSON like {"values": {"mode": "observe"}}')
        name = values.get("pruning_model")
        is_known = name in (None, SAME_MODEL, live.in_force.settings.pruning_model)
        if not (is_known or (isinstance(name, str) and reachable_entries(current_router(), name, {}))):
            said = f"pruning_model = {str(name)[:100]!r}: not a model of this proxy"
            raise HTTPException(422, {"message": f"Not saved. {said}", "problems": {"pruning_model": said}})
        try:
            await live.write(values, role=visitor.role)
        except WrongSettings as error:
            raise HTTPException(422, {"message": f"Not saved. {error}", "problems": error.problems}) from None
        return self._settings(visitor)

    def _settings(self, visitor: Visitor) -> JsonObject:
        in_force, is_memory = self._service.live.in_force, isinstance(self._service.store.rows, MemoryRows)
        mode = in_force.settings.mode
        notices = {
            in_force.problem: in_force.problem,
            "The store is this process's memory: changes end with it.": is_memory,
            f"mode is {mode}: nothing is changed where a deployment has no mode of its own.": mode != "guard",
        }
        return {
            "role": visitor.role,
            "may_write": visitor.may_write,
            "sees_all": visitor.sees_all,
            "notices": [words for words, holds in notices.items() if holds],
            "settings": [_setting(self._service.live, key) for key in LIVE],
        }

    # ------------------------------------------------------------------ deployments

    async def deployments(self, request: Request, visitor: Visitor) -> JsonObject:
        """The guarded deployments that a visitor may see."""
        router = current_router()
        looks = await asyncio.gather(*(self._rows(router, entry, visitor) for entry in router_entries(router)))
        return {"deployments": [row for rows in looks for row in rows]}

    async def _rows(self, router: Any, entry: Mapping[str, Any], visitor: Visitor) -> list[JsonObject]:
        """One row, or one for each loaded model of a wildcard; none for what is not guarded, or not to be seen."""
        guards, owner = self._service.guards, {"user_api_key_auth": visitor.auth}
        is_seen = visitor.sees_all or await is_allowed(router, str(entry.get("model_name") or ""), owner)
        if not is_seen or (deployment := await _soon(guards.guard_of(entry), None)) is None:
            return []
        own, settings, name = deployment.own, deployment.settings, deployment.settings.pruning_model
        # A path is not everybody's business.
        hidden = {"enabled"} if visitor.sees_all else {"enabled", "tokenizer"}
        notes = [f"{key}: {value}" for key, value in own.model_dump(exclude_unset=True, exclude=hidden).items()]
        if name != SAME_MODEL:
            why = await _soon(guards.why_unusable(router, name), "its server does not answer")
            notes += [f"pruning_model {name} is not used: {why}"] if why else []
        notes += [f"Changes made here do not reach it: {deployment.conflict}"] if deployment.conflict else []
        silent = [DeploymentReport(deployment.target, deployment.carrier)]
        reports = await _soon(self._service.reporter.reports(deployment), silent)
        return [
            {
                "model_name": deployment.group,
                "model": report.target.model,
                "window_tokens": 0 if report.window is None else report.window.tokens,
                "compact_ratio": settings.pre_request_ratio,
                "carry_ratio": settings.streaming_ratio,
                "facts": report.facts(shows_places=visitor.sees_all),
                "notes": [*notes, *report.warnings],
            }
            for report in reports
        ]

    # ------------------------------------------------------------------ events

    async def events(self, request: Request, visitor: Visitor) -> JsonObject:
        """The newest events that a visitor may see, the newest first."""
        limit = _limit(request.query_params.get("limit", 200), 1000)
        tenant = "" if visitor.sees_all else visitor.tenant
        # The store looks for the characters alone.
        stored = await self._service.store.events(limit=limit, containing=tenant)

        def shown() -> list[JsonObject]:
            events = (event_from_json(row.text) for row in reversed(stored))
            return [_fields(event) for event in events if event is not None and tenant in ("", event.tenant)]

        return {"events": await asyncio.to_thread(shown)}

    # ------------------------------------------------------------------ records and recall

    async def record(self, request: Request, visitor: Visitor) -> JsonObject:
        """A record beside its messages, for its owner, and for administrators if the operator allows."""
        service, record, owner = self._service, str(request.path_params["record"]), visitor.tenant
        stored = await service.store.named(owner, record)
        if stored is None and visitor.sees_all and service.live.configured.admins_see_text:
            for event in (await events_of_record(service.store, record))[-1:]:
                owner = event.tenant
                stored = await service.store.named(owner, record)
        if stored is None:
            raise HTTPException(404, _NO_RECORD)
        view = await view_of(stored, service.store, service.originals, owner)
        return {
            "id": record,
            "is_own": owner == visitor.tenant,
            "digest": digest(stored.compaction),
            "record": stored.compaction.record,
            "messages": [pair._asdict() for pair in view.pairs],
            "why_incomplete": view.why_incomplete,
            "events": [_fields(event) for event in view.events],
        }

    async def undo(self, request: Request, visitor: Visitor) -> JsonObject:
        store, record = self._service.store, str(request.path_params["record"])
        if (stored := await store.named(visitor.tenant, record)) is None:
            raise HTTPException(404, _NO_RECORD)
        return {"id": record, "forgotten": await undo(store, stored, visitor.tenant)}

    async def recall(self, request: Request, visitor: Visitor) -> JsonObject:
        """A search, or a message by its handle; the words stand in the body, since servers log addresses."""
        if (lookup := self._service.compactor.recaller.lookup) is None:
            raise HTTPException(404, "this proxy keeps no originals")
        body = await _body_of(request)
        if isinstance(handle := body.get("handle"), str):
            if parts := await lookup.find(visitor.tenant, handle):
                return message_fields(parts)
            raise HTTPException(404, NOT_KEPT)
        query, limit = body.get("query"), _limit(body.get("limit", 5), 50)
        if not isinstance(query, str) or not query.strip():
            raise HTTPException(400, "query is empty: give words, an id, or a handle")
        return found_fields(await lookup.search(visitor.tenant, query, limit=limit))


def _setting(live: LiveSettings, key: str) -> JsonObject:
    setting = Settings.model_fields[key]
    value, configured = getattr(live.in_force.settings, key), getattr(live.configured, key)
    return {
        "key": key,
        "label": key.replace("_", " ").capitalize(),
        "text": " ".join((setting.description or "").split()),
        "value": value,
        "configured": configured,
        "is_changed": value != configured,
        "options": [*choices(setting)],
    }


def _fields(event: Event) -> JsonObject:
    """An event without the fingerprint of its owner."""
    return {name: value for name, value in json.loads(event_to_json(event)).items() if name != "tenant"}
