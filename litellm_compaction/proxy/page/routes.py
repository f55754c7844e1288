"""`/compaction` in the proxy: the rights to look and to write, and the effect of a form.

LiteLLM decides whose key it is. A form saves or resets settings, or says why not; another site's form is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus

from fastapi import Request, Response
from starlette.routing import Route

from litellm_compaction.config import LIVE, SAME_MODEL
from litellm_compaction.errors import StoreError
from litellm_compaction.proxy.litellm_inside.seam import Seam
from litellm_compaction.proxy.live_settings import Known, Overlay, WrongValues, with_values
from litellm_compaction.proxy.page.auth import Visitor, form_of, is_own_request, visitor_of
from litellm_compaction.proxy.page.data import (
    Surroundings,
    events_for,
    fields_for,
    models_for,
    refused_value,
    revision_of,
    rows_for,
    talks_for,
    useless_models,
)
from litellm_compaction.proxy.page.mcp import MCP_PATH, McpRoute
from litellm_compaction.proxy.page.recall import MESSAGES_PATH, RECALL_PATH, RecallRoutes, hide_queries
from litellm_compaction.proxy.page.records import RECORDS_PATH, RecordRoutes
from litellm_compaction.proxy.page.view import ALL, SECURITY_HEADERS, Content, Notice, page, plain_page
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.routing import reachable_entries
from litellm_compaction.stores.rows import MemoryRows

PATH = "/compaction"
# Browsers send a password to the folder of the address that has asked for it (RFC 7617, 2.2): asked for at `PATH`, it
# would go to every route of the proxy.
_ASKING_PATH = f"{PATH}/"
_ROUTE_NAME = "litellm_compaction_page"
_SHOWN_TALKS = 8
_NEEDS_KEY = (
    "This page of litellm_compaction needs a key of this LiteLLM proxy. Open it again and enter the key as the "
    "password, with any user name. `litellm-compaction up` says at its start where its key is. "
    "The master key and keys of proxy administrators may change settings; every other key shows the numbers of its own "
    "team, user or key."
)
_DONE = {
    "saved": "Saved. New requests follow it.",
    "reset": "Reset: config.yaml holds again.",
    "same": "Nothing changed.",
    "undone": "Forgotten. The conversation is sent as it is while it fits, until more is said.",
    "redone": "Forgotten. It is made anew at the next request, with that focus.",
}
_OF_SETTINGS = ("saved", "reset", "same")
_KEYS = re.compile(rf"\b(?:{'|'.join(LIVE)})\b")


def add_page(around: Surroundings) -> None:
    """Adds the page to the proxy that is being started; nothing happens outside of one."""
    app = Seam.PAGE.get()
    if app is None:
        return
    # A configuration that is loaded anew brings a new handler; the page must belong to that one.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "name", "") != _ROUTE_NAME]
    served = _Page(around)
    for path in (PATH, _ASKING_PATH):
        app.add_api_route(path, served.answer, methods=["GET", "POST"], name=_ROUTE_NAME, include_in_schema=False)
    if around.lookup is not None:
        answers = RecallRoutes(around.lookup, _visitor_or_none)
        for path, answer in ((RECALL_PATH, answers.search), (f"{MESSAGES_PATH}/{{handle:path}}", answers.message)):
            app.add_api_route(path, answer, methods=["GET"], name=_ROUTE_NAME, include_in_schema=False)
        # First: LiteLLM has `/{mcp_server_name}/mcp` (proxy_server.py, 1.106.2).
        mcp = McpRoute(around.lookup, around.store, _visitor_or_none)
        app.router.routes.insert(0, Route(MCP_PATH, mcp, name=_ROUTE_NAME, include_in_schema=False))
        hide_queries()
    admins_see_text = around.live.configured.admins_see_text
    records = RecordRoutes(around.store, around.originals, _visitor_or_none, admins_see_text=admins_see_text)
    path = f"{RECORDS_PATH}/{{record}}"
    app.add_api_route(path, records.show, methods=["GET"], name=_ROUTE_NAME, include_in_schema=False)
    for name, answer in (("undo", records.undo), ("redo", records.redo), ("pin", records.pin)):
        app.add_api_route(f"{path}/{name}", answer, methods=["POST"], name=_ROUTE_NAME, include_in_schema=False)


class _Page:
    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def answer(self, request: Request) -> Response:
        """The page, or a sentence: the proxy's own error page would be JSON, and its log would quote values."""
        try:
            return await (self._get(request) if request.method == "GET" else self._post(request))
        except _Refused as refused:
            return refused.response
        except Exception as error:  # noqa: BLE001 - the proxy goes on
            log_failure("page", error)
            text = "This page has failed; the proxy's log says where."
            return _answer(plain_page(text), HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _get(self, request: Request) -> Response:
        visitor = await _visitor(request)
        known = await self._around.live.read()
        done = _DONE.get(request.query_params.get("done", ""))
        return await self._page(request, visitor, known, [Notice("done", done)] if done else [])

    async def _post(self, request: Request) -> Response:
        form = await form_of(request)
        if form is None:
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "This is not a form of this page.")
        visitor = await _visitor(request)
        if not visitor.may_write:
            raise _Refused(HTTPStatus.FORBIDDEN, "Only proxy administrators may change settings.")
        live = self._around.live
        try:
            return _see_other(f"?done={await write(self._around, form, await live.read(), visitor)}")
        except NotSaved as error:
            entered, notices = _entered(form), [Notice("problem", error.notice)]
            return await self._page(request, visitor, live.known, notices, error.status, entered, error.problems)

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        known: Known,
        notices: Sequence[Notice],
        status: HTTPStatus = HTTPStatus.OK,
        entered: Mapping[str, str] = {},
        problems: Mapping[str, str] = {},
    ) -> Response:
        around = self._around
        rows = await rows_for(around, visitor)
        models = models_for(around.router(), rows, visitor)
        talks = await talks_for(around.store, visitor)
        # Titles and health checks are conversations of one request; they would crowd out the others.
        drawn = ([talk for talk in talks if talk.is_eventful] or talks)[:_SHOWN_TALKS]
        events = await events_for(around.store, visitor)
        content = Content(
            visitor=visitor,
            revision=revision_of(known),
            fields=fields_for(around.live.configured, known, models, entered=entered, problems=problems),
            notices=[*notices, *self._state(known), *useless_models(events)],
            rows=rows,
            talks=drawn,
            more_talks=len(talks) - len(drawn),
            events=events,
            now_s=time.time(),
            base_url=f"{request.base_url}v1",
            # Links are relative to the page's own address: a proxy in front may have another path.
            folder="" if request.url.path.endswith("/") else _ASKING_PATH[1:],
            shows_settings=request.method == "POST" or request.query_params.get("done") in _OF_SETTINGS,
        )
        return _answer(page(content), status)

    def _state(self, known: Known) -> Iterator[Notice]:
        """The value in force in place of the expected one."""
        if known.failure:
            rest = "The changes that were last read hold." if known.overlay.changes else "config.yaml holds."
            yield Notice("problem", f"The store cannot be read: {known.failure}. {rest} Nothing can be saved.")
        if known.ignored:
            text = f"The saved changes are ignored, config.yaml holds: {known.ignored}. Save or reset to replace them."
            yield Notice("problem", text)
        if isinstance(self._around.store.rows, MemoryRows):
            text = "The store is this process's memory: changes end with it, and other workers do not see them."
            yield Notice("note", text)
        if known.settings.mode != "guard":
            yield Notice("note", f"mode is {known.settings.mode}: no request is changed.")


