"""What of a continuation is new: joins a partial answer and what the model was made to add to it.

Called by the restart loop, which sends what `Joiner.feed` returns: no word lost, none twice, legitimate repetition
stays.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from litellm_compaction.core.continuation.overlap import SEARCHED_CHARS, Ending, Overlap, repeats_itself
from litellm_compaction.core.continuation.preamble import read_preamble, scene_of
from litellm_compaction.core.continuation.text import (
    THINK_END,
    THINK_START,
    is_no_space,
    open_fence,
    open_think,
    settled_length,
    unstopped_length,
)

__all__ = ["SEARCHED_CHARS", "Joiner", "open_fence", "open_think", "settled_length", "unstopped_length"]

# How a continuation begins: not known yet; with something new; with all that the server was told to go on with, which
# some servers send back before the model's own words; with another part of the answer, or with words about it.
Opening: TypeAlias = Literal["undecided", "new", "echo", "anew"]

# A shorter echo could be the answer's own words; so could a shorter beginning like that of what was shown.
_LEAST_ECHO_CHARS = 12
_LEAST_START_CHARS = 24
# As much of the last word as `settled_length` may have sent before it cut a word in two.
_LONG_WORD_CHARS = 48
# Of white space in a row no rule reads more than a line's length, and of a beginning none more than a few lines.
_READ_SPACE_CHARS = 160
_READ_CHARS = 4_000
_RUN = re.compile(r"\s+|\S+")


class _Held:
    """The beginning of a continuation that nobody can tell yet, read again with each delta.

    Attributes:
        brief: what rules read of it. A server may send a megabyte of white space, one blank in each delta.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._space_chars = 0
        # Where in `brief` white space is left out, and how much.
        self._gaps: list[tuple[int, int]] = []
        self.brief = ""

    def add(self, delta: str) -> bool:
        """Takes a delta; whether `brief` says more than before."""
        self._pieces.append(delta)
        known_chars = len(self.brief)
        for run in _RUN.finditer(delta):
            if len(self.brief) >= _READ_CHARS:
                break
            self._read(run.group())
        return len(self.brief) > known_chars

    def _read(self, run: str) -> None:
        if not run.isspace():
            self._space_chars = 0
            self.brief += run
            return
        read = run[: max(_READ_SPACE_CHARS - self._space_chars, 0)]
        self.brief += read
        self._space_chars += len(run)
        if len(read) < len(run):
            place, chars = len(self.brief), len(run) - len(read)
            if self._gaps and self._gaps[-1][0] == place:
                chars += self._gaps.pop()[1]
            self._gaps.append((place, chars))

    def place(self, index: int) -> int:
        """Where in the whole text a place of `brief` is."""
        return index + sum(chars for place, chars in self._gaps if place <= index)

    @property
    def text(self) -> str:
        """All that was added."""
        return "".join(self._pieces)


