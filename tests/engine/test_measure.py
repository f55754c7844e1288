"""What is measured decides: whether a new compaction does, and whether a request is known to be too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import Request
from litellm_compaction.core.plan import Step
from litellm_compaction.engine.deciding import is_enough
from tests.builders import chat, parsed
from tests.engine.bench import Bench

# With the default settings, 9552 tokens fit this window and more than 7000 have to be compacted.
WINDOW_TOKENS = 10_000


@pytest.mark.parametrize(
    ("level", "predicted_tokens", "before_tokens", "after_tokens", "enough"),
    [
        ("summary", None, 9000, 7001, True),
        ("summary", None, 20_000, 9552, True),
        ("summary", None, 20_000, 9553, False),
        ("summary", None, 6000, 5999, True),
        ("summary", None, 6000, 6000, False),
        ("edit", 7001, 9000, 7001, True),
        ("edit", 7000, 9000, 7001, False),
        ("edit", 6000, 9000, 7000, True),
        ("prune", None, 9000, 7000, True),
        ("prune", None, 9000, 7001, False),
    ],
)
async def test_a_compaction_does_if_it_fits_shrinks_and_its_level_reaches_what_it_was_made_for(
    level: str, predicted_tokens: int | None, before_tokens: int, after_tokens: int, enough: bool
) -> None:
    """A summary only has to fit and shrink; an edit or a pruning that would be compacted again at once does not do."""
    bench = Bench()
    measurer = bench.compactor.measurer
    measured = await measurer.measure(Request(messages=parsed(chat(4))), bench.context(WINDOW_TOKENS))
    prepared = measurer.unchanged(measured)
    compaction = Compaction(covered_messages=2, covered_hash="h", start=2, level=level)
    draft = replace(compaction, start=2 if predicted_tokens is None else 0)
    step = Step(draft=draft, question="summary", ledger_tokens=100, predicted_tokens=predicted_tokens or 1000)
    step = step if predicted_tokens is None else replace(step, question="none")
    measured = replace(measured, count=replace(measured.count, tokens=before_tokens))
    assert measurer.by(measured, replace(measured.count)).request is measured.request, "a walk that was made"
    prepared = replace(prepared, count=replace(prepared.count, tokens=after_tokens))
    assert is_enough(measured, step, compaction, prepared) is enough
