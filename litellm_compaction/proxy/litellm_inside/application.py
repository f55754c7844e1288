"""LiteLLM's proxy: its configuration and secret, its end, what its requests pass, its keys and what they may do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from litellm_compaction.proxy.litellm_inside.seam import Seam

_Application: TypeAlias = Callable[..., Awaitable[None]]
_KEPT_IN_SCOPE = ("app", "asgi", "client", "http_version", "scheme", "server")
# The answers of LiteLLM's own checks for a call on a caller's behalf.
_ALLOWS = ("allowed", True)
# In the names of LiteLLM's fields for what a caller may spend.
_LIMITS = ("limit", "budget")


def configuration() -> Mapping[str, Any]:
    """The configuration that is being loaded; empty outside the proxy."""
    read = Seam.CONFIG.get()
    state = read() if read is not None else {}
    return state if isinstance(state, Mapping) else {}


def keeps_responses() -> bool:
    """LiteLLM finds the messages before a `previous_response_id`: it keeps prompts in its database, or beside it."""
    if Seam.DATABASE.get() is None:
        return False
    keeps = Seam.KEPT_PROMPTS.get()
    return keeps is None or bool(keeps()) or Seam.COLD_STORAGE.get() is not None


def proxy_secret() -> str | None:
    """The proxy's master key; None before the configuration is loaded, and without one."""
    key = Seam.MASTER_KEY.get()
    return key if isinstance(key, str) and key else None


def before_end(job: Callable[[], Awaitable[None]]) -> None:
    """Runs `job`, which ends by itself and never raises, before a proxy ends in order, while its loop still runs."""

    def with_job(end: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def ended(*args: Any, **options: Any) -> Any:
            await job()
            found = end(*args, **options)
            return await found if inspect.isawaitable(found) else found

        return ended

    # LiteLLM gives callbacks no such moment; its lifespan looks this function up when it is over.
    Seam.END.wrap(with_job)


def wrap_requests(*makes: Callable[[_Application], _Application]) -> None:
    """Puts what `makes` make of the proxy's ASGI application in its place, inside of all middleware; idempotent."""
    Seam.REQUESTS.wrap(
        lambda application: functools.reduce(lambda inner, make: make(inner), makes, application), anew=True
    )


# ------------------------------------------------------------------ keys


async def key_owner(scope: Mapping[str, Any], headers: Mapping[str, str], path: str) -> Any:
    """Returns LiteLLM's record of the key in `headers` (lower case), as if it asked to GET `path`; else its error."""
    from fastapi import Request

    # As a POST it could be refused for what its body does not have (`enforce_user_param`).
    user_api_key_auth = Seam.KEYS.needed()
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    asked = {
        **{name: scope[name] for name in _KEPT_IN_SCOPE if name in scope},
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "state": {},
        "headers": [(name, value) for name, value in raw if not name.startswith(b"content-")],
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


def may_use(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """True if the lists of models that a key and its team carry allow `model_name` `model`; no look into a database."""
    # A call through the router skips the proxy's own check.
    auth, check = _auth(metadata), Seam.LISTED.get()
    for attribute, kind in (("models", "key"), ("team_models", "team")):
        allowed = getattr(auth, attribute, None)
        if not isinstance(allowed, list) or not allowed:
            continue
        if check is None and model not in allowed:
            return False
        aliases, team_id = getattr(auth, "team_model_aliases", None), getattr(auth, "team_id", None)
        whose = {"models": allowed, "team_model_aliases": aliases, "team_id": team_id, "object_type": kind}
        try:
            if check is not None:
                check(model=model, llm_router=router, **whose)
        except Exception:  # noqa: BLE001 - refused: ProxyException, whose place moved between versions
            return False
    return True


async def is_allowed(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """True if LiteLLM would let a key call a `model_name`: by all lists of models, and the budgets for that model."""
    auth = _auth(metadata)
    if auth is None:
        return True
    can_call, is_within_budget = Seam.ACCESS.get(), Seam.BUDGET.get()
    # By position: the first three mean the same in all versions.
    may_call = may_use(router, model, metadata) and (can_call is None or await can_call(auth, model, router) in _ALLOWS)
    return may_call and (is_within_budget is None or await is_within_budget(auth, model) in _ALLOWS)


def has_limits(metadata: Mapping[str, Any]) -> bool:
    """True if any limit or budget is set for the caller, its metadata or its team's, whatever LiteLLM calls it."""
    auth = _auth(metadata)
    # Of a model of pydantic; another object's fields are its own.
    fields = {} if auth is None else dict(auth) if hasattr(auth, "model_fields_set") else vars(auth)
    holders = [fields, *(fields.get(name) or {} for name in ("metadata", "team_metadata"))]
    return any(
        value is not None and value is not False and value not in ({}, [])  # a limit of 0 is one
        for holder in holders
        for name, value in holder.items()
        if any(word in name for word in _LIMITS)
    )


def _auth(metadata: Mapping[str, Any]) -> Any:
    """LiteLLM's own object of the caller; None outside a proxy."""
    found = metadata.get("user_api_key_auth")
    return Seam.CALLER.needed()(**found) if isinstance(found, Mapping) else found
