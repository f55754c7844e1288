"""A thousand restarts with fixed seeds: nothing lost, nothing repeated, no legitimate repetition removed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from litellm_compaction.core.continuation.joiner import Joiner
from tests.core.continuation.restarts import (
    GENERATORS,
    STYLES,
    Restart,
    dense,
    draw,
    is_ambiguous,
    is_distinctive,
    join,
)

_RESTARTS = 1000


def test_a_thousand_restarts_lose_and_repeat_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Every generator in every style that applies to it gives back the original, character by character.

    Left out are only combinations that `is_ambiguous` describes: there another original would produce the same
    partial and the same continuation. The most frequent are restarts that repeat fewer than 12 characters and 3 words,
    and "restarts last line" in a table whose last rows are equal.
    """
    counts: Counter[str] = Counter()
    failures: list[tuple[int, str, Restart, str]] = []
    for seed in range(_RESTARTS):
        style, restart = _drawn(seed, counts)
        joined = join(restart, random.Random(seed))
        legitimate = _continues_with_a_repeat(restart)
        counts["legitimate repetitions"] += legitimate
        if joined == restart.rest:
            continue
        kind = "repeated" if len(joined) > len(restart.rest) else "removed" if legitimate else "lost"
        counts[kind] += 1
        failures.append((seed, style, restart, joined))
    with capsys.disabled():
        print(
            f"\n{_RESTARTS} restarts: {counts['lost']} lost, {counts['repeated']} repeated,"
            f" {counts['removed']} of {counts['legitimate repetitions']} legitimate repetitions removed"
            f" ({counts['ambiguous']} ambiguous and {counts['inapplicable']} inapplicable draws replaced)"
        )
    assert not failures, failures[0]


def _drawn(seed: int, counts: Counter[str]) -> tuple[str, Restart]:
    rng = random.Random(seed)
    generate = GENERATORS[seed % len(GENERATORS)]
    for attempt in range(400):
        # A style that never applies to a generator (fences in prose) gives way to the next one.
        style = STYLES[(seed // len(GENERATORS) + attempt // 20) % len(STYLES)]
        restart = draw(rng, generate(rng), style)
        if restart is None:
            counts["inapplicable"] += 1
        elif is_ambiguous(restart.partial, restart.rest, restart.repeated):
            counts["ambiguous"] += 1
        else:
            return style, restart
    raise AssertionError(f"no restart for seed {seed}")


def _continues_with_a_repeat(restart: Restart) -> bool:
    """Whether the original itself goes on with a distinctive block that the partial ends with."""
    rest, partial = dense(restart.rest), dense(restart.partial)
    return any(
        is_distinctive(rest[:length]) and partial.endswith(rest[:length])
        for length in range(6, min(len(rest), 400) + 1)
    )


def test_long_partials_cost_one_pass() -> None:
    """A partial of 200,000 characters, repeated from its start in 5,000 deltas, is removed as a whole."""
    partial = "".join(f"word{number} " for number in range(21_000))
    joiner = Joiner(partial)
    step = len(partial) // 5_000 + 1
    sent = [joiner.feed(partial[place : place + step]) for place in range(0, len(partial), step)]
    assert "".join((*sent, joiner.feed("the end"), joiner.finish())) == "the end"
