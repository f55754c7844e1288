"""Tells the observers of decisions, in numbers: no text of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from litellm_compaction.core.compaction import Compaction, applied_tokens, compaction_id
from litellm_compaction.core.rounds import open_round_start
from litellm_compaction.engine.context import Effort, MeasuredRequest, PreparedRequest, RequestContext
from litellm_compaction.events import (
    USED_AHEAD,
    USED_EARLY,
    CompactionEvent,
    ContinuationEvent,
    ContinuationOutcome,
    Event,
    Observer,
    Outcome,
    TruncationAlarm,
)


class Reporter:
    """Tells observers of decisions, never of mere plans. The wall clock is for the history."""

    def __init__(
        self, observers: Sequence[Observer], *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._observers = tuple(observers)
        self._clock = clock
        self._wall_clock = wall_clock

    def decided(
        self,
        measured: MeasuredRequest,
        outcome: Outcome,
        *,
        prepared: PreparedRequest | None = None,
        compaction: Compaction | None = None,
        effort: Effort | None = None,
        base: Compaction | None = None,
        known: Compaction | None = None,
        after: int = 0,
        reason: str = "",
    ) -> None:
        """Tells of a decision: of a reuse only once, though several hooks look at one client request.

        Args:
            prepared: what is sent; without it `after` is the prompt's tokens.
            compaction: what was made, and applied if something is sent.
            effort: what making it took, if it is new.
            base: what it continues.
            known: the compaction with which the conversation was sent until now.
            reason: one word, if nothing was made.
        """
        context, effort = measured.context, effort or Effort(reason=reason)
        reason = effort.reason
        if prepared is not None and compaction is not None:
            if outcome == "reused" and context.attempts.told_hash == compaction.covered_hash:
                return
            context.attempts.told_hash = compaction.covered_hash
            if compaction.is_waiting:
                reason = USED_AHEAD if measured.budget.own.triggers(measured.count.tokens) else USED_EARLY
        result_tokens, projected_tokens, limit_tokens = _results(measured, known)
        self._tell(
            replace(
                _decision(measured, outcome, compaction, effort),
                reason=reason or ("overflow" if context.refusal else ""),
                tokens_after=prepared.count.tokens if prepared else after,
                duration_ms=1000 * (self._clock() - measured.started_s),
                continues_id=compaction_id(context.scope, base.covered_hash) if base else "",
                result_tokens=result_tokens,
                projected_tokens=projected_tokens,
                limit_tokens=limit_tokens,
                excerpts=prepared.excerpts if prepared else 0,
                excerpt_tokens=prepared.excerpt_tokens if prepared else 0,
            )
        )

    def continued(
        self,
        context: RequestContext,
        prepared: PreparedRequest,
        *,
        outcome: ContinuationOutcome,
        attempt: int,
        used_tokens: int,
        lost_tokens: int,
    ) -> None:
        """Tells how an answer at the limit went on, or ended.

        Args:
            prepared: what is sent now; what was sent last if the answer has ended.
            attempt: which of the restarts this is; how many there were if the answer has ended.
            used_tokens: of the window, when the answer stopped.
            lost_tokens: of these, those that were generated and never reach the client.
        """
        self._tell(
            ContinuationEvent(
                outcome=outcome,
                model=context.label,
                window_tokens=prepared.window.tokens,
                attempt=attempt,
                attempts=context.settings.max_restarts,
                tokens_before=used_tokens,
                tokens_after=prepared.count.tokens if outcome == "restarted" else used_tokens,
                lost_tokens=lost_tokens,
                tenant=context.tenant,
            )
        )

    def alarmed(self, context: RequestContext, prepared: PreparedRequest, prompt_tokens: int, reason: str) -> None:
        """Tells that the server did not see a whole prompt, by the usage that it reported."""
        self._tell(
            TruncationAlarm(
                model=context.label,
                window_tokens=prepared.window.tokens,
                expected_tokens=prepared.count.tokens,
                reported_tokens=prompt_tokens,
                reason=reason,
                tenant=context.tenant,
            )
        )

    def _tell(self, event: Event) -> None:
        event = replace(event, when_s=self._wall_clock())
        for observer in self._observers:
            observer(event)


def _decision(
    measured: MeasuredRequest, outcome: Outcome, compaction: Compaction | None, effort: Effort
) -> CompactionEvent:
    """A decision as far as its request, its record and what that has cost tell of it."""
    context = measured.context
    return CompactionEvent(
        outcome=outcome,
        phase=measured.phase,
        model=context.label,
        window_tokens=measured.window.tokens,
        window_source=measured.window.source,
        tokens_before=measured.tokens_before,
        tokens_after=0,
        covered_messages=compaction.covered_messages if compaction else 0,
        round=compaction.round if compaction else 0,
        strategy=context.settings.strategy,
        pruning_model=effort.pruning_model,
        summary_calls=effort.calls,
        rung=compaction.level if compaction else "",
        summary_ms=1000 * effort.seconds,
        compaction_id=compaction_id(context.scope, compaction.covered_hash) if compaction else "",
        tenant=context.tenant,
        refusal=context.refusal,
        messages=_clients_messages(measured),
    )


def _clients_messages(measured: MeasuredRequest) -> int:
    """The number of messages after the leading system ones, without an answer that goes on."""
    rest = measured.conversation.rest
    if not measured.context.goes_on:
        return len(rest)
    ours = next((at for at, message in enumerate(rest) if message.is_synthetic), len(rest))
    # The answer's first part stands before our first request to go on.
    return ours - 1 if ours < len(rest) and rest[ours].asks_to_go_on else ours


def _results(measured: MeasuredRequest, known: Compaction | None) -> tuple[int, int, int]:
    """Tokens of the newest tool results, of the prompt that they make, and its limit.

    0 but in the phase in which no assistant message follows them; `known` is as in `Reporter.decided`.
    """
    messages, sizes = measured.conversation.messages, measured.conversation.sizes
    start = open_round_start(messages) if measured.phase == "tool_response" else None
    newest = range(len(messages) if start is None else start, len(messages))
    result_tokens = sum(sizes[index] for index in newest if messages[index].role == "tool")
    if not result_tokens:
        return 0, 0, 0
    projected_tokens = measured.tokens_before if known is None else applied_tokens(measured.conversation, known)
    return result_tokens, projected_tokens, measured.budget.own.prompt_limit_tokens
