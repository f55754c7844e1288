"""The engine's front door: measures a request, has it decided about, makes the compaction that it needs, reports.

`proxy/` calls it for every request to a guarded deployment. Nothing here knows LiteLLM or HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import NamedTuple

from litellm_compaction.concurrency import Flights
from litellm_compaction.core.compaction import Compaction, is_undone, usable
from litellm_compaction.core.messages import Request
from litellm_compaction.core.plan import Make, Send
from litellm_compaction.core.steps import Step, bare
from litellm_compaction.engine.ask import SummaryClient
from litellm_compaction.engine.asking import Asker
from litellm_compaction.engine.background import QUIET_S, Background
from litellm_compaction.engine.build import BuiltCompaction, CompactionBuilder
from litellm_compaction.engine.context import (
    CompactionNeeded,
    Decided,
    Effort,
    Foreseen,
    MeasuredRequest,
    PreparedRequest,
    RequestContext,
    nothing,
)
from litellm_compaction.engine.continuing import ContinuationPlanner
from litellm_compaction.engine.deciding import Decider
from litellm_compaction.engine.measure import RequestMeasurer, hashed, is_enough, note_length
from litellm_compaction.engine.pins import Pins
from litellm_compaction.engine.quoting import Quoter
from litellm_compaction.engine.recalling import Recaller
from litellm_compaction.engine.replies import ReplyReader
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.engine.sharing.admission import Admission, Held
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.reservation import Reservation, server_of
from litellm_compaction.engine.ways import KnownWays
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import UNDONE, Observer
from litellm_compaction.stores import Board, Originals, Store
from litellm_compaction.tokenizers.registry import usable_soon
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

logger = logging.getLogger("litellm_compaction")


class _Made(NamedTuple):
    """What has been made of a step, None for nothing usable, and of which request; without one it was found stored."""

    built: BuiltCompaction | None
    measured: MeasuredRequest | None = None


class Compactor:
    """Keeps requests inside their windows.

    It has one attribute for each room of the engine, whose doors the rooms that decide, go on and write ahead use too.

    Args:
        sources: by which vocabulary and template a target is counted; None takes this package's own only.
        board: of the processes that share the store; None for no others.
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
        board: Board | None = None,
        originals: Originals | None = None,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.windows, self.sources = windows, sources or Sources()
        self.reporter = Reporter(observers, clock=clock, wall_clock=wall_clock)
        self.recaller = recaller = Recaller(originals) if originals is not None else None
        self.replies = ReplyReader(windows=windows, counter=counter, reporter=self.reporter)
        self.known_ways = KnownWays(wall_clock)
        self._leases = leases = Leases(board, clock=clock) if board is not None else None
        self.admission = admission = Admission(leases=leases)
        self._flights: Flights[_Made] = Flights()
        # In this order: a store that hangs keeps no other process waiting, and it may be the originals' server.
        self._ending = [each for each in (leases, self.replies, windows, originals, store) if each is not None]
        self.measurer = measurer = RequestMeasurer(
            windows=windows, counter=counter, sources=self.sources, leases=leases, recaller=recaller, clock=clock
        )
        client = SummaryClient(windows=windows, counter=counter, sources=self.sources, recaller=recaller, clock=clock)
        self.builder = CompactionBuilder(summary_client=client, store=store, originals=originals)
        self.asker = Asker(windows=windows, counter=counter, measurer=measurer, admission=admission, clock=clock)
        self.pins, self.quoter = Pins(store), Quoter(measurer)
        self.decider = Decider(self)
        self.background = Background(self, clock=clock, quiet_s=quiet_s)
        admission.make_way = self.background.make_way
        self.continuing = ContinuationPlanner(self, wall_clock)

    async def guard(
        self, request: Request, context: RequestContext, room: Reservation | None = None
    ) -> PreparedRequest:
        """Returns what to send instead of `request`, so that the server never has to cut it.

        Args:
            room: what the answer holds of a shared context; a summary waits for room in its place.

        Raises:
            WindowUnknown: no source says how large the window is.
            ModelNotLoaded: `when_not_loaded` is `error`, or the warm-up did not load the model.
            DoesNotFit: the protected messages alone are too large.
            Overloaded: there was no room for a summary in time.
        """
        return await self.finish(await self.prepare(request, context), room)

    async def prepare(self, request: Request, context: RequestContext) -> Decided:
        """As `guard`, as far as it goes without a summary: returns what to send, or what has to be made first.

        Everything that can be refused is refused here, before the first slow step (promise P8).
        """
        prepared = await self.planned(request, context)
        if isinstance(prepared, PreparedRequest):
            await prepared.tell()
        return prepared

    async def planned(self, request: Request, context: RequestContext) -> Decided:
        """As `prepare`, but nothing is told or kept: it may not be sent."""
        await self.background.make_way(server_of(context), is_beside=context.is_beside)
        measured = await self.measurer.measure(request, context)
        note_length(measured)
        prepared = await self.decider.first(measured)
        if isinstance(prepared, PreparedRequest) and prepared.messages is None and not context.goes_on:
            # The server may have counted fewer tokens than we did.
            context.attempts.too_long = None
        return prepared

    async def prepared_for(self, request: Request, context: RequestContext, foreseen: Foreseen | None) -> Decided:
        """As `prepare`, without doing again what was done for the same request when this deployment was foreseen."""
        if foreseen is None or foreseen.measured.context != context:
            return await self.prepare(request, context)
        if await self.measurer.window(context) != foreseen.window:
            return await self.prepare(request, context)
        # Its calls go the way that is known now.
        return replace(foreseen, measured=replace(foreseen.measured, context=context))

    async def bound(self, prompt_tokens: int, context: RequestContext) -> PreparedRequest:
        """As `guard`, for a prompt of so many token ids, which nothing can compact: itself, with a bound."""
        await self.background.make_way(server_of(context), is_beside=context.is_beside)
        measured = await self.measurer.measure_ids(prompt_tokens, context)
        note_length(measured)
        if not measured.budget.own.fits(prompt_tokens):
            raise await self.decider.refusal(measured)
        return self.measurer.unchanged(measured)

    async def finish(self, needed: Decided, room: Reservation | None = None) -> PreparedRequest:
        """Makes the compaction that `prepare` found necessary, if any, or waits for one that is being made.

        Raises:
            DoesNotFit: it came out larger than it could have been foreseen, or the window has shrunk meanwhile.
            WindowUnknown, ModelNotLoaded, Overloaded: as `guard`; making it may take longer than a window may be old.
        """
        if isinstance(needed, PreparedRequest):
            return needed
        measured = needed.measured

        async def finished(stored: Sequence[Compaction]) -> PreparedRequest:
            decided = needed if stored == needed.stored else await self.decider.decide(measured, stored)
            while isinstance(decided, CompactionNeeded):
                decided = await self._climbed(decided, room)
            return decided

        prepared = await self.builder.without_misfits(measured, needed.stored, finished)
        await prepared.tell()
        if not await self.has_shrunk(measured.context, prepared):
            return prepared
        again = await self.guard(measured.request, measured.context, room)
        if measured.is_shortened and again.messages is None:
            return replace(again, messages=measured.request.messages)
        return again

    async def _climbed(self, needed: CompactionNeeded, room: Reservation | None) -> Decided:
        """The request after the first step whose result does, or what else is decided about it now."""
        measured, effort = needed.measured, Effort()
        for at, step in enumerate(needed.steps):
            prepared = await self._stepped(needed, needed.steps[at:], room, effort)
            if prepared is not None:
                return prepared
            if step.is_record:
                break
        does_fit = measured.budget.own.fits(measured.count.tokens)
        again = await (self.asker.fitted(measured) if does_fit else self.asker.with_floor(measured))
        if again is not None:
            return await self.decider.decide(again, needed.stored)
        if does_fit:
            return self.measurer.unchanged(measured)
        if (hardest := bare(measured.conversation)) is not None:
            prepared = await self.decider.applied(measured, hardest, "compacted")
            if prepared.budget.fits(prepared.count.tokens):
                self.reporter.decided(measured, "fallback", prepared=prepared, compaction=hardest, reason="bare")
                return prepared
        raise await self.decider.refusal(measured)

    async def _stepped(
        self, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None, effort: Effort
    ) -> Decided | None:
        """The request after the first step; None if it does not fit, or an edit or a choice leaves too much."""
        measured, step, context = needed.measured, steps[0], needed.measured.context
        built, made_of = await self._made(needed, steps, room, effort)
        if built is None:
            return None
        if made_of is not measured:
            # Another request's may not be for this one, which goes on differently.
            context.attempts.has_compacted = context.attempts.has_compacted or context.now
            return await self.decider.decide(measured, (built.compaction, *needed.stored))
        compaction = built.compaction
        if compaction.level == "truncate" and measured.is_voluntary:
            # It fits as it came, which says more than a record without a summary.
            prepared = self.measurer.unchanged(measured)
            self.reporter.decided(measured, "fallback", prepared=prepared, effort=effort)
            return prepared
        prepared = await self.decider.applied(measured, compaction, "compacted")
        if not is_enough(measured, step, compaction, prepared):
            return None
        if not step.is_record:
            # A record is the last step: it is sent whatever the template says.
            if not await self.asker.does_render(measured, prepared):
                return None
            await self.builder.put(measured, built.kept)
        if context.now:
            context.attempts.has_compacted = True
            self.decider.small[context.scope] = True
        prepared = replace(prepared, compaction=None if context.is_client_summary else built.kept)
        prepared = await self.quoter.added(prepared)
        if not context.now and is_undone(measured.conversation, needed.stored):
            # It would not have fitted otherwise.
            effort.reason = effort.reason or UNDONE
        is_fallback = compaction.level == "truncate" and not context.is_client_summary
        self.reporter.decided(
            measured,
            "fallback" if is_fallback else "compacted",
            prepared=prepared,
            compaction=built.kept,
            effort=effort,
            base=step.base,
            known=next(iter(usable(measured.conversation, needed.stored)), None),
        )
        return prepared

    async def _made(
        self, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None, effort: Effort
    ) -> _Made:
        """The compaction by the first step; if a model is asked for it, one for all requests that need it now.

        They are those of equal tenants, models, topics, and messages that the model is asked about, in all processes.
        """
        measured, context, step = needed.measured, needed.measured.context, steps[0]

        async def make() -> _Made:
            return _Made(await self.builder.make(measured, steps, effort), measured)

        if step.question == "none":
            return await make()

        async def found() -> _Made | None:
            if room is not None:
                room.pause()
            return await self._made_meanwhile(needed)

        async def once() -> _Made:
            alone: AbstractAsyncContextManager[None] = contextlib.nullcontext()
            topic, limit_s, leases = f"compaction {key!r}", context.settings.summary_timeout_s, self._leases
            async with leases.one_of_all(topic, found, limit_s=limit_s) if leases is not None else alone as made:
                if made is not None:
                    return made
                async with room.for_summary(measured.window, measured.count.tokens) if room is not None else alone:
                    return await self._made_meanwhile(needed) or await make()

        covered_hash = measured.conversation.hashes[step.draft.covered_messages]
        key = (context.scope, context.target.key, context.focus, step.question, covered_hash)
        if room is not None and self._flights.is_under_way(key):
            room.pause()
        return await self._flights.join(key, once)

    async def _made_meanwhile(self, needed: CompactionNeeded) -> _Made | None:
        """A compaction that another request has stored since this one was planned; it may have waited, or come late."""
        _, stored = await self.builder.find(needed.measured)
        if all(each in needed.stored for each in stored):
            return None
        decision = await self.decider.plan(needed.measured, stored)
        made = decision.compaction if isinstance(decision, Send) else None
        return None if made is None or made in needed.stored else _Made(BuiltCompaction(made, made))

    async def has_shrunk(self, context: RequestContext, prepared: PreparedRequest) -> bool:
        """Returns True if the window is smaller than the one that `prepared` was made for; errors as `guard`."""
        if prepared.way is not None:
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
            after, reason = measured.count.tokens, "keep" if isinstance(decision, Send) else "refuse"
            if isinstance(decision, Make):
                step = decision.steps[0]
                after = step.predicted_tokens
                reason = "summarize" if step.is_record else "edit" if step.is_edit else "prune"
            self.reporter.decided(measured, "observed", after=after, reason=reason)

    async def count(self, request: Request, context: RequestContext) -> int:
        """Returns the tokens of a prompt as it came; no model is asked or loaded for it; errors as `guard`."""
        measured = await self.measurer.measure(request, replace(context, warm_up=nothing))
        return (await self.asker.counted(measured)).tokens

    async def prepare_counting(self, target: Target) -> TokenizerSource:
        """Loads the vocabulary and template that count a target's prompts.

        Before requests come in: making a vocabulary holds the interpreter lock for 0.1 to 0.5 s, 1 s for Gemma 4's.
        Errors as `guard`, if no client uses it yet.
        """
        window = await self.windows.resolve(target)
        source = self.sources.source(target, window.architecture)
        await usable_soon(source.family)
        return source

    def room(self, context: RequestContext) -> Reservation:
        """A place for one answer beside the others that share its instance's context."""
        return Reservation(self.admission, context)

    def held(self) -> Held:
        """Returns what the answers of this process hold of all contexts."""
        return self.admission.held()

    def learn_shared(self, context: RequestContext, parallel: int) -> None:
        """Takes note that so many answers fill one context together: an overflow far below the window has shown it."""
        if self.windows.learn_shared(context.target, parallel):
            logger.warning(
                "shared_context model=%s: an overflow far below the window shows that parallel requests fill one "
                "context; from now on they are fitted beside each other",
                context.label,
            )

    @property
    def is_coordinated(self) -> bool:
        """Processes that share the store keep room in shared contexts together."""
        return self._leases is not None

    async def aclose(self) -> None:
        """Ends writing ahead, the leases that other processes would wait for, the clients and the store."""
        await self.background.aclose()
        for each in self._ending:
            await each.aclose()
