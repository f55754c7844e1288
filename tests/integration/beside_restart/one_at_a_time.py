"""Keys without a database: one request at a time, few tokens a minute; every other key is the administrator's."""

from __future__ import annotations

from fastapi import Request
from litellm.proxy._types import UserAPIKeyAuth


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Who calls: keys that begin with `sk-one-` or `sk-few-` are limited, each with a limit of its own."""
    if api_key.startswith("sk-few-"):
        return UserAPIKeyAuth(api_key=api_key, user_id="una", team_id="solo", tpm_limit=7000)
    if api_key.startswith("sk-one-"):
        return UserAPIKeyAuth(api_key=api_key, user_id="una", team_id="solo", max_parallel_requests=1)
    return UserAPIKeyAuth(api_key=api_key, user_id="admin")
