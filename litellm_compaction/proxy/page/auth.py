"""The key that a request to the page's routes shows, and its owner.

LiteLLM decides with each request whose key it is; `docs/page.md` lists the rights of each role. Only a header that a
client sets itself counts: neither a cookie nor a browser's password, which another site can make a browser send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from litellm_compaction.proxy.client import note_credential, tenant_of
from litellm_compaction.proxy.litellm_inside import Seam
from litellm_compaction.proxy.litellm_inside.application import key_owner, may_use

# LiteLLM refuses a path that it does not know to all but administrators (auth/route_checks.py). A key that may list
# models may look here.
_KNOWN_PATH = "/v1/models"


@dataclass(frozen=True, slots=True)
class Visitor:
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

    @property
    def tenant_seen(self) -> str:
        """The tenant whose numbers are shown; "" for all."""
        return "" if self.sees_all else self.tenant

    def may_see(self, router: Any, model: str) -> bool:
        return self.sees_all or may_use(router, model, {"user_api_key_auth": self.auth})


async def visitor_of(request: Request) -> Visitor | None:
    """Returns the owner of the key in a request's headers, as LiteLLM sees it; None if it refuses."""
    headers = {name: value for name, value in request.headers.items() if name != "cookie"}
    shown = headers.get("authorization", "")
    if shown[:6].lower() == "basic ":
        return None
    # Where a proxy looks for keys in a header of its own, a browser cannot know that.
    own = (Seam.KEY_HEADER.get() or {}).get("litellm_key_header_name")
    beside = {own.lower(): shown} if isinstance(own, str) and shown else {}
    try:
        auth = await key_owner(request.scope, {**beside, **headers}, _KNOWN_PATH)
    except Exception:  # noqa: BLE001 - whatever it raises is a no
        # Not only its own errors: without `prisma` it ends with a ModuleNotFoundError at a wrong key.
        return None
    note_credential(headers)
    role, key = getattr(auth, "user_role", None), getattr(auth, "api_key", None)
    if getattr(auth, "is_session_token", False):
        key = getattr(auth, "key_alias", None) or key
    # The metadata that LiteLLM gives this key's requests (litellm_pre_call_utils.py).
    metadata = {f"user_api_key_{name}": getattr(auth, name, None) for name in ("team_id", "user_id")}
    tenant = tenant_of({**metadata, "user_api_key_hash": key})
    return Visitor(role=str(getattr(role, "value", role) or ""), tenant=tenant, auth=auth)
