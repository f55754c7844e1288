"""What a count says of the most that a server may count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.tokens.count import holding, least_tokens, most_tokens
from litellm_compaction.tokens.counter import TokenCounter
from tests.tokens.test_counter import PROSE, STAND_IN, request, user
from tests.tokens.test_counter_left_out_text import LEAVING_OUT, THOUGHT, session, shown_tokens, upper


async def test_a_question_is_never_longer_than_a_window_for_text_left_out() -> None:
    """What a prompt takes at most has such text in it, by any vocabulary."""
    counter, family = TokenCounter(), LEAVING_OUT[0]
    made = await counter.count("t", family, session(20))
    assert most_tokens(made) >= 1.94 * await shown_tokens(family, session(20))


async def test_a_part_that_the_server_has_counted_says_nothing_of_text_left_out_of_the_rest() -> None:
    """Only what the part left out is settled by its number; the rest may be rendered whole, by the same vocabulary."""
    counter, family = TokenCounter(), LEAVING_OUT[0]
    part, whole = session(0), session(12, text=THOUGHT * 40)
    counter.take_over_exact("t", await counter.count("t", family, part), 200)
    told = await counter.count("t", family, part)
    made = holding(await counter.count("t", family, whole), [told])
    assert upper(made) >= await shown_tokens(family, whole)


async def test_the_rest_of_a_prompt_is_as_doubtful_as_text_nobody_has_counted() -> None:
    """A count by its prefix is sure of that alone: what is behind it is what other known texts leave in doubt."""
    made = await TokenCounter().count("t", STAND_IN, request(user(PROSE * 100)))
    known = replace(made, tokens=1000, raw_tokens=1000.0, overhead_tokens=0, error_ratio=0.02)
    whole = replace(made, tokens=2000, raw_tokens=2000.0, error_ratio=0.02, text_error_ratio=0.35)
    assert holding(replace(whole, error_ratio=0.5, text_error_ratio=0.5), [known]).error_ratio == pytest.approx(0.26)
    assert holding(replace(whole, error_ratio=0.3), [known]).error_ratio == pytest.approx(0.185)
    # What a template may leave out of the rest is in doubt by its own size.
    whole = replace(whole, error_ratio=0.5, text_error_ratio=0.5, left_out_tokens=100.0)
    assert holding(whole, [known]).error_ratio == pytest.approx(0.26 + 100 / 2000)


async def test_a_prompt_that_the_server_has_counted_takes_hardly_less_again() -> None:
    """Half a percent, for what a template leaves out of turns that have become old."""
    counter, asked = TokenCounter(), request(user(PROSE * 100))
    made = await counter.count("t", STAND_IN, asked)
    counter.learn("t", made, made.tokens)
    known = await counter.count("t", STAND_IN, asked)
    assert known.anchor is not None
    assert least_tokens(known) == pytest.approx(0.995 * made.tokens, abs=1)
