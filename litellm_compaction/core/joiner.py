"""Joins a partial answer and its continuation: no word lost, none twice.

The beginning of a continuation loses a reasoning block (only its tag if the partial ends inside one), an announcement
("Sure, I'll continue:"), a reopened fence, and a repeat of the partial's end. Each way in which a model starts again
(last words, line, paragraph, everything) is the same event: the continuation begins with an end of the partial. White
space is not compared, since models lose and collapse it at the seam.
"""

from __future__ import annotations

import re
from itertools import islice, pairwise
from typing import Literal

from litellm_compaction.core.cuts import FENCE, fence_language, is_no_space, open_fence, open_think
from litellm_compaction.core.messages import THINK_END, THINK_START

# Shorter ones could be the answer's own words.
_LEAST_ECHO_CHARS, _LEAST_START_CHARS = 12, 24
# An announcement may have two lines and a fence after them. More ends come again only of a text that goes round.
_LINE_CHARS, _MOST_OPENINGS, _MOST_ENDS = 160, 3, 16
# Of a repeat; of one from inside a word (a URL, base64); of one in the unfinished line that stands nowhere else.
_TELLING_CHARS, _TELLING_WORDS, _INSIDE_WORD_CHARS, _RARE_CHARS = 12, 3, 24, 6
_ROW = re.compile(r"[ \t>]*(?:\||[-*+] |\d+[.)] )")
_GOES_ON = r"(?:continu|resum|picking up|fortsetz|weiter|reprends|[继接]续|接着)"
_AGREES = (
    r"(?:sure|certainly|absolutely|of course|ok(?:ay)?|alright|understood|got it|sorry|gerne|natürlich|bien sûr|claro"
    r"|por supuesto|好的)\b\W*"
)
_SAYS = (
    r"(?:(?:i['’]ll|i will|let me|let['’]s) (?:continue|resume)|here(?:['’]s| is) the (?:rest|continuation)|the rest of"
    r"|(?:continu|resum|pick)ing)\b(?=[^:：]* (?:where|answer|response|message|text)\b|\W*(?:[:：]|$))"
    r"|ich fahre\b.*\bfort\b|hier (?:ist die fortsetzung|geht es weiter)\b|je (?:continue|reprends)\b"
    r"|voici la suite\b|continúo\b|aquí está la continuación\b|以下是续写|接着上文|我?继续\W*$"
)
# What only agrees or speaks of going on, like an ellipsis, is taken out if a repeat follows.
_ANNOUNCEMENT = re.compile(
    rf"[*_(\[（]*(?:(?P<says>(?:{_AGREES})?(?:{_SAYS})|{_AGREES}[^:：]*?{_GOES_ON})|{_AGREES}|[^:：]*?{_GOES_ON})"
    r"[^:：]*[:：]?|\.{3,}|…",
    re.IGNORECASE,
)
# A longer sentence may be the answer's, and one word a program's output.
_SAYS_NO_MORE = re.compile(r"[^!-~].*[:：…][*_)\]）]*\Z|\bwhere I\b|\A(?:\S+ ){1,2}\S+\Z")
_OPENING_SIGNS = frozenset(":：\"'“„«‹「『(（[`>")


