"""Keys without a database, one for each role that LiteLLM's own have: administrators, and tenants who are none."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException, Request
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

_KEYS: dict[str, dict[str, Any]] = {
    "sk-page-admin": {"user_id": "root", "user_role": LitellmUserRoles.PROXY_ADMIN},
    "sk-page-viewer": {"user_id": "eve", "user_role": LitellmUserRoles.PROXY_ADMIN_VIEW_ONLY},
    "sk-page-anna": {"user_id": "anna", "team_id": "red", "user_role": LitellmUserRoles.INTERNAL_USER},
    "sk-page-arno": {"user_id": "arno", "team_id": "red", "user_role": LitellmUserRoles.INTERNAL_USER},
    "sk-page-reader": {"user_id": "rita", "team_id": "red", "user_role": LitellmUserRoles.INTERNAL_USER_VIEW_ONLY},
    "sk-page-team": {"team_id": "red", "user_role": LitellmUserRoles.TEAM},
    "sk-page-org": {"user_id": "olaf", "org_id": "org", "user_role": LitellmUserRoles.ORG_ADMIN},
    "sk-page-customer": {"end_user_id": "cora", "user_role": LitellmUserRoles.CUSTOMER},
    "sk-page-plain": {"user_id": "paul"},
    "sk-page-bert": {"user_id": "bert", "models": ["small"], "user_role": LitellmUserRoles.INTERNAL_USER},
}


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Whose key it is; others are refused as LiteLLM refuses them."""
    if api_key not in _KEYS:
        raise HTTPException(status_code=401, detail="unknown key")
    return UserAPIKeyAuth(api_key=api_key, **_KEYS[api_key])
