"""Is there an LM Studio, and what has it loaded? Called by `up`."""

from __future__ import annotations

import asyncio

import httpx

from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.windows.fetch import KeyRefused
from litellm_compaction.windows.lmstudio import Listing, answers_as_lmstudio, list_models

_LIMIT_S = 2.0


def listing_of(url: str, api_key: str | None) -> Listing | None:
    """What the LM Studio at `url` lists; None when nothing, or something else, answers there within 2 s.

    Raises:
        KeyRefused: a server answers, and wants another key: whether it is LM Studio does not matter then.
    """
    return asyncio.run(_listing_of(url, api_key))


async def _listing_of(url: str, api_key: str | None) -> Listing | None:
    # The environment's web proxy must not be asked for a server on this machine or network.
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            return await asyncio.wait_for(_read(http, url, api_key), _LIMIT_S)
        except KeyRefused:
            raise
        except (ServerUnavailable, asyncio.TimeoutError):
            return None


async def _read(http: httpx.AsyncClient, url: str, api_key: str | None) -> Listing | None:
    is_lm_studio = await answers_as_lmstudio(http, url, api_key, timeout_s=_LIMIT_S)
    listing = await list_models(http, url, api_key, timeout_s=_LIMIT_S)
    return listing if is_lm_studio else None
