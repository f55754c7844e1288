"""How much of a continuation's beginning repeats the end of the partial answer.

Asked by `joiner.py`, character by character. Every way in which a model starts again (last words, sentence, line,
paragraph, everything) is the same event: the continuation begins with a suffix of the partial. White space is not
compared, because models lose and collapse it at the seam. A suffix counts only when it is distinctive and when the
partial's own repetitions do not explain it; the rules stand at `Ending`.
"""

from __future__ import annotations

import re
from itertools import islice, pairwise

from litellm_compaction.core.continuation.text import NO_SPACE, is_grapheme_start, is_no_space, open_fence

SEARCHED_CHARS = 8_000

_DISTINCTIVE_CHARS = 12
_DISTINCTIVE_WORDS = 3
_REPEATED_LINE_CHARS = 6
# Of a block inside one line that stands nowhere else; see `Ending`.
_RARE_WORDS = 2
_RARE_CHARS = 8
_RARE_WORD_CHARS = 6
_RARE_WORD = re.compile(r"[\w'-]+[,;]?")
# With these a line of code begins, and no language has any of them twice in a row.
_OPENERS = frozenset(
    (
        *("abstract", "async", "await", "class", "const", "def", "enum", "export", "fn", "for", "foreach", "from"),
        *("func", "function", "if", "impl", "import", "interface", "let", "namespace", "package", "private"),
        *("protected", "pub", "public", "raise", "return", "struct", "switch", "throw", "try", "using", "var"),
        *("while", "with"),
    )
)
_ROW = re.compile(r"[ \t>]*(?:\||[-*+] |\d+[.)] )")
# As `_is_word` has it: \w is `isalnum` and "_". No word goes on where either side of a place is none of it.
_WORD = rf"[^\W{NO_SPACE}]"
_SPACE_OR_START = re.compile(rf"(?P<space>\s+)|(?:(?<!{_WORD})|(?!{_WORD}))\S")
# A text that repeats its end has this much of it twice, or goes round by less.
_END_CHARS = 16
# A repeat that starts inside a word (a URL, base64) needs more evidence; longer ones start at a word as well.
_INSIDE_WORD_CHARS = range(24, 257)


def repeats_itself(partial: str, dense: str) -> bool:
    """Whether `dense`, with which `partial` ends, could come again as it is: the text goes round by it already.

    Args:
        partial: the answer so far.
        dense: its end, without white space.
    """
    text = "".join(partial[-2 * SEARCHED_CHARS :].split())
    return _is_power(dense) or text.endswith(dense + dense)


