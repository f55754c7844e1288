"""Who looks at the page: LiteLLM's own answer, and what follows from it.

Administrators see everything and may write; those who may only view see everything; everybody else sees what their own
team, user or key has done, and the models that they may call.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from fastapi import Request

from litellm_compaction.proxy.access import may_use
from litellm_compaction.proxy.guards import note_credential, tenant_of

# LiteLLM refuses a path that it does not know to everybody but administrators (auth/route_checks.py, 1.106.2). Whoever
# may list models may look here.
_KNOWN_PATH = "/v1/models"
_WRITER, _VIEWER = "proxy_admin", "proxy_admin_viewer"
_KEY_HEADERS = ("authorization", "x-litellm-api-key", "api-key", "x-api-key")
_KEPT_IN_SCOPE = ("app", "asgi", "client", "http_version", "scheme", "server")


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody with a valid key.

    Attributes:
        role: as LiteLLM calls it; "" where it does not say.
        tenant: as in events.
        auth: LiteLLM's record of the key.
    """

    role: str
    tenant: str
    auth: Any

    @property
    def may_write(self) -> bool:
        """Whether settings may be changed."""
        return self.role == _WRITER

    @property
    def sees_all(self) -> bool:
        """Whether other tenants' numbers are shown."""
        return self.role in (_WRITER, _VIEWER)

    @property
    def tenant_seen(self) -> str:
        """Whose numbers are shown; "" for everybody's."""
        return "" if self.sees_all else self.tenant

    def may_see(self, router: Any, model: str) -> bool:
        """Whether a model's name is shown."""
        return self.sees_all or may_use(router, model, {"user_api_key_auth": self.auth})


def shows_key(request: Request) -> bool:
    """Whether a request's headers have a key, be it a good one or not."""
    return any(name in request.headers for name in (*_KEY_HEADERS, _own_header()) if name)


def keys_shown(request: Request) -> str:
    """All that a request's headers have for keys, to tell whether it is the same as another's; "" for none."""
    names = (*_KEY_HEADERS, _own_header())
    return "\n".join(value for name in names if name and (value := request.headers.get(name)))


def address_of(request: Request) -> str:
    """Whose request it is, for counting wrong keys; "" where nobody says.

    Behind reverse proxies that the operator has LiteLLM trust (`general_settings.trusted_proxy_ranges`) the last
    address that none of them has. `use_x_forwarded_for` alone trusts what any client can write. An IPv6 subscriber has
    2**64 addresses or more (RFC 6177), which count as one.
    """
    found = request.client.host if request.client else ""
    try:
        from litellm.proxy.auth.network import TrustedProxyConfig, resolve_client_ip
        from litellm.proxy.auth.trusted_proxy_utils import get_trusted_proxy_cidrs

        ranges = get_trusted_proxy_cidrs()
        config = TrustedProxyConfig(use_forwarded_for=bool(ranges), trusted_proxy_cidrs=ranges)
        found = resolve_client_ip(request, config)[0] or ""
    except (ImportError, AttributeError, TypeError, ValueError):
        # An older LiteLLM, which knows no such proxies.
        pass
    try:
        address = ipaddress.ip_address(found)
    except ValueError:
        return found
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _own_header() -> str:
    """The header in which this proxy looks for a key besides the usual ones; "" for none."""
    from litellm.proxy import proxy_server

    name = (proxy_server.general_settings or {}).get("litellm_key_header_name")
    return name.lower() if isinstance(name, str) else ""


async def visitor_of(request: Request, key: str | None) -> Visitor | None:
    """Who asks, as LiteLLM sees it; None where it refuses.

    Args:
        request: the browser's or a script's; its own headers may carry a key.
        key: of a cookie or the sign-in form, in place of the headers'; None for those.
    """
    from litellm.proxy.auth.user_api_key_auth import user_api_key_auth

    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() != "cookie"}
    if key is not None:
        headers = {name: value for name, value in headers.items() if name not in ("x-litellm-api-key", "x-api-key")}
        headers["authorization"] = f"Bearer {key}"
        if own_name := _own_header():
            headers[own_name] = f"Bearer {key}"
    given = {
        "api_key": headers.get("authorization"),
        "azure_api_key_header": headers.get("api-key"),
        "anthropic_api_key_header": headers.get("x-api-key"),
        "custom_litellm_key_header": headers.get("x-litellm-api-key"),
    }
    # FastAPI fills these in; a parameter that is left out would be its marker in place of a value.
    names = [name for name in signature(user_api_key_auth).parameters if name != "request"]
    try:
        auth = await user_api_key_auth(
            request=_as_known_path(request, headers), **{name: given.get(name) for name in names}
        )
    except Exception:  # noqa: BLE001 - whatever it raises is a no
        # Not only its own errors: without `prisma`, 1.106.2 ends with a ModuleNotFoundError at a wrong key.
        return None
    note_credential(headers)
    role = getattr(auth, "user_role", None)
    return Visitor(role=str(getattr(role, "value", role) or ""), tenant=tenant_of(_metadata_of(auth)), auth=auth)


def _as_known_path(request: Request, headers: Mapping[str, str]) -> Request:
    scope = {name: request.scope[name] for name in _KEPT_IN_SCOPE if name in request.scope}
    scope |= {
        "type": "http",
        "method": "GET",
        "path": _KNOWN_PATH,
        "raw_path": _KNOWN_PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in headers.items()
            if not name.startswith("content-")
        ],
        "state": {},
    }

    async def nothing() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    return Request(scope, nothing)  # type: ignore[arg-type] # starlette's messages are mutable mappings


def _metadata_of(auth: Any) -> Mapping[str, Any]:
    """What LiteLLM would write into the metadata of this key's requests (litellm_pre_call_utils.py:1691, 1.106.2)."""
    key = getattr(auth, "api_key", None)
    if getattr(auth, "is_session_token", False):
        key = getattr(auth, "key_alias", None) or key
    return {
        "user_api_key_team_id": getattr(auth, "team_id", None),
        "user_api_key_user_id": getattr(auth, "user_id", None),
        "user_api_key_hash": key,
    }
