"""Messages that a pruning left out or shortened, as data that holds none of their text.

What is kept of a message is a list of places in the original, so a stored pruning can show nothing that the
conversation did not say, and the same conversation always gives the same bytes. Applied by `compaction`, made by
`pruning`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from litellm_compaction.core.chain import normal_text
from litellm_compaction.core.messages import Message, with_text

REMOVED = "[An earlier message was removed.]"
GAP = "[…]"

Span: TypeAlias = tuple[int, int]

_LEFT_OUT = re.compile(r"\[?(?:…|\.{3,})\]?")
_WORD = re.compile(r"\S+")
_MAX_PIECES = 12
# Shorter pieces, unless they are whole lines, could be put together to words that nobody wrote.
_LEAST_PIECE_CHARS = 16
# A shorter gap is not worth its marker.
_LEAST_GAP_CHARS = 12
_HEAD_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """What is shown of one message.

    Attributes:
        position: of the message, after the leading system ones.
        spans: begin and end of each kept piece in the message's normal text, in characters, ascending; none: a stub.
    """

    position: int
    spans: tuple[Span, ...]


def pruned(
    originals: Sequence[Message],
    shown: Sequence[Message],
    dropped: Collection[int],
    shortened: Sequence[Shortened],
    *,
    start: int,
) -> list[Message | None]:
    """What is sent of each message, None where it is left out; ids, calls and roles stay.

    Args:
        originals: n messages, the first at position `start` after the lead.
        shown: n, the same after rung 1.
        dropped: positions that are left out.
        shortened: positions that show pieces of themselves.
        start: position of the first one.
    """
    texts = {each.position: kept_text(normal_text(originals[each.position - start]), each.spans) for each in shortened}
    return [
        None if position in dropped else message if (text := texts.get(position)) is None else with_text(message, text)
        for position, message in enumerate(shown, start=start)
    ]


def kept_text(text: str, spans: Sequence[Span]) -> str:
    """The pieces of `text` with a marker for everything between them; a stub where there are none."""
    if not spans:
        return REMOVED
    pieces = [text[begin:end] for begin, end in spans]
    before = "" if spans[0][0] == 0 else f"{GAP}\n"
    behind = "" if spans[-1][1] >= len(text) else f"\n{GAP}"
    return before + f"\n{GAP}\n".join(pieces) + behind


def spans_of(text: str, wanted: str) -> tuple[Span, ...]:
    """Where the pieces stand in `text` of which `wanted` is made.

    `wanted` is an excerpt if its pieces, divided by an ellipsis, stand in `text` in this order, white space aside, each
    of 16 characters or a whole line. Anything else shows only how much a model would keep: so much of the head (60 %)
    and the tail, half of the text at most.
    """
    found = _found(text, wanted)
    return _ends(text, min(len(wanted), len(text) // 2)) if found is None else found


def is_excerpt(text: str, wanted: str) -> bool:
    """Whether `wanted` is made of pieces of `text`."""
    return _found(text, wanted) is not None


def _found(text: str, wanted: str) -> tuple[Span, ...] | None:
    pieces = [" ".join(piece.split()) for piece in _LEFT_OUT.split(wanted)]
    pieces = [piece for piece in pieces if piece]
    if not 0 < len(pieces) <= _MAX_PIECES or pieces[0].split(" ", 1)[0] not in text:
        return None
    words = [(word.start(), word[0]) for word in _WORD.finditer(text)]
    flat = " ".join(word for _, word in words)
    flat_starts: list[int] = []
    at = 0
    for _, word in words:
        flat_starts.append(at)
        at += len(word) + 1

    def place(index: int) -> int:
        word = bisect_right(flat_starts, index) - 1
        return words[word][0] + index - flat_starts[word]

    spans: list[Span] = []
    cursor = 0
    for piece in pieces:
        index = flat.find(piece, cursor)
        if index < 0:
            return None
        begin, cursor = place(index), index + len(piece)
        end = place(cursor - 1) + 1
        if len(piece) < _LEAST_PIECE_CHARS and not _is_line(text, begin, end):
            return None
        if spans and begin - spans[-1][1] < _LEAST_GAP_CHARS:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return tuple(spans)


def _is_line(text: str, begin: int, end: int) -> bool:
    return (begin == 0 or text[begin - 1] == "\n") and (end == len(text) or text[end] == "\n")


def _ends(text: str, keep_chars: int) -> tuple[Span, ...]:
    head, tail = int(keep_chars * _HEAD_SHARE), len(text) - (keep_chars - int(keep_chars * _HEAD_SHARE))
    # Whole words where there are any nearby.
    space = text.rfind(" ", head * 4 // 5, head)
    head = space if space > 0 else head
    space = text.find(" ", tail, tail + (len(text) - tail) // 5)
    tail = space + 1 if space > 0 else tail
    return tuple(span for span in ((0, head), (tail, len(text))) if span[1] > span[0])
