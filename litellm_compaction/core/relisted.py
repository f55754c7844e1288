"""Recognizes a conversation of which its client sends fewer messages, shorter or rewritten ones, than before.

Some clear old tool results, some send only their last messages, some write one anew in each request. What a client
changes behind a record its server reads again from there on, and of a list that begins otherwise no record is found. So
all is put back where it was, and what is written anew counts as its first version. Of two lists with equal words and
different data either may be another person's (P9).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from operator import eq
from typing import NamedTuple

from litellm_compaction.core.identity import edits, prints, words_chain
from litellm_compaction.core.messages import Message, user_message
from litellm_compaction.core.stretches import is_text_result

# Changes of a conversation that count: a turn of an agent has several requests.
_MOST_CHANGES = 8
# So many different messages are equal behind what is put back: many conversations begin alike, and end in "go on".
_LEAST_EQUAL = 4
# A message that is written anew has another version each time; the lists of two persons have two.
_MOST_RENEWED, _VERSIONS = 3, 3
# Behind it a system message is none of the leading ones, which no chain holds.
_BEFORE = user_message("")


@dataclass(frozen=True)
class Listed:
    """The messages of a request after the leading system ones, of which its client has sent all but `left_out`."""

    rest: tuple[Message, ...]
    left_out: frozenset[int] = frozenset()

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """What the words and calls of each message are, wherever it stands."""
        now = (replace(each, received=None, is_renewed=False) if each.is_renewed else each for each in self.rest)
        return tuple(words_chain([_BEFORE, each])[-1] + each.call_id for each in now)

    @cached_property
    def spoken(self) -> list[int]:
        """The positions of all but system messages."""
        return [at for at, each in enumerate(self.rest) if not each.is_system]

    @property
    def is_other(self) -> bool:
        """More stands in it, or in another's place, than its client has sent."""
        return bool(self.left_out) or any(each.is_renewed for each in self.rest)

    def without(self, start: int) -> Listed:
        """The list without those that were left out from a position on."""
        left_out = frozenset(at for at in self.left_out if at < start)
        rest = (each for at, each in enumerate(self.rest) if at in left_out or at not in self.left_out)
        return Listed(tuple(rest), left_out)


class Course(NamedTuple):
    """The chain of a conversation's newest list, and how many of its last messages changed from each to the next."""

    entries: Sequence[int] = ()
    changed: Sequence[int] = ()

    def then(self, entries: Sequence[int]) -> Course:
        """The course with another list; a new one if less than half of the last comes again."""
        if entries == self.entries:
            return self
        same = sum(takewhile(bool, map(eq, self.entries, entries)))
        changed = (*self.changed, len(self.entries) - same)[-_MOST_CHANGES:]
        return Course(entries, changed if 2 * same > len(self.entries) else ())


class Relisted(NamedTuple):
    """A list by an earlier one of its conversation."""

    listed: Listed
    cut: int | None = None  # So many of all but system messages stand before what was newly left out.
    renewed: Mapping[int, Sequence[str]] = {}  # The first versions of what is written anew, by position.
    notes: Collection[str] = ()  # What its client has left in the place of results so far.

    def is_as(self, before: Relisted) -> bool:
        """Returns True if it was changed as the other was, for a person may have done so once."""
        renewed = [each for at, each in self.renewed.items() if not self.listed.rest[at].is_system]
        return self.cut in (None, before.cut) and all(len(each) >= _VERSIONS for each in renewed)


