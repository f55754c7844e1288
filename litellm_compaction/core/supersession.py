"""Which value of a thing holds now, where a conversation has given it several.

Asked by the ledger: an older line keeps its words, and says what came later. Only what people and assistants state
counts; rows of a tool's output share their keys without replacing each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

# "port = 8080", "`timeout`: 30 s", "the base url is now https://…", "Port ist 8080"; the name is what stands before.
# Each alternative begins with a plain character, so that the search skips ordinary text quickly.
_VALUE = re.compile(
    r"(?:[=:]|i(?<=[\s`'\"]i)s(?: now)?(?= )|i(?<=[\s`'\"]i)st(?: jetzt)?(?= )|e(?<=[\s`'\"]e)st?(?= )"
    r"|t(?<=[\s`'\"]t)o(?= ))[ \t]*"
    r"[`'\"]?((?!//)(?=[^\s,;`'\"\d/_]{0,80}[\d/_])[^\s,;`'\"<>]{1,80})"
)
_NAME = re.compile(r"[A-Za-z_][\w.-]{2,40}\Z")
_NAME_CHARS = 48
_QUOTES = "`'\""
# "端口是8080"; as above, the name is what stands before: a search that began with it tried 400 ways at each character.
_STATEMENT_CJK = re.compile(r"(?:是|为|成)[ \t]*((?=[^\s\d，。；]{0,40}\d)[^\s，。；]{1,40})")
_NAME_CJK = re.compile(r"[\u4e00-\u9fff]{2,6}\Z")
_NAME_CHARS_CJK = 6
# One search through more than this would hold up other threads.
_SLICE_CHARS = 4096
_MARK = " (later: {values})"


def latest_values(texts: Iterable[str]) -> dict[str, str]:
    """The last stated value of everything that `texts`, oldest first, give a number, a path or an id to."""
    latest: dict[str, str] = {}
    for text in texts:
        for key, value in _statements(text):
            latest.pop(key, None)
            latest[key] = value
    return latest


def marked(line: str, latest: Mapping[str, str]) -> str:
    """`line`, with the values that hold now behind it where it states others."""
    changed = {key: latest[key] for key, value in _statements(line) if latest.get(key, value) != value}
    return (
        line + _MARK.format(values=", ".join(f"{key} {value}" for key, value in changed.items())) if changed else line
    )


def _statements(text: str) -> Iterator[tuple[str, str]]:
    for start, end in _slices(text):
        for found in _VALUE.finditer(text, start, end):
            value = found[1].rstrip(".:)")
            before = text[max(found.start() - _NAME_CHARS, 0) : found.start()].rstrip(" \t")
            name = _NAME.search(before[:-1] if before[-1:] in _QUOTES else before)
            # "I pass dtypes to `_wrap`" moves something; "timeout to 30" gives it a value.
            is_moved = found[0].startswith("to") and not re.search(r"[\d/]", value)
            if name is not None and not is_moved:
                yield name[0].lower(), value
    if text.isascii():
        return
    named = 0
    for start, end in _slices(text):
        for found in _STATEMENT_CJK.finditer(text, start, end):
            before = text[max(named, found.start() - _NAME_CHARS_CJK - 1) : found.start()]
            name = _NAME_CJK.search(before.removesuffix("改")) or _NAME_CJK.search(before)
            if name is not None:
                named = found.end()
                yield name[0], found[1].rstrip(".:)")


def _slices(text: str) -> Iterator[tuple[int, int]]:
    """Where a text is cut: at the end of a line, else behind a word."""
    start = 0
    while len(text) - start > _SLICE_CHARS:
        least, most = start + _SLICE_CHARS // 2, start + _SLICE_CHARS
        at = text.rfind("\n", least, most)
        end = (at if at >= 0 else text.rfind(" ", least, most)) + 1 or most
        yield start, end
        start = end
    yield start, len(text)
