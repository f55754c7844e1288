"""What was learned last, in a form that processes can merge: samples by when they were learned, the newest ones.

`calibration.py`, `growth.py` and `media.py` keep theirs in it. Merging is the union of what both know, cut to the
newest: in whatever order and however often it is done, the same comes out (a join semilattice; Shapiro et al.,
"Conflict-free replicated data types", 2011), so that an outage's facts may be handed over twice. Moments (a mean and
its variance) would merge as well, but what is asked for is the highest and the lowest ratio of requests like this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

# A clock that was ahead when it learned must not keep everybody's later samples away.
_AHEAD_US = 3600 * 10**6


_Value = TypeVar("_Value")


# Python 3.10 has no generic NamedTuple.
@dataclass(frozen=True, slots=True)
class Stamped(Generic[_Value]):
    """A sample and when it was learned, in µs since 1970, which also is its name."""

    stamp_us: int
    value: _Value


class Stamps:
    """Gives every sample a stamp of its own, later than all that it has seen (a hybrid logical clock).

    So a machine's clock that is slow, or was set back, does not make what is learned now older than what others know.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_us = 0

    def stamp(self, value: _Value) -> Stamped[_Value]:
        """A sample that has just been learned."""
        self._last_us = max(round(self._clock() * 1e6), self._last_us + 1)
        return Stamped(self._last_us, value)

    def read(self, rows: object, stamps: object) -> list[tuple[int, object]]:
        """Rows of JSON, each behind the stamp that was written with it.

        Args:
            rows: as a process has written them, oldest first; nothing where it is no list.
            stamps: of each. Rows that have none, as those of earlier versions, and rows of a time that has not come are
                the oldest, in the order in which they stand there.
        """
        if not isinstance(rows, list):
            return []
        known = stamps if isinstance(stamps, list) and len(stamps) == len(rows) else [None] * len(rows)
        read = [
            (self.time_of(stamp) or position, row)
            for position, (stamp, row) in enumerate(zip(known, rows, strict=True), 1)
        ]
        self._last_us = max(self._last_us, *(stamp_us for stamp_us, _ in read), 0)
        return read

    def time_of(self, stamp: object) -> int:
        """A stamp of another process; 0 where it is none, or of a time that has not come."""
        latest_us = round(self._clock() * 1e6) + _AHEAD_US
        return stamp if type(stamp) is int and 0 < stamp <= latest_us else 0


def newest(most: int, *groups: Iterable[Stamped[_Value]]) -> tuple[Stamped[_Value], ...]:
    """The newest of several groups, oldest first; what is in more than one of them counts once."""
    found: dict[int, Stamped[_Value]] = {}
    for group in groups:
        for each in group:
            known = found.setdefault(each.stamp_us, each)
            # Rounded and not, or two processes in the same microsecond: the same one, whoever comes first.
            if known.value != each.value and repr(known.value) < repr(each.value):
                found[each.stamp_us] = each
    return tuple(found[stamp_us] for stamp_us in sorted(found)[-most:])


def values(samples: Iterable[Stamped[_Value]]) -> tuple[_Value, ...]:
    """Without their stamps."""
    return tuple(each.value for each in samples)