def relisted(before: Relisted, now: Listed, end: int) -> Relisted | None:
    """Returns a list by an earlier one of its conversation; None if that is another's, or was changed otherwise.

    The first messages of `now`, `end` of them without system messages, are those of the other; behind them all is new.
    """
    old, notes = before.listed, before.notes
    same = _same(old, now, end)
    changed = [place for place, at in same.items() if old.rest[at].raw != now.rest[place].raw]
    edited = edits([now.rest[each] for each in changed], [prints(old.rest[same[each]]) for each in changed], notes)
    spoken = _with_renewed(old, now, end, same)
    stays = {**spoken, **_systems(old, now, spoken)}
    was_anew = {place for place, at in stays.items() if old.rest[at].is_renewed}
    versions = _versions(before, now, {each: stays[each] for each in was_anew.union(stays.keys() - same.keys())})
    # What comes again so soon is another person's; a system message may have come to stand where another one stood.
    again = {place for place, each in versions.items() if len({*each}) < len(each)}
    anew = {at for at, each in versions.items() if at in now.spoken or (len(each) >= _VERSIONS and at not in again)}
    gone = sorted({*old.spoken}.difference(spoken.values()))
    news = [at for at in gone if at not in old.left_out]
    last = max([*(news or gone), *(stays[place] for place in anew)], default=len(old.rest))
    equal = {now.marks[place] for place, at in same.items() if at > last}
    # Whoever deletes something while the list slides on leaves out at two places.
    is_apart = any(news[0] < at < news[-1] for at in spoken.values() if news)
    is_short = last < len(old.rest) and len(equal) < _LEAST_EQUAL
    is_another = len(spoken) < end or len(anew) > _MOST_RENEWED or not again.isdisjoint(now.spoken)
    if None in edited or is_apart or is_short or is_another:
        return None
    rest, left_out, waiting = list[Message](), set[int](), iter((*gone, len(old.rest)))
    renewed = dict[int, Sequence[str]]()
    cleared, following = {place for place, is_edited in zip(changed, edited, strict=True) if is_edited}, next(waiting)
    for place, message in enumerate(now.rest):
        while following < stays.get(place, 0):
            left_out.add(len(rest))
            rest.append(old.rest[following])
            following = next(waiting)
        if place in cleared and (message.role == "tool" or is_text_result(message)) and not message.other_parts:
            notes = {*notes, message.text.strip()}
            rest.append(old.rest[stays[place]])
        else:
            first = old.rest[stays[place]] if place in anew else None
            rest.append(replace(message, received=first.received or first, is_renewed=True) if first else message)
        renewed |= {len(rest) - 1: versions[place]} if place in versions else {}
    cut = sum(at < news[0] for at in spoken.values()) if news else None
    return Relisted(Listed(tuple(rest), frozenset(left_out)), cut, renewed, notes)


def _same(old: Listed, now: Listed, end: int) -> dict[int, int]:
    """Returns where messages of equal words stand in both lists; of those that are not in one order none."""
    same, left, marks = dict[int, int](), iter(reversed(old.spoken)), {*old.marks}
    for place in reversed(now.spoken[:end]):
        if now.marks[place] in marks:
            at = next((at for at in left if old.marks[at] == now.marks[place]), None)
            if at is None:
                return {}
            same[place] = at
    return same


def _with_renewed(old: Listed, now: Listed, end: int, same: Mapping[int, int]) -> Mapping[int, int]:
    """Returns the same with each user's message of other words that stands where another one stood."""
    left = {at for at in old.spoken if old.rest[at].role == "user"}.difference(same.values())
    stays, before = {**same}, -1
    for place in now.spoken[:end]:
        before = same.get(place, before + 1)
        if before in left and now.rest[place].role == "user":
            stays[place] = before
    return stays


def _systems(old: Listed, now: Listed, spoken: Mapping[int, int]) -> Mapping[int, int]:
    """Returns where system messages of other words stand behind the same message in both lists."""
    behind = {place + 1: at + 1 for place, at in spoken.items() if place + 1 < len(now.rest) and at + 1 < len(old.rest)}
    both = {place: at for place, at in behind.items() if now.rest[place].is_system and old.rest[at].is_system}
    return {place: at for place, at in both.items() if old.rest[at].is_renewed or old.marks[at] != now.marks[place]}


def _versions(before: Relisted, now: Listed, anew: Mapping[int, int]) -> Mapping[int, Sequence[str]]:
    """Returns the first versions of what is written anew, or was before, by the place in the new list."""
    old = before.listed
    marks = {place: (*before.renewed.get(at, ()), old.marks[at], now.marks[place]) for place, at in anew.items()}
    return {place: [mark for mark, _ in groupby(each)][: _VERSIONS + 1] for place, each in marks.items()}
