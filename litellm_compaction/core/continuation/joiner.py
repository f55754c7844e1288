"""Joins a partial answer and its continuation: no word lost, none twice.

Called by the relay, which sends what `Joiner.feed` returns. The beginning of a continuation loses a reasoning block
(only its tag if the partial ends inside one), an announcement ("Sure, continuing from where I left off:"), a reopened
fence, an ellipsis for the cut, and a repeat of the partial's end. Each way in which a model starts again (last words,
line, paragraph, everything) is the same event: the continuation begins with an end of the partial. White space is not
compared, since models lose and collapse it at the seam.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

from litellm_compaction.core.continuation.text import (
    FENCE,
    THINK_END,
    THINK_START,
    fence_language,
    is_no_space,
    open_fence,
    open_think,
)

# How a continuation begins: not known yet; with something new; with what the server was told to go on with, sent back;
# with another part of the answer, or words about it.
Opening: TypeAlias = Literal["undecided", "new", "echo", "anew"]

# A shorter echo could be the answer's own words; so could a shorter beginning like that of the shown text.
_LEAST_ECHO_CHARS, _LEAST_START_CHARS = 12, 24
# As much of the last word as `settled_length` may have sent before it cut a word in two.
_LONG_WORD_CHARS = 48
# Of a beginning the rules read no more: a server may send a megabyte of white space, one blank in each delta.
_READ_CHARS, _LINE_CHARS = 4_000, 160
# Of a partial answer that does not come again as a whole, from its start or from a place that was shown.
_SEARCHED_CHARS = 8_000

_TELLING_CHARS, _TELLING_WORDS = 12, 3
# Of an end that starts inside a word (a URL, base64).
_INSIDE_WORD_CHARS = 24
# Of an end that stands nowhere else, inside the unfinished last line.
_RARE_CHARS = 6
_ROW = re.compile(r"[ \t>]*(?:\||[-*+] |\d+[.)] )")


# Words of announcements: of those that agree, that say what is done, and all others.
_ANNOUNCING = """
sure certainly okay ok alright absolutely understood sorry gerne natürlich klar bien claro 好

continuing continue continued continuation resuming resume proceeding picking rest remainder remaining
fort fortsetzung weiter suite poursuis reprends continúo continuo continuación sigo resto 继 续 接 剩

