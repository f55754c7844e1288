"""Finds the places at which a running text may be cut, and tells if it ends inside a code fence or a block of thoughts.

Each function looks at a text once, however many tags it holds.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import regex

from litellm_compaction.core.messages import THINK_END

# CommonMark 0.31 §4.5, and deeper indentation as models write it in lists and quotations.
FENCE = re.compile(r"^[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_SIGN = re.compile(rf"{FENCE.pattern}|^[ \t]*<think>|</think>", re.MULTILINE)
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
