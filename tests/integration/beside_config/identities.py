"""Identities in place of LiteLLM's database: users, teams, roles, lists of models, budgets, limits, and nobody at all.

Beside a proxy's configuration this is its `custom_auth`. What follows a dot in a key makes it another key of the same
identity.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import HTTPException, Request
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

MODELS = ["local", "small", "guarded", "hooked"]
IDENTITIES: dict[str, dict[str, Any]] = {
    "sk-alice": {"user_id": "alice"},
    "sk-bob": {"user_id": "bob"},
    "sk-red-anna": {"user_id": "anna", "team_id": "red"},
    "sk-red-arno": {"user_id": "arno", "team_id": "red"},
    "sk-blue-bert": {"user_id": "bert", "team_id": "blue"},
    "sk-team-only": {"team_id": "green"},
    "sk-key-only": {},
    "sk-other-key": {},
    "sk-listed": {"user_id": "lisa", "models": MODELS},
    "sk-team-listed": {"user_id": "tom", "team_id": "gray", "models": ["all-team-models"], "team_models": MODELS},
    "sk-no-default": {"user_id": "nora", "models": ["no-default-models"]},
    "sk-poor": {"user_id": "paul", "max_budget": 1.0, "spend": 2.0},
    "sk-slow": {"user_id": "sam", "rpm_limit": 3},
    "sk-admin": {"user_id": "root", "user_role": LitellmUserRoles.PROXY_ADMIN},
    "sk-viewer": {"user_id": "eve", "user_role": LitellmUserRoles.PROXY_ADMIN_VIEW_ONLY},
    # Custom authentication may name neither key nor user nor team.
    "sk-nobody": {"api_key": None},
}
_OTHERS: dict[str, dict[str, Any]] = {
    "sk-anna": {"user_id": "anna", "team_id": "red"},
    "sk-arno": {"user_id": "arno", "team_id": "red"},
    "sk-bert": {"user_id": "bert", "team_id": "blue"},
    "sk-carl": {"user_id": "carl"},
    "sk-dora": {"user_id": "dora"},
    # One for each role that LiteLLM's own keys have: administrators, and tenants who are none.
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
    # One request at a time.
    "sk-one": {"user_id": "una", "team_id": "solo", "max_parallel_requests": 1},
}


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Whose key it is; others are refused as LiteLLM refuses them."""
    admin = {os.environ["LITELLM_MASTER_KEY"]: {"user_id": "admin"}}
    known = {**IDENTITIES, **_OTHERS, **admin}.get(api_key.partition(".")[0])
    if known is None:
        raise HTTPException(status_code=401, detail="unknown key")
    return UserAPIKeyAuth(**{"api_key": api_key, **known})