of course got it thing my me here is s the i ll will let m am just now exactly right from at where we you was left
off stopped ended cut interrupted up with in answer response message text part previous last point
ich fahre setze mache dort da genau wo aufgehört habe hier geht es ist kommt folgt die der antwort
sûr d accord je j là où me suis arrêté voici la le de ma réponse
por supuesto desde donde quedé aquí está tienes el mi respuesta
的 我 将 会 来 现 在 从 上 文 次 停 断 处 下 以 是 为 写 内 容 着 后 部 分"""
_ASSENTS, _GOING_ON, _OTHERS = (frozenset(words.split()) for words in _ANNOUNCING.split("\n\n"))
_WORDS = _ASSENTS | _GOING_ON | _OTHERS
_WORD = re.compile(r"[^\W\d_]+")
# Signs that may open a line of an answer, but not an announcement.
_FIRST_WORD = re.compile(r"[*_(\[（]*([^\W\d_]+)")
_COLON_INSIDE = re.compile(r"[:：](?=.)")
_OPENING_SIGNS = frozenset(":：\"'“„«‹「『(（[`>")
_ELLIPSIS = re.compile(r"(?:\.{3,}|…+)[ \t]*")


class Joiner:
    """The one answer that a client sees, made of a partial answer and its continuation.

    The first line is held back (after an announcement the next one), then whatever repeats the partial. It is decided
    once; then everything passes through untouched.

    Args:
        partial: the visible text sent so far, without our notices, cut by `settled_length`: the next character of the
            answer is not white space.
        shown: the end of the partial with which a server was told to go on itself; "" if the model was asked to.
        is_trusted: the server has shown that it does, so that nothing but an echo of `shown` is taken out.

    Attributes:
        opening: how the continuation begins.
        echoed_text: the part of the shown text that the server has sent back; taken out as well.
    """

    # Many attributes: the beginning of a continuation comes in pieces, and each is a fact known of it so far.
    def __init__(self, partial: str, *, shown: str = "", is_trusted: bool = False) -> None:
        self.opening: Opening = "undecided" if partial else "new"
        self.echoed_text = ""
        self._ending = Ending(partial)
        self._is_trusted = is_trusted
        self._is_open_thought = open_think(partial)
        self._may_think = True
        self._sent_end = ""
        self._removed: list[str] = []
        self._thought_end = ""
        self._held: list[str] = []
        self._held_chars = 0
        # Of what is held, without white space.
        self._read = ""
        # Where it may start: in the held text, and in what is read of it.
        self._starts: list[tuple[int, int]] = []
        self._ended = False
        # In a text that repeats itself an echo looks like the next round.
        echo = _dense(shown)
        is_telling = len(echo) >= _LEAST_ECHO_CHARS and not self._ending.repeats_itself(echo)
        self._echo = echo if is_telling else ""
        self._stage = self._pass if not partial else self._read_echo if self._echo else self._behind_echo

    @property
    def removed_text(self) -> str:
        """The other text that was taken out of the continuation so far, but for white space and tags."""
        return "".join(self._removed)

    def feed(self, delta: str) -> str:
        """Returns the text that can be sent now that `delta` has arrived; may be empty."""
        text = self._stage(delta)
        if self._is_open_thought and text:
            seen = self._sent_end + text
            self._is_open_thought = THINK_END not in seen
            self._sent_end = seen[-len(THINK_END) + 1 :]
        return text

    def finish(self, *, is_complete: bool = False) -> str:
        """Returns the text that is left when the continuation has ended by itself; closes an open reasoning block.

        Not called before a further restart, which brings the held text again. If it `is_complete`, a reasoning block
        that was never closed may hold the answer, and none of it is lost.
        """
        self._ended = True
        rest = self.feed("")
        if is_complete and self._stage == self._drop_thought:
            rest = self.removed_text
            self._removed.clear()
        self._stage = self._pass
        if self._is_open_thought:
            self._is_open_thought = False
            rest += f"\n{THINK_END}\n"
        return rest

    def _hold(self, delta: str) -> bool:
        """Holds a delta; returns True if there is something new to read in it."""
        self._held.append(delta)
        self._held_chars += len(delta)
        self._read += _dense(delta)
        return bool(delta.strip()) or self._ended or self._held_chars >= _READ_CHARS

    def _taken(self) -> str:
        text = "".join(self._held)
        self._held, self._held_chars, self._read = [], 0, ""
        return text

    def _read_echo(self, delta: str) -> str:
        self._hold(delta)
        if self._read.startswith(self._echo):
            text = self._taken()
            end = _place_behind(text, len(self._echo))
            self.opening, self.echoed_text = "echo", text[:end]
            return self._behind_echo(text[end:])
        if self._echo.startswith(self._read) and not self._ended:
            return ""
        # The text matched so far is judged like any other repeat.
        return self._behind_echo(self._taken())

    def _behind_echo(self, delta: str) -> str:
        self._stage = self._decide
        if self._is_trusted:
            self.opening = "echo" if self.echoed_text else "new"
            self._stage = self._skip_space if self._ending.tail[-1].isspace() else self._pass
        return self._stage(delta)

    def _drop_thought(self, delta: str) -> str:
        thought, tag, rest = (self._thought_end + delta).partition(THINK_END)
        # The end may be the beginning of the tag.
        settled = len(thought) if tag or self._ended else max(len(thought) - len(THINK_END) + 1, 0)
        self._removed.append(thought[:settled])
        self._thought_end = thought[settled:]
        self._stage = self._decide if tag else self._drop_thought
        return self._stage(rest) if tag else ""

    def _decide(self, delta: str) -> str:
        is_new = self._hold(delta)
        if not self._starts and is_new:
            held = "".join(self._held)
            head = held[:_READ_CHARS]
            if self._may_think and head.lstrip().startswith(THINK_START):
                self._may_think = False
                self._stage = self._decide if self._is_open_thought else self._drop_thought
                return self._stage(self._taken().lstrip()[len(THINK_START) :])
            starts = _starts(head, self._ending, ended=self._ended or len(head) == _READ_CHARS)
            self._starts = [(start, len(_dense(held[:start]))) for start in starts]
        # Once what was read says another thing than the partial, more text changes nothing.
        may_repeat = any(self._read[begin:] in self._ending.dense for _, begin in self._starts)
        if not self._starts or (may_repeat and not self._ended):
            return ""
        begins_like_shown = self._read[:_LEAST_START_CHARS] == self._echo[:_LEAST_START_CHARS] != ""
        text = self._taken()
        new, repeated_chars = self._first_new(text)
        if (begins_like_shown and self.opening != "echo") or text[:new].strip():
            self.opening = "anew"
        elif self.opening == "undecided":
            self.opening = "new"
        self._removed.append(text[:new])
        self._stage = self._skip_space if self._drops_space(new, repeated_chars) else self._pass
        return self._stage(text[new:])

    def _first_new(self, text: str) -> tuple[int, int]:
        """The start of the new text, and the length of the repeat before it; a later start is taken for its repeat."""
        for start, _ in reversed(self._starts):
            if repeated_chars := self._ending.repeated_chars(text[start:]):
                return start + repeated_chars, repeated_chars
        return self._starts[0][0], 0

    def _drops_space(self, new: int, repeated_chars: int) -> bool:
        """The partial ends with the white space of the seam, or by `settled_length` none can follow."""
        tail = self._ending.tail
        if tail[-1].isspace():
            return True
        if repeated_chars:
            return False
        is_cut_word = len(tail) >= _LONG_WORD_CHARS and not any(map(str.isspace, tail[-_LONG_WORD_CHARS:]))
        return new > 0 or is_cut_word or is_no_space(tail[-1])

    def _skip_space(self, delta: str) -> str:
        rest = delta.lstrip()
        if rest:
            self._stage = self._pass
        return rest

    def _pass(self, delta: str) -> str:
        return delta


def _starts(head: str, ending: Ending, *, ended: bool) -> list[int]:
    """The places where a continuation may start after its opening, ascending; [] while a first line is incomplete.

    Before the first place all goes. Before a later one it goes if the text from there on repeats the partial's end.
    """
    starts = [0]
    position = 0
    for rule in (_announcement, _announcement, _fence, _ellipsis):
        rest = head[position:].lstrip()
        line, newline, _ = rest.partition("\n")
        if not ended and not newline and len(line) < _LINE_CHARS:
            return []
        for chars, is_certain in rule(line[:_LINE_CHARS], len(line) <= _LINE_CHARS, ending):
            position = len(head) - len(rest) + chars
            starts = [position] if is_certain and len(starts) == 1 else [*starts, position]
    return starts


# (first line of the rest, if that is all of it, the partial) -> the lengths with which it may be left out, ascending,
# and if each is certain to be none of the answer.
_Parts: TypeAlias = Iterator[tuple[int, bool]]


def _announcement(line: str, is_whole: bool, ending: Ending) -> _Parts:
    """A line whose words are all known, or that begins with such a word and is followed by a repeat."""
    first = _FIRST_WORD.match(line)
    if first is None or (ending.is_inside_sentence and line[0].islower()):
        return
    is_known = not (ending.invites_speech or line.strip() in ending.tail)
    colon = _COLON_INSIDE.search(line)
    if colon is not None and _may_announce(before := line[: colon.end()]):
        # On one line with its announcement, new text is only believed to be new if no sentence could start there.
        yield colon.end(), is_known and ending.is_inside_sentence and _announces(before)
    if is_whole and _may_announce(line):
        yield len(line), is_known and _announces(line)


def _fence(line: str, is_whole: bool, ending: Ending) -> _Parts:
    opener = FENCE.fullmatch(line)
    if is_whole and opener is not None and ending.fence is not None and line[0] in "`~":
        language = fence_language(opener["info"])
        yield len(line), bool(language) and language == ending.fence


def _ellipsis(line: str, is_whole: bool, ending: Ending) -> _Parts:
    if found := _ELLIPSIS.match(line):
        follower = line[found.end() :][:1]
        goes_on = follower.islower() or (bool(follower) and is_no_space(follower) and follower.isalpha())
        yield found.end(), ending.is_inside_sentence and ending.fence is None and goes_on


def _words(line: str) -> list[str]:
    """The words of a line in lower case; of a script without spaces each character is one."""
    words = _WORD.findall(line.lower())
    return [part for word in words for part in (word if is_no_space(word[0]) else (word,))]


def _may_announce(line: str) -> bool:
    """Returns True if a line speaks of going on: not enough to drop it, unless a repeat follows it."""
    words = _words(line)
    return words[0] in _ASSENTS or (words[0] in _WORDS and not _GOING_ON.isdisjoint(words))


def _announces(line: str) -> bool:
    """Returns True if a line says nothing but that the answer goes on here; one word may be a program's output."""
    words = _words(line)
    return len(words) > 1 and _WORDS.issuperset(words) and not _GOING_ON.isdisjoint(words)


