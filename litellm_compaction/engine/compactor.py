"""The engine's front door: measures a request, decides, carries the decision out, reports.

`proxy/` calls it for every request to a guarded deployment. Nothing here knows LiteLLM or HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from typing_extensions import assert_never

from litellm_compaction.concurrency import Bounded, Flights, off_loop_if
from litellm_compaction.core.compaction import Compaction, is_undone, usable
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.plan import Compact, Keep, Plan, Refuse, Reuse, plan
from litellm_compaction.core.refusal import refusal, shortened, unchangeable, with_less_data
from litellm_compaction.core.steps import Step, bare
from litellm_compaction.engine.ask import SummaryClient
from litellm_compaction.engine.asking import Asker
from litellm_compaction.engine.background import QUIET_S, Background
from litellm_compaction.engine.build import BuiltCompaction, CompactionBuilder, alike, same
from litellm_compaction.engine.context import (
    CompactionNeeded,
    Effort,
    Foreseen,
    MeasuredRequest,
    PreparedRequest,
    RequestContext,
    nothing,
)
from litellm_compaction.engine.continuing import ContinuationPlanner
from litellm_compaction.engine.measure import RequestMeasurer, hashed, is_enough, is_small, note_length
from litellm_compaction.engine.pins import Pins
from litellm_compaction.engine.quoting import Quoter
from litellm_compaction.engine.recalling import Recaller
from litellm_compaction.engine.replies import ReplyReader
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.engine.sent import SentBefore
from litellm_compaction.engine.sharing.admission import Admission, Held
from litellm_compaction.engine.sharing.leases import Leases
from litellm_compaction.engine.sharing.reservation import Reservation, server_of
from litellm_compaction.engine.ways import KnownWays
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import UNDONE, Observer, Outcome
from litellm_compaction.stores import Board, Originals, Store
from litellm_compaction.tokenizers.registry import usable_soon
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

logger = logging.getLogger("litellm_compaction")
# What a client's clearing has to leave free, of what is sent.
_ROOM_RATIO = 1.25

_MOST_SCOPES = 4096


class _Shared(NamedTuple):
    """A compaction, the request for which it was made, and if it was found in the store after all."""

    measured: MeasuredRequest
    built: BuiltCompaction
    is_found: bool = False


class Compactor:
    """Keeps requests inside their windows.

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
        self.windows = windows
        self.sources = sources if sources is not None else Sources()
        self._counter = counter
        self._store = store
        self.reporter = Reporter(observers, clock=clock, wall_clock=wall_clock)
        self.recaller = Recaller(originals) if originals is not None else None
        summary_client = SummaryClient(
            windows=windows, counter=counter, sources=self.sources, recaller=self.recaller, clock=clock
        )
        self._clock = clock
        self._originals = originals
        self._builder = CompactionBuilder(summary_client=summary_client, store=store, originals=originals)
        self._compactions: Flights[_Shared] = Flights()
        # Tenants of whom a small conversation has been compacted at a client's wish: theirs are looked up, too.
        self._small: Bounded[str, bool] = Bounded(_MOST_SCOPES)
        self._pins = Pins(store)
        self._leases = Leases(board, clock=clock) if board is not None else None
        self._measurer = RequestMeasurer(
            windows=windows,
            counter=counter,
            sources=self.sources,
            leases=self._leases,
            recaller=self.recaller,
            clock=clock,
        )
        self._quoter = Quoter(self._measurer)
        self._sent = SentBefore()
        self.replies = ReplyReader(windows=windows, counter=counter, reporter=self.reporter)
        self.known_ways = KnownWays(wall_clock)
        self.continuing = ContinuationPlanner(
            planned=self._planned,
            finish=self.finish,
            refusal=self._refusal,
            measurer=self._measurer,
            known_ways=self.known_ways,
            sources=self.sources,
            windows=windows,
            wall_clock=wall_clock,
        )
        self._admission = Admission(leases=self._leases)
        self.background = Background(
            builder=self._builder,
            measurer=self._measurer,
            windows=windows,
            admission=self._admission,
            store=store,
            pins=self._pins,
            reporter=self.reporter,
            clock=clock,
            quiet_s=quiet_s,
        )
        self._asker = Asker(
            windows=windows,
            counter=counter,
            measurer=self._measurer,
            admission=self._admission,
            clock=clock,
        )

    def held(self) -> Held:
        """Returns what the answers of this process hold of all contexts."""
        return self._admission.held()

    async def prepare_counting(self, target: Target) -> TokenizerSource:
        """Loads the vocabulary and template that count a target's prompts.

        Before requests come in: making a vocabulary holds the interpreter lock for 0.1 to 0.5 s, 1 s for Gemma 4's.

        Raises:
            ModelNotLoaded, WindowUnknown: no client uses it yet.
        """
        window = await self.windows.resolve(target)
        source = self.sources.source(target, window.architecture)
        await usable_soon(source.family)
        return source

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
        prepared = await self.prepare(request, context)
        return await self.finish(prepared, room)

    async def prepare(self, request: Request, context: RequestContext) -> PreparedRequest | CompactionNeeded:
        """As far as it goes without a summary: returns what to send, or what has to be made first.

        Everything that can be refused is refused here, before the first slow step (promise P8).

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        prepared = await self._planned(request, context)
        if isinstance(prepared, PreparedRequest):
            await prepared.tell()
        return prepared

    async def _planned(self, request: Request, context: RequestContext) -> PreparedRequest | CompactionNeeded:
        """As `prepare`, but nothing is told or kept: it may not be sent."""
        await self.background.make_way(server_of(context), is_beside=context.is_beside)
        measured = await self._measurer.measure(request, context)
        note_length(measured)
        prepared = await self._prepared(measured)
        if isinstance(prepared, PreparedRequest) and prepared.messages is None and not context.goes_on:
            # The server may have counted fewer tokens than we did.
            context.attempts.too_long = None
        return prepared

    async def _prepared(self, measured: MeasuredRequest) -> PreparedRequest | CompactionNeeded:
        context = measured.context
        has_wish = context.is_wanted or context.pins is not None or bool(context.portable)
        if not context.may_change and not context.portable:
            measured = await self._asker.settled(measured)
            if not measured.budget.own.fits(measured.count.tokens):
                self.reporter.decided(measured, "refused", after=measured.count.tokens, reason="does_not_fit")
                raise unchangeable(context.label, measured.count.tokens, measured.budget)
            return self._measurer.unchanged(measured)
        if is_small(measured) and not has_wish and context.scope not in self._small:
            return self._measurer.unchanged(measured)
        measured = await hashed(measured)
        if context.is_beside or context.is_client_summary:
            return await self._found(measured)
        restored = self._sent.restored(context.scope, measured.conversation)
        before, prepared = (None, None) if restored is None else await self._before(measured, restored)
        if before is None or prepared is None or not _is_steady(prepared):
            cleared = await self._found(measured)
            if before is None or prepared is None or not (_needs_no_model(prepared) and _is_full(cleared)):
                before, prepared = measured, cleared
        self._sent.note(context.scope, before)
        return prepared

    async def _before(
        self, measured: MeasuredRequest, restored: tuple[Message, ...]
    ) -> tuple[MeasuredRequest, PreparedRequest | CompactionNeeded | None]:
        """A request as it was before its client cleared some of it, and what to send of that; None for nothing."""
        request = replace(measured.request, messages=restored)
        before = await hashed(await self._measurer.measure(request, measured.context))
        try:
            return before, await self._found(before)
        except CompactionError:
            # Cleared it may well fit.
            return before, None

    async def _found(self, measured: MeasuredRequest) -> PreparedRequest | CompactionNeeded:
        """As `_prepared`, with what the store has of the conversation."""
        measured, found = await self._builder.find(measured)
        measured = await self._pins.applied(measured)

        async def decided(stored: Sequence[Compaction]) -> PreparedRequest | CompactionNeeded:
            settled = measured if stored else await self._asker.settled(measured)
            # A running answer is stopped at this line: nothing begins above it that could begin below.
            limit_tokens = int(settled.budget.rules.streaming_ratio * settled.window.tokens)
            if (messages := await self._with_less_data(settled, limit_tokens)) is not None:
                return await self._decide_shortened(settled, messages, stored, reason="attached")
            return await self._decide(settled, stored)

        return await self._builder.without_misfits(measured, found, decided)

    async def bound(self, prompt_tokens: int, context: RequestContext) -> PreparedRequest:
        """Returns what to send for a prompt of so many token ids, which nothing can compact: itself, with a bound.

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        await self.background.make_way(server_of(context), is_beside=context.is_beside)
        measured = await self._measurer.measure_ids(prompt_tokens, context)
        note_length(measured)
        if not measured.budget.own.fits(prompt_tokens):
            raise await self._refusal(measured)
        return self._measurer.unchanged(measured)

    async def finish(
        self, needed: PreparedRequest | CompactionNeeded, room: Reservation | None = None
    ) -> PreparedRequest:
        """Makes the compaction that `prepare` found necessary, if any, or waits for one that is being made.

        Raises:
            DoesNotFit: it came out larger than it could have been foreseen, or the window has shrunk meanwhile.
            WindowUnknown, ModelNotLoaded: as `guard`; making it may take longer than a window may be old.
            Overloaded: there was no room for a summary in time.
        """
        if isinstance(needed, PreparedRequest):
            return needed

        async def finished(stored: Sequence[Compaction]) -> PreparedRequest:
            decided = needed if stored == needed.stored else await self._decide(needed.measured, stored)
            return decided if isinstance(decided, PreparedRequest) else await self._finished(decided, room)

        prepared = await self._builder.without_misfits(needed.measured, needed.stored, finished)
        await prepared.tell()
        return await self._within_todays_window(needed.measured, prepared, room)

    async def _finished(self, needed: CompactionNeeded, room: Reservation | None) -> PreparedRequest:
        measured = needed.measured
        for at, step in enumerate(needed.steps):
            prepared = await self._built(needed, needed.steps[at:], room)
            if prepared is not None:
                return prepared
            if step.is_record:
                break
        does_fit = measured.budget.own.fits(measured.count.tokens)
        again = await (self._asker.fitted(measured) if does_fit else self._asker.with_floor(measured))
        if again is not None:
            decided = await self._decide(again, needed.stored)
            return decided if isinstance(decided, PreparedRequest) else await self._finished(decided, room)
        if does_fit:
            return self._measurer.unchanged(measured)
        hardest = bare(measured.conversation)
        if hardest is not None:
            prepared = await self._applied_surely(measured, hardest, "compacted")
            if prepared.budget.fits(prepared.count.tokens):
                self.reporter.decided(measured, "fallback", prepared=prepared, compaction=hardest, reason="bare")
                return prepared
        raise await self._refusal(measured)

    async def _within_todays_window(
        self, measured: MeasuredRequest, prepared: PreparedRequest, room: Reservation | None
    ) -> PreparedRequest:
        """`prepared`, made anew if the model has been loaded with a smaller window meanwhile."""
        if not await self.has_shrunk(measured.context, prepared):
            return prepared
        again = await self.guard(measured.request, measured.context, room)
        if measured.is_shortened and again.messages is None:
            return replace(again, messages=measured.request.messages)
        return again

    async def _built(
        self, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None
    ) -> PreparedRequest | None:
        """The request after a new compaction; None if it does not fit, or an edit or a choice leaves too much."""
        measured, step = needed.measured, steps[0]
        shared = await self._shared(alike(measured, steps), needed, steps, room)
        if shared.measured is not measured and not await self._does(shared, measured, step):
            # It begins alike and goes on differently: another request's compaction is not for it.
            shared = await self._shared(same(measured, steps), needed, steps, room)
        built = shared.built
        if built.compaction.level == "truncate" and measured.is_voluntary:
            # It fits as it came, which says more than a record without a summary.
            prepared = self._measurer.unchanged(measured)
            self.reporter.decided(measured, "fallback", prepared=prepared, effort=built.effort)
            return prepared
        prepared = await self._applied_surely(measured, built.compaction, "compacted")
        if not is_enough(measured, step, built.compaction, prepared):
            return None
        # A record is the last step: it is sent whatever the template says.
        if not step.is_record and not await self._asker.does_render(measured, prepared):
            return None
        await self._builder.keep(measured, built)
        prepared = replace(prepared, compaction=None if measured.context.is_client_summary else built.kept)
        if measured.context.now:
            measured.context.attempts.has_compacted = True
            self._small[measured.context.scope] = True
        prepared = await self._quoter.added(prepared)
        is_fallback = built.compaction.level == "truncate" and not measured.context.is_client_summary
        outcome: Outcome = "fallback" if is_fallback else "compacted"
        if shared.measured is not measured or shared.is_found:
            reused = self._reusing(measured, prepared, built.kept)
            # A record that was there before, and only came late, is told as a reuse.
            return replace(reused, action="reused") if shared.is_found else reused
        if not measured.context.now and is_undone(measured.conversation, needed.stored):
            # It would not have fitted otherwise.
            built.effort.reason = built.effort.reason or UNDONE
        known = next(iter(usable(measured.conversation, needed.stored)), None)
        self.reporter.decided(
            measured,
            outcome,
            prepared=prepared,
            compaction=built.kept,
            effort=built.effort,
            base=step.base,
            known=known,
        )
        return prepared

    async def _shared(
        self, key: Hashable, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None
    ) -> _Shared:
        """The one compaction for which all requests that need it now wait."""
        if room is not None and self._compactions.is_under_way(key):
            room.pause()
        return await self._compactions.join(key, lambda: self._make(needed, steps, room))

    async def _make(self, needed: CompactionNeeded, steps: Sequence[Step], room: Reservation | None) -> _Shared:
        measured = needed.measured
        if steps[0].question == "none":
            return _Shared(measured, await self._builder.make(measured, steps))

        async def built_by_another() -> BuiltCompaction | None:
            if room is not None:
                room.pause()
            return await self._built_meanwhile(needed)

        topic, limit_s = f"compaction {alike(measured, steps)!r}", measured.context.settings.summary_timeout_s
        alone: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        leases = self._leases
        async with (
            leases.one_of_all(topic, built_by_another, limit_s=limit_s) if leases is not None else alone
        ) as found:
            if found is None:
                async with room.for_summary(measured.window, measured.count.tokens) if room is not None else alone:
                    found = await self._built_meanwhile(needed)
                    if found is None:
                        return _Shared(measured, await self._builder.make(measured, steps))
            return _Shared(measured, found, is_found=True)

    async def _built_meanwhile(self, needed: CompactionNeeded) -> BuiltCompaction | None:
        """A compaction that another request has stored since this one was planned; it may have waited, or come late."""
        measured = needed.measured
        _, stored = await self._builder.find(measured)
        if all(each in needed.stored for each in stored):
            return None
        decision = await self._plan(measured, stored)
        if not isinstance(decision, Reuse) or decision.compaction in needed.stored:
            return None
        prepared = await self._measurer.applied(measured, decision.compaction, "reused")
        if not prepared.budget.fits(prepared.count.tokens):
            return None
        return BuiltCompaction(decision.compaction, decision.compaction, Effort())

    async def _does(self, shared: _Shared, measured: MeasuredRequest, step: Step) -> bool:
        compaction = shared.built.compaction
        if not usable(measured.conversation, [compaction]):
            return False
        prepared = await self._measurer.applied(measured, compaction, "compacted")
        return is_enough(measured, step, compaction, prepared)

    async def prepared_for(
        self, request: Request, context: RequestContext, foreseen: Foreseen | None
    ) -> PreparedRequest | CompactionNeeded:
        """As `prepare`, without doing again what was done for the same request when this deployment was foreseen.

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        if foreseen is None or foreseen.measured.context != context:
            return await self.prepare(request, context)
        if await self._measurer.window(context) != foreseen.window:
            return await self.prepare(request, context)
        # Its calls go the way that is known now.
        return replace(foreseen, measured=replace(foreseen.measured, context=context))

    async def has_shrunk(self, context: RequestContext, prepared: PreparedRequest) -> bool:
        """Returns True if the window is smaller than the one that `prepared` was made for: it may have waited.

        For the rest of an answer the window is read anew: where LM Studio's protocol does not work, nothing else tells
        that the model was loaded again while it spoke.

        Raises:
            WindowUnknown, ModelNotLoaded: as `guard`.
        """
        if prepared.way is not None:
            self.windows.invalidate(context.target)
        window = await self._measurer.window(context, prompt_tokens=prepared.count.tokens)
        return window.tokens < prepared.window.tokens

    async def observe(self, request: Request, context: RequestContext) -> None:
        """Reports what `guard` would do; no model call, no warm-up, no error, no change."""
        try:
            measured = await self._measurer.measure(request, replace(context, warm_up=nothing))
        except CompactionError:
            return
        if measured.budget.own.triggers(measured.count.tokens):
            measured = await hashed(measured)
            decision = await self._plan(measured, ())
            step = decision.steps[0] if isinstance(decision, Compact) else None
            after = step.predicted_tokens if step is not None else measured.count.tokens
            reason = type(decision).__name__.lower() if step is None else _told(step)
            self.reporter.decided(measured, "observed", after=after, reason=reason)

    async def count(self, request: Request, context: RequestContext) -> int:
        """Returns the tokens of a request's prompt as it came; no model is asked or loaded for it.

        Raises:
            WindowUnknown, ModelNotLoaded: as `guard`.
        """
        measured = await self._measurer.measure(request, replace(context, warm_up=nothing))
        return (await self._asker.counted(measured)).tokens

    def room(self, context: RequestContext) -> Reservation:
        """A place for one answer beside the others that share its instance's context."""
        return Reservation(self._admission, context)

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
        # First: a store that hangs keeps no other process waiting.
        if self._leases is not None:
            await self._leases.aclose()
        await self.replies.aclose()
        await self.windows.aclose()
        # Before the store, whose server it may share.
        if self._originals is not None:
            await self._originals.aclose()
        await self._store.aclose()

    async def _plan(self, measured: MeasuredRequest, stored: Sequence[Compaction]) -> Plan:
        budget = replace(measured.budget, is_wanted=True) if measured.context.is_wanted else measured.budget
        return await off_loop_if(
            measured.is_long, lambda: plan(measured.conversation, budget, measured.options, stored)
        )

    async def _decide(
        self, measured: MeasuredRequest, stored: Sequence[Compaction], *, shorten: bool = True
    ) -> PreparedRequest | CompactionNeeded:
        known = stored
        while True:
            decision = await self._plan(measured, known)
            match decision:
                case Keep(is_undone=is_undone):
                    again = await self._asker.fitted(measured)
                    if again is not None:
                        return await self._decide(again, stored, shorten=shorten)
                    return self._kept(measured) if is_undone else self._measurer.unchanged(measured)
                case Reuse(compaction=compaction):
                    prepared = await self._applied_surely(measured, compaction, "reused")
                    if prepared.budget.fits(prepared.count.tokens):
                        quoting = await self._quoter.added(prepared)
                        return self._reusing(measured, quoting, compaction)
                    # Counted as it is sent it does not do: what is decided without it?
                    known = ()
                case Compact(steps=steps):
                    reused = await self._reused(measured, known)
                    return reused or CompactionNeeded(measured=measured, steps=steps, stored=tuple(stored))
                case Refuse():
                    again = await self._asker.with_floor(measured)
                    if again is not None:
                        return await self._decide(again, stored, shorten=shorten)
                    return await self._shortened_or_refused(measured, stored, shorten=shorten)
                case _:
                    assert_never(decision)

    async def _applied_surely(
        self, measured: MeasuredRequest, compaction: Compaction, action: Literal["reused", "compacted"]
    ) -> PreparedRequest:
        """The request after a compaction, counted by the server if our doubt would decide about it."""
        prepared = await self._measurer.applied(measured, compaction, action)
        if await self._asker.has_recounted(measured, prepared):
            return await self._measurer.applied(measured, compaction, action)
        return prepared

    async def _reused(self, measured: MeasuredRequest, stored: Sequence[Compaction]) -> PreparedRequest | None:
        """An earlier compaction that still does, counted as it is sent; None if a new one is due or wanted.

        The planner's number is an estimate; the server may have counted all of it but the newest messages.
        """
        if measured.context.is_wanted:
            return None
        found = await off_loop_if(bool(stored) and measured.is_long, lambda: usable(measured.conversation, stored))
        if found and not found[0].provisional:
            prepared = await self._applied_surely(measured, found[0], "reused")
            if not prepared.budget.triggers(prepared.count.tokens):
                return self._reusing(measured, await self._quoter.added(prepared), found[0])
        return None

    def _reusing(self, measured: MeasuredRequest, prepared: PreparedRequest, compaction: Compaction) -> PreparedRequest:
        """A reuse; a record written ahead is in effect once it is sent, also if a later turn is smaller."""

        async def tell() -> None:
            self.reporter.decided(measured, "reused", prepared=prepared, compaction=compaction)
            if compaction.ahead or compaction.early:
                await self._builder.put_into_effect(measured, compaction)

        return replace(prepared, compaction=compaction, tell=tell)

    def _kept(self, measured: MeasuredRequest) -> PreparedRequest:
        """The request as it came, since the owner of its compaction has undone that."""
        prepared = self._measurer.unchanged(measured)

        async def tell() -> None:
            if measured.budget.own.triggers(measured.count.tokens):
                self.reporter.decided(measured, "kept", prepared=prepared, reason=UNDONE)

        return replace(prepared, tell=tell)

    async def _shortened_or_refused(
        self, measured: MeasuredRequest, stored: Sequence[Compaction], *, shorten: bool
    ) -> PreparedRequest | CompactionNeeded:
        """The request with its largest texts cut to excerpts if the operator allows it, else the error."""
        limit_tokens = measured.budget.prompt_limit_tokens
        if not measured.is_shortened and (messages := await self._with_less_data(measured, limit_tokens)):
            return await self._decide_shortened(measured, messages, stored, reason="attached", shorten=shorten)
        settings = measured.context.settings
        excerpts = partial(
            shortened,
            measured.conversation,
            measured.budget,
            tool_results=settings.oversized_tool_result == "excerpt",
            user_message=settings.oversized_user_message == "excerpt",
        )
        if not shorten or not (messages := await off_loop_if(measured.is_long, excerpts)):
            raise await self._refusal(measured)
        return await self._decide_shortened(measured, messages, stored, reason="excerpt", shorten=False)

    async def _decide_shortened(
        self,
        measured: MeasuredRequest,
        messages: tuple[Message, ...],
        stored: Sequence[Compaction],
        *,
        reason: str,
        shorten: bool = True,
    ) -> PreparedRequest | CompactionNeeded:
        again = await self._measurer.shortened(measured, messages)
        decided = await self._decide(again, stored, shorten=shorten)
        if not isinstance(decided, PreparedRequest) or decided.round:
            return decided

        async def tell() -> None:
            self.reporter.decided(measured, "fallback", prepared=decided, reason=reason)

        return replace(decided, tell=tell)

    async def _with_less_data(self, measured: MeasuredRequest, limit_tokens: int) -> tuple[Message, ...] | None:
        """The request with less of the data attached to unanswered messages; None if all may stay."""
        return await off_loop_if(
            measured.is_long, lambda: with_less_data(measured.conversation, measured.budget, limit_tokens)
        )

    async def _refusal(self, measured: MeasuredRequest) -> DoesNotFit:
        if not measured.context.goes_on:
            # An answer that cannot be carried over is no refused request: the loop that carries it tells of it.
            self.reporter.decided(measured, "refused", after=measured.budget.floor_tokens, reason="does_not_fit")
        count, fixed_tokens = measured.count, measured.conversation.fixed_tokens
        tools_share = count.tools_tokens / max(1, count.tools_tokens + count.overhead_tokens)
        return await off_loop_if(
            measured.is_long,
            lambda: refusal(
                measured.context.label, measured.conversation, measured.budget, round(tools_share * fixed_tokens)
            ),
        )


def _told(step: Step) -> str:
    """What is planned, for events."""
    return "summarize" if step.is_record else "edit" if step.is_edit else "prune"


def _is_steady(prepared: PreparedRequest | CompactionNeeded) -> bool:
    """A compaction that was there does once more."""
    return isinstance(prepared, PreparedRequest) and prepared.round > 0


def _needs_no_model(prepared: PreparedRequest | CompactionNeeded) -> bool:
    return isinstance(prepared, CompactionNeeded) and prepared.steps[0].is_edit


def _is_full(prepared: PreparedRequest | CompactionNeeded) -> bool:
    """Little more has room before the next compaction, so that each turn until then would be read anew."""
    if isinstance(prepared, CompactionNeeded):
        return True
    return prepared.round > 0 and prepared.budget.triggers(int(_ROOM_RATIO * prepared.count.tokens))
