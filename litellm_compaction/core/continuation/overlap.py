"""How much of a continuation's beginning repeats the end of the partial answer.

Asked by `joiner.py`. Every way in which a model starts again (last words, sentence, line, paragraph, everything) is the
same event: the continuation begins with an end of the partial. White space is not compared, because models lose and
collapse it at the seam.
"""

from __future__ import annotations

import re
from functools import cached_property
from itertools import pairwise

from litellm_compaction.core.continuation.text import is_no_space

# Of a partial answer that does not come again as a whole, from its start or from a place that was shown.
SEARCHED_CHARS = 8_000

_TELLING_CHARS = 12
_TELLING_WORDS = 3
# Of an end that starts inside a word (a URL, base64).
_INSIDE_WORD_CHARS = 24
# Of an end that stands nowhere else, inside the unfinished last line.
_RARE_CHARS = 6
_REPEATED_LINE_CHARS = 6
_ROW = re.compile(r"[ \t>]*(?:\||[-*+] |\d+[.)] )")


class Ending:
    """The end of a partial answer, and which of its ends are a restart when they come again.

    The longest end counts that is telling: 12 characters without white space (letters of scripts without spaces count
    two) or 3 words with letters, from a word's start (inside one 24); or inside the unfinished last line, but for a
    table's, all of the line's words, 2 or more, or 6 characters, if they stand nowhere else: who doubles a word that
    they have not used before? (Who has doubled such a word before: then 6 characters do not count.) It is repetition
    all the same, and stays, if the partial shows that it comes repeatedly: twice in a row, or as rows of a table or
    list that have come twice in a row.

    Ambiguous by nature: the *first* time that a telling block is legitimately repeated back to back and the cut falls
    exactly between the two, it looks like a restart and is removed; a restart of a block for which the partial shows
    repetition looks legitimate and is kept.
    """

    def __init__(self, partial: str) -> None:
        self.dense = _dense(partial)
        self._tail = partial[-SEARCHED_CHARS:]
        self._places = [place for place, char in enumerate(self._tail) if not char.isspace()]
        self._last_line = partial[partial.rfind("\n") + 1 :]

    def repeated_chars(self, text: str, place: int) -> int:
        """Returns how much of the beginning of `text`, in its characters, says the end of the partial again.

        Args:
            text: the continuation.
            place: an end of any length that may be said again, in `dense`; others have at most `SEARCHED_CHARS`.
        """
        read = _dense(text)
        searched = min(len(read), len(self._places))
        for start in (max(place, 0), *range(len(self.dense) - searched, len(self.dense))):
            if self.dense[start : start + 1] == read[:1] and read.startswith(self.dense[start:]):
                block = self.dense[start:]
                end = _place_behind(text, len(block))
                if not block or not self._is_telling(start, text[end : end + 1]):
                    continue
                if _is_power(block) or block + block in self.dense:
                    return 0
                if not self._is_row(block):
                    return end
        # A line of code that begins again, with its own indentation.
        again = text.lstrip("\n")
        if self._last_line[:2].isspace() and self._last_line.strip() and again.startswith(self._last_line):
            return len(text) - len(again) + len(self._last_line)
        return 0

    def repeats_itself(self, block: str) -> bool:
        """Returns True if the partial goes round by `block`, its end without white space: it ends with it twice."""
        return _is_power(block) or self.dense.endswith(block + block)

    @cached_property
    def _doubles_words(self) -> bool:
        """Whether a word as long as a rare one comes twice in a row: a third such word may be meant so, too."""
        words = self._tail.split()
        return any(word == after and len(word) >= _RARE_CHARS and _has_letter(word) for word, after in pairwise(words))

    def _is_row(self, block: str) -> bool:
        """Returns True if rows have come twice in a row, and a repeat of `block` would make another one of them."""
        last_line = _dense(self._last_line)
        if len(last_line) >= _REPEATED_LINE_CHARS and self.dense.endswith(last_line + block):
            return True
        lines = [line for line in self._tail.split("\n") if line.strip()]
        rows = [_dense(line) if _ROW.match(line) else "" for line in lines]
        if not rows[-1] or not any(row == after and len(row) >= _REPEATED_LINE_CHARS for row, after in pairwise(rows)):
            return False
        if not last_line:
            return len(block) == len(rows[-1])
        return len(rows[-1]) < len(block) < len(rows[-1]) + len(rows[-2])

    def _is_telling(self, start: int, follower: str) -> bool:
        """Returns True if a repeat of `dense[start:]` can hardly be chance.

        Args:
            start: of an end in `dense`.
            follower: the character after the repeat; "" for none.
        """
        chars = len(self.dense) - start
        if chars > len(self._places):
            return True
        place = self._places[-chars]
        block = self._tail[place:]
        # "the cat" is not repeated by "the cats".
        if block[-1].isspace() and _is_word(self.dense[-1]) and _is_word(follower):
            return False
        is_inside_word = place > 0 and _is_word(self._tail[place - 1]) and _is_word(block[0])
        if is_inside_word:
            return chars >= _INSIDE_WORD_CHARS
        if chars >= _TELLING_CHARS or sum(map(_has_letter, block.split())) >= _TELLING_WORDS:
            return True
        if chars + sum(is_no_space(char) and char.isalpha() for char in block) >= _TELLING_CHARS:
            return True
        if len(block) > len(self._last_line) or self._last_line.lstrip()[:1] == "|" or follower.strip():
            return False
        is_line = chars == len(_dense(self._last_line)) and len(block.split()) > 1
        is_long = is_line or (chars >= _RARE_CHARS and not self._doubles_words)
        return is_long and _has_letter(block) and self.dense.find(self.dense[start:]) == start


class Overlap:
    """Follows a continuation for as long as it stands in the partial answer word by word.

    Attributes:
        is_over: more text can change nothing.
        place: the first one in the partial, without white space, at which all that was read stands or goes over its
            end; -1 for none. In all, one walk over the partial.
    """

    def __init__(self, ending: Ending) -> None:
        self.is_over = False
        self.place = 0
        self._said = ending.dense
        self._read: list[str] = []
        self._chars = 0

    def feed(self, text: str) -> None:
        piece = _dense(text)
        if self.is_over or not piece:
            return
        self._read.append(piece)
        end = self.place + self._chars
        self._chars += len(piece)
        if self._said.startswith(piece, end):
            return
        goes_over = end + len(piece) > len(self._said)
        if not (goes_over and piece.startswith(self._said[end:])):
            self.place = self._said.find("".join(self._read), self.place + 1)
        self.is_over = goes_over or self.place < 0


def _dense(text: str) -> str:
    return "".join(text.split())


def _is_power(text: str) -> bool:
    return (text + text).find(text, 1) < len(text)


def _place_behind(text: str, chars: int) -> int:
    """Where in `text` its first `chars` characters that are no white space end."""
    for run in re.finditer(r"\S+", text):
        if chars <= len(run[0]):
            return run.start() + chars
        chars -= len(run[0])
    return len(text)


def _has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))


def _is_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and not is_no_space(char)
