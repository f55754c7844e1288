"""Compactions for tests: one by name, and any that the types allow."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from litellm_compaction.core.compaction import Compaction, PartialCoverage, State
from litellm_compaction.core.forms import Form, How
from litellm_compaction.core.prompts import STRATEGIES

states = st.sampled_from(get_args(State))


def compaction(name: str, *, covered: int = 4, text: str = "What happened.", state: State = "applied") -> Compaction:
    return Compaction(
        covered_messages=covered,
        covered_hash=name,
        start=covered,
        forms=(Form(1, "whole"),) if covered > 1 else (),
        round=1,
        summary=text,
        summarized_messages=covered,
        ledger="- src/a.py",
        level="summary",
        state=state,
    )


@st.composite
def compactions(draw: st.DrawFn) -> Any:
    """All fields of all types, half surrogate pairs and zero characters in texts too; positions as those made here."""
    texts = st.text(st.characters())
    covered = draw(st.integers(1, 50))
    start = draw(st.just(covered) | st.integers(0, covered))
    staying = st.builds(Form, st.integers(0, covered - 1), st.sampled_from(["whole", "words"]))
    hows = st.sampled_from(get_args(How))
    forms = st.builds(Form, st.integers(min(start, covered - 1), covered - 1), hows)
    known = st.builds(
        Compaction,
        covered_messages=st.just(covered),
        start=st.just(start),
        forms=st.lists(staying if start == covered else staying | forms, max_size=4).map(tuple),
        images=st.lists(st.tuples(st.integers(0, covered - 1), st.integers(0, 3)), max_size=2).map(tuple),
        ledger=texts,
        level=st.sampled_from(["edit", "truncate", *STRATEGIES]),
        window_tokens=st.integers(0, 10**9),
        state=states,
        covered_part=st.none() | st.builds(PartialCoverage, chars=st.integers(0, 10**6), text_hash=texts),
        summary=texts,
        summarized_messages=st.integers(0, covered),
    )
    return draw(known)
