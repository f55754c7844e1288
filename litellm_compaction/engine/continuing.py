"""Plans how a model goes on with an answer that was stopped at the limit (phase 3), and makes what is then sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from litellm_compaction.core.continuation.request import Partial, Way, asked_to_go_on, can_end_in_answer, carried_over
from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.engine.context import (
    CompactionNeeded,
    MeasuredRequest,
    PreparedRequest,
    Prospect,
    RequestContext,
)
from litellm_compaction.engine.going_on import GoingOn, without_thoughts
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.reservation import Reservation
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokenizers.families import no_thinking_switch
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.prompt import BegunPrompt, begun_prompt, needed_renderings
from litellm_compaction.windows.windows import Target, Window, Windows

# A request to go on in the user's place can be sent anywhere.
_ASKING: frozenset[Way] = frozenset(("turn",))
# A shorter end of an answer would not tell the model where it stopped.
_LEAST_TAIL_TOKENS = 48
# Of what a compaction leaves, this much may be the verbatim end of the answer that is being carried over.
_PARTIAL_TAIL_RATIO = 0.35


class ContinuationPlanner:
    """Plans and makes continuations; the callables are the compactor's `prepare`, `finish` and its refusal."""

    def __init__(
        self,
        *,
        prepare: Callable[[Request, RequestContext], Awaitable[PreparedRequest | CompactionNeeded]],
        finish: Callable[[CompactionNeeded, Reservation | None], Awaitable[PreparedRequest]],
        refusal: Callable[[MeasuredRequest], Awaitable[DoesNotFit]],
        measurer: RequestMeasurer,
        going_on: GoingOn,
        sources: Sources,
        windows: Windows,
        wall_clock: Callable[[], float],
    ) -> None:
        self._prepare = prepare
        self._finish = finish
        self._refusal = refusal
        self._measurer = measurer
        self._going_on = going_on
        self._sources = sources
        self._windows = windows
        self._wall_clock = wall_clock

    async def carry_over(
        self,
        request: Request,
        partial: Partial,
        case: RequestContext,
        room: Reservation | None = None,
        *,
        ways: Collection[Way] = _ASKING,
    ) -> PreparedRequest:
        """Returns what to send so that the model goes on; arguments as `prospect`, and `room` as `Compactor.guard`.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded, Overloaded: as there.
        """
        return await self.carried(await self.prospect(request, partial, case, ways=ways), room)

    async def prospect(
        self,
        request: Request,
        partial: Partial,
        case: RequestContext,
        *,
        room_tokens: int = 0,
        ways: Collection[Way] = _ASKING,
    ) -> Prospect:
        """Plans how the model could go on with an answer; no model call, and nothing is told, taught or kept.

        Of the answer only the end stays verbatim: as much as lets the rest start early, else less and less of it.

        Args:
            request: the conversation that was being answered, as the client sent it.
            partial: the answer so far.
            case: of the request.
            room_tokens: what the rest of the answer must have at least; without it no compaction is worth a stop.
            ways: those that the carrier can send; `turn` always is.

        Raises:
            DoesNotFit: nothing leaves so much room.
            WindowUnknown, ModelNotLoaded: as `Compactor.guard`.
        """
        window, count_text = await self._measurer.text_counter(case)
        good = [way for way in await self._going_on.ways(case.target, window.source) if way in ways]
        if request.tools or partial.is_json:
            good = [way for way in good if way != "raw"]
        ends_in_answer = good[:1] not in ([], ["turn"]) and can_end_in_answer(request.messages, partial)
        # What the client wanted before its answer is done.
        case = replace(case, now=False, focus="", goes_on=True)
        # No server is asked: it may still be writing the very answer.
        roomy = replace(case.with_room(room_tokens), measure=None, is_supposed=True)
        whole_tokens = count_text(partial.text or partial.reasoning)
        tail_tokens = int(_PARTIAL_TAIL_RATIO * case.settings.target_ratio * window.tokens)
        while True:
            messages = carried_over(
                request.messages,
                partial,
                tail_tokens=tail_tokens,
                count=count_text,
                ends_in_answer=ends_in_answer,
                switch=no_thinking_switch(case.target.model),
            )
            try:
                prepared = await self._prepare(replace(request, messages=messages), roomy)
            except DoesNotFit:
                if tail_tokens <= _LEAST_TAIL_TOKENS:
                    raise
            else:
                if tail_tokens <= _LEAST_TAIL_TOKENS or _starts_early(prepared, room_tokens):
                    break
            tail_tokens = max(min(tail_tokens, whole_tokens) // 2, _LEAST_TAIL_TOKENS)
        if isinstance(prepared, CompactionNeeded) and not prepared.will_fit:
            raise await self._refusal(prepared.work)
        return Prospect(
            request=request,
            partial=partial,
            case=case,
            roomy=replace(roomy, is_supposed=False),
            messages=messages,
            prepared=prepared,
            ways=tuple(good) if ends_in_answer else (),
        )

    async def carried(self, prospect: Prospect, room: Reservation | None = None) -> PreparedRequest:
        """Returns what to send so that the model goes on, in the best way that its server knows.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded, Overloaded: as `Compactor.finish`.
        """
        case = prospect.case
        # What was only asked is decided again, so that what is sent is told and kept.
        decided = await self._prepare(replace(prospect.request, messages=prospect.messages), prospect.roomy)
        guarded = await self._finish(decided, room) if isinstance(decided, CompactionNeeded) else decided
        sent = prospect.messages if guarded.messages is None else guarded.messages
        guarded = replace(guarded, messages=sent)
        if not prospect.ways:
            closing: Mapping[str, JsonValue] | None = None
            if prospect.partial.closes:
                family = await self._sources.family(case.target, guarded.window)
                closing = without_thoughts(case.target, guarded.window.source, family.name)
            return replace(guarded, way="turn", closing=closing)
        if "raw" in prospect.ways:
            prompt = await self._begun_prompt(case.target, guarded.window, sent)
            if prompt is not None:
                is_trusted = await self._going_on.has_gone_on(case.target, "raw")
                return replace(guarded, way="raw", prompt=prompt, is_trusted=is_trusted)
        return await self.by_another_way(guarded, prospect.request, prospect.partial, case, room, ways=prospect.ways)

    async def _begun_prompt(self, target: Target, window: Window, sent: Sequence[Message]) -> BegunPrompt | None:
        """The prompt that ends inside the last message, as LM Studio renders it, else as it is rendered here."""
        family = await self._sources.family(target, window)
        requests = [Request(messages=each) for each in needed_renderings(sent)]
        said = [await self._windows.rendered(target, each, without_bos=window.adds_bos) for each in requests]
        texts = [text for text in said if text is not None] if None not in said else []
        now = datetime.fromtimestamp(self._wall_clock())
        return await asyncio.to_thread(begun_prompt, family, sent, now, texts, adds_bos=window.adds_bos)

    async def by_another_way(
        self,
        guarded: PreparedRequest,
        request: Request,
        partial: Partial,
        case: RequestContext,
        room: Reservation | None = None,
        *,
        ways: Collection[Way],
    ) -> PreparedRequest:
        """Returns the same list, with its compaction, for a server that does not go on by the way that was tried.

        Args:
            guarded: what `carried` gave; its last message is the end of the answer.
            request: as for `prospect`, and `partial`, `case` as well.
            room: as for `carried`.
            ways: those that are left.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded, Overloaded: as `Compactor.guard`.
        """
        good = await self._going_on.ways(case.target, guarded.window.source)
        if "prefill" in ways and "prefill" in good:
            return replace(guarded, way="prefill", prompt=None, is_trusted=False)
        messages = asked_to_go_on(guarded.messages, partial) if guarded.messages else request.messages
        work = await self._measurer.weigh(replace(request, messages=messages), case)
        if not work.budget.own.fits(work.count.tokens):
            # Our request is too much for it.
            return await self.carry_over(request, partial, case, room)
        return replace(
            guarded,
            messages=messages,
            count=work.count,
            budget=work.budget.own,
            way="turn",
            prompt=None,
            is_trusted=False,
        )


def _starts_early(prepared: PreparedRequest | CompactionNeeded, room_tokens: int) -> bool:
    """Returns True if the rest of an answer has the output buffer before the streaming limit.

    Without `room_tokens`, as for `prospect`, it only has to fit.
    """
    if isinstance(prepared, CompactionNeeded):
        tokens, budget = prepared.levels[0].predicted_tokens, prepared.work.budget
        return tokens <= (budget.early_start_tokens if room_tokens else budget.prompt_limit_tokens)
    return not room_tokens or prepared.count.tokens <= prepared.budget.early_start_tokens
