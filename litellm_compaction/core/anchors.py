"""What a text names: paths, ids, numbers, commands and errors, and the values that it gives things.

What is an anchor is a matter of its form, so it is the same in any language. Deterministic and in linear time: every
repetition in a pattern is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from litellm_compaction.core.directives import NO_NAMES

# "port = 8080", "`timeout`: 30 s", "the base url is now https://…", "Port ist 8080"; the name is what stands before.
# Each alternative begins with a plain character, so that the search skips ordinary text quickly.
_VALUE = re.compile(
    r"(?:[=:]|i(?<=[\s`'\"]i)s(?: now)?(?= )|i(?<=[\s`'\"]i)st(?: jetzt)?(?= )|e(?<=[\s`'\"]e)st?(?= )"
    r"|t(?<=[\s`'\"]t)o(?= ))[ \t]*"
    r"[`'\"]?((?!//)(?=[^\s,;`'\"\d/_]{0,80}[\d/_])[^\s,;`'\"<>]{1,80})"
)
# Without any of these nothing has a value.
_IN_VALUE = re.compile(r"[\d/_]")
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
_ANCHORS_PER_PIECE = 24
# A row of figures is one thing to know, however many it has.
_NUMBERS_PER_PIECE = 4
# What makes a word worth keeping, best first where two begin at the same place. Every repetition is bounded, so that
# hostile text costs linear time.
_KINDS: tuple[tuple[str, float], ...] = (
    (r"\b[\w.]{0,60}(?:Error|Exception|Warning|Fault|Failure|Panic):", 3.0),
    (r"\bhttps?://[^\s\"'<>)\]]{1,200}", 2.0),
    (r"(?:[\w.@~-]{0,60}/){1,16}[\w.@-]{1,80}\.\w{1,8}\b(?::\d{1,9})?", 2.5),
    (r"(?<![\w/.])/(?:[\w.@-]{1,60}/){1,16}[\w.@-]{1,80}", 2.0),
    (
        r"\b[\w-]{1,80}\.(?:py|js|ts|tsx|c|h|cc|cpp|rs|go|java|md|json|ya?ml|toml|txt|sh|sql|html|css|pony)\b",
        2.0,
    ),
    (r"\b(?=[A-Z0-9]{0,40}\d)(?=[A-Z0-9]{0,40}[A-Z])[A-Z0-9]{5,40}\b", 3.0),
    (r"\b(?=[0-9a-f]{0,40}[a-f])(?=[0-9a-f]{0,40}\d)[0-9a-f]{7,40}\b", 1.5),
    # Tickets, regions, versions: "ABC-1234", "eu-north-2".
    (r"\b[a-zA-Z]{2,16}(?:-[a-zA-Z0-9]{1,16}){0,3}-\d{1,10}\b", 2.0),
    (r"\b_{0,2}[a-zA-Z]\w{0,40}_\w{1,60}(?:\(\))?", 1.2),
    (r"\b_[a-zA-Z]\w{2,40}", 1.0),
    # Not "e.g" nor "z.B".
    (r"\b(?:[A-Za-z_]\w{1,40}(?:\.[A-Za-z_]\w{0,40}){1,8}|[A-Za-z_]\.[A-Za-z_]\w{1,40})", 1.0),
    (r"\b[A-Z]?[a-z]{1,40}(?:[A-Z][a-z0-9]{1,40}){1,8}\b", 1.0),
    (r"\b[\w.]{0,60}(?:Error|Exception|Warning|Fault|Failure|Panic)\b", 1.0),
    # Loanwords and names of Japanese.
    (r"[\u30a1-\u30fa\u30fc]{4,20}", 0.8),
    (r"\$?\d[\d,:-]{0,20}(?:\.\d{1,12})?%?", 0.8),
)
_NUMBER_GROUP = len(_KINDS)
# Words without any of these hold no anchor.
_MAY_BE_ANCHOR = re.compile(r"[\d_/]|[a-z][A-Z]|\.\w|[\u30a1-\u30fa\u30fc]{4}|rror|xception|arning|ault|ailure|anic")
# A name of somebody or something: a capital inside a sentence.
_PROPER = re.compile(r"[^\W\d_]{4,24}")
_PROPER_WEIGHT = 0.4
_SENTENCE_ENDS = ".!?:;"
# What somebody sets off as code.
_SPAN = re.compile(r"`([^`]{2,60})`")
_SPAN_WEIGHT = 1.2
# Signal words, as prefixes of lower-case words and as parts of a lower-case line.
_FAILURE_WORDS = (
    *("error", "fail", "fatal", "traceback", "segfault", "assert", "cannot", "denied", "missing", "unable"),
    *("couldn't", "can't", "fehler", "erreur", "échou", "falló", "fallo"),
)
_FAILURE_PARTS = ("not found", "no such", "could not")
_DECISION_WORDS = (
    *("decid", "instead", "because", "therefore", "must", "fixed", "fixes", "conclu", "confirm", "i'll", "i’ll"),
    *("revert", "entschied", "deshalb", "weil", "muss", "parce", "donc", "porque", "debe"),
)
_DECISION_PARTS = ("should not", "will use", "root cause", "problem is", "issue is", "bug is", "problem was")
_DECISION_PARTS_CJK = ("决定", "因为", "必须", "错误", "计划", "准备")
_FAILURE_SIGNAL = 1.5
_OPENING = "([{\"'`*_"
# The words with which the parts above begin or end: only lines with one of them are searched for parts.
_PART_WORDS = ("found", "such", "could", "should", "will", "cause", "problem", "issue", "bug")
_FAILS, _DECIDES, _PART = 1, 2, 4
_ANCHOR = re.compile("|".join(f"({pattern})" for pattern, _ in _KINDS))
_WEIGHTS = tuple(weight for _, weight in _KINDS)


def latest_values(texts: Iterable[str]) -> dict[str, str]:
    """The last stated value of everything that `texts`, oldest first, give a number, a path or an id to."""
    latest: dict[str, str] = {}
    for text in texts:
        for key, value in statements(text):
            latest.pop(key, None)
            latest[key] = value
    return latest


def marked(line: str, latest: Mapping[str, str], stated: Iterable[tuple[str, str]] | None = None) -> str:
    """`line`, with the values that hold now behind it where it states others.

    Args:
        line: any.
        latest: values that hold now.
        stated: the line's `statements`, where they are known.
    """
    stated = statements(line) if stated is None else stated
    changed = {key: latest[key] for key, value in stated if latest.get(key, value) != value}
    return (
        line + _MARK.format(values=", ".join(f"{key} {value}" for key, value in changed.items())) if changed else line
    )


def statements(text: str) -> list[tuple[str, str]]:
    """What a text gives values to, and which."""
    found: list[tuple[str, str]] = []
    if _IN_VALUE.search(text) is None:
        return found
    for start, end in _slices(text):
        for each in _VALUE.finditer(text, start, end):
            value, at = each[1].rstrip(".:)"), each.start()
            before = text[max(at - _NAME_CHARS, 0) : at].rstrip(" \t")
            name = _NAME.search((before[:-1] if before[-1:] in _QUOTES else before).rpartition(" ")[2])
            # "I pass dtypes to `_wrap`" moves something; "timeout to 30" gives it a value.
            is_moved = text.startswith("to", at) and not re.search(r"[\d/]", value)
            if name is not None and not is_moved:
                found.append((name[0].lower(), value))
    if text.isascii():
        return found
    named = 0
    for start, end in _slices(text):
        for each in _STATEMENT_CJK.finditer(text, start, end):
            before = text[max(named, each.start() - _NAME_CHARS_CJK - 1) : each.start()]
            name = _NAME_CJK.search(before.removesuffix("改")) or _NAME_CJK.search(before)
            if name is not None:
                named = each.end()
                found.append((name[0], each[1].rstrip(".:)")))
    return found


def _slices(text: str) -> list[tuple[int, int]]:
    """Where a text is cut: at the end of a line, else behind a word."""
    found: list[tuple[int, int]] = []
    start = 0
    while len(text) - start > _SLICE_CHARS:
        least, most = start + _SLICE_CHARS // 2, start + _SLICE_CHARS
        at = text.rfind("\n", least, most)
        end = (at if at >= 0 else text.rfind(" ", least, most)) + 1 or most
        found.append((start, end))
        start = end
    return [*found, (start, len(text))]


def is_plain(anchor: str) -> bool:
    """Whether an anchor is written as a word: somebody's name, or in German any noun."""
    return anchor.isalpha() and anchor[1:] == anchor[1:].lower()