class Joiner:
    """The one answer that a client sees, made of a partial answer and its continuation.

    The first line is held back (after an announcement the next one), then whatever repeats the partial. Once that is
    decided, everything passes through untouched.

    Args:
        partial: the visible text sent so far, without our notices.
        shown: the end of the partial with which a server was told to go on itself; "" if the model was asked to.
        is_trusted: the server has shown that it does, so that nothing but an echo of `shown` is taken out.
        is_settled: the partial was cut by `settled_length`, so that the next character of the answer is no white space.
    """

    # More than 12 attributes: the beginning of a continuation comes in pieces, and each is a fact known of it so far.
    def __init__(self, partial: str, *, shown: str = "", is_trusted: bool = False, is_settled: bool = True) -> None:
        # The continuation begins with something new, or with another part of the answer or words about it.
        self.opening: Literal["undecided", "new", "anew"] = "undecided" if partial else "new"
        # What was taken out: shown text that the server has sent back; all else but white space and tags.
        self.echoed_text = self.removed_text = ""
        self._ending = Ending(partial)
        # In a text that repeats itself an echo looks like the next round.
        echo = _dense(shown)
        is_telling = len(echo) >= _LEAST_ECHO_CHARS and not self._ending.repeats_itself(echo)
        self._echo = echo if is_telling else ""
        self._is_trusted, self._is_settled, self._is_open_thought = is_trusted, is_settled, open_think(partial)
        self._drops_space = self._ended = self._is_complete = self.may_be_echo = False
        # What is held, and the same without white space.
        self._text = self._read = ""
        # Where it may start: in the held text, and in what is read of it.
        self._starts: list[tuple[int, int]] = []

    def feed(self, delta: str) -> str:
        """Returns the text that can be sent now that `delta` has arrived; may be empty."""
        if self.opening == "undecided":
            self._text += delta
            self._read += _dense(delta)
            if not (self._ended or delta.strip()) or not (self._is_past_thought() and self._is_past_repeat()):
                return ""
            delta, self._text = self._text, ""
        if self._drops_space:
            delta = delta.lstrip()
            self._drops_space = not delta
        return delta

    def finish(self, *, is_complete: bool = False) -> str:
        """Returns the text that is left when the continuation has ended by itself.

        Not called before a further restart, which brings the held text again. If it `is_complete`, a reasoning block
        that was never closed may hold the answer, and none of it is lost.
        """
        self._ended, self._is_complete = True, is_complete
        return self.feed("")

    def _hold(self, text: str) -> None:
        self._text, self._read = text, _dense(text)

    def _is_past_thought(self) -> bool:
        if self._is_trusted or not self._read.startswith(THINK_START):
            return self._is_trusted or self._ended or not THINK_START.startswith(self._read)
        inside = self._text.lstrip().removeprefix(THINK_START)
        if self._is_open_thought:
            self._hold(inside)
            return True
        thought, tag, behind = inside.partition(THINK_END)
        is_answer = not tag and self._is_complete
        self.removed_text = "" if is_answer else thought
        if tag or self._ended:
            self._hold(thought if is_answer else behind)
        return bool(tag) or self._is_complete

    def _is_past_repeat(self) -> bool:
        text, read, ending = self._text, self._read, self._ending
        if not self._starts:
            starts = [0] if self._is_trusted else _starts(text, ending, ended=self._ended)
            self._starts = [(start, len(_dense(text[:start]))) for start in starts]
        # Once what was read says another thing than the partial, or than what was shown, more text changes nothing.
        self.may_be_echo = self._echo.startswith(read)
        may_repeat = self.may_be_echo if self._is_trusted else any(read[at:] in ending.dense for _, at in self._starts)
        if not self._starts or (may_repeat and not self._ended):
            return False
        # A later start is taken for the repeat that follows it.
        repeats = [(start, self._repeated_chars(text[start:])) for start, _ in reversed(self._starts)]
        start, repeated_chars = next((each for each in repeats if each[1]), (self._starts[0][0], 0))
        new = start + repeated_chars
        begins_alike = read[:_LEAST_START_CHARS] == self._echo[:_LEAST_START_CHARS] != ""
        if is_echo := self._echo == _dense(text[:new]) != "":
            self.echoed_text = text[:new]
        else:
            self.removed_text += text[:new]
        self.opening = "anew" if not is_echo and (text[:new].strip() or begins_alike) else "new"
        self._text = text[new:]
        # A settled partial ends with the white space of the seam, or none can follow; else that may go on.
        is_certain = not self._is_trusted and not repeated_chars and (new > 0 or is_no_space(ending.last_char))
        self._drops_space = (ending.last_char.isspace() and self._is_settled) or is_certain
        if ending.blank and not (self._is_settled or self._is_trusted):
            self._text = ending.without_blank(self._text, is_repeated=repeated_chars > 0)
        return True

    def _repeated_chars(self, text: str) -> int:
        if not self._is_trusted:
            return self._ending.repeated_chars(text)
        return _place_behind(text, len(self._echo)) if self._echo and self._read.startswith(self._echo) else 0


def _starts(text: str, ending: Ending, *, ended: bool) -> list[int]:
    """The places where a continuation may start after its opening, ascending; [] while a first line is incomplete.

    Before the first place all goes. Before a later one it goes if the text from there on repeats the partial's end.
    """
    starts, start = [0], 0
    for _ in range(_MOST_OPENINGS):
        ahead = text[start:].lstrip()
        line, newline, _ = ahead.partition("\n")
        if not (ended or newline or len(line) >= _LINE_CHARS):
            return []
        chars, is_certain = _opening(line, ending)
        if not chars:
            break
        start = len(text) - len(ahead) + chars
        starts = [start] if is_certain and len(starts) == 1 else [*starts, start]
    return starts


def _opening(line: str, ending: Ending) -> tuple[int, bool]:
    """The length of what may be left out of a first line, 0 for nothing, and if it is certain to be no answer."""
    opener = FENCE.fullmatch(line[:_LINE_CHARS])
    if opener is not None and ending.fence is not None:
        return len(line), fence_language(opener["info"]) == ending.fence != ""
    said = _ANNOUNCEMENT.match(line[:_LINE_CHARS])
    is_alone = said is not None and said.end() == len(line.rstrip())
    if said is None or line[0].islower() or not (is_alone or said[0].endswith((":", "：", "…", "..."))):
        return 0, False
    # On one line with its announcement, new text is only believed to be new if no sentence could start there.
    may_say = said["says"] is not None and not ending.invites_speech and (is_alone or ending.is_inside_sentence)
    return said.end(), may_say and _SAYS_NO_MORE.search(said[0].strip()) is not None


