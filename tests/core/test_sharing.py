"""The rules by which several processes fit their requests into one context, without any of them."""

from __future__ import annotations

import pytest

from litellm_compaction.core.sharing import Loan, Part, Wish, settle

WINDOW_TOKENS = 100


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
