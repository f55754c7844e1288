"""Our own calls through the router: how a summary comes, is ended and paid for, and how a failure is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import litellm
import pytest

from litellm_compaction.core.messages import Request, user_message
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.proxy.internal import Caller
from tests.virtual_time import settled


class ScriptedRouter:
    """A router whose answer comes in pieces, and then never ends, or fails; and its logging object of that stream."""

    def __init__(self, *pieces: Any, ends: bool = True, error: Exception | None = None) -> None:
        self.pieces, self.ends, self.error = pieces, ends, error
        self.asked: dict[str, Any] = {}
        self.closed = 0
        self.waiting = asyncio.Event()
        self.logging_obj = self
        self.model_call_details: dict[str, Any] = {}
        self.logged: list[Any] = []

    async def acompletion(self, **arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.asked = arguments
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece
        self.waiting.set()
        if not self.ends:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed += 1

    async def dispatch_success_handlers(self, response: Any, **_: Any) -> None:
        self.logged.append(response)

    def ask(self, words: str, max_tokens: int) -> Any:
        return Caller(self, str, {}, timeout_s=60, group="pruner").ask([user_message(words)], max_tokens=max_tokens)


def chunk(finish_reason: str | None = None, **delta: Any) -> Any:
    fields = {"content": None, "reasoning_content": None, "tool_calls": None, **delta}
    return SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(**fields), finish_reason=finish_reason)])


_WHERE = {"model": "m", "llm_provider": "lm_studio"}


@pytest.mark.parametrize(
    ("error", "reason", "told"),
    [
        (litellm.Timeout("secret words", **_WHERE), "timeout", "Timeout status=408"),
        (litellm.APIConnectionError("secret words", **_WHERE), "error", "APIConnectionError status=500"),
        (litellm.RateLimitError("secret words", **_WHERE), "error", "RateLimitError status=429"),
        (ValueError("secret words"), "error", "ValueError status=None"),
    ],
)
async def test_a_failed_call_is_told_in_one_word(
    error: Exception, reason: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LiteLLM's own time limit is a timeout like ours; the operator gets model, class and status, none of the words."""
    caplog.set_level("INFO", "litellm_compaction")
    for router in (ScriptedRouter(error=error), ScriptedRouter(chunk(content="secret"), error)):
        with pytest.raises(SummaryFailed) as failed:
            await router.ask("secret words. Prompt it.", 5)
        assert (failed.value.reason, "secret" in str(failed.value)) == (reason, False)
        await settled()
        assert router.logged == []
    assert caplog.messages == [f"pruning_failed model=pruner error={told}"] * 2


async def test_a_summary_is_asked_for_as_a_stream_and_joined() -> None:
    """Only a stream can be ended; its last chunk, with the usage, has no choice."""
    texts = [chunk(content="### Cur"), chunk(content="rent state")]
    router = ScriptedRouter(chunk(reasoning_content="Hm."), *texts, chunk("length"), SimpleNamespace(choices=[]))
    answer = await router.ask("text", 5)
    assert answer == SummaryAnswer(text="### Current state", reasoning="Hm.", finish_reason="length", calls_tool=False)
    asked = {
        "model": "",
        "max_tokens": 5,
        "timeout": 60,
        "temperature": 0.3,
        "num_retries": 0,
        "disable_fallbacks": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache": {"no-cache": True, "no-store": True},
    }
    assert {name: router.asked[name] for name in asked} == asked
    await settled()
    assert (router.closed, router.logged) == (1, [])


# LiteLLM's own shapes, when they are made.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_endless", [True, False], ids=["endless", "given up"])
async def test_what_is_ended_early_is_paid_for(is_endless: bool) -> None:
    """By a server that ignores its bound, or a client that leaves: what was read and written is estimated."""
    router = ScriptedRouter(chunk(content="### Curr"), chunk(content=" \nUSER:\n\n"), ends=False)
    asking = asyncio.ensure_future(router.ask("word " * 400, 1 if is_endless else 50))
    if is_endless:
        assert await asking == SummaryAnswer(text="### Curr \nUSER:\n\n", finish_reason="length")
    else:
        await router.waiting.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await settled()
    [response] = router.logged
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (500, 4)
    assert response.choices[0].message.content == "### Curr \nUSER:\n\n"
    assert router.closed == 1
    thinking = ScriptedRouter(chunk(reasoning_content="Hm, and so forth."), ends=False)
    assert (await asyncio.wait_for(thinking.ask("", 1), 5)).finish_reason == "length"


async def test_a_count_is_asked_for_by_an_answer_of_one_token() -> None:
    """Which costs the least; without usage there is none."""
    router = ScriptedRouter()
    request = Request(messages=(user_message("How long?"),), extras={"documents": ["a"]})
    assert await Caller(router, str, {}, timeout_s=60).measure(request) is None
    assert (router.asked["max_tokens"], router.asked["extra_body"]) == (1, {"documents": ["a"]})
