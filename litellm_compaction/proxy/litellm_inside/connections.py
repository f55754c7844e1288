"""Connections as LiteLLM makes them: to its Redis, and to model servers with its credentials and its certificates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from litellm_compaction.errors import LiteLLMChanged, StoreError
from litellm_compaction.proxy.litellm_inside.seam import Seam

# What LiteLLM's words for the place of a Redis, and for signing in there, begin with.
_REDIS_NAMES = (
    *("url", "host", "port", "db", "user", "pass", "startup_nodes", "sentinel_", "service_name"),
    *("ssl", "gcp_", "azure_", "aws_iam_", "credential_provider"),
)
_REDIS_CACHES = ("redis", "redis-semantic")
_NO_REDIS = (
    "store: the proxy has no Redis of its own: set general_settings.coordination_redis, "
    "litellm_settings.cache_params, or REDIS_HOST and REDIS_PORT; or name one here: redis://host:6379/0"
)
# Idle connections end before the server closes them (Node.js: after 5 s): a request must not meet a closing one.
_IDLE_S = 2.0
# One machine's LM Studio serves a handful of requests at a time; the rest wait for a connection like for a slot.
_POOL_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=_IDLE_S)
_DISABLED_VARIABLE = "DISABLE_AIOHTTP_TRANSPORT"


def proxy_redis() -> Any:
    """The client of the Redis by which LiteLLM's workers coordinate themselves, for the running event loop."""
    connect = getattr(Seam.REDIS.get(), "init_async_client", None)
    if connect is None:
        raise StoreError(_NO_REDIS)
    return connect()


def redis_of(config: Mapping[str, object]) -> Callable[[], Any]:
    """Returns a maker of clients of the Redis that a proxy with this configuration has, for commands outside of it."""
    general, litellm, router = (
        found if isinstance(found := config.get(name), Mapping) else {}
        for name in ("general_settings", "litellm_settings", "router_settings")
    )
    cache = litellm.get("cache_params") or {}
    blocks = [general.get("coordination_redis")]
    if litellm.get("cache") is True and isinstance(cache, Mapping) and cache.get("type", "redis") in _REDIS_CACHES:
        blocks.append({**cache, "startup_nodes": cache.get("redis_startup_nodes", cache.get("startup_nodes"))})
    blocks.append({name.removeprefix("redis_"): value for name, value in router.items() if name.startswith("redis_")})
    found = next((block for block in blocks if isinstance(block, Mapping) and block), {})

    def make() -> Any:
        try:
            get_client = Seam.REDIS_CLIENT.needed()
            named = {name: value for name, value in found.items() if name.startswith(_REDIS_NAMES)}
            return get_client(**{name: value for name, value in named.items() if value is not None})
        except (LiteLLMChanged, ValueError):
            raise StoreError(_NO_REDIS) from None

    return make


def with_credentials(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """`params` of a deployment with those of `litellm_credential_name`, which LiteLLM adds after our hook."""
    name = params.get("litellm_credential_name")
    if not isinstance(name, str):
        return params
    values = Seam.CREDENTIALS.needed()(name)
    return {**values, **{key: value for key, value in params.items() if value is not None}}


def ssl_verification() -> bool | str:
    """LiteLLM's `litellm_settings.ssl_verify`: a switch, or a bundle of certificates."""
    import litellm

    value = os.environ.get("SSL_VERIFY", getattr(litellm, "ssl_verify", True))
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return value if isinstance(value, (bool, str)) else True


def connect() -> httpx.AsyncBaseTransport:
    """A transport with a connection pool, for the running loop; it goes past the proxies of the environment."""
    return _over_aiohttp() or httpx.AsyncHTTPTransport(verify=ssl_verification(), limits=_POOL_LIMITS)


def _over_aiohttp() -> httpx.AsyncBaseTransport | None:
    """None if LiteLLM has no such transport, or may not use it."""
    import litellm

    if getattr(litellm, "disable_aiohttp_transport", False) or _is_true(os.environ.get(_DISABLED_VARIABLE, "")):
        return None
    inherited: Any = Seam.POOL.get()
    if inherited is None:
        return None
    from aiohttp import ClientSession, DummyCookieJar, TCPConnector

    class Transport(inherited):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
        async def _get_proxy_settings(self, request: httpx.Request) -> None:
            return None

    context = httpx.create_ssl_context(verify=ssl_verification())

    def session() -> ClientSession:
        connector = TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=context)
        return ClientSession(connector=connector, cookie_jar=DummyCookieJar())

    transport: Any = Transport(client=session)
    return transport if isinstance(transport, httpx.AsyncBaseTransport) else None


def _is_true(value: str) -> bool:
    return value.strip().lower() in ("true", "1", "yes")
