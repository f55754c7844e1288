"""A compactor with fakes around it: a counter without vocabulary, windows by number, a pruning model on a string."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import Attempts, Compactor, Measure, PreparedRequest, PruningModel, RequestContext
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.errors import StoreError
from litellm_compaction.events import CompactionEvent, Event
from litellm_compaction.stores import Board, Originals
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate, Span
from litellm_compaction.tokens.known import fingerprints
from litellm_compaction.windows.windows import Target, Windows
from tests.builders import JsonDict, broken_promises, count, parsed, size
from tests.constants import settings_of
from tests.stores.made import MemoryStore

SUMMARY = "### Original task\nPort the parser.\n### Current state\nHalf of it is done."
OVERHEAD_TOKENS = 20
NOW_S = 1_700_000_000.0


async def settled(count: int = 20) -> None:
    """Lets every task run that can: a woken task that wakes another needs one turn of the loop for each."""
    for _ in range(count):
        await asyncio.sleep(0)


class FakeCounter(TokenCounter):
    """Four characters are a token, in every family.

    Attributes:
        learned: what the servers reported.
        counted: how often it was asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[tuple[str, int]] = []
        self.counted = 0

    async def count(
        self, target_key: str, family: Family, request: Request, *, asker: str = "", window_tokens: int = 0
    ) -> Estimate:
        self.counted += 1
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
        if self.is_suspicious(counted, prompt_tokens):
            return False
        self.learned.append((target_key, prompt_tokens))
        return True


class RecordingStore(MemoryStore):
    """A memory store that keeps what was asked of it, and fails when told, or with so many compactions in it."""

    def __init__(self) -> None:
        super().__init__(ttl_s=3600, max_bytes=10_000_000)
        self.finds = 0
        self.kept: list[tuple[str, Compaction]] = []
        self.broken = False
        self.full_after: int | None = None

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
        if self.broken or len(self.kept) == self.full_after:
            raise StoreError("the store is down")
        self.kept.append((scope, compaction))
        await super().put(scope, compaction)


class FakeAsk:
    """A pruning model: gives `answer`, or raises it; waits for `gate` when there is one."""

    def __init__(self, answer: str | Exception = SUMMARY, *, gate: asyncio.Event | None = None) -> None:
        self.answer = answer
        self.gate = gate
        self.asked = asyncio.Event()
        self.prompts: list[str] = []
        self.max_tokens: list[int] = []
        self.messages: list[tuple[Message, ...]] = []
        self.tools: list[tuple[Any, ...]] = []
        self.calls_tool = False
        self.cancelled = 0

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[Any] = (),
        tool_choice: Any = None,
        **_: Any,
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
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.calls_tool and tools:
            return SummaryAnswer(text="", calls_tool=True, finish_reason="tool_calls")
        return SummaryAnswer(text=self.answer)


@dataclass
class Clock:
    """Seconds, as a test has them."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def _loads_nothing() -> None:
    return


@dataclass
class Bench:
    """A compactor and everything around it."""

    windows: Windows = field(default_factory=lambda: Windows(cache_s=5.0))
    counter: TokenCounter = field(default_factory=FakeCounter)
    store: RecordingStore = field(default_factory=RecordingStore)
    ask: FakeAsk = field(default_factory=FakeAsk)
    events: list[Event] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    board: Board | None = None
    originals: Originals | None = None

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
            quiet_s=0.0,
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

    def pruning_model(self, ask: FakeAsk, *, label: str = "pruner", window: int | None = None) -> PruningModel:
        """Another model with a window of its own, or the same one."""
        target = self.target(window, model=label)
        return PruningModel(label=label, target=target, ask=ask, is_same=window is None)

    def context(
        self,
        window: int | None = 8192,
        *,
        scope: str = "team",
        tenant: str = "",
        pruning_models: Sequence[PruningModel] | None = None,
        attempts: Attempts | None = None,
        target: Target | None = None,
        warm_up: Callable[[], Awaitable[None]] = _loads_nothing,
        measure: Measure | None = None,
        may_write_ahead: Callable[[], Awaitable[bool]] | None = None,
        asked_tokens: int | None = None,
        now: bool = False,
        focus: str = "",
        carries_calls: bool = False,
        is_client_summary: bool = False,
        is_beside: bool = False,
        pins: tuple[str, ...] | None = None,
        **settings: Any,
    ) -> RequestContext:
        chosen = settings_of(**settings)
        models = [self.pruning_model(self.ask)] if pruning_models is None else pruning_models
        return RequestContext(
            label="served",
            target=target or self.target(window),
            settings=chosen,
            scope=scope,
            tenant=tenant,
            pruning_models=tuple(models),
            warm_up=warm_up,
            attempts=attempts or Attempts(summary_calls_left=chosen.constants.max_summary_calls),
            measure=measure,
            may_write_ahead=may_write_ahead,
            asked_tokens=asked_tokens,
            now=now,
            focus=focus,
            carries_calls=carries_calls,
            is_client_summary=is_client_summary,
            is_beside=is_beside,
            pins=pins,
        )

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
        request = Request(messages=parsed(raw), tools=tuple(tools), tool_choice=tool_choice)
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


class Usage(NamedTuple):
    """What the seats of a pool hold as far as is known, its window, and how many requests of the process wait."""

    used_tokens: int
    window_tokens: int
    waiting: int


def usage(admission: Admission, pool: str) -> Usage:
    place = admission._pools.get(pool)
    if place is None:
        return Usage(0, 0, 0)
    return Usage(place.used_tokens + place.others_tokens, place.window_tokens, len(place.waiting()))
