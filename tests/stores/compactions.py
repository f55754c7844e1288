"""Compactions for tests: one by name, and any that the types allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from litellm_compaction.core.clearing import StubSize
from litellm_compaction.core.compaction import Compaction, PartialCoverage, Segment, Shown
from litellm_compaction.core.strategies import STRATEGIES


def compaction(name: str, *, covered: int = 4, text: str = "What happened.", provisional: bool = False) -> Compaction:
    segment = Segment(text=text, round=1, covered_messages=covered)
    return Compaction(
        covered_messages=covered,
        covered_hash=name,
        pinned=(1,) if covered > 1 else (),
        round=1,
        segments=(segment,),
        ledger="- src/a.py",
        level="summary",
        provisional=provisional,
    )


@st.composite
def compactions(draw: st.DrawFn) -> Any:
    """All fields of all types, half surrogate pairs and zero characters in texts too; positions as those made here."""
    texts = st.text(st.characters())
    covered = draw(st.integers(1, 50))
    start = draw(st.integers(0, covered - 1))
    positions = st.lists(st.integers(0, covered - 1), max_size=4).map(tuple)
    forms = st.sampled_from(["stub", "gone"]) | st.integers(0, 10**6)
    known = st.builds(
        Compaction,
        covered_messages=st.just(covered),
        edited_from=st.none() | st.just(start),
        pinned=positions,
        shown=st.lists(st.builds(Shown, st.integers(start, covered - 1), forms), max_size=4).map(tuple),
        images=st.lists(st.tuples(st.integers(0, covered - 1), st.integers(0, 3)), max_size=2).map(tuple),
        stub_sizes=st.lists(st.builds(StubSize, st.integers(0, covered - 1), texts), max_size=4).map(tuple),
        ledger=texts,
        level=st.sampled_from(["edit", "truncate", *STRATEGIES]),
        window_tokens=st.integers(0, 10**9),
        provisional=st.booleans(),
        covered_part=st.none() | st.builds(PartialCoverage, chars=st.integers(0, 10**6), text_hash=texts),
        segments=st.lists(st.builds(Segment, text=texts, covered_messages=st.integers(0, covered)), max_size=4).map(
            tuple
        ),
    )
    compaction = draw(known)
    # Without edits the record stands for all that it covers.
    return compaction if compaction.edited_from is not None else replace(compaction, shown=())
