"""How failures of our own calls through the router are told."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from litellm_compaction.core.messages import user_message
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy.internal import summary_asker


class _Failing:
    """A router whose every call fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def acompletion(self, **_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (litellm.Timeout("secret words", model="m", llm_provider="lm_studio"), "timeout"),
        (litellm.APIConnectionError("secret words", model="m", llm_provider="lm_studio"), "error"),
        (ValueError("secret words"), "error"),
    ],
)
async def test_a_failed_call_is_told_in_one_word(error: Exception, reason: str) -> None:
    """LiteLLM's own time limit is a timeout like ours; what the server said is in no message."""
    ask = summary_asker(_Failing(error), "m", {}, timeout_s=1)
    with pytest.raises(SummaryFailed) as failed:
        await ask([user_message("text")], max_tokens=5)
    assert failed.value.reason == reason
    assert "secret" not in str(failed.value)