def is_number(anchor: str) -> bool:
    """Whether an anchor is a bare figure, which says little without its line."""
    return not any(map(str.isalpha, anchor))


def read(parts: Sequence[str], shown: str, ratio: float, *, is_stated: bool) -> tuple[dict[str, float], float]:
    """The anchors of a piece with their weights, and what its words signal beside them.

    Args:
        parts: its words.
        shown: the piece.
        ratio: how much it counts.
        is_stated: whether somebody says it in words; only there a capital inside a sentence makes a name.
    """
    found: dict[str, float] = {}
    signals = numbers = 0
    for at, word in enumerate(map(_word, parts)):
        if word is None:
            continue
        if word.name and is_stated and at and parts[at - 1][-1] not in _SENTENCE_ENDS:
            found[word.name] = _PROPER_WEIGHT * ratio
        signals |= word.signals
        for anchor, weight, is_number in word.anchors:
            numbers += is_number
            if (is_number and numbers > _NUMBERS_PER_PIECE) or len(found) >= _ANCHORS_PER_PIECE:
                continue
            found[anchor] = weight * ratio
    if "`" in shown:
        found = {**dict.fromkeys(_SPAN.findall(shown), _SPAN_WEIGHT * ratio), **found}
    if signals & _PART:
        lower = shown.lower()
        signals |= _FAILS if any(map(lower.__contains__, _FAILURE_PARTS)) else 0
        signals |= _DECIDES if any(map(lower.__contains__, _DECISION_PARTS)) else 0
    return found, (_FAILURE_SIGNAL if signals & _FAILS else 0.0) + (ratio if signals & _DECIDES else 0.0)


