"""What a continuation says before it continues: a role label, an announcement, a reopened fence, an ellipsis.

A part is *certain* if the partial answer could hardly be followed by it; else it is only *claimed*: dropped if the
text after it turns out to repeat the partial's end.

An announcement ("Sure, continuing from where I left off:") is a line of which every word is in `_WORDS`, or one that
begins with such a word and is followed by a repeat. A sentence that merely starts with "Continuing" is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.continuation.text import FENCE, fence_language, is_no_space, open_fence

LINE_CHARS = 160
_SCENE_CHARS = 8_000


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ASSENTS = _set(
    "sure certainly okay ok alright absolutely understood sorry apologies"
    " gerne natürlich klar sicher entschuldigung bien claro 好 当"
)
_GOING_ON = _set(
    "continuing continue continued continuation resuming resume proceeding picking rest remainder remaining"
    " fort fortsetzung weiter suite poursuis reprends continúo continuo continuación sigo resto 继 续 接 剩"
)
_OTHERS = _set(
    "of course got it thing my me here is s the i ll will let m am just now exactly right from at where we you was left"
    " off stopped ended cut interrupted up with in answer response message text part previous last point"
    " ich fahre setze mache dort da genau wo aufgehört habe hier geht es ist kommt folgt die der antwort"
    " sûr d accord je j là où me suis arrêté voici la le de ma réponse"
    " por supuesto desde donde quedé aquí está tienes el mi respuesta"
    " 的 然 我 将 会 来 现 在 从 上 文 次 停 断 处 下 以 是 为 写 内 容 着 后 部 分"
)
_WORDS = _ASSENTS | _GOING_ON | _OTHERS
_WORD = re.compile(r"[^\W\d_]+")
# Signs with which a line of an answer may open where an announcement does not.
_FIRST_WORD = re.compile(r"[*_(\[（]*([^\W\d_]+)")
_COLON_INSIDE = re.compile(r"[:：](?=.)")

_LABEL = re.compile(r"(?:### )?(\*\*)?(?:Assistant|ASSISTANT|Assistent|助手)(?(1)(?:\*\*[:：]|[:：]\*\*)|[:：])")
_DIALOGUE = re.compile(
    r"^[ \t>*#]*(?:assistant|assistent|user|human|助手|用户)\**[ \t]*[:：]", re.IGNORECASE | re.MULTILINE
)
_OPENING_SIGNS = frozenset(":：\"'“„«‹「『(（[`>")
_ELLIPSIS = re.compile(r"(?:\.{3,}|…+)[ \t]*")
_FREE_ELLIPSIS = re.compile(r"(?:^|[^\S\n])(?:\.{3,}|…)")


class Preamble(NamedTuple):
    """How much of a continuation's start is not continuation.

    Attributes:
        certain_chars: to be dropped in any case.
        claimed_chars: longer starts, ascending, each dropped only if what follows it repeats the partial's end.
    """

    certain_chars: int
    claimed_chars: tuple[int, ...]


class Scene:
    """The partial answer, as far as the rules for a preamble ask."""

    def __init__(self, partial: str) -> None:
        self.tail = partial[-_SCENE_CHARS:]
        written = self.tail.rstrip()
        last = written[-1:]
        self.fence = open_fence(partial)
        self.is_dialogue = _DIALOGUE.search(self.tail) is not None
        self.invites_speech = last in _OPENING_SIGNS and self.fence is None
        on_same_line = "\n" not in self.tail[len(written) :]
        self.ends_inside_sentence = on_same_line and (last.isalnum() or last == ",")


class _Part(NamedTuple):
    chars: int
    is_certain: bool


# (first line of what is left, whether that is all of it, scene) -> the parts with which it begins, ascending.
_Rule: TypeAlias = Callable[[str, bool, Scene], Iterator[_Part]]


def read_preamble(head: str, scene: Scene, *, ended: bool) -> Preamble | None:
    """Returns the preamble with which a continuation opens, None while one of its lines is not complete.

    Args:
        head: the continuation so far.
        scene: of the partial that it continues.
        ended: nothing that counts comes after `head`.
    """
    certain, claimed = 0, list[int]()
    position = 0
    for rule in _RULES:
        rest = head[position:].lstrip()
        line, newline, _ = rest.partition("\n")
        if not ended and not newline and len(line) < LINE_CHARS:
            return None
        for part in rule(line[:LINE_CHARS], len(line) <= LINE_CHARS, scene):
            position = len(head) - len(rest) + part.chars
            if part.is_certain and not claimed:
                certain = position
            else:
                claimed.append(position)
    return Preamble(certain, tuple(claimed))


def _label(line: str, is_whole: bool, scene: Scene) -> Iterator[_Part]:
    if found := _LABEL.match(line):
        yield _Part(found.end(), not (scene.is_dialogue or scene.invites_speech or scene.fence is not None))


def _announcement(line: str, is_whole: bool, scene: Scene) -> Iterator[_Part]:
    first = _FIRST_WORD.match(line)
    if first is None or (scene.ends_inside_sentence and line[0].islower()):
        return
    is_known = not (scene.invites_speech or line.strip() in scene.tail)
    colon = _COLON_INSIDE.search(line)
    if colon is not None and _may_announce(before := line[: colon.end()]):
        # On one line with its announcement, new text is only believed to be new where no sentence could start.
        yield _Part(colon.end(), is_known and scene.ends_inside_sentence and _announces(before))
    if is_whole and _may_announce(line):
        yield _Part(len(line), is_known and _announces(line))


def _fence(line: str, is_whole: bool, scene: Scene) -> Iterator[_Part]:
    opener = FENCE.fullmatch(line)
    if is_whole and opener is not None and scene.fence is not None and line[0] in "`~":
        language = fence_language(opener["info"])
        yield _Part(len(line), bool(language) and language == scene.fence)


def _ellipsis(line: str, is_whole: bool, scene: Scene) -> Iterator[_Part]:
    if found := _ELLIPSIS.match(line):
        follower = line[found.end() :][:1]
        goes_on = follower.islower() or (bool(follower) and is_no_space(follower) and follower.isalpha())
        stands_for_cut = scene.ends_inside_sentence and scene.fence is None and goes_on
        yield _Part(found.end(), stands_for_cut and _FREE_ELLIPSIS.search(scene.tail) is None)


def _words(line: str) -> list[str]:
    """The words of a line in lower case; of a script without spaces each character is one."""
    words: list[str] = []
    for word in _WORD.findall(line.lower()):
        words.extend(word if is_no_space(word[0]) else (word,))
    return words


def _may_announce(line: str) -> bool:
    """Returns True if a line speaks of going on: not enough to drop it, unless a repeat follows it."""
    words = _words(line)
    return words[0] in _ASSENTS or (words[0] in _WORDS and not _GOING_ON.isdisjoint(words))


def _announces(line: str) -> bool:
    """Returns True if a line says nothing but that the answer goes on here; one word may be a program's output."""
    words = _words(line)
    return len(words) > 1 and _WORDS.issuperset(words) and not _GOING_ON.isdisjoint(words)


_RULES: tuple[_Rule, ...] = (_label, _announcement, _announcement, _fence, _ellipsis)
