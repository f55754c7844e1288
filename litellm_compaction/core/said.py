"""What a source says, for whoever asks whether something stands in it: its words, its numbers, its sentences.

Read once, in slices, whatever is asked of it afterwards: the distinct words of a source are a tenth of its text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property

_SLICE_CHARS, _OVERLAP_CHARS = 65_536, 256
_LETTERS = re.compile(r"[^\W\d_]{1,200}")
NUMBER = re.compile(r"\d{1,3}(?:[ \u00a0\u202f]\d{3}){1,6}(?!\d)|\d{1,40}(?:[.,'’_]\d{1,40}){0,8}")
# Scripts whose names have other forms in Latin letters, which no list knows.
_FOREIGN = re.compile(r"[\u0370-\u03ff\u0530-\u1cff\u1f00-\u1fff\u2e80-\ud7ff\uf900-\ufaff]{2}")
_CYRILLIC = re.compile(r"[\u0400-\u052f]{2}")
_ALPHABETS = ("abcdefghijklmnopqrstuvwxyz", "абвгдеёжзийклмнопрстуфхцчшщъыьэюя")


class Said:
    """A source as it was read.

    Args:
        source: all its texts.
        spellings: casefolded runs of signs that are asked for.

    Attributes:
        texts: the source.
        found: those of `spellings` that stand in it.
        numbers: as they are written in it.
    """

    def __init__(self, source: Iterable[str], spellings: set[str]) -> None:
        self.texts = list(source)
        self.found, self.numbers = set[str](), set[str]()
        self._runs = set[str]()
        left = set(spellings)
        for text in self.texts:
            for start in range(0, len(text), _SLICE_CHARS):
                piece = text[start : start + _SLICE_CHARS + _OVERLAP_CHARS]
                self._runs.update(_LETTERS.findall(piece))
                self.numbers.update(NUMBER.findall(piece))
                if left:
                    folded = piece.casefold()
                    found = {each for each in left if each in folded}
                    self.found |= found
                    left -= found

    @cached_property
    def words(self) -> list[str]:
        """Distinct words, casefolded, ascending."""
        return sorted({run.casefold() for run in self._runs})

    @cached_property
    def capitals(self) -> frozenset[str]:
        """Those that are written with a capital somewhere, casefolded."""
        return frozenset(run.casefold() for run in self._runs if run[0].isupper())

    @cached_property
    def _joined(self) -> str:
        return " ".join(self.words)

    @cached_property
    def is_foreign(self) -> bool:
        """Whether there are words of a script that is neither Latin nor Cyrillic."""
        return _FOREIGN.search(self._joined) is not None

    @cached_property
    def is_cyrillic(self) -> bool:
        """Whether there are words in Cyrillic letters."""
        return _CYRILLIC.search(self._joined) is not None

    def has_part(self, part: str) -> bool:
        """Whether some word has these letters in it."""
        return part in self._joined

    def has_beginning(self, part: str, most_more: int) -> bool:
        """Whether some word begins with these letters, and has at most so many more."""
        at = bisect_left(self.words, part)
        while at < len(self.words) and self.words[at].startswith(part):
            if len(self.words[at]) <= len(part) + most_more:
                return True
            at += 1
        return False

    def has_misspelling(self, word: str) -> bool:
        """Whether a word with a capital is this one but for one letter."""
        alphabet = next((each for each in _ALPHABETS if word[0] in each), "")
        splits = [(word[:at], word[at:]) for at in range(1, len(word) + 1)]
        near = {a + b[1:] for a, b in splits if b} | {a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1}
        near |= {a + letter + rest for a, b in splits for letter in alphabet for rest in (b, b[1:])}
        return not self.capitals.isdisjoint(near)
