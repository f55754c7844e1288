"""What a continuation says before it continues: a role label, an announcement, a reopened fence, an ellipsis.

Asked by `continuation` about the first characters. A part is *certain* when the partial answer could hardly be followed
by it; otherwise it is only *claimed*: dropped if the text behind it turns out to repeat the partial's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.announcements import (
    is_announcement,
    is_bare_announcement,
    may_announce,
    speaks_of_continuing,
)
from litellm_compaction.core.enclosures import FENCE, fence_language, open_fence
from litellm_compaction.core.overlap import SEARCHED_CHARS
from litellm_compaction.core.settled import is_no_space

_LINE_CHARS = 160
_LABELS = (
    *("Assistant:", "ASSISTANT:", "**Assistant:**", "**Assistant**:", "### Assistant:", "Assistent:"),
    *("助手：", "助手:"),
)
_DIALOGUE = re.compile(
    r"^[ \t>*#]*(?:assistant|assistent|user|human|助手|用户)\**[ \t]*[:：]", re.IGNORECASE | re.MULTILINE
)
_OPENING_SIGNS = frozenset(":：\"'“„«‹「『(（[`>")
_COLON_INSIDE = re.compile(r"[:：](?=.)")
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


class _Part(NamedTuple):
    end: int
    is_certain: bool


class Scene(NamedTuple):
    """What a rule needs to know about the partial answer."""

    tail: str
    fence: str | None
    is_dialogue: bool
    invites_speech: bool
    ends_inside_sentence: bool


# (continuation from here on, whether it has ended, scene) -> the parts with which it begins, None while undecided.
_Rule: TypeAlias = Callable[[str, bool, Scene], "tuple[_Part, ...] | None"]


def scene_of(partial: str) -> Scene:
    """The `Scene` in which a continuation of `partial` begins."""
    tail = partial[-SEARCHED_CHARS:]
    written = tail.rstrip()
    last = written[-1:]
    fence = open_fence(partial)
    on_same_line = "\n" not in tail[len(written) :]
    return Scene(
        tail=tail,
        fence=fence,
        is_dialogue=_DIALOGUE.search(tail) is not None,
        invites_speech=last in _OPENING_SIGNS and fence is None,
        ends_inside_sentence=on_same_line and (last.isalnum() or last == ","),
    )


def read_preamble(head: str, scene: Scene, *, ended: bool) -> Preamble | None:
    """The preamble with which a continuation opens, None when `head` is too short to tell.

    Args:
        head: the continuation so far.
        scene: of the partial that it continues.
        ended: whether nothing comes after `head`.
    """
    certain, claimed = 0, list[int]()
    position = 0
    for rule in _RULES:
        rest = head[position:].lstrip()
        if not rest and not ended:
            return None
        parts = rule(rest, ended, scene)
        if parts is None:
            return None
        for part in parts:
            end = len(head) - len(rest) + part.end
            if part.is_certain and not claimed:
                certain = end
            else:
                claimed.append(end)
            position = end
    return Preamble(certain, tuple(claimed))


def _label(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    if not ended and any(label.startswith(rest) for label in _LABELS):
        return None
    end = max((len(label) for label in _LABELS if rest.startswith(label)), default=0)
    if not end:
        return ()
    return (_Part(end, not (scene.is_dialogue or scene.invites_speech or scene.fence is not None)),)


def _announcement(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    if scene.ends_inside_sentence and rest[:1].islower():
        return ()
    if not may_announce(rest, ended=ended):
        return ()
    line_end = rest.find("\n", 0, _LINE_CHARS)
    if line_end < 0 and not ended and len(rest) < _LINE_CHARS:
        return None
    line = rest[:line_end] if line_end >= 0 else rest[:_LINE_CHARS]
    if not speaks_of_continuing(line):
        return ()
    is_whole = line_end >= 0 or len(rest) < _LINE_CHARS
    if is_whole and _is_spoken(line, scene):
        return (_Part(len(line), True),)
    parts = [_Part(len(line), False)] if is_whole else []
    colon = _COLON_INSIDE.search(line)
    if colon is not None:
        # On one line with its announcement, new text is only believed to be new where no sentence could start.
        is_certain = scene.ends_inside_sentence and _is_spoken(line[: colon.end()], scene)
        parts.insert(0, _Part(colon.end(), is_certain))
    return tuple(parts)


def _is_spoken(line: str, scene: Scene) -> bool:
    """Whether `line` announces the continuation and could not stand in the answer itself."""
    if scene.invites_speech or line.strip() in scene.tail:
        return False
    may_be_bare = scene.ends_inside_sentence and scene.fence is None
    return is_announcement(line) or (may_be_bare and is_bare_announcement(line))


def _fence(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    if scene.fence is None or rest[0:1] not in ("`", "~"):
        return ()
    line_end = rest.find("\n", 0, _LINE_CHARS)
    if line_end < 0:
        return None if not ended and len(rest) < _LINE_CHARS else ()
    opener = FENCE.fullmatch(rest, 0, line_end)
    if opener is None:
        return ()
    language = fence_language(opener["info"])
    return (_Part(line_end, bool(language) and language == scene.fence),)


def _ellipsis(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    found = _ELLIPSIS.match(rest)
    if found is None:
        return None if not ended and rest in (".", "..") else ()
    if found.end() == len(rest) and not ended:
        return None if len(rest) < _LINE_CHARS else ()
    follower = rest[found.end() : found.end() + 1]
    goes_on = follower.islower() or (bool(follower) and is_no_space(follower) and follower.isalpha())
    stands_for_cut = scene.ends_inside_sentence and scene.fence is None and goes_on
    return (_Part(found.end(), stands_for_cut and _FREE_ELLIPSIS.search(scene.tail) is None),)


_RULES: tuple[_Rule, ...] = (_label, _announcement, _announcement, _fence, _ellipsis)
