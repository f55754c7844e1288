"""What the engine says about a compaction: which record, after which, how made, when and how long."""

from __future__ import annotations

from litellm_compaction.engine import Attempts
from litellm_compaction.events import CompactionEvent
from tests.builders import chat
from tests.engine.bench import Bench

RAW = chat(16, words=300)


def told(bench: Bench) -> list[CompactionEvent]:
    return [event for event in bench.events if isinstance(event, CompactionEvent)]


async def test_a_request_that_several_hooks_look_at_is_told_once() -> None:
    """What the second hook reuses is what the first one has made or found; the next request is told again."""
    bench = Bench()
    for _ in range(2):
        request = Attempts(summary_calls_left=4)
        for _ in range(3):
            await bench.guard(RAW, attempts=request)
    assert bench.outcomes == ["compacted", "reused"]
