"""Finds the places at which a text may be cut, and tells if it ends inside a code fence or a reasoning block.

Each function looks at a text once, however many tags it holds.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from itertools import pairwise

import regex

THINK_START = "<think>"
THINK_END = "</think>"

# CommonMark 0.31 §4.5, and deeper indentation as models write it in lists and quotations.
FENCE = re.compile(r"^[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_THINK_TAG = re.compile(r"^[ \t]*<think>|</think>", re.MULTILINE)
_BLOCK_OPENS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_BLOCK_ENDS = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_LONGEST_WORD_CHARS = 64
_HELD_OF_LONG_WORD_CHARS = 16
# A stop string is followed no further: the held text stays a line at most.
_WATCHED_STOP_CHARS = 128
# Characters are looked for from here on before the last word; of a longer row of flags one may be cut in two.
_CONTEXT_CHARS = 128
_PUNCTUATION = frozenset(string.punctuation)
# A character as people see it (UAX #29); what a joiner or a first half of a surrogate pair ends in goes on, and nothing
# starts with a mark or a joiner, not even after a line break.
_CHARACTER = regex.compile(r"(?:[\ud800-\udbff][\udc00-\udfff]|\X)(?:[\p{M}\u200d]|(?<=\u200d)\X)*")
# Scripts written without spaces (UAX #14), CJK punctuation, emoji, halves of surrogate pairs.
_NO_SPACE = regex.compile(
    r"[\p{lb=ID}\p{lb=SA}\p{lb=CJ}\p{lb=NS}\p{lb=EB}\p{lb=EM}\p{lb=RI}\p{lb=SG}\p{ExtPict}"
    r"\p{Block=CJK_Symbols_And_Punctuation}\p{Block=Halfwidth_And_Fullwidth_Forms}]"
)


def open_fence(text: str) -> str | None:
    """The language of the code fence inside which `text` ends, "" for a fence without one, None outside fences."""
    open_language = None
    for _, language in _fences(text):
        open_language = language
    return open_language


def _fences(text: str) -> Iterator[tuple[int, str | None]]:
    """The end of each line of marks, and the language of the fence that is open after it, None for none."""
    marks, language = "", ""
    for line in FENCE.finditer(text):
        info = line["info"].strip()
        if not marks:
            if "`" not in info:
                marks, language = line["marks"], fence_language(info)
        elif not info and line["marks"].startswith(marks):
            marks = ""
        yield line.end(), language if marks else None


def fence_language(info: str) -> str:
    """The language that a fence's info string names, in lower case; "" when it names none."""
    return "".join(info.split(None, 1)[:1]).lower()


def open_think(text: str) -> bool:
    """Returns True if `text` ends inside a `<think>` block.

    Only a tag at the start of a line and outside a code fence opens one: others are mentioned in running text.
    """
    fences = [(0, None), *_fences(text), (len(text) + 1, None)]
    at = 0
    is_open = False
    for tag in _THINK_TAG.finditer(text):
        while fences[at + 1][0] <= tag.start():
            at += 1
        if tag[0] == THINK_END:
            is_open = False
        elif fences[at][1] is None:
            is_open = True
    return is_open


def outside_thoughts(text: str) -> list[str]:
    """The text before, between and after the closed `<think>` and `<thinking>` blocks of `text`."""
    found: list[str] = []
    start = 0
    while (opening := _BLOCK_OPENS.search(text, start)) and (end := _BLOCK_ENDS.search(text, opening.end())):
        found.append(text[start : opening.start()])
        start = end.end()
    return [*found, text[start:]]


def is_only_thoughts(text: str) -> bool:
    """Returns True if nothing of `text` stands outside its `<think>` blocks, the last of which may be open."""
    *before, last = outside_thoughts(text)
    return not any(part.strip() for part in before) and (
        not last.strip() or _BLOCK_OPENS.match(last.lstrip()) is not None
    )


def without_think_tags(text: str) -> str:
    """`text` with its thoughts, and without the tags around them."""
    return _BLOCK_ENDS.sub("", _BLOCK_OPENS.sub("", text)).strip()


def settled_length(text: str) -> int:
    """The number of leading characters of `text` that may be sent: everything up to the start of its last word.

    `text` is the unsent tail of a stream. The character after the cut is never white space. In scripts without spaces a
    word is one character as people see it. Of a word of more than 64 characters (base64, a URL) all but the last 16 are
    settled, at such a character and not inside a run of ASCII punctuation.
    """
    word_end = len(text.rstrip())
    earliest = word_end - _LONGEST_WORD_CHARS
    characters = _CHARACTER.finditer(text, max(earliest - _CONTEXT_CHARS, 0), word_end)
    starts: list[int] = [match.start() for match in characters]
    for before, place in reversed([*pairwise(starts)]):
        if place >= earliest and _starts_word(text, before, place):
            return place
    if earliest <= 0:
        return 0
    may_end = [place for place in starts if earliest <= place <= word_end - _HELD_OF_LONG_WORD_CHARS]
    # A long line of punctuation ("-----…"): cutting it is harmless, holding it for ever is not.
    last = may_end[-1] if may_end else 0
    return next((at for at in reversed(may_end) if not _PUNCTUATION.issuperset(text[at - 1 : at + 1])), last)


def unstopped_length(text: str, stops: Sequence[str]) -> int:
    """The number of leading characters of `text` that may be sent so that no stop string has begun in them.

    A server that goes on with an answer knows nothing of what was sent before: held back, a stop string comes whole
    from the continuation. Of each string the first 128 characters count.
    """
    begun = (stop[:size] for stop in stops for size in range(1, min(len(stop), _WATCHED_STOP_CHARS + 1)))
    return len(text) - max((len(start) for start in begun if text.endswith(start)), default=0)


def is_no_space(char: str) -> bool:
    """Returns True for a character of a script written without spaces, an emoji or a CJK sign."""
    return char >= "\u00a9" and _NO_SPACE.match(char) is not None


def _starts_word(text: str, before: int, place: int) -> bool:
    if text[place].isspace():
        return False
    return text[place - 1].isspace() or is_no_space(text[before]) or is_no_space(text[place])
