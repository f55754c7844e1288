"""A compactor with fakes around it: a counter without vocabulary, windows by number, a pruning model on a string."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import Attempts, Compactor, PreparedRequest, PruningModel, RequestContext
from litellm_compaction.engine.context import SummaryAnswer, nothing
from litellm_compaction.errors import StoreError
from litellm_compaction.events import CompactionEvent, Event
from litellm_compaction.stores import Originals
from litellm_compaction.stores.rows import Rows
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate, Span
from litellm_compaction.tokens.known import fingerprints
from litellm_compaction.windows.windows import Target, Windows
from tests.builders import JsonDict, broken_promises, count, parsed, request_of, size
from tests.constants import settings_of
from tests.stores.made import MemoryStore

SUMMARY = "### Original task\nPort the parser.\n### Current state\nHalf of it is done."
OVERHEAD_TOKENS = 20
NOW_S = 1_700_000_000.0


class FakeCounter(TokenCounter):
    """Four characters are a token, in every family; nothing is learned."""

    async def count(
        self, target_key: str, family: Family, request: Request, *, asker: str = "", window_tokens: int = 0
    ) -> Estimate:
        sizes = tuple(size(message) for message in request.messages)
        tools_tokens = count(json.dumps(request.tools)) if request.tools else 0
        tokens = OVERHEAD_TOKENS + tools_tokens + sum(sizes)
        return Estimate.exactly(
            tokens,
            sizes,
            tools_tokens=tools_tokens,
            overhead_tokens=OVERHEAD_TOKENS,
            prints=fingerprints(request, asker),
        )

    def text_counter(
        self, target_key: str, family: Family, *, asker: str = "", text: Span | None = None
    ) -> Callable[[str], int]:
        return count

    def learn(self, target_key: str, counted: Estimate, prompt_tokens: int, *, label: str = "") -> bool:
        return not self.is_suspicious(counted, prompt_tokens)


class RecordingStore(MemoryStore):
    """A memory store that keeps what was asked of it, and fails when told."""

    def __init__(self) -> None:
        super().__init__(ttl_s=3600, max_bytes=10_000_000)
        self.finds = 0
        self.kept: list[tuple[str, Compaction]] = []
        self.broken = False

    async def get_fact(self, scope: str, key: str) -> str | None:
        if self.broken:
            raise StoreError("the store is down")
        return await super().get_fact(scope, key)

    async def find(self, scope: str, hashes: Sequence[str], words_hashes: Sequence[str] = ()) -> list[Compaction]:
        self.finds += 1
        if self.broken:
            raise StoreError("the store is down")
        return await super().find(scope, hashes, words_hashes)

    async def put(self, scope: str, compaction: Compaction) -> None:
        if self.broken:
            raise StoreError("the store is down")
        self.kept.append((scope, compaction))
        await super().put(scope, compaction)


class FakeAsk:
    """A pruning model: gives `answer`, or what that says to the prompt, or raises it; of several one after the other.

    It waits for `gate` when there is one.
    """

    def __init__(self, answer: Any = SUMMARY, *later: Any, gate: asyncio.Event | None = None) -> None:
        self.answer = answer
        self.gate = gate
        self.asked = asyncio.Event()
        self.prompts: list[str] = []
        self.max_tokens: list[int] = []
        self.messages: list[tuple[Message, ...]] = []
        self.tools: list[tuple[Any, ...]] = []
        self.calls_tool = False
        self.cancelled = 0
        self._later = list(later)

    async def __call__(
        self, messages: Sequence[Message], *, max_tokens: int, tools: Sequence[Any] = (), **_: Any
    ) -> SummaryAnswer:
        prompt = "\n".join(message.text for message in messages)
        self.prompts.append(prompt)
        self.messages.append(tuple(messages))
        self.tools.append(tuple(tools))
        self.max_tokens.append(max_tokens)
        self.asked.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer, self.answer = self.answer, self._later.pop(0) if self._later else self.answer
        if isinstance(answer, Exception):
            raise answer
        if self.calls_tool and tools:
            return SummaryAnswer(text="", calls_tool=True, finish_reason="tool_calls")
        said = answer(prompt) if callable(answer) else answer
        return said if isinstance(said, SummaryAnswer) else SummaryAnswer(text=said)


@dataclass
class Bench:
    """A compactor and everything around it."""

    windows: Windows = field(default_factory=lambda: Windows(cache_s=5.0))
    counter: TokenCounter = field(default_factory=FakeCounter)
    store: RecordingStore = field(default_factory=RecordingStore)
    ask: FakeAsk = field(default_factory=FakeAsk)
    events: list[Event] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    board: Rows | None = None
    originals: Originals | None = None
    quiet: dict[str, float] = field(default_factory=lambda: {"quiet_s": 0.0})

    def __post_init__(self) -> None:
        self.compactor = Compactor(
            windows=self.windows,
            counter=self.counter,
            store=self.store,
            board=self.board,
            originals=self.originals,
            observers=[self.events.append],
            clock=self.clock,
            wall_clock=lambda: NOW_S,
            **self.quiet,
        )

    def target(self, window: int | None, *, model: str = "test-model", **changes: Any) -> Target:
        known: dict[str, Any] = {
            "key": f"id-{model}",
            "model": model,
            "api_base": None,
            "api_key": None,
            "context_length": window,
            "is_lmstudio": False,
        }
        return Target(**{**known, **changes})

    def pruning_model(self, ask: FakeAsk) -> PruningModel:
        return PruningModel(label="pruner", target=self.target(None, model="pruner"), ask=ask, is_same=True)

    def context(self, window: int | None = 8192, **given: Any) -> RequestContext:
        """Surroundings of a request; what is no field of theirs is a setting."""
        known = {name: given.pop(name) for name in RequestContext.__dataclass_fields__ if name in given}
        settings = settings_of(**given)
        defaults: dict[str, Any] = {
            "label": "served",
            "target": self.target(window),
            "scope": "team",
            "pruning_models": (self.pruning_model(self.ask),),
            "warm_up": nothing,
            "attempts": Attempts(summary_calls_left=settings.constants.max_summary_calls),
        }
        return RequestContext(settings=settings, **{**defaults, **known})

    @staticmethod
    def request(raw: Sequence[JsonDict]) -> Request:
        return Request(messages=parsed(raw))

    async def guard(
        self,
        raw: Sequence[JsonDict],
        window: int | None = 8192,
        *,
        tools: Sequence[JsonDict] = (),
        tool_choice: Any = None,
        **context: Any,
    ) -> PreparedRequest:
        request = request_of(*raw, tools=tools, tool_choice=tool_choice)
        return await self.compactor.guard(request, self.context(window, **context))

    @property
    def outcomes(self) -> list[str]:
        return [event.outcome if isinstance(event, CompactionEvent) else event.reason for event in self.events]

    @property
    def last(self) -> CompactionEvent:
        event = self.events[-1]
        assert isinstance(event, CompactionEvent)
        return event


def sent(raw: Sequence[JsonDict], prepared: PreparedRequest) -> tuple[Message, ...]:
    """What goes upstream, after a check that it may: it keeps the promises and fits its window."""
    assert prepared.budget.fits(prepared.count.tokens)
    output_tokens = prepared.max_output_tokens(None)
    assert prepared.count.high + output_tokens <= prepared.window.tokens
    assert output_tokens >= prepared.budget.rules.answer_min_tokens
    messages = parsed(raw) if prepared.messages is None else prepared.messages
    assert prepared.count.sizes == tuple(size(message) for message in messages)
    if prepared.messages is not None:
        assert broken_promises(parsed(raw), messages) == []
    return messages
