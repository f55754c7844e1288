"""What a worker remembers from request to request takes a known amount of memory when it is full, and holds no text."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from litellm_compaction.core import ledger
from litellm_compaction.tokens import formula, prefix
from litellm_compaction.tokens.calibration import Mix
from litellm_compaction.tokens.count import Anchor
from litellm_compaction.tokens.growth import Profile

# `docs/scale.md` says so.
WORKER_MB = 50
VOCABULARY = "o200k_base"
FEW = 2000


def fill_texts(count: int) -> object:
    texts = formula.TextCounts()
    texts.get_now(VOCABULARY, [[formula.Written(f"message {number} of a conversation")] for number in range(count)])
    return texts


def fill_anchors(count: int) -> object:
    known = prefix.Anchors()
    for number in range(count):
        profile = Profile(*(number + part + 0.5 for part in range(8)))
        anchor = Anchor(5000 + number, 4000.5 + number, Mix(1 / (1 + number), 0.5 / (1 + number)), profile, role="user")
        known.note("a deployment's key", "stand_in", hash(f"prompt {number}"), anchor)
    return known


def fill_words(count: int) -> object:
    return [ledger._atom.__wrapped__(f"src/part_{number}.py") for number in range(count)]


# The most of each that a worker keeps.
MEMORIES: dict[str, tuple[Callable[[int], object], int]] = {
    "texts": (fill_texts, formula._MAX_ENTRIES),
    "anchors": (fill_anchors, prefix._MAX_ANCHORS),
    "words": (fill_words, ledger._atom.cache_parameters()["maxsize"] or 0),
}


@pytest.mark.slow
def test_what_a_worker_remembers_is_bounded() -> None:
    """By number and, as one entry takes so many bytes, in megabytes; full after some twenty thousand requests."""
    full_mb = {}
    for name, (fill, most) in MEMORIES.items():
        fill(1)
        gc.collect()
        tracemalloc.start()
        try:
            kept = fill(FEW)
            gc.collect()
            full_mb[name] = tracemalloc.get_traced_memory()[0] / FEW * most / 2**20
        finally:
            tracemalloc.stop()
        del kept
    assert 16 < sum(full_mb.values()) < WORKER_MB, full_mb
