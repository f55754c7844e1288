"""The requests that may run at the same time in one loaded context, of one process or of several that send to it.

The only rules there are: what runs never outgrows the window, first come, first served, restarts before new entries,
loans are called back. `engine/sharing/pool.py` asks for a process alone; of several each tells its part to the
others first, and all apply the same rules, one after the other, to the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Wish(NamedTuple):
    """One request that waits for room.

    Attributes:
        number: by which its own process knows it.
        tokens: what it needs to begin, ≥ 1.
        most_tokens: up to so much it is lent if no other request waits.
        is_restart: stands before all that have not begun.
        ticket: its place in the queue of all processes; 0 until it has one.
    """

    number: int
    tokens: int
    most_tokens: int = 0
    is_restart: bool = False
    ticket: int = 0


class Loan(NamedTuple):
    """The tokens that a running request was lent and could do without; never 0."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one process in a context.

    Attributes:
        held_tokens: by its running requests.
        seats: requests that run or wait.
        spare_tokens: of what is held, lent to those that could give it back and were not told to.
        leaving_tokens: of what is held, about to be given back.
    """

    held_tokens: int = 0
    seats: int = 0
    spare_tokens: int = 0
    leaving_tokens: int = 0
    wishes: tuple[Wish, ...] = ()


class Verdict(NamedTuple):
    """The moves of a process.

    Attributes:
        part: its own from now on, which the others have to see before it moves.
        grants: the tokens that requests hold from now on, by their numbers: of those that waited and may begin, and of
            all that wanted more, also if they get none.
        called_back: the loans that have to be given back, by their requests' numbers.
        is_waited_for: True if a request waits that does not fit.
        others_tokens: held by the other processes.
        others_seats: their requests that run or wait.
    """

    part: Part
    grants: Mapping[int, int]
    called_back: tuple[int, ...]
    is_waited_for: bool
    others_tokens: int
    others_seats: int


def settle(
    mine: Part, others: Sequence[Part], window_tokens: int, *, loans: Sequence[Loan] = (), more: Sequence[Wish] = ()
) -> Verdict:
    """Decides for the process of `mine`, besides `others` that are alive.

    Args:
        mine: as it is now; a wish without a ticket gets one.
        others: as they are now.
        window_tokens: the context length.
        loans: the parts of `mine.spare_tokens`.
        more: requests that hold `tokens` already, counted in `mine.held_tokens`, and would like more.
    """
    mine = _with_tickets(mine, others)
    used_tokens = sum(part.held_tokens for part in (mine, *others))
    # A request that wants more is answered by every verdict that knew of it, and by no other.
    grants = {wish.number: wish.tokens for wish in more}
    granted: list[Wish] = []
    head: Wish | None = None
    for part, wish in _queue(mine, others):
        if used_tokens and used_tokens + wish.tokens > window_tokens:
            head = wish
            break
        # Room for others' wishes is theirs before they have heard of it.
        used_tokens += wish.tokens
        if part is mine:
            grants[wish.number] = wish.tokens
            granted.append(wish)
    seats = sum(part.seats for part in (mine, *others))
    if head is None:
        for wish in (*more, *granted):
            tokens = _lent(wish, window_tokens - used_tokens, window_tokens, seats)
            used_tokens += tokens - wish.tokens
            grants[wish.number] = tokens
    held_before = {wish.number: wish.tokens for wish in more}
    taken_tokens = sum(tokens - held_before.get(number, 0) for number, tokens in grants.items())
    called_back: tuple[Loan, ...] = ()
    if head is not None:
        missing_tokens = head.tokens - (window_tokens - used_tokens)
        missing_tokens -= sum(part.leaving_tokens for part in (mine, *others))
        if 0 < missing_tokens <= sum(part.spare_tokens for part in (mine, *others)):
            called_back = tuple(_enough(loans, missing_tokens))
    back_tokens = sum(loan.tokens for loan in called_back)
    part = replace(
        mine,
        held_tokens=mine.held_tokens + taken_tokens,
        spare_tokens=mine.spare_tokens - back_tokens,
        leaving_tokens=mine.leaving_tokens + back_tokens,
        wishes=tuple(wish for wish in mine.wishes if wish.number not in grants),
    )
    return Verdict(
        part=part,
        grants=grants,
        called_back=tuple(loan.number for loan in called_back),
        is_waited_for=head is not None,
        others_tokens=sum(each.held_tokens for each in others),
        others_seats=sum(each.seats for each in others),
    )


def _with_tickets(mine: Part, others: Sequence[Part]) -> Part:
    last = max((wish.ticket for part in (mine, *others) for wish in part.wishes), default=0)
    wishes: list[Wish] = []
    for wish in mine.wishes:
        last += not wish.ticket
        wishes.append(wish if wish.ticket else wish._replace(ticket=last))
    return replace(mine, wishes=tuple(wishes))


def _queue(mine: Part, others: Sequence[Part]) -> list[tuple[Part, Wish]]:
    waiting = [(part, wish) for part in (mine, *others) for wish in part.wishes]
    return sorted(waiting, key=lambda each: (not each[1].is_restart, each[1].ticket))


def _lent(wish: Wish, free_tokens: int, window_tokens: int, seats: int) -> int:
    """The loan of one that is let in: alone all that it would like, beside others an even part of the free room."""
    if seats <= 1:
        return max(wish.tokens, wish.most_tokens)
    even_tokens = min(wish.most_tokens, window_tokens // seats)
    return max(wish.tokens, min(even_tokens, wish.tokens + max(free_tokens, 0)))


def _enough(loans: Sequence[Loan], missing_tokens: int) -> Iterator[Loan]:
    for loan in loans:
        if missing_tokens <= 0:
            return
        missing_tokens -= loan.tokens
        yield loan
