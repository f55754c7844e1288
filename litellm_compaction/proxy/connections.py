"""The connections to guarded deployments: LiteLLM's own kind of transport, over a pool of ours.

Called by the gate, which keeps one for all of them.
"""

from __future__ import annotations

import os
from typing import Any

import httpx

from litellm_compaction.proxy.access import ssl_verification

# Idle connections end before the server closes them (Node.js: after 5 s): a request must not meet a closing one.
_IDLE_S = 2.0
# One machine's LM Studio serves a handful of requests at a time; the rest wait for a connection like for a slot.
_POOL_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=_IDLE_S)
_DISABLED_VARIABLE = "DISABLE_AIOHTTP_TRANSPORT"


def connect() -> httpx.AsyncBaseTransport:
    """A transport with a connection pool, for the running loop; it goes past the proxies of the environment.

    Over aiohttp as in LiteLLM, unless the operator has turned that off: httpx's own transport parses every piece of a
    stream in Python, which costs a chunk 16 µs more (4 % of what the proxy spends on it; 2026-11).
    """
    return _over_aiohttp() or httpx.AsyncHTTPTransport(verify=ssl_verification(), limits=_POOL_LIMITS)


def _over_aiohttp() -> httpx.AsyncBaseTransport | None:
    """The same over aiohttp; None where LiteLLM has no such transport, or may not use it."""
    import litellm

    if getattr(litellm, "disable_aiohttp_transport", False) or _is_true(os.environ.get(_DISABLED_VARIABLE, "")):
        return None
    try:
        from aiohttp import ClientSession, DummyCookieJar, TCPConnector
        from litellm.llms.custom_httpx.aiohttp_transport import LiteLLMAiohttpTransport
    except ImportError:
        return None

    class Transport(LiteLLMAiohttpTransport):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
        """LiteLLM's, without the proxies of the environment, which a conversation with a local server never meets."""

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
