"""How failures of our own calls through the router are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import litellm
import pytest

from litellm_compaction.core.messages import user_message
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy.internal import Caller
from tests.engine.bench import settled


class _Failing:
    """A router whose every call fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def acompletion(self, **_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason", "told"),
    [
        (litellm.Timeout("secret words", model="m", llm_provider="lm_studio"), "timeout", ""),
        (
            litellm.APIConnectionError("secret words", model="m", llm_provider="lm_studio"),
            "error",
            "APIConnectionError status=500",
        ),
        (
            litellm.RateLimitError("secret words", model="m", llm_provider="openai"),
            "error",
            "RateLimitError status=429",
        ),
        (ValueError("secret words"), "error", "ValueError status=None"),
    ],
)
async def test_a_failed_call_is_told_in_one_word(
    error: Exception, reason: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LiteLLM's own time limit is a timeout like ours; the operator gets model, class and status, none of the words."""
    ask = Caller(_Failing(error), "m", {}, timeout_s=60, group="pruner").ask
    with caplog.at_level("INFO", "litellm_compaction"), pytest.raises(SummaryFailed) as failed:
        await ask([user_message("secret words. Prompt it.")], max_tokens=5)
    assert failed.value.reason == reason
    assert "secret" not in str(failed.value)
    assert caplog.messages == ([f"pruning_failed model=pruner error={told}"] if told else [])


class _Streaming:
    """A router whose answer comes in pieces, and then never ends."""

    def __init__(self, pieces: list[Any], *, ends: bool = True) -> None:
        self.pieces = pieces
        self.ends = ends
        self.asked: dict[str, Any] = {}
        self.closed = 0
        self.waiting = asyncio.Event()
        self.logging_obj: _Log | None = None

    async def acompletion(self, **arguments: Any) -> Any:
        self.asked = arguments
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for piece in self.pieces:
            yield piece
        self.waiting.set()
        if not self.ends:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed += 1


def _chunk(finish_reason: str | None = None, **delta: Any) -> Any:
    fields = {"content": None, "reasoning_content": None, "tool_calls": None, **delta}
    return SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(**fields), finish_reason=finish_reason)])


async def test_a_summary_is_asked_for_as_a_stream_and_joined() -> None:
    """Only a stream can be ended; its last chunk, with the usage, has no choice."""
    pieces = [
        _chunk(reasoning_content="Hm."),
        _chunk(content="### Cur"),
        _chunk(content="rent state"),
        _chunk("length"),
        SimpleNamespace(choices=[]),
    ]
    router = _Streaming(pieces)
    answer = await Caller(router, "m", {}, timeout_s=60).ask([user_message("text")], max_tokens=5)
    assert answer == SummaryAnswer(text="### Current state", reasoning="Hm.", finish_reason="length", calls_tool=False)
    assert (router.asked["stream"], router.asked["stream_options"]) == (True, {"include_usage": True})
    assert router.closed == 1


async def test_a_summary_without_an_end_is_ended() -> None:
    """By a server that ignores its bound; what was written counts as an answer that was cut."""
    router = _Streaming([_chunk(content="word " * 10)] * 5, ends=False)
    answer = await Caller(router, "m", {}, timeout_s=60).ask([user_message("text")], max_tokens=10)
    assert answer == SummaryAnswer(text="word " * 40, finish_reason="length")
    assert router.closed == 1


class _Log:
    """LiteLLM's logging object of a stream, as far as it is used."""

    def __init__(self) -> None:
        self.model_call_details: dict[str, Any] = {}
        self.responses: list[Any] = []

    async def dispatch_success_handlers(self, response: Any, **_: Any) -> None:
        self.responses.append(response)


# LiteLLM's own shapes, when they are made.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["endless", "given up"])
async def test_what_is_ended_early_is_paid_for(how: str) -> None:
    """LiteLLM logs and charges streams that end: of the others what was read and written is estimated."""
    router, log = _Streaming([_chunk(content="### Current"), _chunk(content=" state\nUSER:\n")], ends=False), _Log()
    router.logging_obj = log
    ask = Caller(router, "m", {}, timeout_s=60).ask
    asking = asyncio.ensure_future(ask([user_message("word " * 400)], max_tokens=1 if how == "endless" else 50))
    if how == "endless":
        await asking
    else:
        await router.waiting.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await settled()
    [response] = log.responses
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (500, 6)
    assert response.choices[0].message.content == "### Current state\nUSER:\n"
    assert router.closed == 1
