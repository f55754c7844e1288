"""What is compared: our engine, and what people do without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lib.measuring import (
    JsonDict,
    Method,
    SummaryCall,
    Transcript,
    Turn,
    count,
    prompt_tokens,
    rendered,
    size,
)
from benchmarks.lib.summarisers import Kind, summary
from litellm_compaction.core.messages import Message, Request, parse_message
from litellm_compaction.engine import PreparedRequest, RequestContext
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import DoesNotFit, SummaryFailed
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.estimate import Estimate, Span
from tests.engine.bench import Bench, FakeAsk, FakeCounter
from tests.virtual_time import Clock

# A turn takes so long that what an hour allows is no bound.
_TURN_S = 600.0


class _Counter(FakeCounter):
    """Counts as the played server does."""

    async def count(
        self, target_key: str, family: Family, request: Request, *, asker: str = "", window_tokens: int = 0
    ) -> Estimate:
        sizes = tuple(size(message.raw) for message in request.messages)
        tools_tokens = count(json.dumps(request.tools, ensure_ascii=False)) if request.tools else 0
        tokens = tools_tokens + sum(sizes)
        return Estimate.exactly(tokens, sizes, tools_tokens=tools_tokens)

    def text_counter(
        self, target_key: str, family: Family, *, asker: str = "", text: Span | None = None
    ) -> Callable[[str], int]:
        return count


class _Pruner(FakeAsk):
    """A scripted pruning model that keeps what it was asked."""

    def __init__(self, kind: Kind, facts: Sequence[str]) -> None:
        super().__init__()
        self._kind = kind
        self._facts = facts
        self.calls: list[SummaryCall] = []

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[Any] = (),
        tool_choice: Any = None,
        **_: Any,
    ) -> SummaryAnswer:
        raw = [dict(message.raw) for message in messages]
        if max_tokens == 1:
            self.calls.append(SummaryCall(raw, bool(tools), ""))
            return SummaryAnswer(text=".")
        answer = summary(self._kind, "\n".join(map(rendered, raw)), self._facts, max_tokens)
        self.calls.append(SummaryCall(raw, bool(tools), answer))
        if not answer:
            raise SummaryFailed("error")
        return SummaryAnswer(text=answer)


def ours(kind: Kind, transcript: Transcript, window_tokens: int, *, background: str = "off", **settings: Any) -> Method:
    """This package's engine with a scripted pruning model; with `background: idle` its client is never in a hurry."""
    pruner = _Pruner(kind, [fact["text"] for fact in transcript.facts])
    clock = Clock()
    bench = Bench(counter=_Counter(), ask=pruner, clock=clock)
    # A client sends the same messages again in each request.
    parsed = {id(message): parse_message(message) for message in transcript.messages}

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        pruner.calls.clear()
        request = Request(messages=tuple(parsed[id(message)] for message in client), tools=tuple(transcript.tools))
        context = bench.context(window_tokens, may_write_ahead=_yes, background=background, **settings)
        try:
            guarded = await bench.compactor.guard(request, context)
        except DoesNotFit:
            return Turn(None)
        sent = client if guarded.messages is None else [message.raw for message in guarded.messages]
        calls = tuple(pruner.calls)
        pruner.calls.clear()
        if background == "idle":
            clock.now_s += _TURN_S
            await _rest(bench, request, context, guarded, transcript.messages[len(client)])
        is_new = guarded.action == "compacted"
        return Turn(sent, calls, guarded.action != "none", is_new, later=tuple(pruner.calls))

    return send


async def _yes() -> bool:
    return True


async def _rest(
    bench: Bench, request: Request, context: RequestContext, guarded: PreparedRequest, answer: JsonDict
) -> None:
    """Lets what is written ahead behind an answer come to its end."""
    used_tokens = guarded.count.tokens + size(answer)
    text = "" if answer.get("tool_calls") else str(answer.get("content") or "")
    bench.compactor.background.answered(request, context, guarded, answer=text, used_tokens=used_tokens)
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*others, return_exceptions=True)


def stock(transcript: Transcript, window_tokens: int) -> Method:
    """What the server does on its own: the middle goes, token by token, without a word to anybody."""

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        over = prompt_tokens(transcript.tools, client) + 256 - window_tokens
        if over <= 0:
            return Turn(client)
        cut: list[JsonDict] = []
        for index, message in enumerate(client):
            if index < 2 or over <= 0:
                cut.append(message)
            elif size(message) <= over:
                over -= size(message)
            else:
                text = message.get("content") or ""
                cut.append({**message, "content": text[len(text) * over // size(message) :]})
                over = 0
        return Turn(cut, is_compacted=True, is_new=True, is_cut=True)

    return send


def trimmed(transcript: Transcript, window_tokens: int) -> Method:
    """LiteLLM's `trim_messages`, as its documentation calls it."""
    import litellm

    async def send(transcript: Transcript, client: Sequence[JsonDict]) -> Turn:
        room = window_tokens - count(json.dumps(transcript.tools)) - 256
        sent = litellm.utils.trim_messages([dict(each) for each in client], model="gpt-4o", max_tokens=room)
        return Turn(sent, is_compacted=sent != list(client), is_new=sent != list(client))

    return send
