"""Breaks our own counting for two models, as a defect of ours would, with an error that quotes the conversation."""

from __future__ import annotations

from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate

_count, _learn = TokenCounter.count, TokenCounter.learn


async def _broken_count(
    self: TokenCounter, target_key: str, family: Any, request: Any, *, asker: str = "", window_tokens: int = 0
) -> Estimate:
    if "sabotaged-count" in target_key:
        raise ValueError(request.messages[-1].text)
    return await _count(self, target_key, family, request, asker=asker, window_tokens=window_tokens)


def _broken_learn(self: TokenCounter, target_key: str, count: Estimate, prompt_tokens: int, **how: Any) -> Any:
    if "sabotaged-learn" in target_key and not how.get("is_asked"):
        raise ValueError("no lesson")
    return _learn(self, target_key, count, prompt_tokens, **how)


TokenCounter.count = _broken_count  # type: ignore[method-assign]
TokenCounter.learn = _broken_learn  # type: ignore[method-assign]
handler = CustomLogger()
