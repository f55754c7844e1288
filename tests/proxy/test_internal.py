"""How failures of our own calls through the router are told."""

from __future__ import annotations

import json
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
    ask = summary_asker(_Failing(error), "m", {}, timeout_s=60)
    with pytest.raises(SummaryFailed) as failed:
        await ask([user_message("text")], max_tokens=5)
    assert failed.value.reason == reason
    assert "secret" not in str(failed.value)


class _Telling:
    """A router that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    async def acompletion(self, **arguments: Any) -> Any:
        self.asked = arguments
        raise ValueError


async def test_budget_reservation_stays_with_the_clients_call() -> None:
    """A summary call carries who pays, but neither the client's budget reservation nor its other metadata."""
    router = _Telling()
    parent = {
        "user_api_key_hash": "h",
        "user_api_key_user_id": "anna",
        "user_api_key_budget_reservation": {"reserved_cost": 0.5},
        "user_api_key_auth": {"user_id": "anna", "budget_reservation": {"reserved_cost": 0.5}},
        "secret_note": "MINE",
    }
    with pytest.raises(SummaryFailed):
        await summary_asker(router, "m", parent, timeout_s=60)([user_message("text")], max_tokens=5)
    sent = json.dumps(router.asked, default=str)
    assert '"user_api_key_user_id": "anna"' in sent
    assert "reserved_cost" not in sent
    assert "MINE" not in sent
