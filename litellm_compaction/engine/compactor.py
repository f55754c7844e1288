"""The engine's front door: weigh a request, decide, carry the decision out, report; learn from replies.

`proxy/` calls `guard` for every request to a guarded deployment. Nothing here knows LiteLLM or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.carry_over import Partial, carried_over
from litellm_compaction.core.compaction import Compaction, apply, compaction_id
from litellm_compaction.core.messages import Request, chain
from litellm_compaction.core.oversize import refusal, shortened
from litellm_compaction.core.plan import Conversation, Keep, Plan, Reuse, Summarize, plan
from litellm_compaction.engine.admission import Admission
from litellm_compaction.engine.case import Case, Guarded, Pending, Work
from litellm_compaction.engine.making import Made, Maker, off_loop
from litellm_compaction.engine.room import Room
from litellm_compaction.errors import CompactionError, DoesNotFit, ModelNotLoaded, Overflow
from litellm_compaction.events import CompactionEvent, Event, Observer, Outcome, TruncationAlarm
from litellm_compaction.flight import Flights
from litellm_compaction.models.counter import Count, TokenCounter
from litellm_compaction.models.families import Family, family_of
from litellm_compaction.models.window import Window, Windows
from litellm_compaction.stores import Store

_FULL_WINDOW_RATIO = 0.98
# Below this share of what it may fill no conversation has ever been compacted, however wrong the count was then.
_COMPACTED_BEFORE_RATIO = 0.25
# Of what a compaction leaves, this much may be the verbatim end of the answer that is being carried over.
_PARTIAL_TAIL_RATIO = 0.35


class Compactor:
    """Keeps requests inside their windows.

    Args:
        windows: which context length a target has.
        counter: tokens of a request.
        store: where compactions are kept.
        observers: are told every event.
        clock: seconds, monotonic, for durations.
        wall_clock: seconds since 1970, for the history.
    """

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        store: Store,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.windows = windows
        self._counter = counter
        self._store = store
        self._observers = tuple(observers)
        self._clock = clock
        self._wall_clock = wall_clock
        self._maker = Maker(windows=windows, counter=counter, store=store, clock=clock)
        self._compactions: Flights[Made] = Flights()
        self._warm_ups: Flights[None] = Flights()
        self._admission = Admission()

    async def guard(self, request: Request, case: Case) -> Guarded:
        """What to send instead of `request`, so that the server never has to cut it.

        Raises:
            WindowUnknown: nobody says how large the window is.
            ModelNotLoaded: `when_not_loaded` is `error`, or the warm-up did not load the model.
            DoesNotFit: the sacred messages alone are too large.
        """
        prepared = await self.prepare(request, case)
        return prepared if isinstance(prepared, Guarded) else await self.finish(prepared)

    async def prepare(self, request: Request, case: Case) -> Guarded | Pending:
        """As far as it goes without a summary: what to send, or what has to be made first.

        Everything that can be refused is refused here, before the first slow step (promise P8).

        Raises:
            WindowUnknown, ModelNotLoaded, DoesNotFit: as `guard`.
        """
        work = await self._weigh(request, case)
        if _is_small(work):
            return _unchanged(work)
        hashes = await off_loop(request.messages, lambda: chain(request.messages))
        work = replace(work, conversation=replace(work.conversation, hashes=hashes))
        return await self._decide(work, await self._find(case.scope, hashes))

    async def finish(self, pending: Pending) -> Guarded:
        """Makes the compaction that `prepare` found necessary.

        Raises:
            DoesNotFit: it came out larger than it could have been foreseen.
        """
        work, decision = pending.work, pending.decision
        made = await self._compactions.join(
            (work.case.scope, work.case.target.key, work.conversation.hashes[-1], decision),
            lambda: self._maker.make(work, decision),
        )
        guarded = await self._applied(work, made.compaction, "compacted")
        if guarded.budget.fits(guarded.count.tokens) and guarded.count.tokens < work.count.tokens:
            outcome: Outcome = "compacted" if made.compaction.rung == "summary" else "fallback"
            self._tell_applied(work, outcome, guarded, made.compaction, made=made, base=decision.base)
            return guarded
        if work.budget.fits(work.count.tokens):
            return _unchanged(work)
        bare = self._maker.bare(work)
        if bare is not None:
            guarded = await self._applied(work, bare, "compacted")
            if guarded.budget.fits(guarded.count.tokens):
                self._tell_applied(work, "fallback", guarded, bare, reason="bare")
                return guarded
        raise self._refusal(work)

    async def carry_over(self, request: Request, partial: Partial, case: Case) -> Guarded:
        """What to send so that the model goes on with an answer that was stopped at the limit (phase 3).

        Args:
            request: the conversation that was being answered, as the client sent it.
            partial: the answer so far.
            case: of the request.

        Raises:
            DoesNotFit, WindowUnknown, ModelNotLoaded: as `guard`.
        """
        window = await self._window(case)
        count_text = self._counter.text_counter(case.target.key, family_of(window.architecture, case.target.model))
        tail_tokens = int(_PARTIAL_TAIL_RATIO * case.settings.target_ratio * window.tokens)
        messages = carried_over(request.messages, partial, tail_tokens=tail_tokens, count=count_text)
        guarded = await self.guard(replace(request, messages=messages), case)
        return guarded if guarded.messages is not None else replace(guarded, messages=messages)

    async def observe(self, request: Request, case: Case) -> None:
        """Reports what `guard` would do; no model call, no warm-up, no error, no change."""
        try:
            work = await self._weigh(request, replace(case, warm_up=_no_warm_up))
        except CompactionError:
            return
        if work.budget.triggers(work.count.tokens):
            decision = self._plan(work, ())
            after = decision.predicted_tokens if isinstance(decision, Summarize) else work.count.tokens
            self._tell(self._event(work, "observed", after=after, reason=type(decision).__name__.lower()))

    def room(self, case: Case) -> Room:
        """A place for one answer beside the others that share its instance's context."""
        return Room(self._admission, case)

    def learn(self, case: Case, guarded: Guarded, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Compares a reply's usage with our count: trains the counter, or raises the truncation alarm.

        Args:
            case: of the request.
            guarded: what was sent.
            prompt_tokens: as the server reported them for exactly that.
            completion_tokens: likewise; 0 for an empty answer.
        """
        reason = ""
        if prompt_tokens > guarded.window.tokens:
            reason = "prompt_above_window"
        elif completion_tokens == 0 and prompt_tokens >= _FULL_WINDOW_RATIO * guarded.window.tokens:
            reason = "empty_at_full_window"
        elif self._counter.is_suspicious(guarded.count, prompt_tokens):
            reason = "prompt_far_below_count"
        if not reason:
            # A reply that was itself truncated never gets here: it would teach the counter a wrong ratio.
            self._counter.learn(case.target.key, guarded.count, prompt_tokens)
            return
        self.windows.invalidate(case.target)
        self._tell(
            TruncationAlarm(
                model=case.label,
                window_tokens=guarded.window.tokens,
                expected_tokens=guarded.count.tokens,
                reported_tokens=prompt_tokens,
                reason=reason,
                when_s=self._wall_clock(),
                tenant=case.tenant,
            )
        )

    def learn_overflow(self, case: Case, guarded: Guarded | None, overflow: Overflow) -> None:
        """Takes note of an overflow error: what we knew of the window is out of date, and what the error names is true.

        Args:
            case: of the request.
            guarded: what was sent; None when that is not certain.
            overflow: what the error says.
        """
        self.windows.invalidate(case.target)
        if overflow.window_tokens is not None:
            self.windows.learn(case.target, overflow.window_tokens)
        if overflow.prompt_tokens is not None and guarded is not None:
            self._counter.learn(case.target.key, guarded.count, overflow.prompt_tokens)

    async def aclose(self) -> None:
        """Ends the clients and the store."""
        await self.windows.aclose()
        await self._store.aclose()

    async def _weigh(self, request: Request, case: Case) -> Work:
        started_s = self._clock()
        window = await self._window(case)
        family = family_of(window.architecture, case.target.model)
        count = await self._counter.count(case.target.key, family, request)
        return self._work(request, case, window, family, count, (), started_s)

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
            sizes=count.sizes,
            fixed_tokens=count.tools_tokens + count.overhead_tokens,
            hashes=hashes,
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
                error_ratio=count.error_ratio,
                fixed_tokens=conversation.lead_tokens,
            ),
            window=window,
            family=family,
            started_s=started_s,
        )

    async def _window(self, case: Case) -> Window:
        try:
            return await self.windows.resolve(case.target)
        except ModelNotLoaded:
            if case.settings.when_not_loaded == "error":
                raise
        await self._warm_ups.join(case.target.key, lambda: _run(case.warm_up))
        return await self.windows.resolve(case.target, fresh=True)

    def _plan(self, work: Work, stored: Sequence[Compaction]) -> Plan:
        return plan(work.conversation, work.budget, work.case.depth, stored, work.count_text)

    async def _decide(self, work: Work, stored: Sequence[Compaction], *, shorten: bool = True) -> Guarded | Pending:
        decision = self._plan(work, stored)
        if isinstance(decision, Keep):
            return _unchanged(work)
        if isinstance(decision, Reuse):
            guarded = await self._applied(work, decision.compaction, "reused")
            if guarded.budget.fits(guarded.count.tokens):
                self._tell_applied(work, "reused", guarded, decision.compaction)
                return guarded
            decision = self._plan(work, ())
        if isinstance(decision, Summarize):
            return Pending(work=work, decision=decision, stored=tuple(stored))
        if work.budget.fits(work.count.tokens):
            return _unchanged(work)
        return await self._shortened_or_refused(work, stored, shorten=shorten)

    async def _shortened_or_refused(
        self, work: Work, stored: Sequence[Compaction], *, shorten: bool
    ) -> Guarded | Pending:
        """The request with its largest texts cut to excerpts where the operator allows it, else the error."""
        settings = work.case.settings
        messages = shorten and shortened(
            work.conversation,
            work.budget,
            tool_results=settings.oversized_tool_result == "excerpt",
            user_message=settings.oversized_user_message == "excerpt",
            count=work.count_text,
        )
        if not messages:
            raise self._refusal(work)
        request = Request(messages=messages, tools=work.request.tools)
        count = await self._counter.count(work.case.target.key, work.family, request)
        # Keyed by the original hashes: the client will send the whole text again.
        again = self._work(
            request, work.case, work.window, work.family, count, work.conversation.hashes, work.started_s
        )
        again = replace(again, is_shortened=True, tokens_before=work.tokens_before)
        decided = await self._decide(again, stored, shorten=False)
        if isinstance(decided, Guarded) and decided.round == 0:
            self._tell(self._event(work, "fallback", guarded=decided, reason="excerpt"))
        return decided

    def _refusal(self, work: Work) -> DoesNotFit:
        self._tell(self._event(work, "refused", after=work.budget.floor_tokens, reason="does_not_fit"))
        return refusal(work.case.label, work.conversation, work.budget, work.count.tools_tokens)

    async def _applied(self, work: Work, compaction: Compaction, action: Literal["reused", "compacted"]) -> Guarded:
        messages = apply(work.conversation.messages, compaction)
        request = Request(messages=messages, tools=work.request.tools)
        return Guarded(
            action=action,
            messages=messages,
            tokens_before=work.tokens_before,
            count=await self._counter.count(work.case.target.key, work.family, request),
            count_text=work.count_text,
            budget=work.budget,
            window=work.window,
            round=compaction.round,
        )

    async def _find(self, scope: str, hashes: Sequence[str]) -> list[Compaction]:
        try:
            return await self._store.find(scope, hashes[1:])
        except CompactionError:
            return []

    def _tell_applied(
        self,
        work: Work,
        outcome: Outcome,
        guarded: Guarded,
        compaction: Compaction,
        *,
        made: Made | None = None,
        base: Compaction | None = None,
        reason: str = "",
    ) -> None:
        """Tells of a record that is sent; a reuse only once, though several hooks look at one client request."""
        attempts = work.case.attempts
        if outcome == "reused" and attempts.told_hash == compaction.covered_hash:
            return
        attempts.told_hash = compaction.covered_hash
        self._tell(
            self._event(work, outcome, guarded=guarded, compaction=compaction, made=made, base=base, reason=reason)
        )

    def _event(
        self,
        work: Work,
        outcome: Outcome,
        *,
        guarded: Guarded | None = None,
        compaction: Compaction | None = None,
        made: Made | None = None,
        base: Compaction | None = None,
        after: int = 0,
        reason: str = "",
    ) -> CompactionEvent:
        scope = work.case.scope
        return CompactionEvent(
            outcome=outcome,
            phase=work.phase,
            model=work.case.label,
            window_tokens=work.window.tokens,
            window_source=work.window.source,
            tokens_before=work.tokens_before,
            tokens_after=guarded.count.tokens if guarded else after,
            covered_messages=compaction.covered_messages if compaction else 0,
            round=compaction.round if compaction else 0,
            pruning_model=made.pruning_model if made else "",
            summary_calls=made.calls if made else 0,
            duration_ms=1000 * (self._clock() - work.started_s),
            reason=made.reason if made else reason,
            when_s=self._wall_clock(),
            rung=compaction.rung if compaction else "",
            summary_ms=made.summary_ms if made else 0.0,
            compaction_id=compaction_id(scope, compaction.covered_hash) if compaction else "",
            continues_id=compaction_id(scope, base.covered_hash) if base else "",
            tenant=work.case.tenant,
        )

    def _tell(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)


def _is_small(work: Work) -> bool:
    """Whether nothing has to be looked up: too short ever to have been compacted."""
    outside = work.budget.outside_tokens
    if outside and not work.budget.fits(work.count.tokens):
        return False
    return work.count.tokens - outside < _COMPACTED_BEFORE_RATIO * work.budget.usable_tokens


def _unchanged(work: Work) -> Guarded:
    return Guarded(
        action="compacted" if work.is_shortened else "none",
        messages=work.request.messages if work.is_shortened else None,
        tokens_before=work.tokens_before,
        count=work.count,
        count_text=work.count_text,
        budget=work.budget,
        window=work.window,
    )


async def _no_warm_up() -> None:
    """Observing loads nothing."""


async def _run(action: Callable[[], Awaitable[None]]) -> None:
    await action()
