"""The key that a request to the page shows, and its owner.

LiteLLM decides with each request whose key it is; `docs/page.md` lists the rights of each role. A browser sends the
key by HTTP's own Basic scheme, also with requests that other sites make it send: `is_own_request` tells those apart.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request

from litellm_compaction.proxy.deployments import note_credential, tenant_of
from litellm_compaction.proxy.litellm_inside.application import key_owner
from litellm_compaction.proxy.litellm_inside.callers import may_use
from litellm_compaction.proxy.litellm_inside.seam import Seam

# LiteLLM refuses a path that it does not know to all but administrators (auth/route_checks.py, 1.106.2). A key that may
# list models may look here.
_KNOWN_PATH = "/v1/models"
_WRITER, _VIEWER = "proxy_admin", "proxy_admin_viewer"
_FORM_TYPE = "application/x-www-form-urlencoded"
_MAX_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Visitor:
    """A client with a valid key.

    Attributes:
        role: LiteLLM's word; "" if it does not say.
        tenant: as in events.
        auth: LiteLLM's record of the key.
    """

    role: str
    tenant: str
    auth: Any

    @property
    def may_write(self) -> bool:
        return self.role == _WRITER

    @property
    def sees_all(self) -> bool:
        return self.role in (_WRITER, _VIEWER)

    @property
    def tenant_seen(self) -> str:
        """The tenant whose numbers are shown; "" for all."""
        return "" if self.sees_all else self.tenant

    def may_see(self, router: Any, model: str) -> bool:
        return self.sees_all or may_use(router, model, {"user_api_key_auth": self.auth})


async def visitor_of(request: Request) -> Visitor | None:
    """The owner of the key in a request's headers, as LiteLLM sees it; None if it refuses."""
    headers = _with_bearer({name: value for name, value in request.headers.items() if name != "cookie"})
    try:
        auth = await key_owner(request.scope, headers, _KNOWN_PATH)
    except Exception:  # noqa: BLE001 - whatever it raises is a no
        # Not only its own errors: without `prisma`, 1.106.2 ends with a ModuleNotFoundError at a wrong key.
        return None
    note_credential(headers)
    role = getattr(auth, "user_role", None)
    return Visitor(role=str(getattr(role, "value", role) or ""), tenant=tenant_of(_metadata_of(auth)), auth=auth)


async def form_of(request: Request) -> dict[str, str] | None:
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


def is_own_request(method: str, headers: Mapping[str, str], scheme: str) -> bool:
    """False for a request that another site makes a browser send, with the key that the browser knows.

    Other ports of a host are other origins. Browsers send `Sec-Fetch-Site` to https and loopback addresses (W3C, Fetch
    Metadata), and `Origin` with everything that a script can read and with every form: a form that comes with a
    browser's password and neither of them is refused. Names of `headers` are in lower case.

    Args:
        scheme: of the request. What comes as http may have been https before a proxy, never the other way round.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none") or (method == "GET" and headers.get("sec-fetch-mode") == "navigate")
    origin = headers.get("origin")
    if origin is None:
        return method == "GET" or not _is_basic(headers)
    shown = urlsplit(origin)
    return shown.netloc == headers.get("host") and (shown.scheme == "https" or scheme == "http")


def _is_basic(headers: Mapping[str, str]) -> bool:
    return headers.get("authorization", "")[:6].lower() == "basic "


def _with_bearer(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers with the key of a browser's password box (RFC 7617) in the place where LiteLLM looks for keys.

    The key is the password, or the name if there is no password.
    """
    if not _is_basic(headers):
        return dict(headers)
    try:
        name, _, password = base64.b64decode(headers["authorization"][6:], validate=True).decode().partition(":")
    except ValueError:
        return {key: value for key, value in headers.items() if key != "authorization"}
    bearer = {"authorization": f"Bearer {password or name}"}
    if isinstance(own := (Seam.KEY_HEADER.get() or {}).get("litellm_key_header_name"), str):
        bearer[own.lower()] = bearer["authorization"]
    return {**headers, **bearer}


def _metadata_of(auth: Any) -> Mapping[str, Any]:
    """The metadata that LiteLLM gives this key's requests (litellm_pre_call_utils.py:1691, 1.106.2)."""
    key = getattr(auth, "api_key", None)
    if getattr(auth, "is_session_token", False):
        key = getattr(auth, "key_alias", None) or key
    return {
        "user_api_key_team_id": getattr(auth, "team_id", None),
        "user_api_key_user_id": getattr(auth, "user_id", None),
        "user_api_key_hash": key,
    }
