"""Looks at what of LiteLLM we stand on, so that a guard that cannot stand says so, and sends nothing.

A version of LiteLLM may move or drop any of it. Without it a request would go on unguarded as if all were well: that
is no mishap of one request, for which P8 lets it pass.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable
from typing import Any

import httpx

from litellm_compaction.concurrency import Kept
from litellm_compaction.errors import LiteLLMChanged
from litellm_compaction.proxy import litellm_inside as litellm_router
from litellm_compaction.proxy.internal import as_ours
from litellm_compaction.proxy.litellm_inside import Seam

logger = logging.getLogger("litellm_compaction")

# No deployment has it, and nothing answers there (RFC 863): only a LiteLLM that passes no client on asks it.
_NOBODY, _NOWHERE = "litellm-compaction", "http://127.0.0.1:9/v1"
_LIMIT_S = 10.0
_ANSWER = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "seen"}}]}


def check_classes(hooks: Iterable[str]) -> None:
    """Raises LiteLLMChanged if nobody would call `hooks`, which we fill, or if a piece is missing that guards all."""
    from litellm.integrations.custom_logger import CustomLogger

    lacking = [f"CustomLogger.{name}" for name in hooks if not hasattr(CustomLogger, name)]
    lacking += [str(seam) for seam in Seam if not seam.lost and seam.is_missing]
    if lacking:
        raise LiteLLMChanged(lacking[0])


class Seams:
    """Says if something of LiteLLM is missing by which requests are guarded, after one look at each router."""

    def __init__(self) -> None:
        self._router: Any = None
        self._of_router: LiteLLMChanged | None = None
        self._of_client: Kept[str, LiteLLMChanged | None] = Kept(_look_at_client, lambda _: math.inf, most=1)

    @property
    def fault(self) -> LiteLLMChanged | None:
        """What is known to be missing."""
        return self._of_router or self._of_client.last(_NOBODY)

    def of_router(self, router: Any) -> LiteLLMChanged | None:
        """What the router lacks; None if nothing."""
        if router is not self._router:
            self._router, self._of_router = router, None
            try:
                litellm_router.deployment(router, _NOBODY)
                litellm_router.deployments(router)
                for name in (*litellm_router.FALLBACKS, litellm_router.CHECKS):
                    litellm_router.setting(router, name)
            except LiteLLMChanged as error:
                logger.error("%s", error)  # noqa: TRY400 - the message is the finding
                self._of_router = error
        return self._of_router

    async def of_client(self) -> LiteLLMChanged | None:
        """The client that LiteLLM does not pass on, with which our transport carries answers; None if it does."""
        return await self._of_client.get(_NOBODY)

    async def aclose(self) -> None:
        await self._of_client.aclose()


async def _look_at_client(model: str) -> LiteLLMChanged | None:
    """Has LiteLLM make a call whose client answers by itself; no other callback is told of it."""
    import litellm
    from openai import AsyncOpenAI

    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=_ANSWER)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with AsyncOpenAI(api_key=model, base_url=_NOWHERE, http_client=http) as client:
        prompt = [{"role": "user", "content": "."}]
        options = {"api_base": _NOWHERE, "api_key": model, "timeout": _LIMIT_S, "no-log": True}
        with contextlib.suppress(Exception), as_ours():
            await litellm.acompletion(
                model=f"lm_studio/{model}", messages=prompt, client=client, max_retries=0, num_retries=0, **options
            )
    if asked:
        return None
    error = LiteLLMChanged("client=", "Or set `carrier: hooks`, which passes no client on.")
    logger.error("%s", error)
    return error
