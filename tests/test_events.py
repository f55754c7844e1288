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


LEVELS = {
    logging.INFO: "compacted: observed:summarize fallback:no_room fallback:attached fallback:excerpt kept:undone "
    "compacted:client_summary prepared:",
    logging.WARNING: "compacted:timeout fallback:empty fallback:small_window refused:does_not_fit",
    logging.DEBUG: "reused: kept: given_up:",
}


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_says_how_bad_it_is(level: int, caplog: pytest.LogCaptureFixture) -> None:
    """One INFO for a compaction, a WARNING where something can be changed, DEBUG for what happens all the time."""
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        for each in LEVELS[level].split():
            outcome, _, reason = each.partition(":")
            log_observer(LOGGER)(event(outcome, reason=reason))  # type: ignore[arg-type]
    assert [record.levelno for record in caplog.records] == [level] * len(LEVELS[level].split())


def test_a_line_has_a_name_and_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Reason, excerpts and refusal only where there are any."""
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_observer(LOGGER)(event())
        log_observer(LOGGER)(event("fallback", reason="timeout", pruning_model=""))
        log_observer(LOGGER)(event(refusal="crash", excerpts=2, excerpt_tokens=40))
    plain, fallback, refused = (record.getMessage() for record in caplog.records)
    assert plain.startswith("compacted model=qwen phase=pre_request 7000/8192 tokens (85 %) before=7000 after=3000")
    assert plain.endswith("window_source=api/v1 pruning_model=small duration_ms=1234 summary_ms=1200")
    assert fallback.endswith("pruning_model=- duration_ms=1234 summary_ms=1200 reason=timeout")
    assert "(server overflow)" in refused
    assert refused.endswith("summary_ms=1200 excerpts=2 excerpt_tokens=40 refusal=crash")


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


@pytest.mark.parametrize(
    ("outcome", "after", "gained"),
    [("restarted", 1200, 1600), ("attempts", 2800, 0), ("aborted", 3700, 0), ("unanswered", 1200, 1600)],
)
def test_a_restart_is_a_warning_and_a_cut_answer_an_error(
    outcome: ContinuationOutcome, after: int, gained: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One line each; what was thrown away is no gain."""
    log_observer(LOGGER)(dataclasses.replace(CUT, outcome=outcome, tokens_after=after))
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if outcome == "restarted" else logging.ERROR)
    assert f"before=3700 after={after} gained={gained} window=4096" in record.getMessage()


ALARM = TruncationAlarm(model="qwen", window_tokens=1, expected_tokens=2, reported_tokens=3, reason="x", when_s=2e12)


@pytest.mark.parametrize("told", [event(when_s=1.5, rung="summary", compaction_id="ab"), ALARM, CUT])
def test_an_event_survives_as_json(told: Event) -> None:
    """Every field; what a newer version adds is passed over, and what an older one did not write is nothing."""
    text = event_to_json(told)
    assert event_from_json(text) == told
    assert "\n" not in text
    fields = json.loads(text)
    assert event_from_json(json.dumps({**fields, "new": 1})) == told
    needed = {"event", *(field.name for field in dataclasses.fields(told) if field.default is dataclasses.MISSING)}
    early = event_from_json(json.dumps({name: fields[name] for name in needed}))
    assert early is not None
    assert {name for name, value in dataclasses.asdict(early).items() if value} - needed <= {"strategy"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"event": "new"}', '{"event": "compaction"}', "3"])
def test_what_is_no_event_is_none(text: str) -> None:
    """Another version's, or damaged: it is not shown, and no error."""
    assert event_from_json(text) is None