class Ending:
    """The end of a partial answer, prepared for `Overlap`.

    Rules for a suffix B of the partial (lengths in non-space characters, letters of scripts without spaces count two):

    - distinctive: at least 12 characters or 3 words with letters. A shorter repeat ("the" / "the") is kept.
    - the unfinished last line, from its start, also counts with 2 words of any kind and a letter ("x = "), except in a
      table; in a code fence with one word that opens lines ("def "); and with any length when the continuation begins
      with that line's own indentation ("    total ").
    - inside the unfinished last line, but for a table's, a block that stands nowhere else counts with 2 words and 8
      characters, and outside code one word of 6 characters, if white space follows its repeat: who doubles a word that
      he has not used before?
    - it starts at a word; inside one only with 24 to 256 characters.
    - kept as legitimate repetition, where the partial itself repeats: B is a power of a shorter block ("ha ha ha"); B
      occurs twice in a row in the searched part (equal rows, a repeated line); or the unfinished last line, of at least
      6 characters, also stands right before B (the third of equal rows, cut inside).
    - kept as well, where table rows or list items have come twice in a row before: B is the last one, or reaches from
      inside the last one into the unfinished next one. This is how a second equal row looks.

    Ambiguous by nature: the *first* time that a distinctive block is legitimately repeated back to back and the cut
    falls exactly between the two, it looks like a restart and is removed; a restart of a block for which the partial
    shows repetition looks legitimate and is kept.
    """

    def __init__(self, partial: str) -> None:
        """Reads the last 8,000 characters of `partial`, and all of it only for the case that all is repeated."""
        window = partial[-SEARCHED_CHARS:]
        self.dense = "".join(window.split())
        self.ends_in_space = partial[-1:].isspace()
        has_line_start = len(window) == len(partial) or "\n" in window
        last_line = window[window.rfind("\n") + 1 :] if has_line_start else ""
        self.last_line_indent = last_line[: len(last_line) - len(last_line.lstrip())]
        self.last_line_start = len(self.dense) - len("".join(last_line.split()))
        self._is_code = open_fence(partial) is not None
        self.rare_words: frozenset[int] = frozenset()
        self.starts = self._find_starts(partial[-SEARCHED_CHARS - 1 : -SEARCHED_CHARS], window, last_line)
        self._starts_of_equal_row = self._find_starts_of_equal_row(window)
        everything = "".join(partial.split()) if len(partial) > SEARCHED_CHARS else ""
        self.everything = "" if _is_power(everything) else everything

    def is_restart(self, start: int) -> bool:
        """Whether a repeat of `dense[start:]` is a restart, not repetition that the partial itself shows."""
        block = self.dense[start:]
        last_line = self.dense[self.last_line_start :]
        if len(last_line) >= _REPEATED_LINE_CHARS and self.dense[:start].endswith(last_line):
            return False
        return start not in self._starts_of_equal_row and block + block not in self.dense

    def starts_behind(self, space: str) -> list[int]:
        """Where in `dense` a repeat may start, ascending, when the continuation begins with white space `space`."""
        indent = self.last_line_indent
        if indent in ("", " ") or space.rpartition("\n")[2] != indent or self.last_line_start == len(self.dense):
            return self.starts
        return sorted({*self.starts, self.last_line_start})

    def _find_starts_of_equal_row(self, window: str) -> range:
        """Where in `dense` a block starts that the next row would repeat, if it equaled the last one."""
        lines = [line for line in window.split("\n") if line.strip()]
        rows = ["".join(line.split()) if _ROW.match(line) else "" for line in lines]
        come_twice = any(row == after and len(row) >= _REPEATED_LINE_CHARS for row, after in pairwise(rows))
        if not come_twice or not rows[-1]:
            return range(0)
        if self.last_line_start == len(self.dense):
            start = len(self.dense) - len(rows[-1])
            return range(start, start + 1)
        return range(self.last_line_start - len(rows[-2]) + 1, self.last_line_start)

    def _find_starts(self, before: str, window: str, last_line: str) -> list[int]:
        """Where in `dense` a repeat may start, ascending."""
        repeated = _repeated_suffixes(self.dense)
        text, spaces = before + window, len(before)
        is_ascii = text.isascii()
        places: dict[int, int] = {}
        for match in _SPACE_OR_START.finditer(text, len(before)):
            place = match.start()
            if match.lastgroup:
                spaces += match.end() - place
            elif is_ascii or _is_character_start(text, place):
                places[place - spaces] = place
        backwards = (place for place in range(len(text) - 1, len(before) - 1, -1) if not text[place].isspace())
        for length, place in enumerate(islice(backwards, _INSIDE_WORD_CHARS[-1]), 1):
            if length in _INSIDE_WORD_CHARS:
                places[len(self.dense) - length] = place
        found = [(index, place) for index, place in sorted(places.items()) if not repeated[len(self.dense) - index]]
        rare: list[tuple[int, int]] = []
        while found and not _is_distinctive(text[found[-1][1] :]):
            index, place = found.pop()
            block = text[place:]
            if index > self.last_line_start and self._is_rare(index, block, last_line):
                rare.append((index, len(block.split())))
        self.rare_words = frozenset(index for index, words in rare if words == 1)
        starts = [index for index, _ in (*found, *rare)]
        if not repeated[len(self.dense) - self.last_line_start] and self._is_distinctive_line(last_line):
            starts.append(self.last_line_start)
        return sorted({*starts})

    def _is_rare(self, index: int, block: str, last_line: str) -> bool:
        """Whether `block`, inside the unfinished last line, stands nowhere else and is more than a word by chance."""
        if last_line.lstrip()[:1] == "|" or self.dense.find(self.dense[index:]) != index:
            return False
        words = block.split()
        if sum(any(map(str.isalpha, word)) for word in words) >= _RARE_WORDS:
            return len(self.dense) - index >= _RARE_CHARS
        is_word = len(words) == 1 and any(map(str.isalpha, block)) and _RARE_WORD.fullmatch(words[0]) is not None
        return is_word and not self._is_code and len(self.dense) - index >= _RARE_WORD_CHARS

    def _is_distinctive_line(self, line: str) -> bool:
        words = line.split()
        if len(words) == 1:
            return self._is_code and words[0] in _OPENERS
        return len(words) >= _RARE_WORDS and any(map(str.isalpha, line)) and words[0][0] != "|"