class Ending:
    """The end of a partial answer; tells which of its ends are a restart when they come again.

    The longest telling end counts: 12 characters without white space (letters of scripts without spaces count two) or
    3 words with letters, from a word's start (inside one 24); or inside the unfinished last line, but for a table's,
    its words, 2 or more, or 6 characters, if they stand nowhere else. It stays if the partial shows that it comes
    repeatedly: twice in a row, or as rows of a table or list that have come twice in a row.

    Ambiguous by nature: the *first* time that a block is rightly repeated back to back and the cut falls between the
    two, it is removed; a restart of a block that the partial has repeated is kept.
    """

    def __init__(self, partial: str) -> None:
        self.dense = _dense(partial)
        self.tail = partial[-_SEARCHED_CHARS:]
        self.fence = open_fence(partial)
        written = self.tail.rstrip()
        last = written[-1:]
        self.invites_speech = last in _OPENING_SIGNS and self.fence is None
        self.is_inside_sentence = "\n" not in self.tail[len(written) :] and (last.isalnum() or last == ",")
        self._places = [place for place, char in enumerate(self.tail) if not char.isspace()]
        self._last_line = partial[partial.rfind("\n") + 1 :]

    def repeated_chars(self, text: str) -> int:
        """Returns how much of the beginning of `text`, in its characters, says the end of the partial again."""
        read = _dense(text)
        searched = min(len(read), len(self._places))
        # A longer end is looked for by its beginning.
        longer = self.dense.find(read[:_SEARCHED_CHARS])
        for start in (max(longer, 0), *range(len(self.dense) - searched, len(self.dense))):
            block = self.dense[start:]
            if block[:1] != read[:1] or not read.startswith(block):
                continue
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
        """Returns True if the partial goes round by `block`, its end without white space."""
        return _is_power(block) or self.dense.endswith(block + block)

    @cached_property
    def _doubles_words(self) -> bool:
        words = self.tail.split()
        return any(word == after and len(word) >= _RARE_CHARS and _has_letter(word) for word, after in pairwise(words))

    def _is_row(self, block: str) -> bool:
        """Rows have come twice in a row, and a repeat of `block` would make another one of them."""
        last_line = _dense(self._last_line)
        if len(last_line) >= _RARE_CHARS and self.dense.endswith(last_line + block):
            return True
        lines = [line for line in self.tail.split("\n") if line.strip()]
        rows = [_dense(line) if _ROW.match(line) else "" for line in lines]
        if not rows[-1] or not any(row == after and len(row) >= _RARE_CHARS for row, after in pairwise(rows)):
            return False
        if not last_line:
            return len(block) == len(rows[-1])
        return len(rows[-1]) < len(block) < len(rows[-1]) + len(rows[-2])

    def _is_telling(self, start: int, follower: str) -> bool:
        """A repeat of `dense[start:]`, with `follower` after it ("" for nothing), can hardly be chance."""
        chars = len(self.dense) - start
        if chars > len(self._places):
            return True
        place = self._places[-chars]
        block = self.tail[place:]
        # "the cat" is not repeated by "the cats".
        if block[-1].isspace() and _is_word(self.dense[-1]) and _is_word(follower):
            return False
        if place > 0 and _is_word(self.tail[place - 1]) and _is_word(block[0]):
            return chars >= _INSIDE_WORD_CHARS
        wide = sum(is_no_space(char) and char.isalpha() for char in block)
        if chars + wide >= _TELLING_CHARS or sum(map(_has_letter, block.split())) >= _TELLING_WORDS:
            return True
        if len(block) > len(self._last_line) or self._last_line.lstrip()[:1] == "|" or follower.strip():
            return False
        is_line = chars == len(_dense(self._last_line)) and len(block.split()) > 1
        is_long = is_line or (chars >= _RARE_CHARS and not self._doubles_words)
        return is_long and _has_letter(block) and self.dense.find(self.dense[start:]) == start


def _dense(text: str) -> str:
    return "".join(text.split())


def _is_power(text: str) -> bool:
    return (text + text).find(text, 1) < len(text)


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