class _Word(NamedTuple):
    """What a word says.

    Attributes:
        anchors: what it names, with the weight of each and whether it is a number.
        signals: of failures and decisions.
        name: somebody's or something's where it stands inside a sentence, "" for none.
    """

    anchors: tuple[tuple[str, float, bool], ...]
    signals: int
    name: str


@lru_cache(maxsize=16_384)
def _word(text: str) -> _Word | None:
    """What a word says; None for most. Remembered: words come back, in a conversation and in its next compaction."""
    lower = text.lower()
    if lower.isalpha() and lower == text and text.isascii():
        found: tuple[tuple[str, float, bool], ...] = ()
    else:
        found = tuple(
            (match[0], _WEIGHTS[match.lastindex - 1], match.lastindex == _NUMBER_GROUP)
            for match in (_ANCHOR.finditer(text) if _MAY_BE_ANCHOR.search(text) else ())
            if match.lastindex is not None and len(match[0]) >= 2
        )
        lower = lower.lstrip(_OPENING)
    signals = _FAILS if lower.startswith(_FAILURE_WORDS) else 0
    if lower.startswith(_DECISION_WORDS) or (not text.isascii() and any(map(text.__contains__, _DECISION_PARTS_CJK))):
        signals |= _DECIDES
    if lower.startswith(_PART_WORDS):
        signals |= _PART
    # "ALWAYS" is written so for its weight, and as a name it would order something that nobody said.
    proper = _PROPER.match(text) if text[0].isupper() else None
    name = proper[0] if proper is not None and proper[0].casefold() not in NO_NAMES else ""
    return _Word(found, signals, name) if found or signals or name else None
