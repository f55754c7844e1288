"""Keys without a database: each has its user and its team, and one may call only one model.

What follows a dot in a key makes it another key of the same person's.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from litellm.proxy._types import UserAPIKeyAuth

_KEYS: dict[str, dict[str, Any]] = {
    "sk-anna": {"user_id": "anna", "team_id": "red"},
    "sk-arno": {"user_id": "arno", "team_id": "red"},
    "sk-bert": {"user_id": "bert", "team_id": "blue"},
    "sk-carl": {"user_id": "carl"},
    "sk-dora": {"user_id": "dora"},
}


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Who calls; an unknown key is the proxy's own administrator."""
    return UserAPIKeyAuth(api_key=api_key, **_KEYS.get(api_key.partition(".")[0], {"user_id": "admin"}))
