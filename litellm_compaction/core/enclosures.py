"""Inside what a text ends: an open code fence, an unclosed reasoning block; and what stands outside such blocks.

Asked by `continuation` and `preamble` about a partial answer: both decide what a continuation's first line means; by
`edits` and `prompts` for a text without its reasoning. Each looks at a text once, however many tags it holds: 14,000
openings without an end froze a proxy for 13 s while a pattern looked for the end of each (2026-11).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

THINK_START = "<think>"
THINK_END = "</think>"

# CommonMark 0.31 §4.5, and deeper indentation as models write it in lists and quotations.
FENCE = re.compile(r"^[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_THINK_TAG = re.compile(r"^[ \t]*<think>|</think>", re.MULTILINE)
_BLOCK_OPENS = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_BLOCK_ENDS = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


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
