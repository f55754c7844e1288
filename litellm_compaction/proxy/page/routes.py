"""`/compaction` in the proxy: who may look, who may write, and what a form does.

LiteLLM decides whose key it is. A form saves or resets settings, or says why not; one that another site has a browser
send is refused.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request, Response

from litellm_compaction.config import LIVE, SAME_MODEL
from litellm_compaction.errors import ConfigError, StoreError
from litellm_compaction.proxy.live_settings import Known, Overlay, WrongValues, with_values
from litellm_compaction.proxy.page.auth import Visitor, is_own_request, visitor_of
from litellm_compaction.proxy.page.content import Content, Notice
from litellm_compaction.proxy.page.data import (
    Surroundings,
    events_for,
    fields_for,
    models_for,
    revision_of,
    rows_for,
    talks_for,
    useless_models,
)
from litellm_compaction.proxy.page.view import ALL, SECURITY_HEADERS, page, plain_page
from litellm_compaction.proxy.refusals import log_failure
from litellm_compaction.proxy.routing import reachable_entries
from litellm_compaction.stores.memory import MemoryRows

PATH = "/compaction"
# Browsers send a password to the folder of the address that has asked for it (RFC 7617, 2.2): asked for at `PATH`, it
# would go to every route of the proxy.
_ASKING_PATH = f"{PATH}/"
_PROXY_MODULE = "litellm.proxy.proxy_server"
_ROUTE_NAME = "litellm_compaction_page"
_FORM_TYPE = "application/x-www-form-urlencoded"
_MAX_BODY_BYTES = 64 * 1024
_SHOWN_TALKS = 8
_NEEDS_KEY = (
    "This page needs a key of this LiteLLM proxy. Open it again and enter the key as the password, with any user name. "
    "The master key and keys of proxy administrators may change settings; every other key shows the numbers of its own "
    "team, user or key."
)
_DONE = {
    "saved": "Saved. New requests follow it.",
    "reset": "Reset: config.yaml holds again.",
    "same": "Nothing changed.",
}


def add_page(around: Surroundings) -> None:
    """Adds the page to the proxy that is being started; nothing happens outside of one."""
    proxy_server = sys.modules.get(_PROXY_MODULE)
    if proxy_server is None:
        return
    app = proxy_server.app
    # A configuration that is loaded anew brings a new handler; the page must be the one of that.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "name", "") != _ROUTE_NAME]
    served = _Page(around)
    for path in (PATH, _ASKING_PATH):
        app.add_api_route(path, served.get, methods=["GET"], name=_ROUTE_NAME, include_in_schema=False)
        app.add_api_route(path, served.post, methods=["POST"], name=_ROUTE_NAME, include_in_schema=False)


class _Page:
    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def get(self, request: Request) -> Response:
        """The page, or why it is not shown."""
        return await _safely(self._get(request))

    async def post(self, request: Request) -> Response:
        """What a form asks for; then the page again."""
        return await _safely(self._post(request))

    async def _get(self, request: Request) -> Response:
        visitor = await _visitor(request)
        if isinstance(visitor, Response):
            return visitor
        known = await self._around.live.read()
        done = _DONE.get(request.query_params.get("done", ""))
        return _answer(await self._content(visitor, known, done=done))

    async def _post(self, request: Request) -> Response:
        form = await _form(request)
        if form is None:
            return _answer(plain_page("This is not a form of this page."), HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        visitor = await _visitor(request)
        if isinstance(visitor, Response):
            return visitor
        if not visitor.may_write:
            return _answer(plain_page("Only proxy administrators may change settings."), HTTPStatus.FORBIDDEN)
        known = await self._around.live.read()
        outcome = await write(self._around, form, known, visitor)
        if isinstance(outcome, str):
            return _see_other(f"?done={outcome}")
        return _answer(await self._content(visitor, self._around.live.known, refused=outcome), outcome.status)

    async def _content(
        self, visitor: Visitor, known: Known, *, done: str | None = None, refused: Refused | None = None
    ) -> str:
        around = self._around
        rows = await rows_for(around, visitor)
        models = models_for(around.router(), rows, visitor)
        talks = await talks_for(around.store, visitor)
        # Titles and health checks are conversations of one request; they would crowd out the others.
        drawn = ([talk for talk in talks if talk.is_eventful] or talks)[:_SHOWN_TALKS]
        events = await events_for(around.store, visitor)
        content = Content(
            role=visitor.role,
            may_write=visitor.may_write,
            sees_all=visitor.sees_all,
            revision=revision_of(known),
            fields=fields_for(
                around.live.configured,
                known,
                models,
                entered=refused.entered if refused else {},
                problems=refused.problems if refused else {},
            ),
            notices=[*_notices(done, refused), *self._state(known), *useless_models(events)],
            rows=rows,
            talks=drawn,
            more_talks=len(talks) - len(drawn),
            events=events,
        )
        return page(content)

    def _state(self, known: Known) -> list[Notice]:
        """What holds in place of what somebody may expect."""
        found: list[Notice] = []
        if known.failure:
            rest = "The changes that were last read hold." if known.overlay.changes else "config.yaml holds."
            text = f"The store cannot be read: {known.failure}. {rest} Nothing can be saved."
            found.append(Notice(kind="problem", text=text))
        if known.ignored:
            text = f"The saved changes are ignored, config.yaml holds: {known.ignored}. Save or reset to replace them."
            found.append(Notice(kind="problem", text=text))
        if isinstance(self._around.store.rows, MemoryRows):
            text = "The store is this process's memory: changes end with it, and other workers do not see them."
            found.append(Notice(kind="note", text=text))
        if known.settings.mode != "guard":
            found.append(Notice(kind="note", text=f"mode is {known.settings.mode}: no request is changed."))
        return found


async def _visitor(request: Request) -> Visitor | Response:
    """The owner of a request's key, or the answer to a request that has none."""
    if not is_own_request(request.method, request.headers):
        return _answer(plain_page("This request was not sent from this page."), HTTPStatus.FORBIDDEN)
    visitor = await visitor_of(request)
    if visitor is not None:
        return visitor
    may_ask = request.url.path.endswith("/")
    if request.method == "GET" and not may_ask and "authorization" not in request.headers:
        return _see_other(_ASKING_PATH[1:])
    # RFC 9110, 15.5.2: a 401 names a scheme; at Basic browsers open a box for a password.
    response = _answer(plain_page(_NEEDS_KEY), HTTPStatus.UNAUTHORIZED)
    response.headers["WWW-Authenticate"] = 'Basic realm="key as password", charset="UTF-8"' if may_ask else "Bearer"
    return response


