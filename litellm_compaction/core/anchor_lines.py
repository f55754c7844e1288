"""Which lines of a conversation name something that a summary would lose, and how much each of them says.

Asked by the ledger, which chooses among them. What is an anchor is a matter of its form (paths, ids, numbers, errors,
names in code), so it is the same in any language; what a line is worth is a matter of who says it, where, and how often
the assistant came back to it. Deterministic, and in linear time whatever the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from litellm_compaction.core.messages import Message, render_arguments, without_notices

_PIECE_CHARS = 160
# Anchors per 1,000 characters are many in logs: what is older than this many characters has only its user's words.
SCANNED_CHARS = 120_000
# Of one giant result the two ends say what it was and how it came out; the rest must not hide older messages.
SCANNED_PER_MESSAGE_CHARS = 12_000
_ANCHORS_PER_PIECE = 24
# A row of figures is one thing to know, however many it has.
_NUMBERS_PER_PIECE = 4
# A shorter line without an anchor ("So the plan is:") states nothing.
_LEAST_STATEMENT_CHARS = 30

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
    (r"\b[a-zA-Z]\w{0,40}_\w{1,60}(?:\(\))?", 1.2),
    (r"\b[a-z]{1,40}(?:[A-Z][a-z0-9]{1,40}){1,8}\b", 1.0),
    (r"\b[\w.]{0,60}(?:Error|Exception|Warning|Fault|Failure|Panic)\b", 1.0),
    (r"\$?\d[\d,:-]{0,20}(?:\.\d{1,12})?%?", 0.8),
)
_ANCHOR = re.compile("|".join(f"({pattern})" for pattern, _ in _KINDS))
_WEIGHTS = tuple(weight for _, weight in _KINDS)
_NUMBER_GROUP = len(_KINDS)
# Words without any of these hold no anchor.
_MAY_BE_ANCHOR = re.compile(r"[\d_/]|[a-z][A-Z]|\.\w|rror|xception|arning|ault|ailure|anic")
# What somebody sets off as code.
_SPAN = re.compile(r"`([^`]{2,60})`")
_SPAN_WEIGHT = 1.2
# Where a long line is divided: behind a sentence, an item, a word.
_SEPARATORS = (". ", "。", "; ", "}, ", "], ", ", ", " ")
# Who says it: an assistant's words tell what mattered, a listing names everything.
_USER, _ASSISTANT, _CALL = 1.6, 1.6, 1.2
# A short result says how something came out, a long one is a listing: from 1.2 down to 0.4.
_SHORT_RESULT_CHARS, _LONG_RESULT_CHARS = 400, 6_000
_SHORT_RESULT, _LONG_RESULT = 1.2, 0.4
# How a step came out: what the first words behind a result, and all of a short one, say beside their anchors.
_OUTCOME = 4.0
# What the user's words say beside their anchors, where there was no room to quote them all.
_USERS_OWN = 1.5
_SHORT_OUTCOME = 3.0
# Source code can be read again, and names in every line what one line says once.
_CODE = re.compile(
    r"(?:\d+[:\s-]\s*)?(?:import |from \w|def |class |return\b|raise |except\b|try:|elif |else\b|while |@\w|#|//|/\*|"
    r"\*|\.\. |>>> |\.\.\. |self\.|func |fn |let |const |var |public |private |static )"
)
_CODE_ENDS = (":", "{", "(", ";")
_CODE_RATIO = 0.4
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
# What was only asked or weighed says little of what is.
_DOUBTS = ("wait", "maybe", "perhaps", "hmm", "if i ", "let's ", "let’s ", "let me ")
_DOUBT_RATIO = 0.6


@dataclass(frozen=True, slots=True)
class Line:
    """A line that may stand in the ledger.

    Attributes:
        text: on one line, at most about 160 characters.
        anchors: what it names, with the weight that each has here.
        weight: what it says beside its anchors.
        is_stated: whether a person or an assistant states it in words.
    """

    text: str
    anchors: Mapping[str, float]
    weight: float
    is_stated: bool


def candidates(messages: Sequence[Message]) -> tuple[list[Line], dict[str, int]]:
    """The lines worth a place, oldest first, and in how many of the assistant's messages each of its anchors stands.

    Args:
        messages: the covered part, oldest first, without the user's messages that are quoted elsewhere.
    """
    found: list[Line] = []
    used: dict[str, int] = {}
    scanned = 0
    seen: set[str] = set()
    # Newest first, so that the bound on scanned text drops the oldest and a repeated line keeps its latest place.
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        is_stated = message.role in ("user", "assistant")
        named: set[str] = set()
        for text, ratio, bonus in reversed(_lines(message, index > 0 and messages[index - 1].role == "tool")):
            scanned += len(text)
            if scanned > SCANNED_CHARS:
                break
            parts = text.split()
            shown = " ".join(parts)
            if len(shown) < 4 or shown in seen:
                continue
            seen.add(shown)
            anchors, signal = _read(parts, shown, ratio)
            if message.role == "assistant":
                named.update(anchors)
            signal += bonus
            if anchors or (signal > 1 and len(shown) >= _LEAST_STATEMENT_CHARS):
                if _is_doubtful(shown) if is_stated else _is_code(shown):
                    doubt = _DOUBT_RATIO if is_stated else _CODE_RATIO
                    signal *= doubt
                    anchors = {anchor: weight * doubt for anchor, weight in anchors.items()}
                found.append(Line(shown, anchors, signal * ratio, is_stated))
        for anchor in named:
            used[anchor] = used.get(anchor, 0) + 1
        if scanned > SCANNED_CHARS:
            break
    found.reverse()
    return found, used


def _is_doubtful(shown: str) -> bool:
    return shown.endswith("?") or shown[:12].lower().startswith(_DOUBTS)


def _is_code(shown: str) -> bool:
    return shown.endswith(_CODE_ENDS) or _CODE.match(shown) is not None


def _lines(message: Message, follows_result: bool) -> list[tuple[str, float, float]]:
    """The pieces of a message, with the weight of who said them and what their place says."""
    if message.role == "user":
        return [(piece, _USER, _USERS_OWN) for piece in _pieces(message.text)]
    if message.role != "assistant":
        ratio = _result_ratio(len(message.text))
        bonus = _SHORT_OUTCOME if ratio == _SHORT_RESULT else 0.0
        return [(piece, ratio, bonus) for piece in _pieces(message.text)]
    found = [(piece, _ASSISTANT, 0.0) for piece in _pieces(without_notices(message.text))]
    if found and follows_result:
        # How the last step came out is what comes first, in any language.
        found[0] = (found[0][0], _ASSISTANT, _OUTCOME)
    for call in message.calls:
        pieces = _pieces(f"{call.name}({render_arguments(call.arguments)})")
        found += [(piece, _CALL, 0.0) for piece in pieces]
    return found


def _result_ratio(chars: int) -> float:
    if chars <= _SHORT_RESULT_CHARS:
        return _SHORT_RESULT
    share = math.log(chars / _SHORT_RESULT_CHARS) / math.log(_LONG_RESULT_CHARS / _SHORT_RESULT_CHARS)
    return max(_SHORT_RESULT - (_SHORT_RESULT - _LONG_RESULT) * share, _LONG_RESULT)


def _pieces(text: str) -> list[str]:
    """The lines of a text, long ones divided where a sentence, an item or at least a word ends."""
    if len(text) > SCANNED_PER_MESSAGE_CHARS:
        half = SCANNED_PER_MESSAGE_CHARS // 2
        text = f"{text[:half]}\n{text[-half:]}"
    found: list[str] = []
    for line in text.splitlines():
        start = 0
        while len(line) - start > _PIECE_CHARS:
            end = start + _PIECE_CHARS
            for separator in _SEPARATORS:
                at = line.rfind(separator, start + _PIECE_CHARS // 3, end)
                if at >= 0:
                    end = at + len(separator)
                    break
            found.append(line[start:end])
            start = end
        found.append(line[start:] if start else line)
    return found


def _read(parts: Sequence[str], shown: str, ratio: float) -> tuple[dict[str, float], float]:
    """The anchors of a piece with their weights, and what its words signal beside them."""
    found: dict[str, float] = {}
    signals = numbers = 0
    for part in parts:
        word = _word(part)
        if word is None:
            continue
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
    """What a word names, with the weight of each name and whether it is a number, and what it signals."""

    anchors: tuple[tuple[str, float, bool], ...]
    signals: int


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
    return _Word(found, signals) if found or signals else None
