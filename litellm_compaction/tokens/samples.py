"""The newest samples of what was learned, in a form that processes can merge.

Merging is the union of what both know, cut to the newest: in whatever order and however often it is done, the same
comes out (a join semilattice; Shapiro et al., "Conflict-free replicated data types", 2011). Moments (a mean and its
variance) would merge as well, but what is asked for is the highest and the lowest ratio of requests like this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# A clock that was ahead when it learned must not keep all other processes' later samples away.
_AHEAD_US = 3600 * 10**6
_MAX_NUMBER = 1e15

_Sample = TypeVar("_Sample", bound="tuple[float, ...]")


# Python 3.10 has no generic NamedTuple.
@dataclass(frozen=True, slots=True)
class _Stamped(Generic[_Sample]):
    stamp_us: int
    value: _Sample


class Stamps:
    """Gives every sample a stamp of its own, later than all that it has seen (a hybrid logical clock).

    So a machine's clock that is slow, or was set back, does not make new lessons older than those of others.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_us = 0

    def stamp(self) -> int:
        """µs since 1970."""
        self._last_us = max(round(self._clock() * 1e6), self._last_us + 1)
        return self._last_us

    def see(self, stamp: object) -> int:
        """A stamp of another process; 0 if it is none, or of a time that has not come."""
        latest_us = round(self._clock() * 1e6) + _AHEAD_US
        seen_us = stamp if type(stamp) is int and 0 < stamp <= latest_us else 0
        self._last_us = max(self._last_us, seen_us)
        return seen_us


class Samples(Generic[_Sample]):
    """The newest samples of one kind; `values` is replaced and never changed, so that threads may read it.

    Args:
        stamps: of the deployment.
        most: so many are kept.
        parse: makes a sample of its numbers; None if no process can have learned it.
        digits: after the point, as written.
    """

    def __init__(
        self, stamps: Stamps, most: int, parse: Callable[[Sequence[float]], _Sample | None], digits: int
    ) -> None:
        self._stamps = stamps
        self._most = most
        self._parse = parse
        self._digits = digits
        self._keep(())

    def add(self, *values: _Sample) -> int:
        """Adds new lessons, and returns the first stamp."""
        added = [_Stamped(self._stamps.stamp(), value) for value in values]
        self._keep(self._newest(self._kept, added))
        return added[0].stamp_us

    def forget(self, number: int) -> None:
        """Drops so many of the oldest."""
        self._keep(self._kept[number:])

    def forget_before(self, stamp_us: int) -> None:
        """Drops earlier lessons."""
        self._keep(tuple(each for each in self._kept if each.stamp_us >= stamp_us))

    def merge(self, rows: object) -> None:
        """Adds what `as_json` once gave, and skips what it cannot have written.

        Rows without a possible stamp are the oldest, in the order in which they stand there.
        """
        learned = []
        for position, row in enumerate(rows if isinstance(rows, list) else [], 1):
            if isinstance(row, list) and row and all(map(_is_number, row[1:])):
                value = self._parse(row[1:])
                if value is not None:
                    learned.append(_Stamped(self._stamps.see(row[0]) or position, value))
        self._keep(self._newest(learned, self._kept))

    def as_json(self) -> list[list[float]]:
        """All of them, each after its stamp."""
        return [[each.stamp_us, *(round(number, self._digits) for number in each.value)] for each in self._kept]

    @property
    def newest_us(self) -> int:
        """The last stamp; 0 if there is none."""
        return self._kept[-1].stamp_us if self._kept else 0

    def _keep(self, kept: tuple[_Stamped[_Sample], ...]) -> None:
        self._kept = kept
        self.values = tuple(each.value for each in kept)

    def _newest(self, *groups: Iterable[_Stamped[_Sample]]) -> tuple[_Stamped[_Sample], ...]:
        found: dict[int, _Stamped[_Sample]] = {}
        for group in groups:
            for each in group:
                known = found.setdefault(each.stamp_us, each)
                # Rounded and not, or two processes in the same microsecond: the same one, in any order.
                if known.value != each.value and repr(known.value) < repr(each.value):
                    found[each.stamp_us] = each
        return tuple(found[stamp_us] for stamp_us in sorted(found)[-self._most :])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
