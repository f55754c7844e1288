"""What is told about a decision, and which line it becomes in the log."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from litellm_compaction.events import (
    CompactionEvent,
    ContinuationEvent,
    ContinuationOutcome,
    Event,
    Outcome,
    TruncationAlarm,
    event_from_json,
    event_to_json,
    log_observer,
)

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
        summary_ms=1200.0,
    )
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "reason", "level"),
    [
        ("compacted", "", logging.INFO),
        ("compacted", "timeout", logging.WARNING),
        ("observed", "summarize", logging.INFO),
        ("fallback", "empty", logging.WARNING),
        ("fallback", "small_window", logging.WARNING),
        ("fallback", "no_room", logging.INFO),
        ("fallback", "attached", logging.INFO),
        ("fallback", "excerpt", logging.INFO),
        ("compacted", "client_summary", logging.INFO),
        ("refused", "does_not_fit", logging.WARNING),
        ("reused", "", logging.DEBUG),
        ("kept", "", logging.DEBUG),
        ("kept", "undone", logging.INFO),
    ],
)
def test_the_level_says_how_bad_it_is(
    outcome: Outcome, reason: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One INFO for a compaction, a WARNING where something can be changed, DEBUG for what happens all the time."""
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_observer(LOGGER)(event(outcome, reason=reason))
    (record,) = caplog.records
    assert record.levelno == level


def test_a_line_has_a_name_and_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """The reason only where there is one."""
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_observer(LOGGER)(event())
        log_observer(LOGGER)(event("fallback", reason="timeout", pruning_model=""))
    plain, fallback = (record.getMessage() for record in caplog.records)
    assert plain.startswith("compacted model=qwen phase=pre_request 7000/8192 tokens (85 %) before=7000 after=3000")
    assert "pruning_model=small duration_ms=1234 summary_ms=1200" in plain
    assert ("reason" in plain, fallback.endswith("reason=timeout")) == (False, True)


CUT = ContinuationEvent(
    outcome="attempts",
    model="qwen",
    window_tokens=4096,
    attempt=1,
    attempts=3,
    tokens_before=3700,
    tokens_after=1200,
    lost_tokens=900,
    when_s=4.0,
)


@pytest.mark.parametrize("outcome", ["restarted", "attempts", "aborted", "unanswered"])
def test_a_restart_is_a_warning_and_a_cut_answer_an_error(
    outcome: ContinuationOutcome, caplog: pytest.LogCaptureFixture
) -> None:
    """One line each; what was thrown away is no gain."""
    log_observer(LOGGER)(dataclasses.replace(CUT, outcome=outcome))
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if outcome == "restarted" else logging.ERROR)
    assert "before=3700 after=1200 gained=1600 window=4096" in record.getMessage()


@pytest.mark.parametrize(
    "told",
    [
        event(when_s=1.5, rung="summary", compaction_id="ab", continues_id="cd"),
        TruncationAlarm(
            model="qwen", window_tokens=1, expected_tokens=2, reported_tokens=3, reason="empty", when_s=4.0
        ),
        CUT,
    ],
)
def test_an_event_survives_as_json(told: Event) -> None:
    """Every field; what a newer version adds is passed over, what an older one did not know has its default."""
    text = event_to_json(told)
    assert event_from_json(text) == told
    assert "\n" not in text
    fields = json.loads(text)
    assert event_from_json(json.dumps({**fields, "new": 1})) == told
    del fields["when_s"]
    assert event_from_json(json.dumps(fields)) == dataclasses.replace(told, when_s=0.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"event": "new"}', '{"event": "compaction"}', "3"])
def test_what_is_no_event_is_none(text: str) -> None:
    """Another version's, or damaged: it is not shown, and no error."""
    assert event_from_json(text) is None
