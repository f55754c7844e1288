"""What of a continuation is new: joins a partial answer and what the model was made to add to it.

Called by the restart loop, which sends what `Joiner.feed` returns: no word lost, none twice, legitimate repetition
stays.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from litellm_compaction.core.continuation.overlap import Ending, Overlap
from litellm_compaction.core.continuation.preamble import Scene, read_preamble
from litellm_compaction.core.continuation.text import THINK_END, THINK_START, is_no_space, open_think

# How a continuation begins: not known yet; with something new; with all that the server was told to go on with, which
# some servers send back before the model's own words; with another part of the answer, or with words about it.
Opening: TypeAlias = Literal["undecided", "new", "echo", "anew"]

# A shorter echo could be the answer's own words; so could a shorter beginning like that of what was shown.
_LEAST_ECHO_CHARS = 12
_LEAST_START_CHARS = 24
# As much of the last word as `settled_length` may have sent before it cut a word in two.
_LONG_WORD_CHARS = 48
# Of a beginning the rules read no more: a server may send a megabyte of white space, one blank in each delta.
_READ_CHARS = 4_000


class Joiner:
    """The one answer that a client sees, made of a partial answer and its continuation.

    Removed from the beginning of the continuation: a reasoning block (unless the partial ends inside one, then only
    its tag), a role label, an announcement, a reopened fence, an ellipsis for the cut (`preamble`), what repeats the
    end of the partial (`overlap`), and white space that the partial already ends with. What stays ambiguous is said at
    `overlap.Ending` and at `preamble`.

    The first line is held back, of at most 160 characters (after an announcement the next one), then whatever repeats
    the partial word by word. It is decided once; then everything passes through untouched.
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
        self._scene = Scene(partial)
        self._continues_thought = open_think(partial)
        self._is_open_thought = self._continues_thought
        self._sent_end = ""
        self._removed: list[str] = []
        self._thought_end = ""
        self._held: list[str] = []
        self._held_chars = 0
        self._ending = Ending(partial)
        self._starts: list[tuple[int, Overlap]] = []
        self._ended = False
        self._opening: Opening = "undecided" if partial else "new"
        self._left_out = self._echoed = ""
        # Of a text that repeats itself nobody can tell an echo from the next round.
        dense = "".join(shown.split())
        is_telling = len(dense) >= _LEAST_ECHO_CHARS and not self._ending.repeats_itself(dense)
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
            self._stage = self._hold
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
                self._added(delta)
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

    def _added(self, delta: str) -> bool:
        """Holds a delta; returns True if there is something new to read in it."""
        self._held.append(delta)
        self._held_chars += len(delta)
        return bool(delta.strip()) or self._ended or self._held_chars >= _READ_CHARS

    def _taken(self) -> str:
        """What was held; nothing is any more."""
        text = "".join(self._held)
        self._held, self._held_chars = [], 0
        return text

    def _read_tag(self, delta: str) -> str:
        if not self._added(delta):
            return ""
        head = "".join(self._held)[:_READ_CHARS].lstrip()
        is_short = len(head) < len(THINK_START) and THINK_START.startswith(head)
        if is_short and not self._ended and self._held_chars < _READ_CHARS:
            return ""
        text = self._taken()
        self._stage = self._hold
        if head.startswith(THINK_START):
            text = text.lstrip()[len(THINK_START) :]
            if not self._continues_thought:
                self._stage = self._drop_thought
        return self._stage(text)

    def _drop_thought(self, delta: str) -> str:
        thought, tag, rest = (self._thought_end + delta).partition(THINK_END)
        if tag:
            self._removed.append(thought)
            self._stage = self._hold
            return self._stage(rest)
        kept = 0 if self._ended else len(THINK_END) - 1
        settled = max(len(thought) - kept, 0)
        self._removed.append(thought[:settled])
        self._thought_end = thought[settled:]
        return ""

    def _hold(self, delta: str) -> str:
        is_new = self._added(delta)
        if not self._starts:
            if not is_new:
                return ""
            head = "".join(self._held)[:_READ_CHARS]
            preamble = read_preamble(head, self._scene, ended=self._ended or len(head) == _READ_CHARS)
            if preamble is None:
                return ""
            self._starts = [
                (start, Overlap(self._ending)) for start in (preamble.certain_chars, *preamble.claimed_chars)
            ]
            for start, overlap in self._starts:
                overlap.feed("".join(self._held)[start:])
        else:
            for _, overlap in self._starts:
                overlap.feed(delta)
        if not self._ended and not all(overlap.is_over for _, overlap in self._starts):
            return ""
        text = self._taken()
        new, repeated_chars = self._first_new(text)
        begins_like_shown = self._opening != "echo" and self._echoed_chars >= _LEAST_START_CHARS
        if begins_like_shown or text[:new].strip():
            self._opening = "anew"
        elif self._opening == "undecided":
            self._opening = "new"
        self._left_out = text[:new]
        self._stage = self._skip_space if self._drops_space(new, repeated_chars) else self._pass
        return self._stage(text[new:])

    def _first_new(self, text: str) -> tuple[int, int]:
        """Where the new text starts, and how much before it was repeated; what a repeat confirms goes first."""
        for start, overlap in reversed(self._starts):
            if repeated_chars := self._ending.repeated_chars(text[start:], overlap.place):
                return start + repeated_chars, repeated_chars
        return self._starts[0][0], 0

    def _drops_space(self, new: int, repeated_chars: int) -> bool:
        """Whether the partial ends with the white space of the seam, or where by `settled_length` none can follow."""
        if self._partial[-1].isspace():
            return True
        if repeated_chars:
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
