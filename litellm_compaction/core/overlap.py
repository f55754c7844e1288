"""How much of a continuation's beginning repeats the end of the partial answer.

Asked by `continuation`, character by character. Every way in which a model starts again (last words, sentence, line,
paragraph, everything) is the same event: the continuation begins with a suffix of the partial. White space is not
compared, because models lose and collapse it at the seam. A suffix counts only when it is distinctive and when the
partial's own repetitions do not explain it; the rules stand at `Ending`.
"""

from __future__ import annotations

from litellm_compaction.core.settled import is_grapheme_start, is_no_space

SEARCHED_CHARS = 8_000

_DISTINCTIVE_CHARS = 12
_DISTINCTIVE_WORDS = 3
_REPEATED_LINE_CHARS = 6
# A repeat that starts inside a word (a URL, base64) needs more evidence; longer ones start at a word as well.
_INSIDE_WORD_CHARS = range(24, 257)


class Ending:
    """The end of a partial answer, prepared for `Overlap`.

    Rules for a suffix B of the partial (lengths in non-space characters, letters of scripts without spaces count two):

    - distinctive: at least 12 characters or 3 words with letters. A shorter repeat ("the" / "the") is kept.
    - it starts at a word; inside one only with 24 to 256 characters.
    - kept as legitimate repetition, where the partial itself repeats: B is a power of a shorter block ("ha ha ha"); B
      occurs twice in a row in the searched part (equal rows, a repeated line); or the unfinished last line, of at
      least 6 characters, also stands right before B (the third of equal rows, cut inside).

    Ambiguous by nature: the *first* time that a distinctive block is legitimately repeated back to back and the cut
    falls exactly between the two, it looks like a restart and is removed; a restart of a block that the partial has
    already doubled looks legitimate and is kept.
    """

    def __init__(self, partial: str) -> None:
        """Reads the last 8,000 characters of `partial`, and all of it only for the case that all is repeated."""
        window = partial[-SEARCHED_CHARS:]
        self.dense = "".join(window.split())
        self.ends_in_space = partial[-1:].isspace()
        self.starts = self._find_starts(partial[-SEARCHED_CHARS - 1 : -SEARCHED_CHARS], window)
        self._last_line_chars = len("".join(window[window.rfind("\n") + 1 :].split()))
        everything = "".join(partial.split()) if len(partial) > SEARCHED_CHARS else ""
        self.everything = "" if _is_power(everything) else everything

    def is_restart(self, start: int) -> bool:
        """Whether a repeat of `dense[start:]` is a restart, not repetition that the partial itself shows."""
        block = self.dense[start:]
        line_chars = self._last_line_chars
        if _REPEATED_LINE_CHARS <= line_chars <= start and self.dense[start - line_chars : start] == block[-line_chars:]:
            return False
        return block + block not in self.dense

    def _find_starts(self, before: str, window: str) -> list[int]:
        """Where in `dense` a repeat may start, ascending."""
        repeated = _repeated_suffixes(self.dense)
        found: list[tuple[int, int]] = []
        index = -1
        text = before + window
        for place in range(len(before), len(text)):
            char = text[place]
            if char.isspace():
                continue
            index += 1
            left = len(self.dense) - index
            if not repeated[left] and (left in _INSIDE_WORD_CHARS or _may_start(text, place)):
                found.append((index, place))
        while found and not _is_distinctive(text[found[-1][1] :]):
            found.pop()
        return [index for index, _ in found]


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
        self._alive = ending.starts
        self._repeats_everything = bool(ending.everything)
        self._read_chars = 0
        self._compared_chars = 0
        self._last = ""
        self._completed_chars = 0

    def feed(self, text: str) -> None:
        """Reads the next piece of the continuation."""
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
            glued = self._ending.ends_in_space and _is_word(self._last) and _is_word(char)
            self.repeated_chars = self.repeated_chars if glued else self._completed_chars
            self._completed_chars = 0
        self._read_chars += 1
        if not char.isspace():
            self._compare(char)
        self.decided = not (self._alive or self._repeats_everything or self._completed_chars)

    def _compare(self, char: str) -> None:
        dense, everything, offset = self._ending.dense, self._ending.everything, self._compared_chars
        self._compared_chars += 1
        self._last = char
        alive = [start for start in self._alive if dense[start + offset] == char]
        if alive and alive[-1] + self._compared_chars == len(dense) and self._ending.is_restart(alive.pop()):
            self._completed_chars = self._read_chars
        self._alive = alive
        if self._repeats_everything:
            self._repeats_everything = everything[offset] == char
            if self._repeats_everything and self._compared_chars == len(everything):
                self._completed_chars = self._read_chars
                self._repeats_everything = False


def _may_start(text: str, place: int) -> bool:
    if place == 0 or text[place - 1].isspace():
        return True
    return not (_is_word(text[place - 1]) and _is_word(text[place])) and is_grapheme_start(text, place)


def _is_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and not is_no_space(char)


def _is_distinctive(text: str) -> bool:
    """Whether a repeat of `text` can hardly be chance; monotone: more text is never less distinctive."""
    chars = sum(2 if is_no_space(char) and char.isalpha() else 1 for char in text if not char.isspace())
    words = sum(any(char.isalpha() for char in word) for word in text.split())
    return chars >= _DISTINCTIVE_CHARS or words >= _DISTINCTIVE_WORDS


def _repeated_suffixes(text: str) -> list[bool]:
    """For each length from 0 to len(text): whether the suffix is a power of a shorter block, or occurs twice at the end.

    By the failure function of Knuth, Morris and Pratt on the reversed text: linear, so that a text of one repeated
    character costs no more than any other.
    """
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


def _is_power(text: str) -> bool:
    return bool(text) and (text + text).find(text, 1) < len(text)
