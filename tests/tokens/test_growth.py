"""What new messages take at an unknown model is learned from few of its numbers, and its doubt is honest."""

from __future__ import annotations

import json
import random

import pytest

from litellm_compaction.tokens.growth import Growths, Profile


def message(tokens: float, **more: float) -> Profile:
    return Profile(tokens=tokens, messages=1.0, **more)


def test_a_session_of_its_own_decides() -> None:
    """After some turns a ratio and a cost per message that are far from usual are followed."""
    growths = Growths()
    source = random.Random(1)
    for _ in range(8):
        tokens = source.uniform(50, 900)
        growths.note(message(tokens), 1.3 * tokens + 11)
    made = growths.predict(message(500))
    assert made.tokens == pytest.approx(661, rel=0.02)
    assert made.doubt_tokens < 0.06 * made.tokens


def test_text_beside_calls_is_learned_apart() -> None:
    """A template that leaves it out says nothing of other text."""
    growths = Growths()
    for tokens in (80, 300, 120, 500):
        growths.note(message(tokens + 100, said_tokens=100, calls=1), tokens + 20)
        growths.note(message(tokens), tokens + 6)
    assert growths.predict(message(400)).tokens == pytest.approx(406, rel=0.05)
    assert growths.predict(message(500, said_tokens=100, calls=1)).tokens == pytest.approx(420, rel=0.07)


def test_what_it_has_not_seen_is_doubted() -> None:
    """A conversation in English says little of the next text in another script."""
    growths = Growths()
    for _ in range(20):
        growths.note(message(400), 420)
    english, other = growths.predict(message(400)), growths.predict(message(400, other_chars=400))
    assert other.doubt_tokens > 5 * english.doubt_tokens


def test_one_odd_number_changes_little() -> None:
    """A template that drops what it rendered before is no reason to count all text low."""
    growths = Growths()
    for _ in range(6):
        growths.note(message(400), 420)
    before = growths.predict(message(400)).tokens
    growths.note(message(400), -2000)
    assert growths.predict(message(400)).tokens == pytest.approx(before, rel=0.05)
    growths.note(message(400), -2000, like_ends=False)
    assert growths.predict(message(400)).tokens == pytest.approx(before, rel=0.05)


def test_a_whole_prompt_says_something_too() -> None:
    """The first number of a conversation tells a costly vocabulary before there is any growth."""
    growths = Growths()
    growths.note_whole(message(5000), 0.0, 7000)
    assert growths.predict(message(1000)).tokens > 1200


def test_it_survives_a_restart_and_is_bounded() -> None:
    """What it writes is JSON, and what it reads back predicts the same; nonsense is ignored."""
    growths = Growths()
    for number in range(200):
        growths.note(message(100 + number), 1.2 * (100 + number) + 5)
    rows = json.loads(json.dumps(growths.samples.as_json()))
    assert 0 < len(rows) <= 48
    again = Growths()
    again.samples.merge([*rows, "x", [1.0], [None] * 11, [1e300] * 11, [0.0] * 11])
    assert again.predict(message(300)).tokens == pytest.approx(growths.predict(message(300)).tokens, rel=0.01)
    assert len(again.samples.values) == len(rows)
