"""What happened to a request, as one frozen record, and the observers that are told.

Built by the engine; a log line, a metric and a history are observers. It never holds text of a conversation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["reused", "compacted", "fallback", "kept", "refused", "observed", "failed_open"]
Phase: TypeAlias = Literal["pre_request", "tool_response", "streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionEvent:
    """One decision about a request above the trigger.

    Attributes:
        model: `model_name` or deployment that was asked.
        tokens_before, tokens_after: estimated prompt as it came and as it was sent.
        covered_messages: how many messages the record stands for.
        summary_calls: jobs of the pruning model that this request paid for.
        reason: one word that explains a fallback or a failure, else "".
    """

    outcome: Outcome
    phase: Phase
    model: str
    window_tokens: int
    window_source: str
    tokens_before: int
    tokens_after: int
    covered_messages: int = 0
    round: int = 0
    strategy: str = "summary"
    pruning_model: str = ""
    summary_calls: int = 0
    duration_ms: float = 0.0
    reason: str = ""

    @property
    def filled_percent(self) -> float:
        """How full the window was with the prompt as it came."""
        return 100.0 * self.tokens_before / self.window_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationAlarm:
    """A reply whose usage says that the server did not see the whole prompt."""

    model: str
    window_tokens: int
    expected_tokens: int
    reported_tokens: int
    reason: str


Event: TypeAlias = CompactionEvent | TruncationAlarm
Observer: TypeAlias = Callable[[Event], None]

_LEVELS: dict[str, int] = {
    "compacted": logging.INFO,
    "fallback": logging.WARNING,
    "refused": logging.WARNING,
    "failed_open": logging.ERROR,
    "observed": logging.INFO,
}


def log_observer(logger: logging.Logger) -> Observer:
    """An observer that writes one line an event: INFO for a compaction, WARNING after trouble, else DEBUG."""

    def observe(event: Event) -> None:
        if isinstance(event, TruncationAlarm):
            logger.warning(
                "truncation_alarm model=%s reason=%s reported=%d expected=%d window=%d tokens",
                event.model,
                event.reason,
                event.reported_tokens,
                event.expected_tokens,
                event.window_tokens,
            )
            return
        level = logging.WARNING if event.outcome == "compacted" and event.reason else _LEVELS.get(event.outcome)
        logger.log(
            level or logging.DEBUG,
            "%s model=%s phase=%s %d/%d tokens (%.0f %%) before=%d after=%d covered=%d round=%d calls=%d "
            "window_source=%s pruning_model=%s duration_ms=%.0f%s",
            event.outcome,
            event.model,
            event.phase,
            event.tokens_before,
            event.window_tokens,
            event.filled_percent,
            event.tokens_before,
            event.tokens_after,
            event.covered_messages,
            event.round,
            event.summary_calls,
            event.window_source,
            event.pruning_model or "-",
            event.duration_ms,
            f" reason={event.reason}" if event.reason else "",
        )

    return observe
