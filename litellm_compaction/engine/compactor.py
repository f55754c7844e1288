"""The engine's front door: what is sent for a request, and for one that makes the model go on with an answer.

`proxy/` calls it for every request to a guarded deployment. Nothing here knows LiteLLM or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from litellm_compaction.core.go_on import Partial, Way, asked_to_go_on, can_end_in_answer, continued_request
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.plan import Make
from litellm_compaction.core.refusal import UNPREPARED, too_long
from litellm_compaction.engine.additions import Recaller
from litellm_compaction.engine.ask import SummaryClient
from litellm_compaction.engine.background import QUIET_S, Background
from litellm_compaction.engine.context import (
    CompactionNeeded,
    Continuation,
    ContinuationPlan,
    Decided,
    Decision,
    Effort,
    PreparedRequest,
    RequestContext,
    nothing,
)
from litellm_compaction.engine.deciding import Decider
from litellm_compaction.engine.make import Maker
from litellm_compaction.engine.measure import RequestMeasurer, hashed
from litellm_compaction.engine.records import Reporter
from litellm_compaction.engine.servers import ALL_WAYS, Asker, KnownWays, ReplyReader
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.reservation import Reservation, server_of
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import Observer
from litellm_compaction.stores import Originals, Store
from litellm_compaction.stores.rows import Rows
from litellm_compaction.tokenizers.families import no_thinking_switch
from litellm_compaction.tokenizers.registry import Sources
from litellm_compaction.tokens.begun import BegunPrompt, begun_prompt, needed_renderings
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Window, Windows, no_thoughts

logger = logging.getLogger("litellm_compaction")

# A request to go on in the user's place can be sent anywhere.
_ASKING: frozenset[Way] = frozenset(("turn",))
# A shorter end of an answer would not tell the model where it stopped.
_LEAST_TAIL_TOKENS = 48
# Of what a compaction leaves, this much may be the verbatim end of the answer that is being carried over.
_PARTIAL_TAIL_RATIO = 0.35


class Compactor:
    """Keeps requests inside their windows; one attribute for each room, for those that decide and write ahead, too.

    Args:
        sources: by which vocabulary and template a target is counted.
        board: of notes of the processes that share the store; None for no others.
        originals: keeps the messages that compactions cover; None for nowhere. Ends with the compactor.
        quiet_s: for how long a server has been idle before a record is written ahead.
    """

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        store: Store,
        sources: Sources | None = None,
        board: Rows | None = None,
        originals: Originals | None = None,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.windows, self.sources, self._wall_clock = windows, sources or Sources(), wall_clock
        self.reporter = Reporter(observers, clock=clock, wall_clock=wall_clock)
        self.recaller = recaller = Recaller(originals)
        self.replies = ReplyReader(windows=windows, counter=counter, reporter=self.reporter)
        self.known_ways = KnownWays(wall_clock)
        leases = Leases(board, clock=clock) if board is not None else None
        self.admission = admission = Admission(leases=leases)
        # In this order: the store may be the originals' server.
        self._ending = [each for each in (leases, self.replies, windows, originals, store) if each is not None]
        self.measurer = measurer = RequestMeasurer(
            windows=windows, counter=counter, sources=self.sources, leases=leases, recaller=recaller, clock=clock
        )
        client = SummaryClient(windows, counter, self.sources, recaller, clock)
        self.maker = Maker(client, store, originals)
        self.asker = Asker(measurer, admission, clock)
        self.decider = Decider(self, leases)
        self.background = Background(self, quiet_s)
        admission.make_way, admission.turns = self.background.make_way, self.background.turns

    # ------------------------------------------------------------------ a request

    async def guard(
        self, request: Request, context: RequestContext, room: Reservation | None = None
    ) -> PreparedRequest:
        """Returns what to send instead of `request`, so that the server never has to cut it.

        A summary waits for room in the place of `room`, which the answer holds of a shared context. Errors as
        `RequestMeasurer.measure`; a DoesNotFit if the protected messages alone are too large, and an Overloaded if
        there was no room for a summary in time.
        """
        return await self.finish(await self.prepare(request, context), room)

    async def prepare(self, request: Request, context: RequestContext, foreseen: Decided | None = None) -> Decided:
        """As `guard`, as far as it goes without a summary: returns what to send, or what has to be made first.

        What can be refused is refused here, before the first slow step (promise P8); `finish` tells and keeps.
        Nothing is done again that was done for the same request when this deployment was `foreseen`.
        """
        before = foreseen.measured if foreseen else None
        if foreseen and before and before.context == context and await self.measurer.window(context) == before.window:
            # Its calls go the way that is known now.
            return replace(foreseen, measured=replace(before, context=context))
        if self.background.turns:
            await self.background.make_way(server_of(context), is_beside=context.is_beside)
        measured = await self.measurer.measure(request, context)
        tokens, does_fit = measured.count.tokens, measured.budget.own.fits(measured.count.tokens)
        if not context.goes_on:
            unprepared = None if does_fit else lambda: too_long(context.label, tokens, measured.budget, UNPREPARED)
            context.attempts.too_long = unprepared
        if request.token_ids is not None:
            # Nothing can compact it.
            if not does_fit:
                raise await self.decider.refusal(measured)
            return self.measurer.unchanged(measured)
        decided = await self.decider.first(measured)
        if isinstance(decided, PreparedRequest) and decided.messages is None and not context.goes_on:
            # The server may have counted fewer tokens than we did.
            context.attempts.too_long = None
        return decided

    async def finish(self, decided: Decided, room: Reservation | None = None) -> PreparedRequest:
        """Makes the compaction that `prepare` found necessary, or waits for another request's; errors as `guard`."""
        if isinstance(decided, PreparedRequest):
            return await self.decider.sent(decided)
        measured = decided.measured
        prepared = await self.finish(await self.decider.climbed(decided, room))
        if not await self.has_shrunk(measured.context, prepared):
            return prepared
        again = await self.guard(measured.request, measured.context, room)
        # Texts of the request may have been cut already.
        return replace(again, messages=again.messages or measured.request.messages)

    async def has_shrunk(self, context: RequestContext, prepared: PreparedRequest) -> bool:
        """Returns True if the window is smaller than the one that `prepared` was made for; errors as `guard`."""
        if prepared.continuation.way is not None:
            # Where LM Studio's protocol does not work, nothing else tells that the model was loaded again meanwhile.
            self.windows.invalidate(context.target)
        window = await self.measurer.window(context, prompt_tokens=prepared.count.tokens)
        return window.tokens < prepared.window.tokens

    async def observe(self, request: Request, context: RequestContext) -> None:
        """Reports what `guard` would do; no model call, no warm-up, no error, no change."""
        try:
            measured = await self.measurer.measure(request, replace(context, warm_up=nothing))
        except CompactionError:
            return
        if measured.budget.own.triggers(measured.count.tokens):
            decision = await self.decider.plan(await hashed(measured), ())
            step = decision.steps[0] if isinstance(decision, Make) else None
            after = step.predicted_tokens if step is not None else measured.count.tokens
            reason = step.draft.level if step is not None else type(decision).__name__.lower()
            self.reporter.decided(measured, Decision("observed", Effort(reason=reason)), after=after)

    async def count(self, request: Request, context: RequestContext) -> int:
        """Returns the tokens of a prompt as it came; no model is asked or loaded for it; errors as `guard`."""
        measured = await self.measurer.measure(request, replace(context, warm_up=nothing))
        return (await self.asker.counted(measured)).tokens

    # ------------------------------------------------------------------ an answer that goes on (phase 3)

    async def go_on(
        self,
        request: Request,
        partial: Partial,
        context: RequestContext,
        *,
        room_tokens: int = 0,
        ways: Collection[Way] = _ASKING,
    ) -> ContinuationPlan:
        """Plans how the model could go on with an answer, `partial`; no model call, and nothing is told or kept.

        A DoesNotFit says that its rest cannot have `room_tokens`; without them no compaction is worth a stop. The
        carrier can send the `ways`, and `turn` always.
        """
        window, count = await self.measurer.text_counter(context)
        own_ways = self._own_ways(request, partial, context.target, window, ways)
        # The client's wishes from before its answer are done.
        context = replace(context, now=False, focus="", pins=None, goes_on=True)
        # No server is asked: it may still be writing the very answer.
        planned = replace(context, room_tokens=room_tokens, measure=None)
        whole_tokens = count(partial.thoughts if partial.is_thoughts else partial.text)
        whole = [whole_tokens] if own_ways and partial.closes else []
        for tail_tokens in (*whole, *_tails(whole_tokens, context.settings.target_ratio * window.tokens)):
            is_last = tail_tokens <= _LEAST_TAIL_TOKENS
            messages = continued_request(
                request.messages,
                partial,
                tail_tokens=tail_tokens,
                count=count,
                ends_in_answer=bool(own_ways),
                switch=no_thinking_switch(context.target.model),
            )
            try:
                prepared = await self.prepare(replace(request, messages=messages), planned)
            except DoesNotFit:
                if is_last:
                    raise
                continue
            # Whole thoughts are in the server's cache, but not worth a compaction, or an answer without room.
            if is_last or _starts_early(prepared, room_tokens, compacts=tail_tokens not in whole):
                break
        measured = prepared.measured
        if isinstance(prepared, CompactionNeeded) and not measured.budget.fits(prepared.steps[0].predicted_tokens):
            raise await self.decider.refusal(measured)
        return ContinuationPlan(request, partial, context, messages, prepared, own_ways)

    def _own_ways(
        self, request: Request, partial: Partial, target: Target, window: Window, ways: Collection[Way]
    ) -> tuple[Way, ...]:
        """The ways in which the server can go on itself, best first; none if the model has to be asked to."""
        barred: set[Way] = {"raw"} if request.tools or partial.is_json else set()
        # Templates leave out what is thought in a last message; a prompt of ours can end behind it.
        barred |= {"prefill", "turn"} if partial.closes else set()
        good = [way for way in self.known_ways.ways(target, window.source) if way in ways and way not in barred]
        is_own = good[:1] not in ([], ["turn"]) and can_end_in_answer(request.messages, partial)
        return tuple(good) if is_own else ()

    async def continued(
        self, plan: ContinuationPlan, room: Reservation | None = None, *, ways: Collection[Way] = ALL_WAYS
    ) -> PreparedRequest:
        """Returns what to send so that the model goes on, in the best way of the plan's that is left; as `finish`."""
        request, partial, context, messages, decided, own_ways = plan
        prepared = await self.finish(decided, room)
        sent = messages if prepared.messages is None else prepared.messages
        target, window = context.target, prepared.window
        # Those that the server does not take after all get the same messages in another way.
        plan, left = plan._replace(messages=sent, prepared=prepared), [way for way in own_ways if way in ways]
        prompt = await self._begun_prompt(target, window, sent, closes=partial.closes) if "raw" in left else None
        if not own_ways:
            name = self.sources.family(target, window).name
            closing = no_thoughts(target, window.source, name) if partial.closes else None
            how = Continuation(plan, "turn", closing=closing)
        elif prompt is not None:
            is_trusted, closing = self.known_ways.has_gone_on(target, "raw"), {} if partial.closes else None
            how = Continuation(plan, "raw", prompt, is_trusted, closing)
        elif "prefill" in left:
            how = Continuation(plan, "prefill")
        else:
            sent, how = asked_to_go_on(sent, partial), Continuation(plan, "turn")
            measured = await self.measurer.measure(replace(prepared.sent(request), messages=sent), context)
            if partial.closes or not measured.budget.own.fits(measured.count.tokens):
                # Our request is too much for it, or quotes less of the thoughts than the server has in its cache.
                again = await self.go_on(request, partial, replace(context, trigger_ratio=None))
                return await self.continued(again, room)
            prepared = replace(prepared, count=measured.count, budget=measured.budget.own)
        return replace(prepared, messages=sent, continuation=how)

    async def _begun_prompt(
        self, target: Target, window: Window, sent: Sequence[Message], *, closes: bool
    ) -> BegunPrompt | None:
        """The prompt that ends inside the last message, or behind closed thoughts, as LM Studio or we render it."""
        requests = [Request(messages=each) for each in needed_renderings(sent)]
        said = [await self.windows.rendered(target, each, without_bos=window.adds_bos) for each in requests]
        texts = [text for text in said if text is not None] if None not in said else []
        family, now = self.sources.family(target, window), datetime.fromtimestamp(self._wall_clock())
        return await asyncio.to_thread(begun_prompt, family, sent, now, texts, adds_bos=window.adds_bos, closes=closes)

    # ------------------------------------------------------------------ beside requests

    def room(self, context: RequestContext) -> Reservation:
        """A place for one answer beside the others that share its instance's context."""
        return Reservation(self.admission, context)

    def learn_shared(self, context: RequestContext, parallel: int) -> None:
        """Takes note that so many answers fill one context together: an overflow far below the window has shown it."""
        if self.windows.learn_shared(context.target, parallel):
            logger.warning(
                "shared_context model=%s: an overflow far below the window shows that parallel requests fill one "
                "context; from now on they are fitted beside each other",
                context.label,
            )

    async def aclose(self) -> None:
        """Ends all that was begun, the clients and the store; a proxy leaves that to the end of its process."""
        await self.background.aclose()
        for each in self._ending:
            await each.aclose()


def _tails(whole_tokens: int, target_tokens: float) -> Iterator[int]:
    """Bounds for the end of an answer, which alone stays verbatim: less and less until the rest can start early."""
    tokens = int(_PARTIAL_TAIL_RATIO * target_tokens)
    while tokens > _LEAST_TAIL_TOKENS:
        yield tokens
        tokens = min(tokens, whole_tokens) // 2
    yield _LEAST_TAIL_TOKENS


def _starts_early(prepared: Decided, room_tokens: int, *, compacts: bool) -> bool:
    """Returns True if the rest of an answer has the output buffer before the streaming limit.

    Without `room_tokens`, as for `go_on`, it only has to fit; unless it `compacts`, without a compaction.
    """
    if isinstance(prepared, CompactionNeeded):
        tokens, budget = prepared.steps[0].predicted_tokens, prepared.measured.budget
        limit_tokens = budget.early_start_tokens if room_tokens else budget.prompt_limit_tokens
        return compacts and tokens <= limit_tokens
    is_bound = bool(room_tokens) or not compacts
    return not is_bound or prepared.count.tokens <= prepared.budget.early_start_tokens