async def _safely(answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer, or a sentence: the proxy's own error page would be JSON, and its log would quote values."""
    try:
        return await answer
    except Exception as error:  # noqa: BLE001 - the proxy goes on
        log_failure("page", error)
        return _answer(
            plain_page("This page has failed; the proxy's log says where."), HTTPStatus.INTERNAL_SERVER_ERROR
        )


async def _form(request: Request) -> dict[str, str] | None:
    """The fields of a form; None for anything else, or far too much of it."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
        return None
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            return None
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError:
        return None


def _notices(done: str | None, refused: Refused | None) -> list[Notice]:
    if refused is not None:
        return [Notice(kind="problem", text=refused.notice)]
    return [Notice(kind="done", text=done)] if done else []


def _answer(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    body = text.encode("utf-8", "replace")
    return Response(body, status_code=int(status), media_type="text/html; charset=utf-8", headers=SECURITY_HEADERS)


def _see_other(where: str) -> Response:
    """To an address relative to the page's own: a proxy in front may have another path."""
    return Response(status_code=303, headers={**SECURITY_HEADERS, "Location": where})


@dataclass(frozen=True, slots=True)
class Refused:
    """A form that was not accepted: what was entered, and why not.

    Attributes:
        problems: by key; `notice` is for the whole form.
    """

    status: HTTPStatus
    entered: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    notice: str = ""


async def write(around: Surroundings, form: Mapping[str, str], known: Known, visitor: Visitor) -> str | Refused:
    """Changes the settings as a form asks for; gives `saved`, `reset` or `same`, or why not.

    Args:
        around: the running plug-in.
        form: `do`, `revision`, and the settings by key, or under `reset` one key or `*`.
        known: what is in force now.
        visitor: who sent the form; may write.
    """
    entered = {key: form[key].strip() for key in LIVE if key in form}
    if form.get("revision") != revision_of(known):
        notice = "Somebody else has changed the settings meanwhile. Look at them and save again."
        return Refused(HTTPStatus.CONFLICT, entered=entered, notice=notice)
    is_reset = form.get("do") == "reset"
    overlay = _reset(form, known) if is_reset else _changed(around, entered, known, visitor)
    if isinstance(overlay, Refused):
        return overlay
    if overlay == known.overlay and not known.ignored:
        return "same"
    try:
        await around.live.write(overlay)
    except ConfigError as error:
        # What is left after a reset of one key may contradict the file.
        return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, entered=entered, notice=f"Not saved. {error}")
    except StoreError as error:
        notice = f"Not saved, and nothing has changed: {error}"
        return Refused(HTTPStatus.SERVICE_UNAVAILABLE, entered=entered, notice=notice)
    return "reset" if is_reset else "saved"


def _reset(form: Mapping[str, str], known: Known) -> Overlay:
    key = form.get("reset", "")
    return Overlay() if key == ALL else known.overlay.without([key])


def _changed(around: Surroundings, entered: Mapping[str, str], known: Known, visitor: Visitor) -> Overlay | Refused:
    configured = around.live.configured
    problems: dict[str, str] = {}
    settings = configured
    try:
        settings = with_values(configured, {**known.overlay.values, **entered})
    except WrongValues as error:
        problems = error.problems
    model = entered.get("pruning_model")
    if model and not _is_model(around, model, known):
        problems["pruning_model"] = f"pruning_model = {model}: not a model of this proxy"
    if problems:
        notice = "Not saved. " + problems.pop("", "See below.")
        return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, entered=entered, problems=problems, notice=notice)
    values = {key: getattr(settings, key) for key in entered}
    return known.overlay.changed(configured, values, when_s=time.time(), role=visitor.role)


def _is_model(around: Surroundings, name: str, known: Known) -> bool:
    if name in (SAME_MODEL, known.settings.pruning_model):
        return True
    router = around.router()
    return router is not None and bool(reachable_entries(router, name, {}))
