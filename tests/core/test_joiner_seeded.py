"""A thousand restarts with fixed seeds: nothing lost, nothing repeated, no legitimate repetition removed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from litellm_compaction.core.joiner import Joiner
from tests.core.restarts import GENERATORS, STYLES, Restart, draw, is_ambiguous, join


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)])
def test_a_thousand_restarts_lose_and_repeat_nothing(seeds: range) -> None:
    """Every generator in every style that applies to it gives back the original, character by character.

    Left out are only combinations that `is_ambiguous` describes: there another original would produce the same
    partial and the same continuation. The most frequent are restarts that repeat fewer than 12 characters and 3 words,
    and "restarts last line" in a table whose last rows are equal.
    """
    kinds: Counter[str] = Counter()
    failures: list[tuple[int, str, Restart, str]] = []
    for seed in seeds:
        style, restart = _drawn(seed)
        joined = join(restart, random.Random(seed))
        if joined != restart.rest:
            kinds["repeated" if len(joined) > len(restart.rest) else "lost"] += 1
            failures.append((seed, style, restart, joined))
    assert not failures, (kinds, failures[0])


def _drawn(seed: int) -> tuple[str, Restart]:
    rng = random.Random(seed)
    generate = GENERATORS[seed % len(GENERATORS)]
    for attempt in range(400):
        # A style that never applies to a generator (fences in prose) gives way to the next one.
        style = STYLES[(seed // len(GENERATORS) + attempt // 20) % len(STYLES)]
        restart = draw(rng, generate(rng), style)
        if restart is not None and not is_ambiguous(restart.partial, restart.rest, restart.repeated):
            return style, restart
    raise AssertionError(f"no restart for seed {seed}")


def test_long_partials_cost_one_pass() -> None:
    """A partial of 200,000 characters, repeated from its start in 5,000 deltas, is removed as a whole."""
    partial = "".join(f"word{number} " for number in range(21_000))
    joiner = Joiner(partial)
    step = len(partial) // 5_000 + 1
    sent = [joiner.feed(partial[place : place + step]) for place in range(0, len(partial), step)]
    assert "".join((*sent, joiner.feed("the end"), joiner.finish())) == "the end"
