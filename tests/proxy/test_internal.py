"""How failures of our own calls through the router are told."""

from __future__ import annotations

import json
import re
from typing import Any

import litellm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import user_message
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy.internal import _ERROR_WORDS, summary_asker, told_apart


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
    ask = summary_asker(_Failing(error), "m", {}, timeout_s=60, group="pruner")
    with pytest.raises(SummaryFailed) as failed:
        await ask([user_message("text")], max_tokens=5)
    assert failed.value.reason == reason
    assert "secret" not in str(failed.value)


async def test_a_failed_call_leaves_what_the_operator_needs(caplog: pytest.LogCaptureFixture) -> None:
    """Which model, the status, the exception's class, and the server's words but for those of the conversation."""
    said = "Rate limit reached for org-17. Prompt was: 'The password of Ada is SwordFish99'"
    error = litellm.RateLimitError(said, model="m", llm_provider="openai")
    ask = summary_asker(_Failing(error), "m", {}, timeout_s=60, group="pruner")
    with caplog.at_level("WARNING", "litellm_compaction"), pytest.raises(SummaryFailed):
        await ask([user_message("The password of Ada is SwordFish99. Prompt it.")], max_tokens=5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("pruning_failed model=pruner error=RateLimitError status=429 message=Rate limit reached for")
    assert "org - 17" in line
    assert [word for word in ("password", "Ada", "SwordFish99") if word in line] == []


_WORD = st.text(st.characters(categories=["L", "Nd"]), min_size=3, max_size=9)


@given(st.lists(_WORD, min_size=1, max_size=12), st.integers(0, 3))
def test_no_word_of_a_conversation_is_logged(words: list[str], times: int) -> None:
    """However the server quotes it: as it was, or escaped by JSON again and again."""
    text = "\n".join(words)
    quoted = text
    for _ in range(times):
        quoted = json.dumps(quoted)
    told = told_apart(f"Bad request: {quoted}", [user_message(text)])
    assert told.startswith("Bad request :")
    logged = set(re.findall(r"(?:\\u[0-9a-f]{4}|\w)+", told.removeprefix("Bad request :").lower()))
    own = {json.dumps(word.lower())[1:-1] for word in words} - _ERROR_WORDS
    assert logged & own == set()


def test_a_long_error_is_cut() -> None:
    """A log line is no place for a page."""
    assert len(told_apart("overloaded " * 1000, [user_message("text")])) < 400


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
        await summary_asker(router, "m", parent, timeout_s=60, group="pruner")([user_message("text")], max_tokens=5)
    sent = json.dumps(router.asked, default=str)
    assert '"user_api_key_user_id": "anna"' in sent
    assert "reserved_cost" not in sent
    assert "MINE" not in sent
