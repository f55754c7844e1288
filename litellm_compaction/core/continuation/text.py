"""Where a text may be cut, and inside what it ends: an open code fence, an unclosed reasoning block.

An open fence or block decides what a continuation's first line means. Each function looks at a text once, however many
tags it holds: 14,000 openings without an end froze a proxy for 13 s while a pattern looked for the end of each
(2026-11).

A streamed text is sent only so far that a stop never splits a word, white space or a character. Grapheme rules are the
part of UAX #29 that can be had from `unicodedata`: marks, joiners, flags, viramas.
"""

from __future__ import annotations

import re
import string
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence

THINK_START = "<think>"
THINK_END = "</think>"

# CommonMark 0.31 §4.5, and deeper indentation as models write it in lists and quotations.
FENCE = re.compile(r"^[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_THINK_TAG = re.compile(r"^[ \t]*<think>|</think>", re.MULTILINE)
_BLOCK_OPENS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_BLOCK_ENDS = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_LONGEST_WORD_CHARS = 64
_HELD_OF_LONG_WORD_CHARS = 16
# A stop string is followed no further: what is held back stays a line at most.
_WATCHED_STOP_CHARS = 128
# Where more flags follow each other, one of them may be cut in two: no reason to read 800 KB of them again and again.
_WATCHED_REGIONALS = 128
_PUNCTUATION = frozenset(string.punctuation)
_JOINER = "\u200d"
# Scripts written without spaces (UAX #14, classes ID and SA), CJK punctuation, emoji, surrogate halves.
_NO_SPACE_RANGES = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2600, 0x27BF),
    (0x2B00, 0x2BFF),
    (0x2E80, 0x312F),
    (0x3190, 0x4DBF),
    (0x4E00, 0xA4CF),
    (0xD800, 0xDFFF),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F),
    (0xFF00, 0xFFEF),
    (0x1F000, 0x1FAFF),
    (0x20000, 0x3FFFF),
)

# The same, inside the brackets of a pattern.
NO_SPACE = "".join(f"{chr(first)}-{chr(last)}" for first, last in _NO_SPACE_RANGES)


def open_fence(text: str) -> str | None:
    """The language of the code fence inside which `text` ends, "" for a fence without one, None outside fences."""
    open_language = None
    for _, language in _fences(text):
        open_language = language
    return open_language


def _fences(text: str) -> Iterator[tuple[int, str | None]]:
    """Where each line of marks ends, and the language of the fence that is open behind it, None for none."""
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
    words = info.split(None, 1)
    return words[0].lower() if words else ""


def open_think(text: str) -> bool:
    """Whether `text` ends inside a `<think>` block.

    Only a tag at the start of a line and outside a code fence opens one: answers about reasoning models mention
    the tag in running text.
    """
    fences = _fences(text)
    nowhere: tuple[int, str | None] = (len(text) + 1, None)
    upcoming = next(fences, nowhere)
    fence = None
    is_open = False
    for tag in _THINK_TAG.finditer(text):
        while upcoming[0] <= tag.start():
            fence = upcoming[1]
            upcoming = next(fences, nowhere)
        if tag[0] == THINK_END:
            is_open = False
        elif fence is None:
            is_open = True
    return is_open


def outside_thoughts(text: str) -> list[str]:
    """What stands before, between and behind the closed `<think>` and `<thinking>` blocks of `text`."""
    found: list[str] = []
    start = 0
    while (opening := _BLOCK_OPENS.search(text, start)) and (end := _BLOCK_ENDS.search(text, opening.end())):
        found.append(text[start : opening.start()])
        start = end.end()
    return [*found, text[start:]]


def is_only_thoughts(text: str) -> bool:
    """Whether nothing of `text` stands outside its `<think>` blocks, of which the last may be open."""
    *before, last = outside_thoughts(text)
    return not any(part.strip() for part in before) and (
        not last.strip() or _BLOCK_OPENS.match(last.lstrip()) is not None
    )


def without_think_tags(text: str) -> str:
    """`text` with its thoughts, and without what marks them as such."""
    return _BLOCK_ENDS.sub("", _BLOCK_OPENS.sub("", text)).strip()


_RANGE_STARTS = tuple(first for first, _ in _NO_SPACE_RANGES)


