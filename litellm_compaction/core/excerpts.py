"""The part of a long text that fits: its head and tail with a marker between them, or what is about words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

GAP = "\n[…]\n"


def excerpt(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` if it has at most `limit_tokens`, else its head (60 %) and tail with a marker between them.

    Below the marker's own size, 16 tokens, only the marker is left.
    """
    total = count(text) if len(text) > limit_tokens // 4 else 0
    if total <= limit_tokens:
        return text
    keep_tokens = max(limit_tokens - 16, 0)
    keep_chars = len(text) * keep_tokens // total
    while True:
        head, tail = _ends(text, keep_chars)
        kept = count(head) + count(tail)
        if kept <= keep_tokens or keep_chars == 0:
            return f"{head}\n[… {max(total - kept, 1)} tokens left out …]\n{tail}"
        # The ends may be denser than the average text: shrink in proportion, at least by a twentieth.
        keep_chars = min(keep_chars * keep_tokens // max(kept, 1), keep_chars * 19 // 20)


def about(text: str, words: Sequence[str], limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` if it has at most `limit_tokens`, else its part around the rarest of some words, beside the most others.

    A word counts by its beginning, whatever its ending is. Without any of them the head and tail are left.
    """
    if count(text) <= limit_tokens:
        return text
    beginnings = dict.fromkeys(word[:5].casefold() for word in words if len(word) > 2)
    found = ([each.start() for each in re.finditer(re.escape(word), text, re.IGNORECASE)] for word in beginnings)
    places = sorted(filter(None, found), key=len)
    if not places:
        return excerpt(text, limit_tokens, count)
    # Words that stand so near to each other are of one statement.
    middle = max(places[0], key=lambda at: (sum(any(abs(place - at) < 150 for place in each) for each in places), at))
    chars = len(text)
    while True:
        start, end = max(middle - chars, 0), middle + chars
        part = ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")
        if not chars or count(part) <= limit_tokens:
            return part
        chars = chars * 9 // 10


def ends(text: str, keep_chars: int) -> str:
    """The head (60 %) and tail of `text`, of at most so many characters, with a marker between them."""
    return GAP.join(_ends(text, keep_chars)) if keep_chars < len(text) else text


def common_level(sizes: Sequence[int], weights: Sequence[int], room_tokens: int) -> int:
    """The largest L with sum(min(size, L * weight)) ≤ room, by bisection; the largest size if all fit."""
    low, high = 0, max(sizes, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        taken = sum(min(size, middle * weight) for size, weight in zip(sizes, weights, strict=True))
        low, high = (middle, high) if taken <= room_tokens else (low, middle - 1)
    return low


def _ends(text: str, keep_chars: int) -> tuple[str, str]:
    head_chars = int(keep_chars * 0.6)
    head, tail = text[:head_chars], text[len(text) - keep_chars + head_chars :]
    # To the end of a line and from the start of one, if that costs at most a fifth.
    end, start = head.rfind("\n"), tail.find("\n")
    return (
        head[:end] if end >= len(head) * 4 // 5 else head,
        tail[start + 1 :] if 0 <= start <= len(tail) // 5 else tail,
    )
