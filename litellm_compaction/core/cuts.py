"""Finds the places at which a text may be cut, tells if it ends inside a code fence or a block of thoughts, and cuts
what is too long to the part that fits: its head and tail with a marker between them, or what is about words.

Each function looks at a text once, however many tags it holds.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_right
from collections.abc import Callable, Sequence

import regex

THINK_START = "<think>"
THINK_END = "</think>"
GAP = "\n[…]\n"

# CommonMark 0.31 §4.5, and deeper indentation as models write it in lists and quotations.
FENCE = re.compile(r"^[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_SIGN = re.compile(rf"{FENCE.pattern}|^[ \t]*<think>|</think>", re.MULTILINE)
_BLOCK_OPENS, _BLOCK_ENDS = re.compile(r"(?i)<think(?:ing)?>"), re.compile(r"(?i)</think(?:ing)?>")
_LONGEST_WORD_CHARS, _HELD_OF_LONG_WORD_CHARS = 64, 16
# Characters are looked for from here on before the last word; of a longer row of flags one may be cut in two.
_CONTEXT_CHARS = 128
# A character as people see it (UAX #29); what a joiner or a first half of a surrogate pair ends in goes on, and nothing
# starts with a mark or a joiner, not even after a line break.
_ONE = r"(?:[\ud800-\udbff][\udc00-\udfff]|\X)(?:[\p{M}\u200d]|(?<=\u200d)\X)*"
# Scripts written without spaces (UAX #14), CJK punctuation, emoji, halves of surrogate pairs.
_WIDE = (
    r"[\p{lb=ID}\p{lb=SA}\p{lb=CJ}\p{lb=NS}\p{lb=EB}\p{lb=EM}\p{lb=RI}\p{lb=SG}\p{ExtPict}"
    r"\p{Block=CJK_Symbols_And_Punctuation}\p{Block=Halfwidth_And_Fullwidth_Forms}]"
)
_CHARACTER, _NO_SPACE = regex.compile(_ONE), regex.compile(_WIDE)
_WORDS = regex.compile(rf"(?={_WIDE}){_ONE}|(?:[!-~]+(?![^\x00-\x7f])|(?!{_WIDE}|\s(?![\p{{M}}\u200d])){_ONE})+")


def open_fence(text: str) -> str | None:
    """The language of the code fence inside which `text` ends, "" for a fence without one, None outside fences."""
    return _open_at_end(text)[0]


def open_think(text: str) -> bool:
    """True if `text` ends inside a `<think>` block, which a tag at the start of a line and outside a fence opens."""
    return _open_at_end(text)[1]


def _open_at_end(text: str) -> tuple[str | None, bool]:
    marks, language, is_open = "", None, False
    for sign in _SIGN.finditer(text):
        info = (sign["info"] or "").strip()
        if sign["marks"] is None:
            is_open = sign[0] != THINK_END and (is_open or not marks)
        elif not marks and "`" not in info:
            marks, language = sign["marks"], fence_language(info)
        elif marks and not info and sign["marks"].startswith(marks):
            marks, language = "", None
    return language, is_open


def fence_language(info: str) -> str:
    """The language that a fence's info string names, in lower case; "" when it names none."""
    return "".join(info.split()[:1]).lower()


def outside_thoughts(text: str) -> list[str]:
    """The text before, between and after the closed `<think>` and `<thinking>` blocks of `text`."""
    outside: list[str] = []
    start = 0
    while (opening := _BLOCK_OPENS.search(text, start)) and (end := _BLOCK_ENDS.search(text, opening.end())):
        outside.append(text[start : opening.start()])
        start = end.end()
    return [*outside, text[start:]]


def is_only_thoughts(text: str) -> bool:
    """True if nothing of `text` stands outside its `<think>` blocks, the last of which may be open."""
    outside = "".join(outside_thoughts(text)).strip()
    return not outside or _BLOCK_OPENS.match(outside) is not None


def settled_length(text: str) -> int:
    """The number of leading characters of `text` that may be sent: everything up to the start of its last word.

    `text` is the unsent tail of a stream. The character after the cut is never white space. In scripts without spaces a
    word is one character as people see it. Of a word of more than 64 characters (base64, a URL) all but the last 16 are
    settled, at such a character and not inside a run of ASCII punctuation.
    """
    word_end = len(text.rstrip())
    earliest = word_end - _LONGEST_WORD_CHARS
    begin = max(earliest - _CONTEXT_CHARS, 0)
    words = _WORDS.finditer(text, begin, word_end)
    start = max((word.start() for word in words if not text[word.start()].isspace()), default=0)
    if start >= earliest:
        return start
    latest = word_end - _HELD_OF_LONG_WORD_CHARS
    starts = (one.start() for one in _CHARACTER.finditer(text, begin, word_end))
    may_end = [place for place in starts if earliest <= place <= latest]
    # A long line of punctuation ("-----…"): cutting it is harmless, holding it for ever is not.
    calm = [place for place in may_end if not set(string.punctuation).issuperset(text[place - 1 : place + 1])]
    return max(calm or may_end, default=0)


def unstopped_length(text: str, stops: Sequence[str]) -> int:
    """The number of leading characters of `text` that may be sent so that no stop string has begun in them.

    A server that goes on with an answer knows nothing of what was sent before: held back, a stop string comes whole
    from the continuation. Of each string the first 128 characters count.
    """
    begun = (stop[:size] for stop in stops for size in range(1, min(len(stop), 128) + 1))
    return len(text) - max((len(start) for start in begun if text.endswith(start)), default=0)


def is_no_space(char: str) -> bool:
    """True for a character of a script written without spaces, an emoji or a CJK sign."""
    return char >= "\u00a9" and _NO_SPACE.match(char) is not None


def excerpt(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """`text` if it has at most `limit_tokens`, else its head (60 %) and tail with a marker between them.

    Below the marker's own size, 16 tokens, only the marker is left.
    """
    total = count(text) if len(text) > limit_tokens // 4 else 0
    if total <= limit_tokens:
        return text
    keep_tokens = max(limit_tokens - 16, 0)
    keep_chars = len(text) * keep_tokens // total
    # The ends may be denser than the average text.
    while (kept := sum(map(count, halves := _ends(text, keep_chars)))) > keep_tokens and keep_chars:
        keep_chars = min(keep_chars * keep_tokens // kept, keep_chars * 19 // 20)
    return f"\n[… {max(total - kept, 1)} tokens left out …]\n".join(halves)


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

    def taken(level: int) -> int:
        return sum(min(size, level * weight) for size, weight in zip(sizes, weights, strict=True))

    return max(bisect_right(range(max(sizes, default=0) + 1), room_tokens, key=taken) - 1, 0)


def _ends(text: str, keep_chars: int) -> tuple[str, str]:
    head_chars = int(keep_chars * 0.6)
    head, tail = text[:head_chars], text[len(text) - keep_chars + head_chars :]
    # To the end of a line and from the start of one, if that costs at most a fifth.
    end, start = head.rfind("\n"), tail.find("\n")
    return (
        head[:end] if end >= len(head) * 4 // 5 else head,
        tail[start + 1 :] if 0 <= start <= len(tail) // 5 else tail,
    )
