"""The anchor ledger: what survives a compaction verbatim, without any model.

First the user's own words, because a constraint cannot be recognised by signal words (summaries keep 17 % of
side constraints, arXiv 2608.11242); then the lines that name paths, ids, numbers, commands and errors, which
summaries lose first (paths 9.8 %, numbers 1.9 % survive, deja-vu 543). Deterministic, bounded, any language.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.messages import Message, render_arguments, without_notices

_LINE_CHARS = 240
_PIECE_CHARS = 1_000
_SCANNED_CHARS = 200_000
_ANCHORS_PER_LINE = 24

# What makes a line worth keeping. A stretch of text counts once, under the first kind that matches. Every
# repetition is bounded, so that hostile text costs linear time.
_KINDS: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r"\b[\w.]{0,60}(?:Error|Exception|Warning|Fault|Failure|Panic)\b(?::[^\n]{0,80})?"), 3.0),
    (re.compile(r"\bhttps?://[^\s\"'<>)\]]{1,200}"), 2.0),
    (re.compile(r"(?:[\w.@~-]{0,60}/){1,16}[\w.@-]{1,80}\.\w{1,8}\b(?::\d{1,9})?"), 2.5),
    (re.compile(r"(?<![\w/.])/(?:[\w.@-]{1,60}/){1,16}[\w.@-]{1,80}"), 2.0),
    (
        re.compile(
            r"\b[\w-]{1,80}\."
            r"(?:py|js|ts|tsx|c|h|cc|cpp|rs|go|java|md|json|ya?ml|toml|txt|sh|sql|html|css|pony)\b"
        ),
        2.0,
    ),
    (re.compile(r"\b(?=[A-Z0-9]{0,40}\d)(?=[A-Z0-9]{0,40}[A-Z])[A-Z0-9]{5,40}\b"), 3.0),
    (re.compile(r"\b(?=[0-9a-f]{0,40}[a-f])[0-9a-f]{7,40}\b"), 1.5),
    (re.compile(r"\b[a-zA-Z]\w{0,40}_\w{1,60}(?:\(\))?"), 1.2),
    (re.compile(r"\b[a-z]{1,40}(?:[A-Z][a-z0-9]{1,40}){1,8}\b"), 1.0),
    (re.compile(r"\$ ?\d[\d,]{0,20}(?:\.\d{1,6})?|\b\d[\d,]{0,20}(?:\.\d{1,6})?\s?(?:%|[kKMG]i?B\b|ms\b|s\b)?"), 0.8),
)
_FAILURE = re.compile(
    r"\b(?:error|failed|failure|fatal|traceback|segfault|assert\w*|cannot|could not|denied)\b", re.IGNORECASE
)
_DECISION = re.compile(
    r"\b(?:decid\w+|instead|because|therefore|must|should|will use|let'?s|need to|fix(?:ed|es)?|root cause|"
    r"the (?:issue|problem|bug)|conclu\w+|plan)\b|决定|因为|必须|应该|错误|计划|准备",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    anchors: dict[str, float]
    weight: float


def ledger(
    messages: Sequence[Message],
    *,
    budget_tokens: int,
    words_tokens: int,
    count: Callable[[str], int],
    known: str = "",
) -> str:
    """The verbatim record of `messages` in at most `budget_tokens`; "" when there is nothing or no room.

    Args:
        messages: the covered part, oldest first, without what is kept verbatim elsewhere.
        budget_tokens: bound on the whole ledger.
        words_tokens: bound on the user's own words, counted inside the budget.
        count: tokens of a text.
        known: what stays visible beside the ledger, and need not be repeated in it.
    """
    words = _users_words(messages, min(words_tokens, budget_tokens), count)
    used = count(words) if words else 0
    lines = _anchor_lines(messages, max(budget_tokens - used, 0), words + known, count)
    return "\n".join(section for section in (words, lines) if section)


def _users_words(messages: Sequence[Message], budget_tokens: int, count: Callable[[str], int]) -> str:
    """Every user message, oldest first, while they fit; long ones shortened, the middle ones left out first."""
    texts = [text for message in messages if message.role == "user" and (text := message.text.strip())]
    if not texts or budget_tokens < 32:
        return ""
    head = "The user's own words:"
    room = budget_tokens - count(head)
    # The original task may take half, every other message a quarter: pasted bulk is shortened, words are not.
    limits = [room // 2 if index == 0 else room // 4 for index in range(len(texts))]
    quoted = ["- " + excerpt(text, limit, count) for text, limit in zip(texts, limits, strict=True)]
    sizes = [count(line) + 1 for line in quoted]
    kept = {0} if sizes[0] <= room else set()
    room -= sizes[0] if kept else 0
    for index in range(len(quoted) - 1, 0, -1):
        if sizes[index] <= room:
            kept.add(index)
            room -= sizes[index]
    lines = [quoted[index] for index in sorted(kept)]
    return "\n".join([head, *lines]) if lines else ""


def _anchor_lines(messages: Sequence[Message], budget_tokens: int, known: str, count: Callable[[str], int]) -> str:
    """The lines with the most new anchors for their size, in the order of the conversation."""
    head = "Paths, ids, numbers, commands and errors, as they stood:"
    room = budget_tokens - count(head)
    if room < 24:
        return ""
    lines = _candidates(messages)
    spread = Counter(anchor for line in lines for anchor in line.anchors)
    # An anchor that comes back matters more, up to a point.
    bonus = {anchor: 1 + 0.3 * math.log(min(lines_with_it, 20)) for anchor, lines_with_it in spread.items()}
    seen = {anchor for anchor in spread if anchor in known}

    def worth(index: int) -> float:
        line = lines[index]
        fresh = [anchor for anchor in line.anchors if anchor not in seen]
        if not fresh and line.weight <= 1:
            return 0.0
        value = sum(line.anchors[anchor] * bonus[anchor] for anchor in fresh)
        recency = 0.75 + 0.5 * index / len(lines)
        return (value + line.weight) * recency / (8 + len(line.text))

    chosen: list[int] = []
    for index in sorted(range(len(lines)), key=lambda index: (-worth(index), index)):
        if room < 12:
            break
        size = count(lines[index].text) + 2
        if size <= room and worth(index) > 0.0:
            room -= size
            chosen.append(index)
            seen.update(lines[index].anchors)
    return "\n".join([head, *(f"- {lines[index].text}" for index in sorted(chosen))]) if chosen else ""


def _candidates(messages: Sequence[Message]) -> list[_Line]:
    found: list[_Line] = []
    scanned = 0
    seen: set[str] = set()
    # Newest first, so that the bound on scanned text drops the oldest and a repeated line keeps its latest place.
    for message in reversed(messages):
        for text, role_weight in reversed(list(_lines(message))):
            scanned += len(text)
            if scanned > _SCANNED_CHARS:
                break
            shown = " ".join(text.split())
            if len(shown) < 4 or shown in seen:
                continue
            seen.add(shown)
            shown, anchors = _shortened(shown)
            signal = (1.5 if _FAILURE.search(shown) else 0.0) + (role_weight if _DECISION.search(shown) else 0.0)
            if anchors or signal > 1:
                found.append(_Line(shown, anchors, signal * role_weight))
    found.reverse()
    return found


def _lines(message: Message) -> Iterator[tuple[str, float]]:
    """The lines of a message with the weight of who said them; the user's words have their own section."""
    if message.role == "assistant":
        yield from _pieces(without_notices(message.text), 1.6)
        for call in message.calls:
            yield from _pieces(f"{call.name}({render_arguments(call.arguments)})", 1.2)
    elif message.role != "user":
        yield from _pieces(message.text, 0.8)