class Ending:
    """The end of a partial answer; tells which of its ends are a restart when they come again.

    The longest telling end counts: 12 characters without white space (letters of scripts without spaces count two) or
    3 words with letters, from a word's start (inside one 24); or, of an unfinished line but a table's, all its words
    or, if the answer doubles no words, 6 characters that stand nowhere else. It stays if the partial shows that it
    comes repeatedly, as a block or as rows of a table or list. So a first rightful repeat is removed, and a restart of
    a repeated block is kept.
    """

    def __init__(self, partial: str) -> None:
        self.dense = _dense(partial)
        self.fence = open_fence(partial)
        self.last_char, self.blank = partial[-1:], partial[len(partial.rstrip()) :]
        self._partial, self._last_line = partial, partial[partial.rfind("\n") + 1 :]
        last = self.dense[-1:]
        self.invites_speech = last in _OPENING_SIGNS and self.fence is None
        self.is_inside_sentence = (last.isalnum() or last == ",") and self._last_line.strip() != ""

    def repeated_chars(self, text: str) -> int:
        """Returns how much of the beginning of `text`, in its characters, says the end of the partial again."""
        read, dense = _dense(text), self.dense
        ends, begins = range(max(len(dense) - len(read), 0), len(dense)), read.startswith
        # Most are other ones from their beginning on.
        same = (at for at in ends if begins(dense[at : at + _LEAST_START_CHARS]) and begins(dense[at:]))
        for start in islice(same, _MOST_ENDS):
            block, end = dense[start:], _place_behind(text, len(dense) - start)
            if self._is_telling(start, text[end : end + 1]):
                if self.repeats_itself(block) or block + block in dense:
                    return 0
                if not self._is_row(block):
                    return end
        # A line of code that begins again, with its own indentation.
        again = text.lstrip("\n")
        if self._last_line[:2].isspace() and self._last_line.strip() and again.startswith(self._last_line):
            return len(text) - len(again) + len(self._last_line)
        return 0

    def without_blank(self, text: str, *, is_repeated: bool) -> str:
        """Returns `text` without the white space at the partial's end, if it begins with that again, or a line does."""
        begun = text[: len(text) - len(text.lstrip())]
        if is_repeated:
            return text.removeprefix(self.blank)
        return text.removeprefix(begun) if begun in (self.blank, self.blank.rpartition("\n")[2]) else text

    def repeats_itself(self, block: str) -> bool:
        """Returns True if the partial goes round by `block`, its end without white space."""
        return (block + block).find(block, 1) < len(block) or self.dense.endswith(block + block)

    def _is_row(self, block: str) -> bool:
        """Rows have come twice in a row, and a repeat of `block` would make another one of them."""
        last_line = _dense(self._last_line)
        if len(last_line) >= _RARE_CHARS and self.dense.endswith(last_line + block):
            return True
        lines = [line for line in self._partial.split("\n") if line.strip()]
        rows = [_dense(line) if _ROW.match(line) else "" for line in lines]
        if not rows[-1] or not any(row == after and len(row) >= _RARE_CHARS for row, after in pairwise(rows)):
            return False
        if not last_line:
            return len(block) == len(rows[-1])
        return len(rows[-1]) < len(block) < len(rows[-1]) + len(rows[-2])

    def _is_telling(self, start: int, follower: str) -> bool:
        """A repeat of `dense[start:]`, with `follower` after it ("" for nothing), can hardly be chance."""
        place, chars = _place_behind(self._partial, start + 1) - 1, len(self.dense) - start
        block = self._partial[place:]
        # "the cat" is not repeated by "the cats".
        if block[-1].isspace() and _is_word(self.dense[-1]) and _is_word(follower):
            return False
        if place > 0 and _is_word(self._partial[place - 1]) and _is_word(block[0]):
            return chars >= _INSIDE_WORD_CHARS
        wide = sum(is_no_space(char) and char.isalpha() for char in self.dense[start : start + _TELLING_CHARS])
        if chars + wide >= _TELLING_CHARS or sum(map(_has_letter, block.split())) >= _TELLING_WORDS:
            return True
        if len(block) > len(self._last_line) or self._last_line.lstrip()[:1] == "|" or follower.strip():
            return False
        is_line = chars == len(_dense(self._last_line)) and len(block.split()) > 1
        pairs = pairwise(self._partial.split())
        doubled = (word for word, after in pairs if word == after and len(word) >= _RARE_CHARS)
        is_long = is_line or (chars >= _RARE_CHARS and not any(map(_has_letter, doubled)))
        return is_long and _has_letter(block) and self.dense.find(self.dense[start:]) == start


def _dense(text: str) -> str:
    return "".join(text.split())


def _place_behind(text: str, chars: int) -> int:
    """The place in `text` after its first `chars` characters that are no white space."""
    for run in re.finditer(r"\S+", text):
        if chars <= len(run[0]):
            return run.start() + chars
        chars -= len(run[0])
    return len(text)


def _has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))


def _is_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and not is_no_space(char)
