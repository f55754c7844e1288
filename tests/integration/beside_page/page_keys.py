"""Keys without a database: an administrator, one who may only view, and two tenants."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException, Request
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

_KEYS: dict[str, dict[str, Any]] = {
    "sk-page-admin": {"user_id": "root", "user_role": LitellmUserRoles.PROXY_ADMIN},
    "sk-page-viewer": {"user_id": "eve", "user_role": LitellmUserRoles.PROXY_ADMIN_VIEW_ONLY},
    "sk-page-anna": {"user_id": "anna", "team_id": "red", "user_role": LitellmUserRoles.INTERNAL_USER},
    "sk-page-arno": {"user_id": "arno", "team_id": "red", "user_role": LitellmUserRoles.INTERNAL_USER},
    "sk-page-bert": {"user_id": "bert", "models": ["small"], "user_role": LitellmUserRoles.INTERNAL_USER},
}


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Whose key it is; others are refused as LiteLLM refuses them."""
    if api_key not in _KEYS:
        raise HTTPException(status_code=401, detail="unknown key")
    return UserAPIKeyAuth(api_key=api_key, **_KEYS[api_key])