def _pieces(text: str, role_weight: float) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        for start in range(0, len(line), _PIECE_CHARS):
            yield line[start : start + _PIECE_CHARS], role_weight


def _shortened(line: str) -> tuple[str, dict[str, float]]:
    """A line cut to the stretch with the most anchors, and the weights of the anchors in it."""
    spans = _anchor_spans(line)
    begin, end = 0, len(line)
    if len(line) > _LINE_CHARS:
        starts = [0, *(max(start - _LINE_CHARS // 3, 0) for start, _, _ in spans)]
        begin = max(starts, key=lambda at: sum(w for s, e, w in spans if s >= at and e <= at + _LINE_CHARS))
        end = begin + _LINE_CHARS
    shown = ("… " if begin else "") + line[begin:end] + (" …" if end < len(line) else "")
    return shown, {line[s:e]: weight for s, e, weight in spans if s >= begin and e <= end}


def _anchor_spans(line: str) -> list[tuple[int, int, float]]:
    taken: list[tuple[int, int, float]] = []
    for pattern, weight in _KINDS:
        for found in pattern.finditer(line):
            start, end = found.span()
            if end - start >= 2 and all(end <= s or start >= e for s, e, _ in taken):
                taken.append((start, end, weight))
                if len(taken) >= _ANCHORS_PER_LINE:
                    return taken
    return taken
