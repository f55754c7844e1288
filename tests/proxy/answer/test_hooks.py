"""How LiteLLM's own streams, and the ways in which they fail in its versions, look to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from litellm.exceptions import APIError
from litellm.types.utils import Delta, ModelResponseStream, StreamingChoices, Usage

from litellm_compaction.core.go_on import Way
from litellm_compaction.engine.context import Continuation
from litellm_compaction.proxy.answer.hooks import HookedUpstream
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.sse import Received, UpstreamError

# LiteLLM's own types, which it builds when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")


class _Log:
    """LiteLLM's logging object: what is logged through it as a success."""

    def __init__(self) -> None:
        self.model_call_details: dict[str, Any] = {}
        self.logged: list[Any] = []

    async def dispatch_success_handlers(self, response: Any, **_: Any) -> None:
        self.logged.append(response)


class _Stream:
    """LiteLLM's stream: `words`, then a regular end."""

    def __init__(self, words: list[str], *, usage: Usage | None = None) -> None:
        self.words = words
        self.usage = usage
        self.chunks: list[ModelResponseStream] = []
        self.logging_obj = _Log()
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[ModelResponseStream]:
        for word in self.words:
            self.chunks.append(ModelResponseStream(choices=[StreamingChoices(delta=Delta(content=word))]))
            yield self.chunks[-1]
        if self.usage is not None:
            yield ModelResponseStream(choices=[], usage=self.usage)

    async def aclose(self) -> None:
        self.is_closed = True


class _Router:
    """A router that opens one stream, or fails."""

    def __init__(self, outcome: _Stream | Exception) -> None:
        self.outcome = outcome
        self.asked: dict[str, Any] = {}

    async def acompletion(self, **asked: Any) -> _Stream:
        self.asked = asked
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def _upstream(first: _Stream | None, router: _Router | None = None) -> HookedUpstream:
    log = first.logging_obj if first is not None else _Log()
    return HookedUpstream(first, router, "pin", {"messages": [], "litellm_logging_obj": log})


def _leg(way: Way | None) -> Leg:
    window = SimpleNamespace(source="operator")
    prepared: Any = SimpleNamespace(continuation=Continuation(way=way), messages=None, tools=None, window=window)
    return Leg(prepared=prepared, max_tokens=100, goes_on=way is not None)


@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
async def test_usage_that_litellm_made_up_is_no_usage(is_reported: bool, is_wrapped: bool) -> None:
    """It ends every stream with one; the server's is among the chunks that it keeps, where those can be seen."""
    usage = Usage(prompt_tokens=10, completion_tokens=2, total_tokens=12)
    stream = _Stream(["so", " far"], usage=usage)
    if is_reported:
        stream.chunks.append(ModelResponseStream(choices=[], usage=usage))
    first = (chunk async for chunk in stream) if is_wrapped else stream
    upstream = HookedUpstream(first, None, "pin", {"messages": [], "litellm_logging_obj": stream.logging_obj})
    async with upstream.open(_leg(None)) as chunks:
        last = [chunk async for (chunk,) in chunks][-1]
    assert isinstance(last, Received)
    assert ("usage" in last) is (is_reported and not is_wrapped)
    assert last.origin.usage == usage


@pytest.mark.parametrize(("status", "may_pass"), [(400, False), (404, False), (500, True), (503, True)])
async def test_what_a_server_does_not_go_on_with_itself_is_asked_otherwise(status: int, may_pass: bool) -> None:
    """The loop judges it; asked in the user's place there is no other way, and it stays what it is."""
    error = APIError(status_code=status, message="no", llm_provider="openai", model="any")
    own: Way = "prefill"
    asking: Way = "turn"
    for way in (own, asking):
        opened = _upstream(None, _Router(error))
        with pytest.raises(UpstreamError if way == "prefill" else APIError) as raised:
            async with opened.open(_leg(way)):
                pass
        if isinstance(raised.value, UpstreamError):
            assert raised.value.__cause__ is error
            assert raised.value.may_pass is may_pass
        else:
            assert raised.value is error


async def test_a_stream_that_its_client_leaves_is_logged() -> None:
    """Starlette cancels each await of a response whose client has gone; what was generated is paid for all the same."""
    stream = _Stream(["word", "never"])
    upstream = _upstream(stream)

    async def batches() -> AsyncIterator[list[Received]]:
        async with upstream.open(_leg(None)) as chunks:
            async for batch in chunks:
                yield batch
                await asyncio.Event().wait()

    answer: Any = SimpleNamespace(batches=batches, is_one_leg=False)
    prepared: Any = SimpleNamespace(count_text=len, count=SimpleNamespace(tokens=10))
    with anyio.CancelScope() as scope:
        async for chunk in upstream.carried(answer, prepared):
            assert chunk.choices[0].delta.content == "word"
            scope.cancel()
    logged = [each.choices[0].message.content for each in stream.logging_obj.logged]
    assert (logged, stream.is_closed) == (["word"], True)
