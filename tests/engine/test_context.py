"""What one client request may spend, over all its phases."""

from __future__ import annotations

import copy

from litellm_compaction.engine import Attempts
from litellm_compaction.errors import SummaryFailed
from tests.engine.bench import Bench, FakeAsk, sent
from tests.engine.test_compactor import LONG


async def test_a_client_request_has_one_budget_of_summaries() -> None:
    """P5: over pruning models, phases, retries and fallbacks; with none left, the verbatim record has to do."""
    bench = Bench(ask=FakeAsk(SummaryFailed("error")))
    attempts = Attempts(summary_calls_left=3)
    models = [bench.pruning_model(bench.ask, label=f"m{n}") for n in range(2)]
    for turn in range(4):
        raw = copy.deepcopy(LONG)
        raw[1]["content"] += f" variant {turn}"
        sent(raw, await bench.guard(raw, pruning_models=models, attempts=attempts))
    assert len(bench.ask.prompts) == 3
    assert attempts.summary_calls_left == 0
    assert [event.reason for event in bench.events] == ["error", "error", "attempts", "attempts"]  # type: ignore[union-attr]


async def test_zero_summary_calls_compact_without_a_model() -> None:
    """`max_summary_calls: 0` is a way to run."""
    bench = Bench()
    sent(LONG, await bench.guard(LONG, max_summary_calls=0))
    assert (bench.ask.prompts, bench.outcomes) == ([], ["fallback"])
