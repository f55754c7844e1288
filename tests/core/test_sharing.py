"""The rules by which several processes fit their requests into one context, without any of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.core.sharing import Loan, Part, Wish, settle

WINDOW_TOKENS = 100


def test_alone_it_may_hold_more_than_the_window() -> None:
    """It harms nobody else; the window is its budget's business."""
    assert settle(Part(seats=1, wishes=(Wish(1, 300, 500),)), (), WINDOW_TOKENS).grants == {1: 500}
    beside = settle(Part(seats=1, wishes=(Wish(1, 300),)), (Part(held_tokens=1, seats=1),), WINDOW_TOKENS)
    assert (beside.grants, beside.is_waited_for) == ({}, True)


@pytest.mark.parametrize(("others_tokens", "granted"), [(70, True), (71, False)])
def test_what_others_hold_counts(others_tokens: int, granted: bool) -> None:
    """Up to the last token of the window."""
    verdict = settle(Part(seats=1, wishes=(Wish(1, 30),)), (Part(held_tokens=others_tokens, seats=1),), WINDOW_TOKENS)
    assert (verdict.grants == {1: 30}) is granted
    assert (verdict.is_waited_for, verdict.others_tokens) == (not granted, others_tokens)


def test_another_process_that_came_first_is_let_in_first() -> None:
    """A small request does not overtake a large one that waits, and room that is the other's is not given away."""
    first = Part(seats=1, wishes=(Wish(1, 60, ticket=1),))
    running = Part(held_tokens=50, seats=1)
    late = Part(seats=1, wishes=(Wish(1, 10, 100),))
    verdict = settle(late, (first, running), WINDOW_TOKENS)
    assert (verdict.grants, verdict.is_waited_for) == ({}, True)
    assert [wish.ticket for wish in verdict.part.wishes] == [2]
    verdict = settle(verdict.part, (first, replace(running, held_tokens=30)), WINDOW_TOKENS)
    assert verdict.grants == {1: 10}
    verdict = settle(late, (first, replace(running, held_tokens=31)), WINDOW_TOKENS)
    assert verdict.grants == {}


@pytest.mark.parametrize(
    ("asked", "leaving", "called_back"),
    [
        (20, 0, ()),
        (21, 0, (7,)),
        (45, 0, (7,)),
        (46, 0, (7, 8)),
        (60, 0, (7, 8)),
        (61, 0, ()),
        (60, 15, (7,)),
        (35, 15, ()),
    ],
)
def test_what_was_lent_is_called_back_as_far_as_it_is_missed(
    asked: int, leaving: int, called_back: tuple[int, ...]
) -> None:
    """The first loans that are enough, and none where all of them are not; what is on its way back counts."""
    mine = Part(held_tokens=80, seats=1, spare_tokens=40, leaving_tokens=leaving)
    other = Part(seats=1, wishes=(Wish(1, asked, ticket=1),))
    verdict = settle(mine, (other,), WINDOW_TOKENS, loans=(Loan(7, 25), Loan(8, 15)))
    back_tokens = sum({7: 25, 8: 15}[number] for number in called_back)
    assert verdict.called_back == called_back
    assert (verdict.part.spare_tokens, verdict.part.leaving_tokens) == (40 - back_tokens, leaving + back_tokens)
    assert verdict.part.held_tokens == 80


@pytest.mark.parametrize(("others_tokens", "lent"), [(20, 50), (70, 30), (89, 11), (90, 10)])
def test_beside_others_a_loan_is_an_even_part_of_what_is_free(others_tokens: int, lent: int) -> None:
    """And a restart comes before those that have not begun."""
    mine = Part(seats=1, wishes=(Wish(1, 10, 100),))
    assert settle(mine, (Part(held_tokens=others_tokens, seats=1),), WINDOW_TOKENS).grants == {1: lent}
    waiting = Part(seats=1, wishes=(Wish(1, 95, ticket=1),))
    again = Part(seats=1, wishes=(Wish(1, 10, is_restart=True, ticket=2),))
    assert settle(again, (waiting,), WINDOW_TOKENS).grants == {1: 10}