def settled_length(text: str) -> int:
    """How many leading characters of `text` may be sent: everything up to the start of its last word.

    The character behind the cut is never white space, so the sent part holds all white space that stands before the
    next word. In scripts without spaces a word is one grapheme; a run of ASCII punctuation counts as one. Of a word of
    more than 64 characters (base64, a URL) all but the last 16 are settled, at a grapheme boundary.

    Args:
        text: the unsent tail of a stream, not the whole stream. The caller keeps `pending`, and per delta does
            `pending += delta`, `n = settled_length(pending)`, sends `pending[:n]` and keeps `pending[n:]`. `pending`
            is then one word with the white space behind it, and one call looks at no more than that and the delta.
    """
    word_end = len(text.rstrip())
    earliest = max(word_end - _LONGEST_WORD_CHARS, 1)
    for index in range(word_end - 1, earliest - 1, -1):
        if _starts_word(text, index):
            return index
    if word_end <= _LONGEST_WORD_CHARS:
        return 0
    for index in range(word_end - _HELD_OF_LONG_WORD_CHARS, earliest - 1, -1):
        if is_grapheme_start(text, index) and not _inside_punctuation(text, index):
            return index
    # A long line of punctuation ("-----…"): cutting it is harmless, holding it for ever is not.
    for index in range(word_end - _HELD_OF_LONG_WORD_CHARS, earliest - 1, -1):
        if is_grapheme_start(text, index):
            return index
    return 0


def unstopped_length(text: str, stops: Sequence[str]) -> int:
    """How many leading characters of `text` may be sent so that no stop string has begun in them.

    A server that goes on with an answer knows nothing of what was sent before: a stop string that had begun there
    would end it nowhere. Held back, it comes whole from the continuation, and the server sees it.

    Args:
        text: the unsent tail of a stream.
        stops: the client's stop strings; of each the first 128 characters count.
    """
    length = len(text)
    for stop in stops:
        for size in range(min(len(stop) - 1, _WATCHED_STOP_CHARS, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                length = min(length, len(text) - size)
                break
    return length


def is_grapheme_start(text: str, index: int) -> bool:
    """Whether no user-perceived character spans the place before `text[index]`; 0 < index < len(text)."""
    before, after = text[index - 1], text[index]
    if before < "\u0300" and after < "\u0300":
        return not (before == "\r" and after == "\n")
    if _extends(after) or before == _JOINER or unicodedata.combining(before) == 9:
        return False
    if _is_regional(before) and _is_regional(after):
        return _regionals_before(text, index) % 2 == 0
    if "\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff":
        return False
    leading_jamo = "\u1100" <= before <= "\u115f"
    return not (leading_jamo and ("\u1100" <= after <= "\u11ff" or "\uac00" <= after <= "\ud7a3"))


def is_no_space(char: str) -> bool:
    """Whether `char` belongs to a script written without spaces, or is an emoji or a CJK sign."""
    code = ord(char)
    if code < _RANGE_STARTS[0]:
        return False
    return code <= _NO_SPACE_RANGES[bisect_right(_RANGE_STARTS, code) - 1][1]


def _starts_word(text: str, index: int) -> bool:
    before, after = text[index - 1], text[index]
    if after.isspace() or not is_grapheme_start(text, index):
        return False
    if before.isspace():
        return True
    # What an extender belongs to decides: an emoji with a variation selector, a kana with a voicing mark.
    base = index - 1
    while base > 0 and not is_grapheme_start(text, base):
        base -= 1
    return is_no_space(text[base]) or is_no_space(after)


def _inside_punctuation(text: str, index: int) -> bool:
    return text[index - 1] in _PUNCTUATION and text[index] in _PUNCTUATION


def _extends(char: str) -> bool:
    return (
        unicodedata.category(char) in {"Mn", "Me", "Mc"}
        or char in "\u200c\u200d\u0e33\u0eb3"
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or "\U000e0020" <= char <= "\U000e007f"
        or "\u1160" <= char <= "\u11ff"
    )


def _is_regional(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _regionals_before(text: str, index: int) -> int:
    """How many regional indicators stand before a place; of a longer row of flags it looks no further back."""
    start, earliest = index, max(index - _WATCHED_REGIONALS, 0)
    while start > earliest and _is_regional(text[start - 1]):
        start -= 1
    return index - start