async def _visitor_or_none(request: Request) -> Visitor | None:
    return await visitor_of(request) if is_own_request(request.method, request.headers, request.url.scheme) else None


async def _visitor(request: Request) -> Visitor:
    """The owner of a request's key.

    Raises:
        _Refused: it has none, or another site made the browser send it.
    """
    if not is_own_request(request.method, request.headers, request.url.scheme):
        raise _Refused(HTTPStatus.FORBIDDEN, "This request was not sent from this page.")
    visitor = await visitor_of(request)
    if visitor is not None:
        return visitor
    may_ask = request.url.path.endswith("/")
    refused = _Refused(HTTPStatus.UNAUTHORIZED, _NEEDS_KEY)
    # RFC 9110, 15.5.2: a 401 names a scheme; at Basic browsers open a box for a password.
    scheme = 'Basic realm="key as password", charset="UTF-8"' if may_ask else "Bearer"
    refused.response.headers["WWW-Authenticate"] = scheme
    if request.method == "GET" and not may_ask and "authorization" not in request.headers:
        refused.response = _see_other(_ASKING_PATH[1:])
    raise refused


def _answer(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    body = text.encode("utf-8", "replace")
    return Response(body, status_code=int(status), media_type="text/html; charset=utf-8", headers=SECURITY_HEADERS)


def _see_other(where: str) -> Response:
    """To an address relative to the page's own: a proxy in front may have another path."""
    return Response(status_code=303, headers={**SECURITY_HEADERS, "Location": where})


class _Refused(Exception):
    """A sentence in place of the page."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        self.response = _answer(plain_page(text), status)


class NotSaved(Exception):
    """A form was not accepted: `problems` by key, `notice` for the whole form."""

    def __init__(self, status: HTTPStatus, notice: str, problems: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.notice = notice
        self.problems = problems or {}


async def write(around: Surroundings, form: Mapping[str, str], known: Known, visitor: Visitor) -> str:
    """Changes the settings as a form asks for; gives a key of `_DONE`.

    Args:
        form: `do`, `revision`, and the settings by key, or under `reset` one key or `*`.
        known: in force now.
        visitor: may write.

    Raises:
        NotSaved: nothing has changed.
    """
    if form.get("revision") != revision_of(known):
        notice = "Somebody else has changed the settings meanwhile. Look at them and save again."
        raise NotSaved(HTTPStatus.CONFLICT, notice)
    is_reset, key = form.get("do") == "reset", form.get("reset", "")
    if is_reset:
        overlay = Overlay() if key == ALL else known.overlay.without([key])
    else:
        overlay = _changed(around, _entered(form), known, visitor)
    if overlay == known.overlay and not known.ignored:
        return "same"
    try:
        await around.live.write(overlay)
    except WrongValues as error:
        # The rest after a reset of one key may contradict the file.
        raise _not_saved(error.problems, {}) from None
    except StoreError as error:
        notice = f"Not saved, and nothing has changed: {error}"
        raise NotSaved(HTTPStatus.SERVICE_UNAVAILABLE, notice) from None
    return "reset" if is_reset else "saved"


def _entered(form: Mapping[str, str]) -> dict[str, str]:
    return {key: form[key].strip() for key in LIVE if key in form}


def _changed(around: Surroundings, entered: Mapping[str, str], known: Known, visitor: Visitor) -> Overlay:
    configured = around.live.configured
    problems: dict[str, str] = {}
    settings = configured
    try:
        settings = with_values(configured, {**known.overlay.values, **entered})
    except WrongValues as error:
        problems = error.problems
    model = entered.get("pruning_model")
    if model not in (None, "", SAME_MODEL, known.settings.pruning_model):
        router = around.router()
        if router is None or not reachable_entries(router, model, {}):
            problems["pruning_model"] = "not a model of this proxy"
    if problems:
        raise _not_saved(problems, entered)
    values = {key: getattr(settings, key) for key in entered}
    return known.overlay.changed(configured, values, when_s=time.time(), role=visitor.role)


def _not_saved(problems: Mapping[str, str], entered: Mapping[str, str]) -> NotSaved:
    """Words problems as the form names its fields. A problem of several keys marks the field of each that it names."""
    worded = {key: refused_value(key, entered[key]) for key in problems if key in entered}
    for key, problem in problems.items():
        if key not in worded:
            text = _KEYS.sub(lambda found: f"“{LIVE[found[0]].label}”", problem)
            worded |= dict.fromkeys(_KEYS.findall(problem) or [key], f"{text}.")
    return NotSaved(HTTPStatus.UNPROCESSABLE_ENTITY, " ".join(["Not saved.", *dict.fromkeys(worded.values())]), worded)
