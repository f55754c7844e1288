"""What a source says, for the checks of a summary: its words, its numbers, and how it writes names and numbers.

Read once, in slices, whatever is asked of it afterwards: the distinct words of a source are a tenth of its text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

_SLICE_CHARS, _OVERLAP_CHARS = 65_536, 256
_LETTERS = re.compile(r"[^\W\d_]{1,200}")
NUMBER = re.compile(r"\d{1,3}(?:[ \u00a0\u202f]\d{3}){1,6}(?!\d)|\d{1,40}(?:[.,'’_]\d{1,40}){0,8}")
# Of scripts whose names have other forms in Latin letters.
_OTHER_SCRIPT = re.compile(r"[\u0370-\u1cff\u1f00-\u1fff\u2e80-\ud7ff\uf900-\ufaff]{2}")
# Agents' sessions, orders and chats have a number of two digits in 40 to 2,300 characters, transcripts of what was
# spoken none in a million. 500 to 4,000 give the same on people's summaries.
_CHARS_PER_NUMBER = 2_000


class Said:
    """A source as it was read.

    Args:
        source: all its texts.
        spellings: casefolded runs of signs that are asked for.

    Attributes:
        texts: the source.
        found: those of `spellings` that stand in it.
        numbers: as they are written in it.
        has_spoken_numbers: whether it says most of its numbers in words.
    """

    def __init__(self, source: Iterable[str], spellings: set[str]) -> None:
        self.texts = list(source)
        self.found, self.numbers = set[str](), set[str]()
        self._runs = set[str]()
        left = set(spellings)
        written = 0
        for text in self.texts:
            for start in range(0, len(text), _SLICE_CHARS):
                piece = text[start : start + _SLICE_CHARS + _OVERLAP_CHARS]
                self._runs.update(_LETTERS.findall(piece))
                numbers = NUMBER.findall(piece)
                written += sum([len(number) > 1 for number in numbers])
                self.numbers.update(numbers)
                if left:
                    folded = piece.casefold()
                    found = {each for each in left if each in folded}
                    self.found |= found
                    left -= found
        self.has_spoken_numbers = written * _CHARS_PER_NUMBER < sum(map(len, self.texts))

    @cached_property
    def _words(self) -> list[str]:
        """Distinct words, casefolded, ascending."""
        return sorted({run.casefold() for run in self._runs})

    @cached_property
    def _joined(self) -> str:
        return " ".join(self._words)

    @cached_property
    def has_other_script(self) -> bool:
        """Whether there are words that are not of Latin letters."""
        return _OTHER_SCRIPT.search(self._joined) is not None

    def has_part(self, part: str) -> bool:
        """Whether some word has these letters in it."""
        return part in self._joined

    def beginning(self, part: str) -> Sequence[str]:
        """The words that begin with these letters, casefolded."""
        return self._words[bisect_left(self._words, part) : bisect_left(self._words, part + "\U0010ffff")]
