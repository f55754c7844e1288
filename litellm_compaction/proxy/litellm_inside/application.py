"""The application of LiteLLM's proxy: its configuration and secret, its end, what its requests pass, its lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from litellm_compaction.proxy.litellm_inside.seam import Seam

# The attribute of a function of ours that stands in place of one of LiteLLM's.
_ORIGINAL = "litellm_compaction_original"
_KEPT_IN_SCOPE = ("app", "asgi", "client", "http_version", "scheme", "server")


def configuration() -> Mapping[str, Any]:
    """The configuration that is being loaded; empty outside the proxy."""
    read = Seam.CONFIG.get()
    state = read() if read is not None else {}
    return state if isinstance(state, Mapping) else {}


async def key_owner(scope: Mapping[str, Any], headers: Mapping[str, str], path: str) -> Any:
    """Returns LiteLLM's record of the key in a request's headers, as if it asked to GET `path` without a body.

    As a POST it could be refused for what its body does not have (`enforce_user_param`).

    Args:
        scope: of the request; nothing is written to it.
        headers: names in lower case.

    Raises:
        LiteLLMChanged: LiteLLM reads keys elsewhere.
        Exception: LiteLLM refuses the key; raised inside of its application, it becomes LiteLLM's own answer.
    """
    from fastapi import Request

    user_api_key_auth = Seam.KEYS.needed()
    kept = {name: scope[name] for name in _KEPT_IN_SCOPE if name in scope}
    asked = {
        **kept,
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in headers.items()
            if not name.startswith("content-")
        ],
        "state": {},
    }

    async def nothing() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    # A parameter that is left out would be FastAPI's marker in place of a value; it knows the header's name.
    parameters = inspect.signature(user_api_key_auth).parameters
    markers = {name: parameter.default for name, parameter in parameters.items() if name != "request"}
    given = {name: headers.get(_header_of(marker)) for name, marker in markers.items()}
    return await user_api_key_auth(request=Request(asked, nothing), **given)


def _header_of(marker: object) -> str:
    return str(getattr(getattr(getattr(marker, "dependency", None), "model", None), "name", "")).lower()


def keeps_responses() -> bool:
    """LiteLLM finds the messages before a `previous_response_id`: it has a database, and keeps prompts in it or beside.

    By default it keeps none, finds an empty row, and goes on without the history (responses/
    litellm_completion_transformation/session_handler.py).
    """
    if Seam.DATABASE.get() is None:
        return False
    keeps = Seam.KEPT_PROMPTS.get()
    return keeps is None or bool(keeps()) or Seam.COLD_STORAGE.get() is not None


def proxy_secret() -> str | None:
    """The proxy's master key; None before the configuration is loaded, and without one."""
    key = Seam.MASTER_KEY.get()
    return key if isinstance(key, str) and key else None


def before_end(job: Callable[[], Awaitable[None]]) -> None:
    """Runs `job` when the proxy ends in order: its last answer is over, and its event loop still runs.

    LiteLLM gives callbacks no such moment. Its own end is a function that its lifespan looks up when it is over
    (proxy_server.py, `proxy_startup_event`): this one does `job` first. Outside a proxy nothing happens.

    Args:
        job: must come to an end by itself, and never raise.
    """

    end = Seam.END.get()
    if end is None:
        return

    @functools.wraps(end)
    async def ended(*args: Any, **options: Any) -> Any:
        await job()
        found = end(*args, **options)
        return await found if inspect.isawaitable(found) else found

    Seam.END.put(ended)


def wrap_requests(*makes: Callable[[Callable[..., Awaitable[None]]], Callable[..., Awaitable[None]]]) -> None:
    """Puts what `makes` make of the proxy's ASGI application in its place, inside of all middleware; idempotent."""
    _replace(Seam.REQUESTS, lambda application: functools.reduce(lambda inner, make: make(inner), makes, application))


def _replace(seam: Seam, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts what `make` makes of a function in its place; the next time in place of that."""
    current = seam.get()
    if current is None:
        return
    original = getattr(current, _ORIGINAL, current)
    made = functools.wraps(original)(make(original))
    setattr(made, _ORIGINAL, original)
    seam.put(made)
