"""Tokens up to any character of a prompt, and the beginnings of prompts that later ones have in common with them.

Made by `counting.py` for each prompt, read by `shares.py`. Conversations are not kept here: what is remembered of a
prompt is where its special tokens are, how many tokens stand before each, and hashes of its parts.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter, eq
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from litellm_compaction.models.vocabularies import Segment

if TYPE_CHECKING:
    from litellm_compaction.models.shares import Place

# Between special tokens of a turn's header stands at most a role.
_HEADER_GAP_CHARS = 24
# Segments and parts of all prompts together; about 100 bytes each.
_MAX_SIZE = 200_000

Key: TypeAlias = tuple[str, str, int]


class Scale:
    """Tokens up to any character of a prompt; inside a text in proportion to its characters."""

    def __init__(self, segments: list[Segment], lengths: Sequence[int], known: Scale | None = None) -> None:
        """Takes the segments and the tokens of those that are texts; with `known`, of what follows it."""
        self.segments: list[Segment] = known.segments + segments if known is not None else segments
        self.ends: list[int] = known.ends[:] if known is not None else []
        self._tokens: list[int] = known._tokens[:] if known is not None else [0]
        remaining = iter(lengths)
        total = self._tokens[-1]
        for segment in segments:
            self.ends.append(segment.end)
            total += 1 if segment.is_special else next(remaining)
            self._tokens.append(total)
        self.total = total

    def head(self, count: int) -> Scale:
        """The scale of the first `count` segments."""
        made = Scale([], ())
        made.segments, made.ends, made._tokens = self.segments[:count], self.ends[:count], self._tokens[: count + 1]
        made.total = made._tokens[-1]
        return made

    def specials_before(self, position: int) -> int:
        """How many segments there are up to the last special token that ends before a character, it included."""
        count = bisect_right(self.ends, position)
        while count and not self.segments[count - 1].is_special:
            count -= 1
        return count

    @property
    def end(self) -> int:
        """Characters."""
        return self.ends[-1] if self.ends else 0

    def before(self, position: int) -> int:
        """Tokens before a character."""
        index = bisect_right(self.ends, position)
        if index == len(self.segments):
            return self.total
        segment = self.segments[index]
        inside = self._tokens[index + 1] - self._tokens[index]
        return self._tokens[index] + inside * (position - segment.start) // (segment.end - segment.start)

    def follows_header(self, position: int) -> bool:
        """Whether at most a role and the like stands between a special token and a character."""
        index = bisect_right(self.ends, position)
        return index < len(self.segments) and position - self.segments[index].start <= _HEADER_GAP_CHARS

    def header_start(self, position: int, lower: int) -> int:
        """Where the header begins that ends at a character: at most a role stands between its special tokens."""
        start = position
        index = bisect_right(self.ends, position - 1)
        if index < len(self.segments) and not self.segments[index].is_special:
            if position - self.segments[index].start > _HEADER_GAP_CHARS:
                return start
            start = max(lower, self.segments[index].start)
            index -= 1
        while index >= 0 and index < len(self.segments) and self.segments[index].start >= lower:
            segment = self.segments[index]
            if not segment.is_special and segment.end - segment.start > _HEADER_GAP_CHARS:
                break
            start = segment.start
            index -= 1
        return start


class Beginning(NamedTuple):
    """The part of a prompt that an earlier one began with.

    Attributes:
        scale: of that part; its last segment is a special token.
        places: of messages that certainly are where they were.
    """

    scale: Scale
    places: Sequence[Place]


class _Entry(NamedTuple):
    hashes: list[int]
    scale: Scale
    places: list[Place]

    @property
    def size(self) -> int:
        return len(self.hashes) + len(self.scale.segments)


class Beginnings:
    """Prompts by their requests' fingerprints, least recently used ones forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def find(
        self, names: tuple[str, str], prints: Sequence[int], parts: Sequence[str], longest_special: int
    ) -> Beginning:
        """What is known of the beginning of a prompt; empty where nothing is.

        Args:
            names: of the vocabulary and the template.
            prints: of the request, one per number of its messages (`prefix_anchors.py`).
            parts: its prompt, as the template has written it. Templates may write old messages in another way, so
                that only equal text counts. Most parts are texts of messages, whose hashes the interpreter knows from
                the fingerprints, so that no old text is read again.
            longest_special: characters of the vocabulary's longest special token.
        """
        known = self._known(names, prints)
        if known is None:
            return Beginning(Scale([], ()), ())
        equal = sum(takewhile(bool, map(eq, known.hashes, map(hash, parts))))
        equal_chars = sum(map(len, parts[:equal]))
        # What follows a special token may make it another one, or a part of another one.
        scale = known.scale.head(known.scale.specials_before(equal_chars - longest_special))
        return Beginning(scale, known.places[: bisect_right(known.places, scale.end, key=attrgetter("reach"))])

    def note(
        self, names: tuple[str, str], prints: Sequence[int], parts: Sequence[str], scale: Scale, places: list[Place]
    ) -> None:
        """Remembers a prompt.

        Args:
            names: as for `find`, as `prints` and `parts`.
            scale: of the whole prompt.
            places: of the request's messages.
        """
        if not prints:
            return
        key = (*names, prints[-1])
        entry = _Entry(list(map(hash, parts)), scale, places)
        with self._lock:
            self._drop(key)
            self._entries[key] = entry
            self._size += entry.size
            while self._size > _MAX_SIZE and len(self._entries) > 1:
                self._drop(next(iter(self._entries)))

    def _known(self, names: tuple[str, str], prints: Sequence[int]) -> _Entry | None:
        """The longest known prompt of a request that this one begins with."""
        with self._lock:
            for entry in reversed(prints):
                known = self._entries.get((*names, entry))
                if known is not None:
                    self._entries.move_to_end((*names, entry))
                    return known
        return None

    def _drop(self, key: Key) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self._size -= dropped.size
