"""Tokens up to any character of a prompt, and the beginnings of prompts that later ones have in common with them.

Made by `counting.py` for each prompt, read by `shares.py`. Conversations are not kept here: what is remembered of a
prompt is where its special tokens are, how many tokens stand before each, and hashes of its text.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from litellm_compaction.models.vocabularies import Segment

if TYPE_CHECKING:
    from litellm_compaction.models.shares import Place

# Between special tokens of a turn's header stands at most a role.
_HEADER_GAP_CHARS = 24
# Of all prompts together; about 150 bytes each.
_MAX_SEGMENTS = 100_000
# Besides the last ones, a prompt has a mark about every so many of its parts.
_MARKS, _LAST_MARKS, _MAX_MARKS = 48, 4, 192
_LEAST_MARK_CHARS = 512

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


class Mark(NamedTuple):
    """A place up to which a prompt is known.

    Attributes:
        segments: how many of them end here; the last one is a special token.
        end: the characters that decide about them: a few more, which could make that token a longer one.
        digest: of these characters, and of the marks before.
    """

    segments: int
    end: int
    digest: int


class Beginning(NamedTuple):
    """The part of a prompt that an earlier one began with.

    Attributes:
        scale: of that part.
        marks: in it, the last one at its end.
        places: of messages that certainly are where they were.
    """

    scale: Scale
    marks: list[Mark]
    places: list[Place]


class Beginnings:
    """Prompts by their requests' fingerprints, least recently used ones forgotten; safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, Beginning] = OrderedDict()
        self._segments = 0
        self._lock = threading.Lock()

    def find(self, names: tuple[str, str], prints: Sequence[int], text: str) -> Beginning:
        """What is known of the beginning of a prompt; empty where nothing is.

        Args:
            names: of the vocabulary and the template.
            prints: of the request, one per number of its messages (`prefix_anchors.py`).
            text: its prompt. Templates may write old messages in another way, so that only equal text counts.
        """
        with self._lock:
            known = None
            for entry in reversed(prints):
                known = self._entries.get((*names, entry))
                if known is not None:
                    self._entries.move_to_end((*names, entry))
                    break
        if known is None:
            return Beginning(Scale([], ()), [], [])
        digest = start = equal = 0
        for mark in known.marks:
            if mark.end > len(text):
                break
            digest = hash((digest, text[start : mark.end]))
            if digest != mark.digest:
                break
            start = mark.end
            equal += 1
        if not equal:
            return Beginning(Scale([], ()), [], [])
        scale = known.scale.head(known.marks[equal - 1].segments)
        sure = bisect_right([place.reach for place in known.places], scale.end)
        return Beginning(scale, known.marks[:equal], known.places[:sure])

    def note(
        self,
        names: tuple[str, str],
        prints: Sequence[int],
        text: str,
        scale: Scale,
        known: Beginning,
        places: list[Place],
        longest_special: int,
    ) -> None:
        """Remembers a prompt.

        Args:
            names: as for `find`, as `prints` and `text`.
            scale: of the whole prompt.
            known: what `find` gave for it.
            places: of the request's messages.
            longest_special: characters of the vocabulary's longest special token.
        """
        if not prints:
            return
        marks = _marks(text, scale, known.marks if len(known.marks) < _MAX_MARKS else [], longest_special)
        if not marks:
            return
        key = (*names, prints[-1])
        with self._lock:
            self._drop(key)
            self._entries[key] = Beginning(scale, marks, places)
            self._segments += len(scale.segments)
            while self._segments > _MAX_SEGMENTS and len(self._entries) > 1:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self._segments -= len(dropped.scale.segments)


def _marks(text: str, scale: Scale, known: list[Mark], longest_special: int) -> list[Mark]:
    """Marks behind special tokens: the known ones, some at even distances, and the last few."""
    marks = known[:]
    first = marks[-1].segments if marks else 0
    least = max(_LEAST_MARK_CHARS, len(text) // _MARKS)
    chosen: list[int] = []
    last: list[int] = []
    end = marks[-1].end if marks else 0
    for index in range(first, len(scale.segments)):
        if not scale.segments[index].is_special or scale.ends[index] + longest_special > len(text):
            continue
        last.append(index)
        if scale.ends[index] >= end + least:
            chosen.append(index)
            end = scale.ends[index]
    digest, start = (marks[-1].digest, marks[-1].end) if marks else (0, 0)
    for index in sorted({*chosen, *last[-_LAST_MARKS:]}):
        end = scale.ends[index] + longest_special
        digest = hash((digest, text[start:end]))
        marks.append(Mark(index + 1, end, digest))
        start = end
    return marks
