"""`demo`: its picture; tests/processes has a real run."""

from __future__ import annotations

from litellm_compaction.cli.demo import drawn


def test_a_cut_prompt_is_a_bar_with_a_gap() -> None:
    """The gap is as wide as the share that is lost, half of it here, and its tokens stand beside it in capitals."""
    assert drawn(10_000, 8192, 5_000).rstrip() == "██████xxxxxxxxxxxx██████  10,000 CUT -5,000"
    assert drawn(0, 8192, state="FAILED").rstrip() == "░░░░░░░░░░░░░░░░░░░░░░░░       0 FAILED"
