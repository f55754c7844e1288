"""Inside what a text ends: an open code fence, an unclosed reasoning block.

Asked by `continuation` and `preamble` about a partial answer: both decide what a continuation's first line means.
"""

from __future__ import annotations

import re

THINK_START = "<think>"
THINK_END = "</think>"

# CommonMark 0.31 §4.5, and deeper indentation as models write it in lists and quotations.
FENCE = re.compile(r"^[ \t>]*(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_THINK_TAG = re.compile(r"^[ \t]*<think>|</think>", re.MULTILINE)


def open_fence(text: str) -> str | None:
    """The language of the code fence inside which `text` ends, "" for a fence without one, None outside fences."""
    marks, language = "", ""
    for line in FENCE.finditer(text):
        info = line["info"].strip()
        if not marks:
            if "`" not in info:
                marks, language = line["marks"], fence_language(info)
        elif not info and line["marks"].startswith(marks):
            marks = ""
    return language if marks else None


def fence_language(info: str) -> str:
    """The language that a fence's info string names, in lower case; "" when it names none."""
    words = info.split(None, 1)
    return words[0].lower() if words else ""


def open_think(text: str) -> bool:
    """Whether `text` ends inside a `<think>` block.

    Only a tag at the start of a line and outside a code fence opens one: answers about reasoning models mention
    the tag in running text.
    """
    opened = -1
    for tag in _THINK_TAG.finditer(text):
        if tag[0] == THINK_END:
            opened = -1
        elif opened < 0 and open_fence(text[: tag.start()]) is None:
            opened = tag.start()
    return opened >= 0
