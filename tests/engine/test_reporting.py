"""What the engine says about a compaction: which record, after which, how made, when and how long."""

from __future__ import annotations

from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.engine import Attempts
from litellm_compaction.events import CompactionEvent
from tests.builders import assistant, chat, user
from tests.engine.bench import NOW_S, Bench

RAW = chat(16, words=300)


def told(bench: Bench) -> list[CompactionEvent]:
    return [event for event in bench.events if isinstance(event, CompactionEvent)]


async def test_events_of_a_conversation_form_a_chain() -> None:
    """Each new record names the one that it goes on from, a reuse names the record that was made; others have none."""
    bench = Bench()
    raw = RAW
    for turn in range(12):
        await bench.guard(raw, scope="team")
        raw = [*raw, assistant(f"answer {turn} " + "word " * 400), user(f"question {turn}")]
    made = [event for event in told(bench) if event.outcome == "compacted"]
    assert len(made) >= 2
    assert [event.round for event in made] == list(range(1, len(made) + 1))
    assert [event.continues_id for event in made] == ["", *(event.compaction_id for event in made[:-1])]
    assert [event.compaction_id for event in made] == [
        compaction_id(scope, kept.covered_hash) for scope, kept in bench.store.kept
    ]
    latest = ""
    for event in told(bench):
        if event.outcome == "reused":
            assert (event.compaction_id, event.continues_id, event.rung) == (latest, "", "summary")
        latest = event.compaction_id


async def test_an_event_says_how_and_when() -> None:
    """The rung and the wall clock; the summary's time is part of the whole."""
    bench = Bench()
    await bench.guard(RAW)
    assert (bench.last.rung, bench.last.when_s) == ("summary", NOW_S)
    assert 0 < bench.last.summary_ms <= bench.last.duration_ms


async def test_a_request_that_several_hooks_look_at_is_told_once() -> None:
    """What the second hook reuses is what the first one has made or found; the next request is told again."""
    bench = Bench()
    for _ in range(2):
        request = Attempts(summary_calls_left=4)
        for _ in range(3):
            await bench.guard(RAW, attempts=request)
    assert bench.outcomes == ["compacted", "reused"]
