"""LiteLLM's proxy: its configuration and secret, what its requests pass, its keys, and its connections."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import httpx

from litellm_compaction.errors import LiteLLMChanged, StoreError
from litellm_compaction.proxy.client import mapping
from litellm_compaction.proxy.litellm_inside import Seam

_Application: TypeAlias = Callable[..., Awaitable[None]]
# Nothing else of a request's, such as a body that LiteLLM has read.
_KEPT_IN_SCOPE = ("type", "app", "asgi", "client", "http_version", "scheme", "server")
# The answers of LiteLLM's own checks for a call on a caller's behalf.
_ALLOWS = ("allowed", True)
_NO_REDIS = (
    "store: the proxy has no Redis of its own: set general_settings.coordination_redis, or REDIS_HOST and REDIS_PORT; "
    "or name one here: redis://host:6379/0"
)
# One machine's LM Studio serves a handful of requests at a time; the rest wait for a connection like for a slot. Idle
# connections end before the server closes them (Node.js: after 5 s): a request must not meet a closing one.
_POOL_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=2.0)
_SWITCH = {"true": True, "1": True, "yes": True, "false": False}


def configuration() -> Mapping[str, Any]:
    """The configuration that is being loaded; empty outside the proxy."""
    read = Seam.CONFIG.get()
    return mapping(read() if read is not None else None)


def keeps_responses() -> bool:
    """LiteLLM finds the messages before a `previous_response_id`: it keeps prompts in its database."""
    keeps = Seam.KEPT_PROMPTS.get()
    return Seam.DATABASE.get() is not None and (keeps is None or bool(keeps()))


def proxy_secret() -> str | None:
    """The proxy's master key; None before the configuration is loaded, and without one."""
    key = Seam.MASTER_KEY.get()
    return key if isinstance(key, str) and key else None


def wrap_requests(make: Callable[[_Application], _Application]) -> None:
    """Puts what is made of the proxy's ASGI application in its place, inside of all middleware."""
    if (application := Seam.REQUESTS.get()) is not None:
        # What was put there before goes.
        inner = getattr(application, "__wrapped__", application)
        Seam.PAGE.needed().router.middleware_stack = functools.update_wrapper(make(inner), inner)


# ------------------------------------------------------------------ keys


async def key_owner(request: Any, path: str) -> Any:
    """Returns LiteLLM's record of the key that a request shows, as if it asked to GET `path`; else its error."""
    user_api_key_auth = Seam.KEYS.needed()
    # As a POST it could be refused for what its body does not have (`enforce_user_param`).
    get = {"method": "GET", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "state": {}}
    scope = {name: request.scope[name] for name in _KEPT_IN_SCOPE if name in request.scope}
    headers = [each for each in request.headers.raw if each[0] != b"cookie" and not each[0].startswith(b"content-")]

    async def nothing() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    look = type(request)({**scope, **get, "headers": headers}, nothing)
    # FastAPI calls it so: a parameter that is left out would be its marker in place of a header's value.
    markers = {name: each.default for name, each in inspect.signature(user_api_key_auth).parameters.items()}
    given = {name: await each.dependency(look) for name, each in markers.items() if hasattr(each, "dependency")}
    return await user_api_key_auth(request=look, **given)


async def is_allowed(router: Any, model: str, metadata: Mapping[str, Any]) -> bool:
    """True if LiteLLM would let a key call a `model_name`: by all lists of models, and the budgets for that model."""
    # A call through the router skips the proxy's own check.
    if (auth := metadata.get("user_api_key_auth")) is None:
        return True
    access, budget = Seam.ACCESS.get(), Seam.BUDGET.get()
    # Anything else than LiteLLM's own object is nobody's word.
    if access is None and any(getattr(auth, name, True) for name in ("models", "team_models")):
        return False
    # By position: the first three mean the same in all versions.
    checks = (access, (auth, model, router)), (budget, (auth, model))
    try:
        return all([check is None or await check(*given) in _ALLOWS for check, given in checks])
    except Exception:  # noqa: BLE001 - fails closed, as LiteLLM's own checks do
        return False


def has_limits(metadata: Mapping[str, Any]) -> bool:
    """True if any limit or budget is set for the caller, its metadata or its team's, whatever LiteLLM calls it."""
    fields = dict(metadata.get("user_api_key_auth") or {})
    holders = [fields, *(fields.get(name) or {} for name in ("metadata", "team_metadata"))]
    limits = [holder[name] for holder in holders for name in holder if "limit" in name or "budget" in name]
    # A limit of 0 is one.
    return any(value is not None and value is not False and value not in ({}, []) for value in limits)


# ------------------------------------------------------------------ connections


def proxy_redis() -> Any:
    """The client of the Redis by which LiteLLM's workers coordinate themselves, for the running event loop."""
    connect = getattr(Seam.REDIS.get(), "init_async_client", None)
    if connect is None:
        raise StoreError(_NO_REDIS)
    return connect()


def redis_of(config: Mapping[str, object]) -> Callable[[], Any]:
    """Returns a maker of clients, outside of the proxy, of the Redis that `coordination_redis` or variables name."""
    block = mapping(mapping(config.get("general_settings")).get("coordination_redis"))

    def make() -> Any:
        try:
            return Seam.REDIS_CLIENT.needed()(**{name: value for name, value in block.items() if value is not None})
        except (LiteLLMChanged, TypeError, ValueError):
            raise StoreError(_NO_REDIS) from None

    return make


def connect() -> httpx.AsyncBaseTransport:
    """A transport with a connection pool, for the running loop; it goes past the proxies of the environment."""
    import litellm

    # LiteLLM's `litellm_settings.ssl_verify`: a switch, or a bundle of certificates.
    verify = os.environ.get("SSL_VERIFY", getattr(litellm, "ssl_verify", True))
    verify = _SWITCH.get(verify.strip().lower(), verify) if isinstance(verify, str) else verify is not False
    return httpx.AsyncHTTPTransport(verify=verify, limits=_POOL_LIMITS)