class Joiner:
    """The one answer that a client sees, made of a partial answer and its continuation.

    Removed from the beginning of the continuation: a reasoning block (unless the partial ends inside one, then only
    its tag), a role label, an announcement, a reopened fence, an ellipsis for the cut (`preamble`), what repeats the
    end of the partial (`overlap`), and white space that the partial already ends with. What stays ambiguous is said at
    `overlap.Ending` and at `preamble`.

    Text is held back only while it is undecided: the first line, of at most 160 characters, if it opens like an
    announcement (two of them at most), and for as long as the continuation repeats the partial word by word.
    Then everything passes through untouched.
    """

    def __init__(self, partial: str, *, shown: str = "", is_trusted: bool = False) -> None:
        """Prepares to continue `partial`.

        Args:
            partial: the visible text sent so far, without our notices, cut by `settled_length`: the next character
                of the answer is not white space. The model should be shown at most its last `SEARCHED_CHARS`
                characters or all of it, so that a repeat from the beginning of what it was shown is found.
            shown: the end of the partial with which a server was told to go on itself; "" where the model was asked to.
            is_trusted: the server has shown that it does, so that nothing but an echo of `shown` is taken out.
        """
        self._partial = partial
        self._scene = scene_of(partial)
        self._continues_thought = open_think(partial)
        self._is_open_thought = self._continues_thought
        self._sent_end = ""
        self._removed: list[str] = []
        self._held = _Held()
        self._thought_end = ""
        self._pieces: list[str] = []
        self._starts: list[tuple[int, Overlap]] = []
        self._ended = False
        self._opening: Opening = "undecided" if partial else "new"
        self._left_out = self._echoed = ""
        # Of a text that repeats itself nobody can tell an echo from the next round.
        dense = "".join(shown.split())
        is_telling = len(dense) >= _LEAST_ECHO_CHARS and not repeats_itself(partial, dense)
        self._echo = dense if is_telling else ""
        self._echoed_chars = 0
        self._is_trusted = is_trusted
        first = self._read_echo if self._echo else self._behind_echo
        self._stage = first if partial else self._pass

    @property
    def opening(self) -> Opening:
        """How the continuation begins."""
        return self._opening

    @property
    def echoed_text(self) -> str:
        """What the server has sent back of what it was shown; taken out as well."""
        return self._echoed

    @property
    def removed_text(self) -> str:
        """What else was taken out of the continuation so far, but for white space and tags."""
        return "".join(self._removed) + self._left_out

    @property
    def removed_thinking(self) -> str:
        """The reasoning taken out of the continuation so far, without its tags."""
        return "".join(self._removed)

    def feed(self, delta: str) -> str:
        """What can be sent now that `delta` has arrived; may be empty."""
        return self._noted(self._stage(delta))

    def finish(self, *, is_complete: bool = False) -> str:
        """What remains to be sent when the continuation has ended by itself; closes an open reasoning block.

        Not called before a further restart: what is held then was never sent, and the next continuation brings it.

        Args:
            is_complete: whether the model says that this was all: of a reasoning block that it opened and never closed
                nobody can tell where the answer begins, and none of it is lost.
        """
        self._ended = True
        is_unclosed = self._stage == self._drop_thought
        rest = self._noted(self._stage(""))
        if is_complete and is_unclosed:
            text = "".join(self._removed)
            self._removed.clear()
            self._stage = self._read_preamble
            rest = self._noted(self._stage(text))
        self._stage = self._pass
        if not self._is_open_thought:
            return rest
        self._is_open_thought = False
        return f"{rest}\n{THINK_END}\n"

    def _noted(self, text: str) -> str:
        if self._is_open_thought and text:
            seen = self._sent_end + text
            self._is_open_thought = THINK_END not in seen
            self._sent_end = seen[-len(THINK_END) + 1 :]
        return text

    def _read_echo(self, delta: str) -> str:
        for index, char in enumerate(delta):
            if char.isspace():
                continue
            if char != self._echo[self._echoed_chars]:
                break
            self._echoed_chars += 1
            if self._echoed_chars == len(self._echo):
                self._opening, self._echoed = "echo", self._taken() + delta[: index + 1]
                return self._behind_echo(delta[index + 1 :])
        else:
            if not self._ended:
                self._held.add(delta)
                return ""
        # What has matched so far is judged like any other repeat.
        return self._behind_echo(self._taken() + delta)

    def _behind_echo(self, delta: str) -> str:
        if not self._is_trusted:
            self._stage = self._read_tag
        else:
            self._opening = "echo" if self._echoed else "new"
            self._stage = self._skip_space if self._partial[-1].isspace() else self._pass
        return self._stage(delta)

    def _taken(self) -> str:
        """What was held; nothing is any more."""
        held, self._held = self._held, _Held()
        return held.text

    def _read_tag(self, delta: str) -> str:
        if not self._held.add(delta) and not self._ended:
            return ""
        head = self._held.brief.lstrip()
        if not self._ended and len(head) < len(THINK_START) and THINK_START.startswith(head):
            return ""
        text = self._taken()
        self._stage = self._read_preamble
        if head.startswith(THINK_START):
            text = text.lstrip()[len(THINK_START) :]
            if not self._continues_thought:
                self._stage = self._drop_thought
        return self._stage(text)

    def _drop_thought(self, delta: str) -> str:
        thought, tag, rest = (self._thought_end + delta).partition(THINK_END)
        if tag:
            self._removed.append(thought)
            self._stage = self._read_preamble
            return self._stage(rest)
        kept = 0 if self._ended else len(THINK_END) - 1
        settled = max(len(thought) - kept, 0)
        self._removed.append(thought[:settled])
        self._thought_end = thought[settled:]
        return ""

    def _read_preamble(self, delta: str) -> str:
        held = self._held
        if not held.add(delta) and not self._ended:
            return ""
        preamble = read_preamble(held.brief, self._scene, ended=self._ended)
        if preamble is None:
            return ""
        ending = Ending(self._partial)
        starts = (preamble.certain_chars, *preamble.claimed_chars)
        self._starts = [(held.place(start), Overlap(ending)) for start in starts]
        text = self._taken()
        for start, overlap in self._starts:
            overlap.feed(text[start:])
        self._pieces = [text]
        self._stage = self._find_overlap
        return self._find_overlap("")

    def _find_overlap(self, delta: str) -> str:
        self._pieces.append(delta)
        for _, overlap in self._starts:
            overlap.feed(delta)
            if self._ended:
                overlap.settle()
        if not all(overlap.decided for _, overlap in self._starts):
            return ""
        text = "".join(self._pieces)
        self._pieces = []
        new = self._first_new(text)
        begins_like_shown = self._opening != "echo" and self._echoed_chars >= _LEAST_START_CHARS
        if begins_like_shown or text[:new].strip():
            self._opening = "anew"
        elif self._opening == "undecided":
            self._opening = "new"
        self._left_out = text[:new]
        self._stage = self._skip_space if self._drops_space(new) else self._pass
        return self._stage(text[new:])

    def _first_new(self, text: str) -> int:
        """Where the new text starts; the longest preamble that a repeat confirms goes first."""
        for start, overlap in reversed(self._starts):
            if overlap.repeated_chars:
                return start + overlap.repeated_chars
        return self._starts[0][0]

    def _drops_space(self, new: int) -> bool:
        """Whether the partial ends with the white space of the seam, or where by `settled_length` none can follow."""
        if self._partial[-1].isspace():
            return True
        if any(overlap.repeated_chars for _, overlap in self._starts):
            return False
        last_word = self._partial[-_LONG_WORD_CHARS:]
        is_cut_word = len(last_word) == _LONG_WORD_CHARS and not any(map(str.isspace, last_word))
        return new > 0 or is_cut_word or is_no_space(self._partial[-1])

    def _skip_space(self, delta: str) -> str:
        rest = delta.lstrip()
        if rest:
            self._stage = self._pass
        return rest

    def _pass(self, delta: str) -> str:
        return delta
