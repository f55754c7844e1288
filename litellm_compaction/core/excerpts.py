"""A long text cut down to its head and tail, with a marker that says how much is missing.

Used where a single text is too large for the window (oversized results), too large for the summariser, or
pasted bulk inside the user's own words. Same input, same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARKER = "\n[… {left_out} tokens left out …]\n"
_MARKER_TOKENS = 16
_HEAD_SHARE = 0.6


def excerpt(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` if it has at most `limit_tokens`, else its head (60 %) and tail with a marker between them.

    Args:
        text: anything.
        limit_tokens: what the result may weigh; below the marker's own size only the marker is left.
        count: tokens of a text.
    """
    total = count(text) if len(text) > limit_tokens // 4 else 0
    if total <= limit_tokens:
        return text
    keep_tokens = max(limit_tokens - _MARKER_TOKENS, 0)
    keep_chars = len(text) * keep_tokens // total
    while True:
        head, tail = _ends(text, keep_chars)
        kept = count(head) + count(tail)
        if kept <= keep_tokens or keep_chars == 0:
            return head + _MARKER.format(left_out=max(total - kept, 1)) + tail
        # The ends may be denser than the average text: shrink in proportion, at least by a twentieth.
        keep_chars = min(keep_chars * keep_tokens // max(kept, 1), keep_chars * 19 // 20)


def condensed(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` in at most `limit_tokens`, long paragraphs given up first: what people ask stands in short ones.

    The first and the last paragraph come before all others, cut to excerpts where they are long, and bare headings and
    tags behind them; fenced code is one paragraph. A marker stands for each stretch that is missing.

    Args:
        text: what somebody wrote, pasted bulk included.
        limit_tokens: what the result may weigh.
        count: tokens of a text.
    """
    if count(text) <= limit_tokens:
        return text
    parts = _paragraphs(text)
    if len(parts) == 1:
        return excerpt(text, limit_tokens, count)
    ends = {0, len(parts) - 1}
    shown = [excerpt(part, limit_tokens // 4, count) if at in ends else part for at, part in enumerate(parts)]
    sizes = [count(part) + 2 for part in shown]
    kept: set[int] = set()
    room = limit_tokens
    for at in sorted(range(len(parts)), key=lambda at: (at not in ends, _is_heading(parts[at]), sizes[at], at)):
        # Where both neighbours are kept no further marker is needed; else one may be.
        cost = sizes[at] + _MARKER_TOKENS
        if cost <= room:
            kept.add(at)
            room -= cost
    if not kept:
        return excerpt(text, limit_tokens, count)
    lines: list[str] = []
    missing = 0
    for at, part in enumerate(shown):
        if at in kept:
            lines += [_MARKER.format(left_out=missing).strip()] if missing else []
            lines.append(part)
            missing = 0
        else:
            missing += sizes[at]
    lines += [_MARKER.format(left_out=missing).strip()] if missing else []
    return "\n\n".join(lines)


def _is_heading(paragraph: str) -> bool:
    """Whether a paragraph only announces others: it asks nothing, and is short enough to push out what does."""
    return ("\n" not in paragraph and paragraph.startswith(("#", "<"))) or paragraph.endswith((":", "："))


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, a fenced block as one, without the blank lines between them."""
    found: list[str] = []
    fenced = False
    for block in text.split("\n\n"):
        if fenced:
            found[-1] += "\n\n" + block
        elif block.strip():
            found.append(block.strip("\n"))
        fenced ^= block.count("```") % 2 == 1
        if fenced and not found:
            found.append(block)
    return found or [text]


def common_level(sizes: Sequence[int], weights: Sequence[int], room_tokens: int) -> int:
    """The largest L with sum(min(size, L * weight)) ≤ room, by bisection; the largest size when all fit.

    Args:
        sizes: n, tokens.
        weights: n; how many times the level each may have.
        room_tokens: for all together.
    """
    low, high = 0, max(sizes, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        taken = sum(min(size, middle * weight) for size, weight in zip(sizes, weights, strict=True))
        low, high = (middle, high) if taken <= room_tokens else (low, middle - 1)
    return low


def _ends(text: str, keep_chars: int) -> tuple[str, str]:
    head_chars = int(keep_chars * _HEAD_SHARE)
    tail_chars = keep_chars - head_chars
    head = _to_line_end(text[:head_chars])
    tail = text[len(text) - tail_chars :] if tail_chars else ""
    return head, _from_line_start(tail)


def _to_line_end(head: str) -> str:
    """The head up to its last line break, where that costs at most a fifth of it."""
    end = head.rfind("\n")
    return head[:end] if end >= len(head) * 4 // 5 else head


def _from_line_start(tail: str) -> str:
    start = tail.find("\n")
    return tail[start + 1 :] if 0 <= start <= len(tail) // 5 else tail
