"""Servers as commands ask them without a proxy: LM Studio's listing, and chat completions of any server."""

from __future__ import annotations

import asyncio
import contextlib

import httpx

from litellm_compaction.core.messages import JsonObject, JsonValue
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.library.context import Completion
from litellm_compaction.windows.fetch import KeyRefused, without_userinfo
from litellm_compaction.windows.lmstudio import Listing, answers_as_lmstudio, list_models

_LIMIT_S = 2.0
_CONNECT_S = 5.0
_ERROR_CHARS = 300


def listing_of(url: str, api_key: str | None) -> Listing | None:
    """The models of the LM Studio at `url`; None if nothing, or something else, answers there within 2 s.

    Raises:
        KeyRefused: a server answers, and wants another key.
    """

    async def read() -> Listing | None:
        # The environment's web proxy must not be asked for a server on this machine or network.
        async with httpx.AsyncClient(trust_env=False) as http:
            is_lm_studio = await answers_as_lmstudio(http, url, api_key, timeout_s=_LIMIT_S)
            listing = await list_models(http, url, api_key, timeout_s=_LIMIT_S)
            return listing if is_lm_studio else None

    try:
        return asyncio.run(asyncio.wait_for(read(), _LIMIT_S))
    except KeyRefused:
        raise
    except (ServerUnavailable, asyncio.TimeoutError):
        return None


class ChatServer:
    """`/v1/chat/completions` of a server at `api_base`, with or without `/v1`.

    If it cannot be used, that is a mistake to put right: a proxy would go on without a summary, this raises
    `ServerUnavailable`.
    """

    def __init__(self, api_base: str, api_key: str | None) -> None:
        base = api_base.rstrip("/")
        self._url = f"{base if base.endswith('/v1') else f'{base}/v1'}/chat/completions"
        # An address may hold a password, and a report is pasted into bug reports.
        self._shown = without_userinfo(self._url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def completion(self, timeout_s: float) -> Completion:
        """The completion as the library takes one; `timeout_s` is the limit for a whole answer."""
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)

        async def complete(**body: JsonValue) -> object:
            return self._document(await self._posted(body, timeout))

        return complete

    async def _posted(self, body: JsonObject, timeout: httpx.Timeout) -> httpx.Response:
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                return await http.post(self._url, json=body, headers=self._headers, timeout=timeout)
        except httpx.ConnectError as exc:
            raise ServerUnavailable(
                f"nothing answers at {self._shown}. Start LM Studio's server, name another one with --api-base, "
                "or see without a model what would be done: --dry-run"
            ) from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ServerUnavailable(
                f"{self._shown} gave no summary ({type(exc).__name__}). Is --api-base right?"
            ) from exc

    def _document(self, response: httpx.Response) -> object:
        with contextlib.suppress(ValueError, RecursionError):
            document = response.json()
            # LM Studio answers 200 with an error on unknown paths.
            if response.status_code == 200 and isinstance(document, dict) and document.get("choices"):
                return document
        raise ServerUnavailable(
            f"{self._shown} answered HTTP {response.status_code} and no chat completion: "
            f"{' '.join(response.text.split())[:_ERROR_CHARS]!r}. Check --model and --api-base"
        )