class Overlap:
    """Reads a continuation and finds how much of its beginning repeats an `Ending`.

    Attributes:
        repeated_chars: length of the repetition, in characters as fed; final once `decided`.
        decided: whether more text can change nothing. Undecided means: what was fed repeats the partial verbatim.
    """

    def __init__(self, ending: Ending) -> None:
        """Starts with nothing read."""
        self.repeated_chars = 0
        self.decided = False
        self._ending = ending
        self._starts = frozenset(ending.starts)
        # The first of the starts at which all that was read stands; None when there is none any more. Those behind it
        # are looked for when it fails: thousands of starts that all go on would be too many to follow one by one.
        self._first = min(ending.starts, default=None)
        self._is_indented = False
        self._space: list[str] = []
        self._repeats_everything = bool(ending.everything)
        self._read_chars = 0
        self._compared_chars = 0
        self._last = ""
        self._completed_chars = 0
        self._is_rare_word = False

    def feed(self, text: str) -> None:
        """Reads the next piece of the continuation."""
        if not self._compared_chars and not self.decided:
            rest = text.lstrip()
            space = text[: len(text) - len(rest)]
            self._space.append(space)
            self._read_chars += len(space)
            text = rest
        for char in text:
            if self.decided:
                return
            self._read(char)

    def settle(self) -> None:
        """Decides with what was read: the continuation has ended."""
        self.repeated_chars = self._completed_chars or self.repeated_chars
        self.decided = True

    def _read(self, char: str) -> None:
        if self._completed_chars:
            # "the cat" is not repeated by "the cats".
            follows = _is_word(char) or (self._is_rare_word and not char.isspace())
            glued = self._ending.ends_in_space and _is_word(self._last) and follows
            self.repeated_chars = self.repeated_chars if glued else self._completed_chars
            self._completed_chars = 0
        self._read_chars += 1
        if not char.isspace():
            if not self._compared_chars:
                starts = self._ending.starts_behind("".join(self._space))
                self._is_indented = starts is not self._ending.starts
                self._starts, self._first = frozenset(starts), min(starts, default=None)
            self._compare(char)
        self.decided = self._first is None and not self._repeats_everything and not self._completed_chars

    def _compare(self, char: str) -> None:
        dense, everything, offset = self._ending.dense, self._ending.everything, self._compared_chars
        self._compared_chars += 1
        self._last = char
        if self._first is not None and dense[self._first + offset] != char:
            read = dense[self._first : self._first + offset] + char
            self._first = self._next_first(read, self._first + 1)
        start = len(dense) - self._compared_chars
        if self._first is not None and start in self._starts:
            self._complete(start, dense[self._first : self._first + self._compared_chars])
        if self._repeats_everything:
            self._repeats_everything = everything[offset] == char
            if self._repeats_everything and self._compared_chars == len(everything):
                self._completed_chars = self._read_chars
                self._repeats_everything = False

    def _next_first(self, read: str, begin: int) -> int | None:
        """The first start from `begin` on at which all that was read stands; in all, one walk over the ending."""
        found = self._ending.dense.find(read, begin)
        while found >= 0 and found not in self._starts:
            found = self._ending.dense.find(read, found + 1)
        return found if found >= 0 else None

    def _complete(self, start: int, read: str) -> None:
        """Takes note of a repeat that reaches the end of the partial, if one from `start` does."""
        if not self._ending.dense.endswith(read):
            return
        is_indented_line = self._is_indented and start == self._ending.last_line_start
        if is_indented_line or self._ending.is_restart(start):
            self._completed_chars = self._read_chars
            self._is_rare_word = start in self._ending.rare_words
        if start == self._first:
            # All that start behind it have come to their ends before.
            self._first = None


def _is_character_start(text: str, place: int) -> bool:
    return place == 0 or text[place - 1].isspace() or is_grapheme_start(text, place)


def _is_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and not is_no_space(char)


def _is_distinctive(text: str) -> bool:
    """Whether a repeat of `text` can hardly be chance; monotone: more text is never less distinctive."""
    chars = sum(2 if is_no_space(char) and char.isalpha() else 1 for char in text if not char.isspace())
    words = sum(any(char.isalpha() for char in word) for word in text.split())
    return chars >= _DISTINCTIVE_CHARS or words >= _DISTINCTIVE_WORDS


def _repeated_suffixes(text: str) -> list[bool]:
    """For each length from 0 to len(text): whether that suffix is a power of a shorter block, or ends `text` twice.

    By the failure function of Knuth, Morris and Pratt on the reversed text: linear, so that a text of one repeated
    character costs no more than any other. Most end with nothing that comes twice in a row, which shows sooner.
    """
    if not _may_end_twice(text):
        return [False] * (len(text) + 1)
    backwards = text[::-1]
    borders = [0] * (len(text) + 1)
    border = 0
    for index in range(1, len(text)):
        while border and backwards[index] != backwards[border]:
            border = borders[border]
        border += backwards[index] == backwards[border]
        borders[index + 1] = border
    repeated = [False] * (len(text) + 1)
    for length in range(1, len(text) + 1):
        period = length - borders[length]
        if period < length and length % period == 0:
            repeated[length] = True
        elif 2 * length <= len(text):
            # Fine and Wilf: if the doubled suffix has period `length`, its smallest period divides it.
            repeated[length] = length % (2 * length - borders[2 * length]) == 0
    return repeated


def _may_end_twice(text: str) -> bool:
    """Whether `text` may end with a block that stands twice in a row, which any power does, too; never wrongly no."""
    end = text[-_END_CHARS:]
    return text.rfind(end, 0, -1) >= 0 or any(
        text.endswith(text[-length:], 0, -length) for length in range(1, min(_END_CHARS, len(text) // 2 + 1))
    )


def _is_power(text: str) -> bool:
    return bool(text) and (text + text).find(text, 1) < len(text)
