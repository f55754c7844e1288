"""Plans how a model goes on with an answer that was stopped at the limit (phase 3), and makes the request for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from litellm_compaction.core.continuation.request import (
    Partial,
    Way,
    asked_to_go_on,
    can_end_in_answer,
    continued_request,
)
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine.context import CompactionNeeded, Decided, PreparedRequest, RequestContext
from litellm_compaction.engine.sharing.reservation import Reservation
from litellm_compaction.engine.ways import without_thoughts
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokenizers.families import no_thinking_switch
from litellm_compaction.tokens.begun import BegunPrompt, begun_prompt, needed_renderings
from litellm_compaction.windows.windows import Target, Window

if TYPE_CHECKING:
    from litellm_compaction.engine.compactor import Compactor

# A request to go on in the user's place can be sent anywhere.
_ASKING: frozenset[Way] = frozenset(("turn",))
# A shorter end of an answer would not tell the model where it stopped.
_LEAST_TAIL_TOKENS = 48
# Of what a compaction leaves, this much may be the verbatim end of the answer that is being carried over.
_PARTIAL_TAIL_RATIO = 0.35


class ContinuationPlan(NamedTuple):
    """A way for an answer, `partial`, to go on.

    Attributes:
        request: the conversation as the client sent it.
        messages: the conversation that makes the model go on, before any compaction.
        prepared: the same as the engine would send it, or what has to be made first.
        ways: in which the server goes on itself, best first; none if the model is asked to.
    """

    request: Request
    partial: Partial
    context: RequestContext
    messages: tuple[Message, ...]
    prepared: Decided
    ways: tuple[Way, ...]


class ContinuationPlanner:
    """Plans and makes continuations; the compactor prepares them as any other request."""

    def __init__(self, compactor: Compactor, wall_clock: Callable[[], float]) -> None:
        self._compactor = compactor
        self._wall_clock = wall_clock

    async def continue_answer(
        self,
        request: Request,
        partial: Partial,
        context: RequestContext,
        room: Reservation | None = None,
        *,
        ways: Collection[Way] = _ASKING,
    ) -> PreparedRequest:
        """Returns what to send so that the model goes on; arguments and errors as `plan` and `Compactor.finish`."""
        return await self.continued(await self.plan(request, partial, context, ways=ways), room)

    async def plan(
        self,
        request: Request,
        partial: Partial,
        context: RequestContext,
        *,
        room_tokens: int = 0,
        ways: Collection[Way] = _ASKING,
    ) -> ContinuationPlan:
        """Plans how the model could go on with an answer; no model call, and nothing is told, taught or kept.

        Args:
            room_tokens: the least room for the rest of the answer; without it no compaction is worth a stop.
            ways: those that the carrier can send; `turn` always is.

        Raises:
            DoesNotFit: nothing leaves so much room; others as `Compactor.guard`.
        """
        window, count = await self._compactor.measurer.text_counter(context)
        good, switch = self._ways(request, partial, context, window, ways), no_thinking_switch(context.target.model)
        # The client's wishes from before its answer are done.
        context = replace(context, now=False, focus="", pins=None, goes_on=True)
        # No server is asked: it may still be writing the very answer.
        asked = replace(context.with_room(room_tokens) if room_tokens else context, measure=None)
        whole_tokens = count(partial.thoughts if partial.is_thoughts else partial.text)
        whole = [whole_tokens] if good and partial.closes else []
        for tail_tokens in (*whole, *_tails(whole_tokens, context.settings.target_ratio * window.tokens)):
            is_last = tail_tokens <= _LEAST_TAIL_TOKENS
            messages = continued_request(
                request.messages,
                partial,
                tail_tokens=tail_tokens,
                count=count,
                ends_in_answer=bool(good),
                switch=switch,
            )
            try:
                prepared = await self._compactor.planned(replace(request, messages=messages), asked)
            except DoesNotFit:
                if is_last:
                    raise
                continue
            # Whole thoughts are in the server's cache, but not worth a compaction, or an answer without room.
            if is_last or _starts_early(prepared, room_tokens, compacts=tail_tokens not in whole):
                break
        if isinstance(prepared, CompactionNeeded) and not prepared.will_fit:
            raise await self._compactor.decider.refusal(prepared.measured)
        return ContinuationPlan(request, partial, context, messages, prepared, good)

    def _ways(
        self, request: Request, partial: Partial, context: RequestContext, window: Window, ways: Collection[Way]
    ) -> tuple[Way, ...]:
        """The ways in which the server can go on itself, best first; none if the model has to be asked to."""
        good = [way for way in self._compactor.known_ways.ways(context.target, window.source) if way in ways]
        if request.tools or partial.is_json:
            good = [way for way in good if way != "raw"]
        if partial.closes:
            # Templates leave out what is thought in a last message; a prompt of ours can end behind it.
            good = [way for way in good if way == "raw"]
        is_own = good[:1] not in ([], ["turn"]) and can_end_in_answer(request.messages, partial)
        return tuple(good) if is_own else ()

    async def continued(self, plan: ContinuationPlan, room: Reservation | None = None) -> PreparedRequest:
        """Returns what to send so that the model goes on, in the best way that its server knows.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded, Overloaded: as `Compactor.finish`.
        """
        target, prepared, closes = plan.context.target, plan.prepared, plan.partial.closes
        if isinstance(prepared, CompactionNeeded):
            prepared = await self._compactor.finish(prepared, room)
        else:
            await prepared.tell()
        sent = plan.messages if prepared.messages is None else prepared.messages
        prepared = replace(prepared, messages=sent)
        if not plan.ways:
            name = self._compactor.sources.family(target, prepared.window).name
            closing = without_thoughts(target, prepared.window.source, name) if closes else None
            return replace(prepared, way="turn", closing=closing)
        if "raw" in plan.ways:
            prompt = await self._begun_prompt(target, prepared.window, sent, closes=closes)
            if prompt is not None:
                is_trusted = self._compactor.known_ways.has_gone_on(target, "raw")
                closing = {} if closes else None
                return replace(prepared, way="raw", prompt=prompt, is_trusted=is_trusted, closing=closing)
        return await self.by_another_way(prepared, plan.request, plan.partial, plan.context, room, ways=plan.ways)

    async def _begun_prompt(
        self, target: Target, window: Window, sent: Sequence[Message], *, closes: bool
    ) -> BegunPrompt | None:
        """The prompt that ends inside the last message, or behind closed thoughts, as LM Studio or we render it."""
        family, windows = self._compactor.sources.family(target, window), self._compactor.windows
        requests = [Request(messages=each) for each in needed_renderings(sent)]
        said = [await windows.rendered(target, each, without_bos=window.adds_bos) for each in requests]
        texts = [text for text in said if text is not None] if None not in said else []
        now = datetime.fromtimestamp(self._wall_clock())
        return await asyncio.to_thread(begun_prompt, family, sent, now, texts, adds_bos=window.adds_bos, closes=closes)

    async def by_another_way(
        self,
        prepared: PreparedRequest,
        request: Request,
        partial: Partial,
        context: RequestContext,
        room: Reservation | None = None,
        *,
        ways: Collection[Way],
    ) -> PreparedRequest:
        """Returns the same list, with its compaction, for a server that does not go on by the way that was tried.

        `prepared` is what `continued` gave, with the end of the answer as its last message, and `ways` are left; other
        arguments as `plan`.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded, Overloaded: as `Compactor.guard`.
        """
        if partial.closes:
            # A request of ours quotes less of the thoughts than the server has in its cache.
            return await self.continue_answer(request, partial, context, room)
        good = self._compactor.known_ways.ways(context.target, prepared.window.source)
        again = replace(prepared, prompt=None, is_trusted=False)
        if "prefill" in ways and "prefill" in good:
            return replace(again, way="prefill")
        messages = asked_to_go_on(prepared.messages, partial) if prepared.messages else request.messages
        measured = await self._compactor.measurer.measure(replace(request, messages=messages), context)
        if not measured.budget.own.fits(measured.count.tokens):
            # Our request is too much for it.
            return await self.continue_answer(request, partial, context, room)
        return replace(again, messages=messages, count=measured.count, budget=measured.budget.own, way="turn")


def _tails(whole_tokens: int, target_tokens: float) -> Iterator[int]:
    """Bounds for the end of an answer, which alone stays verbatim: less and less until the rest can start early."""
    tokens = int(_PARTIAL_TAIL_RATIO * target_tokens)
    while tokens > _LEAST_TAIL_TOKENS:
        yield tokens
        tokens = min(tokens, whole_tokens) // 2
    yield _LEAST_TAIL_TOKENS


def _starts_early(prepared: Decided, room_tokens: int, *, compacts: bool) -> bool:
    """Returns True if the rest of an answer has the output buffer before the streaming limit.

    Without `room_tokens`, as for `plan`, it only has to fit; unless it `compacts`, without a compaction.
    """
    if isinstance(prepared, CompactionNeeded):
        tokens, budget = prepared.steps[0].predicted_tokens, prepared.measured.budget
        limit_tokens = budget.early_start_tokens if room_tokens else budget.prompt_limit_tokens
        return compacts and tokens <= limit_tokens
    is_bound = bool(room_tokens) or not compacts
    return not is_bound or prepared.count.tokens <= prepared.budget.early_start_tokens
