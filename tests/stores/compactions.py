"""Compactions for tests: one by name, and any that the types allow."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, PartialCoverage, Segment
from litellm_compaction.core.strategies import STRATEGIES


def compaction(name: str, *, covered: int = 4, text: str = "What happened.", provisional: bool = False) -> Compaction:
    segment = Segment(text=text, round=1, covered_messages=covered, covered_hash=name)
    return Compaction(
        covered_messages=covered,
        covered_hash=name,
        pinned=(1,),
        round=1,
        segments=(segment,),
        ledger="- src/a.py",
        rung="summary",
        provisional=provisional,
    )


def compactions() -> st.SearchStrategy[Any]:
    """All fields of all types, half surrogate pairs and zero characters in texts too."""
    texts = st.text(st.characters())
    return st.builds(
        Compaction,
        ledger=texts,
        rung=st.sampled_from(["edit", "truncate", *STRATEGIES]),
        window_tokens=st.integers(0, 10**9),
        provisional=st.booleans(),
        begun=st.none() | st.builds(PartialCoverage, text_hash=texts),
        segments=st.lists(st.builds(Segment, text=texts), max_size=4).map(tuple),
    )
