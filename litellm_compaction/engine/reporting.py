"""What the observers are told about a decision, in numbers.

Called by the compactor; holds no text of a conversation.
"""

from __future__ import annotations

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.engine.case import Case, Guarded, Work
from litellm_compaction.engine.making import Made
from litellm_compaction.events import CompactionEvent, Outcome, TruncationAlarm
from litellm_compaction.models.counter import TokenCounter

_FULL_WINDOW_RATIO = 0.98


def decision_event(
    work: Work,
    outcome: Outcome,
    *,
    now_s: float,
    guarded: Guarded | None = None,
    compaction: Compaction | None = None,
    made: Made | None = None,
    after: int = 0,
    reason: str = "",
) -> CompactionEvent:
    """One decision about a request as an event.

    Args:
        work: the request.
        outcome: what was done.
        now_s: of the compactor's monotonic clock.
        guarded: what is sent, if anything.
        compaction: what was applied, if anything.
        made: what making it cost, if it is new.
        after: tokens of the prompt, where nothing is sent.
        reason: one word, where nothing was made.
    """
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
        duration_ms=1000 * (now_s - work.started_s),
        reason=made.reason if made else reason,
    )


def alarm(
    case: Case, guarded: Guarded, prompt_tokens: int, completion_tokens: int, counter: TokenCounter
) -> TruncationAlarm | None:
    """What a reply's usage says about a prompt that the server did not see whole; None where it says nothing.

    Args:
        case: of the request.
        guarded: what was sent.
        prompt_tokens: as the server reported them for exactly that.
        completion_tokens: likewise; 0 for an empty answer.
        counter: knows which deviation a tokenizer cannot explain.
    """
    if prompt_tokens > guarded.window.tokens:
        reason = "prompt_above_window"
    elif completion_tokens == 0 and prompt_tokens >= _FULL_WINDOW_RATIO * guarded.window.tokens:
        reason = "empty_at_full_window"
    elif counter.is_suspicious(guarded.count, prompt_tokens):
        reason = "prompt_far_below_count"
    else:
        return None
    return TruncationAlarm(
        model=case.label,
        window_tokens=guarded.window.tokens,
        expected_tokens=guarded.count.tokens,
        reported_tokens=prompt_tokens,
        reason=reason,
    )
