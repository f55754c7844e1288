"""What is told about a decision, and which line it becomes in the log."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from litellm_compaction.events import CompactionEvent, Outcome, TruncationAlarm, log_observer

LOGGER = logging.getLogger("litellm_compaction.test_events")


def event(outcome: Outcome = "compacted", **changes: object) -> CompactionEvent:
    known = CompactionEvent(
        outcome=outcome,
        phase="pre_request",
        model="qwen",
        window_tokens=8192,
        window_source="api/v1",
        tokens_before=7000,
        tokens_after=3000,
        covered_messages=12,
        round=2,
        pruning_model="small",
        summary_calls=1,
        duration_ms=1234.5,
    )
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "reason", "level"),
    [
        ("compacted", "", logging.INFO),
        ("compacted", "timeout", logging.WARNING),
        ("observed", "summarize", logging.INFO),
        ("fallback", "empty", logging.WARNING),
        ("refused", "does_not_fit", logging.WARNING),
        ("failed_open", "error", logging.ERROR),
        ("reused", "", logging.DEBUG),
        ("kept", "", logging.DEBUG),
    ],
)
def test_the_level_says_how_bad_it_is(
    outcome: Outcome, reason: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One INFO for a compaction, a WARNING where something went wrong, DEBUG for what happens all the time."""
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_observer(LOGGER)(event(outcome, reason=reason))
    (record,) = caplog.records
    assert record.levelno == level


def test_a_line_has_a_name_and_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """The event's name first, then fields with their units; the reason only where there is one."""
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_observer(LOGGER)(event())
        log_observer(LOGGER)(event("fallback", reason="timeout", pruning_model=""))
    plain, fallback = (record.getMessage() for record in caplog.records)
    assert plain.startswith("compacted model=qwen phase=pre_request 7000/8192 tokens (85 %) before=7000 after=3000")
    assert "covered=12 round=2 calls=1" in plain
    assert "pruning_model=small duration_ms=1234" in plain
    assert "reason" not in plain
    assert fallback.endswith("reason=timeout")
    assert "pruning_model=- " in fallback


def test_an_alarm_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """With what was expected, what was reported, and of which window."""
    alarm = TruncationAlarm(
        model="qwen", window_tokens=4096, expected_tokens=9000, reported_tokens=4096, reason="prompt_far_below_count"
    )
    log_observer(LOGGER)(alarm)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "truncation_alarm model=qwen reason=prompt_far_below_count reported=4096 expected=9000 window=4096 tokens"
    )


def test_an_event_is_a_frozen_record_without_text() -> None:
    """Numbers, names and one word: nothing of a conversation fits into it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        event().tokens_after = 0  # type: ignore[misc]
    assert {field.name for field in dataclasses.fields(CompactionEvent)} == {
        "outcome",
        "phase",
        "model",
        "window_tokens",
        "window_source",
        "tokens_before",
        "tokens_after",
        "covered_messages",
        "round",
        "strategy",
        "pruning_model",
        "summary_calls",
        "duration_ms",
        "reason",
    }
    assert event(tokens_before=4096).filled_percent == 50.0
