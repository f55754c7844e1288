"""Recognizes a conversation of which its client sends other parts, or in another order, than in an earlier request.

Some clear old tool results, some send only their last messages, with or without the first ones; some have system
messages that stand at the same distance from the end in each request. What a client changes behind a record its server
reads again from there on, and of a list that begins otherwise no record is found. So all is put back where it was.

If two conversations of equal words have different data, either may be another person's (promise P9).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from litellm_compaction.core.identity import edits, prints, words_chain
from litellm_compaction.core.messages import Message, user_message
from litellm_compaction.core.stretches import is_text_result

# So many different messages of two lists are equal before anything of the one is put into the other.
_LEAST_EQUAL = 4
# Behind it a system message is none of the leading ones, which no chain holds.
_BEFORE = user_message("")


@dataclass(frozen=True)
class Listed:
    """The messages of a request after the leading system ones, of which its client has sent all but `left_out`."""

    rest: tuple[Message, ...]
    prefix: int  # The number of the leading system ones, with those that have been moved there.
    left_out: frozenset[int] = frozenset()

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """What the words and calls of each message are, wherever it stands."""
        return tuple(words_chain([_BEFORE, each])[-1] for each in self.rest)

    @cached_property
    def spoken(self) -> list[int]:
        """The positions of all but system messages."""
        return [at for at, each in enumerate(self.rest) if not each.is_system]

    def without(self, start: int) -> Listed:
        """The list without those that were left out from a position on."""
        left_out = frozenset(at for at in self.left_out if at < start)
        rest = (each for at, each in enumerate(self.rest) if at in left_out or at not in self.left_out)
        return Listed(tuple(rest), self.prefix, left_out)


class Relisted(NamedTuple):
    """A list with the messages of an earlier one that its client sends no more, or otherwise."""

    rest: tuple[Message, ...]
    left_out: frozenset[int]  # The positions of those that it does not send, or sends at another place.
    moved: tuple[Message, ...]  # System messages that stand elsewhere in each request.
    # So many, of all but system messages, stand before what it has newly left out; None for nothing, and if others
    # stand in the place of each, counted from the end.
    cut: int | None


def relisted(old: Listed, now: Listed, end: int) -> Relisted | None:
    """Returns a list by an earlier one of its conversation; None if that is another's, or was changed otherwise.

    The first messages of `now`, `end` of them without system messages, are those of `old`; behind them all is new.
    """
    were, spoken = old.spoken, now.spoken
    stays, left = dict[int, int](), iter(reversed(were))
    for place in reversed(spoken[:end]):
        at = next((at for at in left if old.marks[at] == now.marks[place]), None)
        if at is None:
            return None
        stays[at] = place
    gone = {at for at in were if at not in stays}
    matched = {old.marks[at] for at in stays}
    # System messages by the message before which they stand.
    places = {place: at for at, place in stays.items()}
    before = {(_next(were, at), old.marks[at]): at for at in _notes(old)}
    own = {(places.get(after := _next(spoken, at), after + len(old.rest)), now.marks[at]): at for at in _notes(now)}
    stays |= {at: own[key] for key, at in before.items() if key in own}
    lost = {at for (after, _), at in before.items() if not (at in stays or after in gone)}
    fresh = sorted(at for key, at in own.items() if key not in before)
    changed = [at for at, place in stays.items() if old.rest[at].raw != now.rest[place].raw]
    edited = edits([now.rest[stays[at]] for at in changed], [prints(old.rest[at]) for at in changed])
    is_another = (gone or lost) and len(matched) < _LEAST_EQUAL
    if is_another or (lost and not fresh and old.prefix == now.prefix) or None in edited:
        return None
    rest = [now.rest[stays[at]] if at in stays else each for at, each in enumerate(old.rest)]
    for at, is_edited in zip(changed, edited, strict=True):
        if is_edited and (rest[at].role == "tool" or is_text_result(rest[at])) and not rest[at].other_parts:
            rest[at] = old.rest[at]
    # One behind the last words is never covered.
    last = spoken[-1] if lost or old.prefix > now.prefix else spoken[end - 1]
    moved = [at for at in fresh if at < last]
    new = {*range(spoken[end - 1] + 1, len(now.rest))}.difference(moved, stays.values())
    news = sorted(gone - old.left_out)
    return Relisted(
        rest=(*rest, *(now.rest[at] for at in sorted(new))),
        left_out=frozenset(gone | lost),
        moved=tuple(now.rest[at] for at in moved),
        cut=None if _are_replaced(news, old, now, new) else sum(at < news[0] for at in were if at not in gone),
    )


def _notes(messages: Listed) -> Iterable[int]:
    return (at for at, each in enumerate(messages.rest) if each.is_system)


def _next(spoken: Sequence[int], at: int) -> int:
    """The position of the message before which a system message stands, or behind which none does."""
    return next(iter(spoken[bisect(spoken, at) :]), spoken[-1] + 1)


def _are_replaced(gone: Sequence[int], old: Listed, now: Listed, new: Iterable[int]) -> bool:
    """Returns True if for each message that is gone a new one stands at the same distance from the end."""
    from_end = {at: n for n, at in enumerate(reversed(old.spoken))}
    there = {n: at for n, at in enumerate(reversed(now.spoken)) if at in new}
    pairs = ((old.rest[at], there.get(from_end[at])) for at in gone)
    return all(place is not None and was.role == now.rest[place].role for was, place in pairs)
