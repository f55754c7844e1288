"""The engine's front door: measures a request, decides, carries the decision out, reports.

`proxy/` calls it for every request to a guarded deployment. Nothing here knows LiteLLM or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Literal, NamedTuple

from typing_extensions import assert_never

from litellm_compaction.concurrency import Bounded, Flights
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.conversation import usable
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.core.plan import Compact, Edit, Keep, Level, Plan, Refuse, Reuse, Summarize, plan
from litellm_compaction.core.refusal import refusal, shortened, unprepared, with_less_data
from litellm_compaction.engine.admission import Admission
from litellm_compaction.engine.ask import SummaryClient
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
from litellm_compaction.engine.coordination import Coordination
from litellm_compaction.engine.feedback import ReplyReader, UsageFeedback
from litellm_compaction.engine.going_on import GoingOn
from litellm_compaction.engine.measure import RequestMeasurer, hashed, is_enough
from litellm_compaction.engine.probing import Prober
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.engine.reservation import Reservation, server_of
from litellm_compaction.engine.threads import off_loop_if
from litellm_compaction.errors import CompactionError, DoesNotFit
from litellm_compaction.events import Observer, Outcome
from litellm_compaction.stores import Board, Store
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

logger = logging.getLogger("litellm_compaction")

# Below this share of what it may fill no conversation has ever been compacted, however wrong the count was then.
_COMPACTED_BEFORE_RATIO = 0.25
# Tenants of which is known whether a small conversation of theirs was compacted, because a client wanted it.
_MAX_WANTED = 4096
_WANTED_FACT = "wanted"
# So long a tenant without any counts as such: another process may be asked for its first.
_UNWANTED_S = 1.0
# A store that does not answer delays nobody again soon.
_STORE_SILENT_S, _STORE_TIMEOUT_S = 30.0, 2.0


class _Flown(NamedTuple):
    """A compaction, for whose request it was made, and if it was found in the store after all."""

    work: MeasuredRequest
    made: BuiltCompaction
    is_found: bool = False


class Compactor:
    """Keeps requests inside their windows.

    Args:
        windows: which context length a target has.
        counter: tokens of a request.
        sources: by which vocabulary and template a target is counted; None takes this package's own only.
        store: where compactions are kept.
        board: of the processes that share the store; None for no others.
        observers: are told every event.
        clock: seconds, monotonic, for durations.
        wall_clock: seconds since 1970, for the history.
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
        summary_client = SummaryClient(windows=windows, counter=counter, sources=self.sources, clock=clock)
        self._clock = clock
        self._builder = CompactionBuilder(summary_client=summary_client, store=store)
        self._compactions: Flights[_Flown] = Flights()
        self._wanted_until_s: Bounded[str, float] = Bounded(_MAX_WANTED)
        self._feedback = UsageFeedback(counter=counter, store=store, clock=clock)
        self._coordination = Coordination(board, clock=clock) if board is not None else None
        self._measurer = RequestMeasurer(
            windows=windows, counter=counter, sources=self.sources, coordination=self._coordination, clock=clock
        )
        self.replies = ReplyReader(windows=windows, counter=counter, feedback=self._feedback, reporter=self.reporter)
        self.going_on = GoingOn(store, wall_clock)
        self.continuing = ContinuationPlanner(
            prepare=self.prepare,
            finish=self.finish,
            refusal=self._refusal,
            measurer=self._measurer,
            going_on=self.going_on,
            sources=self.sources,
            windows=windows,
            wall_clock=wall_clock,
        )
        self._admission = Admission(coordination=self._coordination)
        self.background = Background(
            builder=self._builder,
            measurer=self._measurer,
            windows=windows,
            admission=self._admission,
            store=store,
            reporter=self.reporter,
            clock=clock,
            quiet_s=quiet_s,
        )
        self._prober = Prober(
            windows=windows,
            counter=counter,
            feedback=self._feedback,
            measurer=self._measurer,
            room=lambda work: Reservation(self._admission, work.case),
            clock=clock,
        )

    async def prepare_counting(self, target: Target) -> TokenizerSource:
        """Loads what counts a target's prompts.

        Before requests come in: making a vocabulary holds the interpreter lock for 0.1 to 0.5 s, 1 s for Gemma 4's.

        Raises:
            ModelNotLoaded, WindowUnknown: nobody uses it yet.
        """
        window = await self.windows.resolve(target)
        source = await self.sources.source(target, window.architecture, window.wanted, patient=True)
        await self._counter.prepare(source.family)
        return source

    async def guard(self, request: Request, case: RequestContext, room: Reservation | None = None) -> PreparedRequest:
        """Returns what to send instead of `request`, so that the server never has to cut it.

        Args:
            request: the conversation.
            case: of the request.
            room: what its answer holds of a shared context; a summary waits for room in its place.

        Raises:
            WindowUnknown: nobody says how large the window is.
            ModelNotLoaded: `when_not_loaded` is `error`, or the warm-up did not load the model.
            DoesNotFit: the protected messages alone are too large.
            Overloaded: there was no room for a summary in time.
        """
        prepared = await self.prepare(request, case)
        return prepared if isinstance(prepared, PreparedRequest) else await self.finish(prepared, room)

    async def prepare(self, request: Request, case: RequestContext) -> PreparedRequest | CompactionNeeded:
        """As far as it goes without a summary: returns what to send, or what has to be made first.

        Everything that can be refused is refused here, before the first slow step (promise P8).

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        await self.background.make_way(server_of(case))
        self._feedback.recall(case.target.key)
        work = await self._measurer.weigh(request, case)
        _note_length(work)
        prepared = await self._prepared(work)
        if isinstance(prepared, PreparedRequest) and prepared.messages is None and not case.goes_on:
            # The server may have counted fewer tokens than we did.
            case.attempts.too_long = None
        return prepared

    async def _prepared(self, work: MeasuredRequest) -> PreparedRequest | CompactionNeeded:
        if _is_small(work) and not work.case.is_wanted and not await self._has_small_ones(work.case.scope):
            return self._measurer.unchanged(work)
        work = await hashed(work)

        async def decided(stored: Sequence[Compaction]) -> PreparedRequest | CompactionNeeded:
            settled = work if stored else await self._prober.settled(work)
            # A running answer is stopped at this line: nothing begins above it that could begin below.
            limit_tokens = int(settled.budget.rules.streaming_ratio * settled.window.tokens)
            if (messages := await self._with_less_data(settled, limit_tokens)) is not None:
                return await self._decide_shortened(settled, messages, stored, reason="attached")
            return await self._decide(settled, stored)

        return await self._builder.without_misfits(work, await self._builder.find(work), decided)

    async def bound(self, prompt_tokens: int, case: RequestContext) -> PreparedRequest:
        """Returns what to send for a prompt of so many token ids, which nothing can compact: itself, with a bound.

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        await self.background.make_way(server_of(case))
        work = await self._measurer.weigh_ids(prompt_tokens, case)
        _note_length(work)
        if not work.budget.own.fits(prompt_tokens):
            raise await self._refusal(work)
        return self._measurer.unchanged(work)

    async def finish(self, pending: CompactionNeeded, room: Reservation | None = None) -> PreparedRequest:
        """Makes the compaction that `prepare` found necessary, or waits for one that is being made.

        Raises:
            DoesNotFit: it came out larger than it could have been foreseen, or the window has shrunk meanwhile.
            WindowUnknown, ModelNotLoaded: as `guard`; making it may take longer than a window may be old.
            Overloaded: there was no room for a summary in time.
        """

        async def finished(stored: Sequence[Compaction]) -> PreparedRequest:
            decided = pending if stored == pending.stored else await self._decide(pending.work, stored)
            return decided if isinstance(decided, PreparedRequest) else await self._finished(decided, room)

        guarded = await self._builder.without_misfits(pending.work, pending.stored, finished)
        return await self._within_todays_window(pending.work, guarded, room)

    async def _finished(self, pending: CompactionNeeded, room: Reservation | None) -> PreparedRequest:
        work = pending.work
        for at, level in enumerate(pending.levels):
            guarded = await self._made(pending, pending.levels[at:], room)
            if guarded is not None:
                return guarded
            if isinstance(level, Summarize):
                # No level leaves less.
                break
        does_fit = work.budget.own.fits(work.count.tokens)
        again = await (self._prober.fitted(work) if does_fit else self._prober.with_floor(work))
        if again is not None:
            decided = await self._decide(again, pending.stored)
            return decided if isinstance(decided, PreparedRequest) else await self._finished(decided, room)
        if does_fit:
            return self._measurer.unchanged(work)
        bare = self._builder.bare(work)
        if bare is not None:
            guarded = await self._applied_surely(work, bare, "compacted")
            if guarded.budget.fits(guarded.count.tokens):
                self.reporter.applied(work, "fallback", guarded, bare, reason="bare")
                return guarded
        raise await self._refusal(work)

    async def _within_todays_window(
        self, work: MeasuredRequest, guarded: PreparedRequest, room: Reservation | None
    ) -> PreparedRequest:
        """`guarded`, made anew if the model has been loaded with a smaller window meanwhile."""
        if not await self.has_shrunk(work.case, guarded):
            return guarded
        again = await self.guard(work.request, work.case, room)
        if work.is_shortened and again.messages is None:
            return replace(again, messages=work.request.messages)
        return again

    async def _made(
        self, pending: CompactionNeeded, levels: Sequence[Level], room: Reservation | None
    ) -> PreparedRequest | None:
        """What to send after a new compaction; None if it does not fit, or an edit or a pruning leaves too much."""
        work = pending.work
        flown = await self._flown(alike(work, levels), pending, levels, room)
        if flown.work is not work and not await self._does(flown, work, levels[0]):
            # It begins alike and goes on differently: somebody else's compaction is not for it.
            flown = await self._flown(same(work, levels), pending, levels, room)
        made = flown.made
        if made.compaction.rung == "truncate" and work.is_voluntary:
            # It fits as it came, which says more than a record without a summary.
            guarded = self._measurer.unchanged(work)
            self.reporter.decided(work, "fallback", guarded=guarded, effort=made.effort)
            return guarded
        guarded = await self._applied_surely(work, made.compaction, "compacted")
        if not is_enough(work, levels[0], made.compaction, guarded):
            return None
        # A summary is the last level: it is sent whatever the template says.
        if not isinstance(levels[0], Summarize) and not await self._prober.does_render(work, guarded):
            return None
        await self._builder.keep(work, made)
        if work.case.now:
            work.case.attempts.has_compacted = True
            await self._remember_wanted(work.case.scope)
        is_fallback = made.compaction.rung == "truncate" and not work.case.is_client_summary
        outcome: Outcome = "fallback" if is_fallback else "compacted"
        if flown.work is not work or flown.is_found:
            await self._reuse(work, guarded, made.kept)
            # What was there before, and only came late, is told as what it is.
            return replace(guarded, action="reused") if flown.is_found else guarded
        base = None if isinstance(levels[0], Edit) else levels[0].base
        known = next(iter(usable(work.conversation, pending.stored)), None)
        self.reporter.applied(work, outcome, guarded, made.kept, effort=made.effort, base=base, known=known)
        return guarded

    async def _flown(
        self, key: Hashable, pending: CompactionNeeded, levels: Sequence[Level], room: Reservation | None
    ) -> _Flown:
        """The one compaction that all who need it at this time wait for."""
        if room is not None and self._compactions.is_under_way(key):
            room.rest()
        return await self._compactions.join(key, lambda: self._make(pending, levels, room))

    async def _make(self, pending: CompactionNeeded, levels: Sequence[Level], room: Reservation | None) -> _Flown:
        work, level = pending.work, levels[0]
        if isinstance(level, Edit) or (isinstance(level, Summarize) and level.provisional):
            # No model is asked.
            return _Flown(work, await self._builder.make(work, levels))

        async def made_by_another() -> BuiltCompaction | None:
            if room is not None:
                room.rest()
            return await self._made_meanwhile(pending)

        topic, limit_s = f"compaction {alike(work, levels)!r}", work.case.settings.summary_timeout_s
        alone: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        coordination = self._coordination
        async with (
            coordination.one_of_all(topic, made_by_another, limit_s=limit_s) if coordination is not None else alone
        ) as found:
            if found is None:
                async with room.for_summary(work.window, work.count.tokens) if room is not None else alone:
                    found = await self._made_meanwhile(pending)
                    if found is None:
                        return _Flown(work, await self._builder.make(work, levels))
            return _Flown(work, found, is_found=True)

    async def _made_meanwhile(self, pending: CompactionNeeded) -> BuiltCompaction | None:
        """What somebody else has stored since the request was looked at: it may have waited, or come a moment late."""
        work = pending.work
        stored = await self._builder.find(work)
        if all(each in pending.stored for each in stored):
            return None
        decision = await self._plan(work, stored)
        if not isinstance(decision, Reuse) or decision.compaction in pending.stored:
            return None
        guarded = await self._measurer.applied(work, decision.compaction, "reused")
        if not guarded.budget.fits(guarded.count.tokens):
            return None
        return BuiltCompaction(decision.compaction, decision.compaction, Effort())

    async def _does(self, flown: _Flown, work: MeasuredRequest, level: Level) -> bool:
        compaction = flown.made.compaction
        if not usable(work.conversation, [compaction]):
            return False
        guarded = await self._measurer.applied(work, compaction, "compacted")
        return is_enough(work, level, compaction, guarded)

    async def prepared_for(
        self, request: Request, case: RequestContext, foreseen: Foreseen | None
    ) -> PreparedRequest | CompactionNeeded:
        """As `prepare`, without doing again what was done for the same request when this deployment was foreseen.

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        if foreseen is not None and foreseen.case == case:
            prepared = foreseen.prepared
            if isinstance(prepared, CompactionNeeded):
                # Its calls go the way that is known now.
                prepared = replace(prepared, work=replace(prepared.work, case=case))
            if (await self._measurer.window(case)).is_like(prepared.window):
                return prepared
        return await self.prepare(request, case)

    async def has_shrunk(self, case: RequestContext, guarded: PreparedRequest) -> bool:
        """Returns True if the window is smaller than what is about to be sent was made for: it may have waited.

        Raises:
            WindowUnknown, ModelNotLoaded: as `guard`.
        """
        window = await self._measurer.window(case, prompt_tokens=guarded.count.tokens)
        return window.tokens < guarded.window.tokens

    async def observe(self, request: Request, case: RequestContext) -> None:
        """Reports what `guard` would do; no model call, no warm-up, no error, no change."""
        try:
            work = await self._measurer.weigh(request, replace(case, warm_up=nothing))
        except CompactionError:
            return
        if work.budget.own.triggers(work.count.tokens):
            work = await hashed(work)
            decision = await self._plan(work, ())
            planned = decision.levels[0] if isinstance(decision, Compact) else decision
            after = planned.predicted_tokens if isinstance(planned, Level) else work.count.tokens
            self.reporter.decided(work, "observed", after=after, reason=type(planned).__name__.lower())

    def room(self, case: RequestContext) -> Reservation:
        """A place for one answer beside the others that share its instance's context."""
        return Reservation(self._admission, case)

    def learn_shared(self, case: RequestContext, parallel: int) -> None:
        """Takes note that so many answers fill one context together: an overflow far below the window has shown it."""
        if self.windows.learn_shared(case.target, parallel):
            logger.warning(
                "shared_context model=%s: an overflow far below the window shows that parallel requests fill one "
                "context; from now on they are fitted beside each other",
                case.label,
            )

    @property
    def is_coordinated(self) -> bool:
        """Processes that share the store keep room in shared contexts together."""
        return self._coordination is not None

    async def aclose(self) -> None:
        """Ends what is written ahead, what other processes would wait for, the clients and the store."""
        await self.background.aclose()
        # First: a store that hangs keeps nobody else waiting.
        if self._coordination is not None:
            await self._coordination.aclose()
        await self.replies.aclose()
        await self.sources.aclose()
        await self.windows.aclose()
        await self._feedback.aclose()
        await self.going_on.aclose()
        await self._store.aclose()

    async def _plan(self, work: MeasuredRequest, stored: Sequence[Compaction]) -> Plan:
        budget = replace(work.budget, is_wanted=True) if work.case.is_wanted else work.budget
        return await off_loop_if(work.is_long, lambda: plan(work.conversation, budget, work.depth, stored))

    async def _has_small_ones(self, scope: str) -> bool:
        """Returns True if small conversations of this tenant are looked up, too: one of them has been compacted.

        By another process, or before a restart, as well; asked once a second at most, and of memory if it has.
        """
        until_s = self._wanted_until_s.get(scope, -math.inf)
        if until_s <= self._clock():
            try:
                found = await asyncio.wait_for(self._store.get_fact(scope, _WANTED_FACT), _STORE_TIMEOUT_S)
                until_s = math.inf if found is not None else self._clock() + _UNWANTED_S
            except Exception:  # noqa: BLE001 - the store tells its own troubles; the request is small
                until_s = self._clock() + _STORE_SILENT_S
            # What this process has made meanwhile is known better.
            until_s = max(until_s, self._wanted_until_s.get(scope, until_s))
            self._wanted_until_s[scope] = until_s
        return until_s == math.inf

    async def _remember_wanted(self, scope: str) -> None:
        """Before the answer begins: the next turn may come to another process."""
        self._wanted_until_s[scope] = math.inf
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._store.put_fact(scope, _WANTED_FACT, "1"), _STORE_TIMEOUT_S)

    async def _decide(
        self, work: MeasuredRequest, stored: Sequence[Compaction], *, shorten: bool = True
    ) -> PreparedRequest | CompactionNeeded:
        known = stored
        while True:
            decision = await self._plan(work, known)
            match decision:
                case Keep():
                    again = await self._prober.fitted(work)
                    if again is not None:
                        return await self._decide(again, stored, shorten=shorten)
                    return self._measurer.unchanged(work)
                case Reuse(compaction=compaction):
                    guarded = await self._applied_surely(work, compaction, "reused")
                    if guarded.budget.fits(guarded.count.tokens):
                        await self._reuse(work, guarded, compaction)
                        return guarded
                    # Counted as it is sent it does not do: what is decided without it?
                    known = ()
                case Compact(levels=levels):
                    reused = await self._reused(work, known)
                    return reused or CompactionNeeded(work=work, levels=levels, stored=tuple(stored))
                case Refuse():
                    again = await self._prober.with_floor(work)
                    if again is not None:
                        return await self._decide(again, stored, shorten=shorten)
                    return await self._shortened_or_refused(work, stored, shorten=shorten)
                case _:
                    assert_never(decision)

    async def _applied_surely(
        self, work: MeasuredRequest, compaction: Compaction, action: Literal["reused", "compacted"]
    ) -> PreparedRequest:
        """What a compaction leaves to be sent, counted by the server if our doubt would decide about it."""
        guarded = await self._measurer.applied(work, compaction, action)
        if await self._prober.has_recounted(work, guarded):
            return await self._measurer.applied(work, compaction, action)
        return guarded

    async def _reused(self, work: MeasuredRequest, stored: Sequence[Compaction]) -> PreparedRequest | None:
        """An earlier compaction that still does, counted as it is sent; None if a new one is due.

        What the planner foresees of it is an estimate; the server may have counted all of it but the newest messages.
        """
        found = await off_loop_if(bool(stored) and work.is_long, lambda: usable(work.conversation, stored))
        for compaction in found[:1]:
            if compaction.provisional:
                continue
            guarded = await self._applied_surely(work, compaction, "reused")
            if not guarded.budget.triggers(guarded.count.tokens):
                await self._reuse(work, guarded, compaction)
                return guarded
        return None

    async def _reuse(self, work: MeasuredRequest, guarded: PreparedRequest, compaction: Compaction) -> None:
        """Tells of a reuse; what was written ahead is in effect from now on, also if a later turn is smaller."""
        self.reporter.applied(work, "reused", guarded, compaction)
        if (compaction.ahead or compaction.early) and not work.case.is_supposed:
            await self._builder.put_into_effect(work, compaction)

    async def _shortened_or_refused(
        self, work: MeasuredRequest, stored: Sequence[Compaction], *, shorten: bool
    ) -> PreparedRequest | CompactionNeeded:
        """The request with its largest texts cut to excerpts if the operator allows it, else the error."""
        if not work.is_shortened and (messages := await self._with_less_data(work, work.budget.prompt_limit_tokens)):
            return await self._decide_shortened(work, messages, stored, reason="attached", shorten=shorten)
        messages = await self._shortened(work) if shorten else None
        if not messages:
            raise await self._refusal(work)
        return await self._decide_shortened(work, messages, stored, reason="excerpt", shorten=False)

    async def _decide_shortened(
        self,
        work: MeasuredRequest,
        messages: tuple[Message, ...],
        stored: Sequence[Compaction],
        *,
        reason: str,
        shorten: bool = True,
    ) -> PreparedRequest | CompactionNeeded:
        again = await self._measurer.shortened(work, messages)
        decided = await self._decide(again, stored, shorten=shorten)
        if isinstance(decided, PreparedRequest) and decided.round == 0:
            self.reporter.decided(work, "fallback", guarded=decided, reason=reason)
        return decided

    async def _with_less_data(self, work: MeasuredRequest, limit_tokens: int) -> tuple[Message, ...] | None:
        """The request with less of the data attached to what is not answered yet; None if all may stay."""
        return await off_loop_if(work.is_long, lambda: with_less_data(work.conversation, work.budget, limit_tokens))

    async def _shortened(self, work: MeasuredRequest) -> tuple[Message, ...] | None:
        settings = work.case.settings
        return await off_loop_if(
            work.is_long,
            lambda: shortened(
                work.conversation,
                work.budget,
                tool_results=settings.oversized_tool_result == "excerpt",
                user_message=settings.oversized_user_message == "excerpt",
            ),
        )

    async def _refusal(self, work: MeasuredRequest) -> DoesNotFit:
        if not work.case.goes_on:
            # An answer that cannot be carried over is no refused request: the loop that carries it tells of it.
            self.reporter.decided(work, "refused", after=work.budget.floor_tokens, reason="does_not_fit")
        count, fixed_tokens = work.count, work.conversation.fixed_tokens
        tools_share = count.tools_tokens / max(1, count.tools_tokens + count.overhead_tokens)
        return await off_loop_if(
            work.is_long,
            lambda: refusal(work.case.label, work.conversation, work.budget, round(tools_share * fixed_tokens)),
        )


def _note_length(work: MeasuredRequest) -> None:
    """Notes if the request may not be sent as it came (promise P8)."""
    case, tokens = work.case, work.count.tokens
    if not case.goes_on:
        does_fit = work.budget.own.fits(tokens)
        case.attempts.too_long = None if does_fit else unprepared(case.label, tokens, work.window.tokens)


def _is_small(work: MeasuredRequest) -> bool:
    """Nothing has to be looked up: it is too short ever to have been compacted."""
    outside = work.budget.outside_tokens
    # The rest of an answer may need most of the window.
    if (outside or work.case.goes_on) and not work.budget.own.fits(work.count.tokens):
        return False
    return work.count.tokens - outside < _COMPACTED_BEFORE_RATIO * work.budget.usable_tokens
