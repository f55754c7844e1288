"""A window as a budget: what fits, when to compact, how deep, and how long an answer may be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from litellm_compaction.core.budget import Budget, Rules, margin_tokens
from tests.builders import RULES

RATIOS = st.floats(0.01, 0.99)


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    window_tokens = draw(st.integers(512, 1_000_000))
    floor_tokens = draw(st.integers(0, window_tokens))
    return Budget(
        rules=Rules(
            pre_request_ratio=draw(RATIOS),
            streaming_ratio=draw(RATIOS),
            target_ratio=draw(RATIOS),
            output_buffer_ratio=draw(st.floats(0.0, 0.99)),
            output_buffer_min_tokens=draw(st.integers(0, 5000)),
            answer_min_tokens=draw(st.integers(16, 2048)),
            threshold_tokens=draw(st.sampled_from([0, 0, 256, 4000, 200_000])),
            reserve_tokens=draw(st.sampled_from([0, 0, 500, 20_000])),
        ),
        window_tokens=window_tokens,
        floor=lambda: floor_tokens,
        fixed_tokens=draw(st.integers(0, floor_tokens)),
        likely_ratio=draw(st.one_of(st.sampled_from([1.0, 1.02, 1.03, 1.05, 1.1, 1.25, 1.35]), st.floats(1.0, 5.0))),
    )


def _budget(window_tokens: int, *, floor_tokens: int = 0, **rules: int) -> Budget:
    own = replace(RULES, **rules)  # type: ignore[arg-type]
    return Budget(rules=own, window_tokens=window_tokens, floor=lambda: floor_tokens, likely_ratio=1.0)


@settings(max_examples=settings().max_examples * 4)
@given(budgets(), st.data())
def test_what_fits_leaves_margin_and_answer(budget: Budget, data: st.DataObject) -> None:
    """P1: prompt + margin + least answer stay inside the window, at the limit itself too; two tokens more do not."""
    limit = budget.prompt_limit_tokens
    assume(limit > 0)
    for prompt in (limit, data.draw(st.integers(1, limit))):
        assert budget.fits(prompt)
        margin = margin_tokens(prompt, budget.likely_ratio)
        assert prompt + margin + budget.rules.answer_min_tokens <= budget.window_tokens
        # The true prompt may be larger by the error, and still there is room for an answer.
        assert prompt * budget.likely_ratio + budget.rules.answer_min_tokens <= budget.window_tokens + 1e-6
    assert not budget.fits(limit + 1)
    margin = margin_tokens(limit + 2, budget.likely_ratio)
    assert limit + 2 + margin + budget.rules.answer_min_tokens > budget.window_tokens


@settings(max_examples=settings().max_examples * 4)
@given(budgets(), st.integers(1, 1_000_000), st.none() | st.integers(-1, 2_000_000))
def test_an_answer_never_gets_more_than_is_left_or_asked(budget: Budget, prompt: int, asked: int | None) -> None:
    """Upstream `max_tokens` stays inside the window where the prompt fits, and is never raised."""
    allowed = budget.max_output_tokens(prompt, asked)
    if asked is not None and asked >= 0:
        assert allowed <= asked
    if budget.fits(prompt):
        margin = margin_tokens(prompt, budget.likely_ratio)
        assert prompt + margin + allowed <= budget.window_tokens
        if asked is None or asked < 0:
            assert allowed >= budget.rules.answer_min_tokens


@settings(max_examples=settings().max_examples * 4)
@given(budgets(), st.integers(1, 1_100_000), st.integers(0, 1000))
def test_a_compaction_is_due_in_time_and_aims_at_what_may_be_sent(budget: Budget, prompt: int, more: int) -> None:
    """A longer prompt triggers, too, and what does not fit always does; the target fits, and its floor does in it.

    Loaded with the window that an error names, a multiple of 256, the same prompt fits.
    """
    assert budget.triggers(prompt + more) or not budget.triggers(prompt)
    assert budget.triggers(prompt) or budget.fits(prompt)
    assert min(budget.floor_tokens, budget.prompt_limit_tokens) <= budget.target_tokens(prompt)
    assert budget.target_tokens(prompt) <= budget.prompt_limit_tokens
    assert budget.trigger_tokens <= budget.prompt_limit_tokens
    needed = budget.needed_window_tokens(prompt)
    assert needed % 256 == 0
    assert replace(budget, window_tokens=needed).fits(prompt)


def test_the_target_of_a_threshold_is_half_of_it() -> None:
    """And a reserve counts for no more than three quarters of a window."""
    assert _budget(32_768, threshold_tokens=10_000).target_tokens(10_001) < 5100
    assert _budget(8192, reserve_tokens=20_000).usable_tokens == 2048


def test_only_a_high_floor_waits_beyond_the_trigger() -> None:
    """Up to where a running answer is stopped; never where everything triggers because the count was no guide."""
    low, high = _budget(16_384, floor_tokens=3000), _budget(16_384, floor_tokens=9000)
    above = high.trigger_tokens + 500
    assert (low.triggers(above), high.triggers(above)) == (True, True)
    assert low.waiting_tokens < low.trigger_tokens
    assert not high.triggers(high.trigger_tokens)
    assert above <= high.waiting_tokens < int(0.9 * 16_384)
    pressed = replace(high, rules=replace(high.rules, pre_request_ratio=1e-6))
    assert pressed.waiting_tokens < 0


def test_the_ratio_decides_with_room_for_the_answer() -> None:
    """Of 8,192 tokens 80 % are 6,553, and 819 of these are the least room for an answer."""
    budget = _budget(8192)
    assert (budget.triggers(5734), budget.triggers(5735), budget.trigger_tokens) == (False, True, 5734)
