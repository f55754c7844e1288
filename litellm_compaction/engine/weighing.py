"""What a request weighs and in which window: counts, budget, and the context length that a warm-up may have to bring.

Asked by the compactor for every request, and again for what it is going to send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from litellm_compaction.core.boundaries import sacred_indices
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.weights import RECORD_TOKENS, Conversation
from litellm_compaction.engine.case import Case, Work
from litellm_compaction.errors import ModelNotLoaded
from litellm_compaction.flight import Flights
from litellm_compaction.models.counter import Count, TokenCounter
from litellm_compaction.models.families import Family
from litellm_compaction.models.sources import Sources
from litellm_compaction.models.window import Window, Windows

# By so much what is added to a floor that the server has counted may be more than planned.
_PLANNED_ERROR = 0.10


class Scales:
    """Weighs requests.

    Args:
        windows: which context length a target has.
        counter: tokens of a request.
        sources: by which vocabulary and template a target is counted.
        clock: seconds, monotonic, for durations.
    """

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        sources: Sources,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._windows = windows
        self._counter = counter
        self._sources = sources
        self._clock = clock
        self._warm_ups: Flights[None] = Flights()

    async def weigh(self, request: Request, case: Case) -> Work:
        """The request with its sizes, its window and its budget, still without hashes.

        Raises:
            WindowUnknown: nobody says how large the window is.
            ModelNotLoaded: `when_not_loaded` is `error`, or the warm-up did not load the model.
        """
        started_s = self._clock()
        window = await self.window(case)
        family = await self._sources.family(case.target, window)
        count = await self._counter.count(case.target.key, family, request)
        return self._work(request, case, window, family, count, (), started_s)

    async def again(self, work: Work) -> Work:
        """`work` by what the counter has learned since."""
        count = await self._counter.count(work.case.target.key, work.family, work.request)
        weighed = self._work(
            work.request, work.case, work.window, work.family, count, work.conversation.hashes, work.started_s
        )
        return replace(weighed, is_shortened=work.is_shortened)

    async def shortened(self, work: Work, messages: tuple[Message, ...]) -> Work:
        """`work` with other messages in the client's place; the client will send its own again, so hashes stay."""
        request = replace(work.request, messages=messages)
        count = await self._counter.count(work.case.target.key, work.family, request)
        weighed = self._work(
            request, work.case, work.window, work.family, count, work.conversation.hashes, work.started_s
        )
        return replace(weighed, is_shortened=True, tokens_before=work.tokens_before)

    async def count_request(self, work: Work, request: Request) -> Count:
        """The tokens of a request that is made of `work`'s."""
        return await self._counter.count(work.case.target.key, work.family, request)

    def with_floor(self, work: Work, count: Count) -> Work:
        """`work` with sizes by which its floor takes what a better count says.

        Args:
            work: of which the floor is an estimate.
            count: of the floor as a request of its own.
        """
        conversation, budget = work.conversation, work.budget
        sacred = sacred_indices(conversation.messages)
        if len(sacred) == len(conversation.messages) == len(count.sizes):
            # Nothing of it can be covered: the floor is the request.
            weighed = self._work(
                work.request, work.case, work.window, work.family, count, conversation.hashes, work.started_s
            )
            return replace(weighed, floor_count=count, is_shortened=work.is_shortened)
        record_tokens = RECORD_TOKENS if len(sacred) < len(conversation.messages) else 0
        ratio = min(1.0, count.tokens / max(1, conversation.floor_tokens - record_tokens))
        conversation = replace(
            conversation,
            sizes=tuple(
                math.ceil(size * ratio) if index in sacred else size for index, size in enumerate(conversation.sizes)
            ),
            fixed_tokens=math.ceil(conversation.fixed_tokens * ratio),
        )
        # Of what is made, only the rest of the window is still in doubt; it is counted again before it is sent.
        share = min(1.0, count.tokens / max(1, budget.window_tokens))
        rest_ratio = min(budget.error_ratio, _PLANNED_ERROR)
        error_ratio = min(budget.error_ratio, share * count.error_ratio + (1 - share) * rest_ratio)
        return replace(
            work,
            conversation=conversation,
            budget=replace(
                budget,
                floor_tokens=conversation.floor_tokens,
                fixed_tokens=conversation.lead_tokens,
                error_ratio=error_ratio,
            ),
            floor_count=count,
        )

    async def count(self, work: Work, messages: Sequence[Message]) -> Count:
        """The tokens of a list that may be sent instead of the client's."""
        request = replace(work.request, messages=tuple(messages))
        return await self._counter.count(work.case.target.key, work.family, request)

    async def text_counter(self, case: Case) -> tuple[Window, Callable[[str], int]]:
        """A case's window, and how its model counts text.

        Raises:
            WindowUnknown, ModelNotLoaded: as `weigh`.
        """
        window = await self.window(case)
        family = await self._sources.family(case.target, window)
        return window, self._counter.text_counter(case.target.key, family)

    async def window(self, case: Case) -> Window:
        """The window of a case's target, after a warm-up where that is needed and wanted.

        Raises:
            WindowUnknown, ModelNotLoaded: as `weigh`.
        """
        try:
            return await self._windows.resolve(case.target)
        except ModelNotLoaded:
            if case.settings.when_not_loaded == "error":
                raise
        await self._warm_ups.join(case.target.key, lambda: _run(case.warm_up))
        return await self._windows.resolve(case.target, fresh=True)

    def _work(
        self,
        request: Request,
        case: Case,
        window: Window,
        family: Family,
        count: Count,
        hashes: tuple[str, ...],
        started_s: float,
    ) -> Work:
        conversation = Conversation(
            messages=request.messages,
            # What is made of the request begins otherwise: there the server's number for its beginning is no help.
            sizes=tuple(math.ceil(size * count.text_ratio) for size in count.sizes),
            fixed_tokens=math.ceil((count.tools_tokens + count.overhead_tokens) * count.text_ratio),
            hashes=hashes,
            own_tokens=count.tokens,
        )
        return Work(
            case=case,
            request=request,
            conversation=conversation,
            count=count,
            tokens_before=count.tokens,
            count_text=self._counter.text_counter(case.target.key, family),
            budget=Budget(
                rules=case.rules(reasons=family.reasons),
                window_tokens=window.tokens,
                floor_tokens=conversation.floor_tokens,
                error_ratio=count.text_error_ratio,
                own_error_ratio=count.error_ratio,
                fixed_tokens=conversation.lead_tokens,
            ),
            window=window,
            family=family,
            started_s=started_s,
        )


async def _run(action: Callable[[], Awaitable[None]]) -> None:
    await action()
